"""What users have overridden: refused where it would never run, called in the form it has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Set as AbstractSet
from functools import lru_cache
from typing import Any

from anytrain.core.errors import Unsupported
from anytrain.core.notices import give_notice

_NAMES = (
    "_build_accelerator_args _clip_grad_norm _finalize_training _get_grad_norm "
    "_get_num_items_in_batch _has_mixed_mesh_grads _init_training_state _inner_training_loop "
    "_issue_warnings_after_load _load_rng_state _load_scaler "
    "_mixed_mesh_grad_norm _move_model_to_device _prepare_context_parallel_inputs "
    "_prepare_for_training _run_epoch _save_rng_state "
    "_save_scaler _sync_replicated_trainable_parameters _track_num_input_tokens "
    "_tune_save_checkpoint _update_auto_batch_size _validate_args _wrap_model "
    "create_accelerator_and_postprocess get_batch_samples get_cp_size get_sp_size "
    "get_total_train_batch_size get_tp_size set_initial_training_values"
)
NEVER_CALLED = frozenset(_NAMES.split())
LOOP = "_inner_training_loop"
"""It is called, but a copy of HF's in its place would not find what it works with."""
_INSTEAD = (
    "override training_step, compute_loss, create_optimizer, get_train_dataloader, "
    "prediction_step, evaluation_loop, log or save_model, or write a callback."
)


REPLACED: dict[str, Any] = {}
"""What a script has put in the place of a function of HF's modules, with what stood there."""


def refuse(who: str, idle: AbstractSet[str]) -> None:
    """Refuse code that would never run."""
    if idle:
        raise Unsupported(
            f"{who} overrides {', '.join(sorted(idle))}, to no effect.",
            why="that is the inside of HF's loop; anytrain's loop never calls it.",
            fix=_INSTEAD,
        )


def goes_on(method: Any) -> bool:
    """Whether a method goes on with the loop that it overrides."""
    code = getattr(inspect.unwrap(method) if callable(method) else None, "__code__", None)
    if code is None or LOOP not in code.co_names:
        return False
    return "__class__" in code.co_freevars or "super" in code.co_names


def inside(name: str, fix: str) -> Unsupported:
    """Return the refusal of a call that belongs to the inside of HF's loop."""
    return Unsupported(
        f"anytrain's Trainer has no {name}.", why="it is the inside of HF's loop.", fix=fix
    )


def tell_replaced() -> None:
    """Say of functions that a script has replaced in HF's modules that nothing comes of it."""
    for name in REPLACED:
        give_notice(
            f"{name} was replaced, to no effect: anytrain's Trainer does not look its "
            f"functions up there. Instead, {_INSTEAD}",
            stacklevel=4,
        )


# Older scripts take fewer arguments than the Trainer gives.


def call(method: Callable[..., Any], *given: Any) -> Any:
    """Call a method with as many of the values as it takes by place, the first ones first.

    >>> call(lambda logs: logs, {"loss": 1.0}, 12.5)
    {'loss': 1.0}
    """
    return method(*given[: num_places(method)])


def call_by_name(method: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Call a method with those of the values that it has a name for, or all by place.

    >>> call_by_name(lambda model, loss: (model, loss), {"loss": 1, "norm": 2, "model": 3})
    (3, 1)
    """
    takes = inspect.signature(method).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in takes):
        return method(*given.values())
    takes_any = any(p.kind is p.VAR_KEYWORD for p in takes)
    names = {p.name for p in takes}
    return method(**{n: value for n, value in given.items() if takes_any or n in names})


def num_places(method: Callable[..., Any]) -> int | None:
    """Return how many values a function takes by place; None where any number.

    >>> num_places(lambda model, inputs: 0), num_places(lambda *args: 0)
    (2, None)
    """
    own = getattr(method, "__func__", method)
    bound = own is not method
    try:
        places = _places(own)
    except TypeError:  # an object that cannot be a key
        places = _places.__wrapped__(own)
    return None if places is None else places - bound


@lru_cache(maxsize=64)  # asked at every step, and a signature takes 20 us to read
def _places(function: Callable[..., Any]) -> int | None:
    try:
        found = inspect.signature(function).parameters.values()
    except ValueError:  # compiled: nobody can look into it
        return None
    if any(p.kind is p.VAR_POSITIONAL for p in found):
        return None
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in found)
