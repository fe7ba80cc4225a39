"""What the parts of a checkpoint must hold before any of them is put into a run.

A checkpoint whose checksums match may still hold what no run has saved: another program wrote it,
or somebody edited it. Torch takes most of that without a word and fails steps later.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from anytrain.core.plan import PRECISIONS
from anytrain.engine.checkpoint.schema import (
    MOST,
    Anything,
    Description,
    Each,
    Either,
    Flag,
    Maybe,
    Misfit,
    Named,
    Number,
    Row,
    Simple,
    Taken,
    Text,
    Whole,
    check,
    within,
)
from anytrain.engine.checkpoint.tensors import nonfinite
from anytrain.engine.optim.state_size import KEPT_FOR, kept_by


@dataclass(frozen=True, slots=True)
class Tensors(Simple):
    """A tensor; one of shape () may have any shape that holds one value."""

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    least: float = -math.inf
    floats: bool = False
    """Whether it holds floats, none of them NaN or infinite."""

    def holds(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or self.dtype not in (None, value.dtype):
            return False
        if self.floats and not _are_floats(value):
            return False
        if self.shape == () and value.numel() != 1:
            return False
        if self.shape and tuple(value.shape) != self.shape:
            return False
        return self.least == -math.inf or value.is_meta or bool((value >= self.least).all())

    def __str__(self) -> str:
        of = f" of {self.dtype}" if self.dtype else " of finite floats" if self.floats else ""
        shape = "" if self.shape is None else f", shaped {self.shape}"
        least = f", each at least {self.least:g}" if self.least > -math.inf else ""
        return (
            f"a tensor of one value{of}" if self.shape == () else f"a tensor{of}{shape}"
        ) + least


def _are_floats(value: torch.Tensor) -> bool:
    if not (value.is_floating_point() or value.is_complex()):
        return False
    return value.is_meta or nonfinite({"": value}, {""}, ()) is None


@dataclass(frozen=True, slots=True)
class Arrays(Simple):
    """An array of a kind and shape."""

    shape: tuple[int, ...]
    dtype: str

    def holds(self, value: Any) -> bool:
        is_one = isinstance(value, np.ndarray)
        return is_one and value.shape == self.shape and value.dtype == np.dtype(self.dtype)

    def __str__(self) -> str:
        return f"an array of {self.dtype}, shaped {self.shape}"


def like(own: Any, *, numbers_stay: bool = False) -> Description:
    """Return the kind that one of this run's own values has; what it leaves open may be anything.

    A count may have become a number, a number a tensor, and anything nothing: but no number where
    `numbers_stay`.
    """
    if isinstance(own, bool):
        return Maybe(Either(Whole(0, 1), Flag()))
    if isinstance(own, (int, float)):
        number = Either(Flag(), Number(finite=False), Tensors(shape=()))
        return number if numbers_stay else Maybe(number)
    if isinstance(own, str):
        return Maybe(Text())
    if isinstance(own, torch.Tensor):
        return Maybe(Either(Number(finite=False), Tensors()))
    if isinstance(own, Mapping):
        named = {name: value for name, value in own.items() if isinstance(name, str)}
        return {f"{n}?": like(value, numbers_stay=numbers_stay) for n, value in named.items()}
    if isinstance(own, (list, tuple)) and own:
        alike = len({type(each) for each in own}) == 1
        return Each(like(own[0], numbers_stay=numbers_stay) if alike else Anything())
    return Anything()


def _take_python(state: Any) -> None:
    random.Random().setstate(state)
    if not (state[2] is None or math.isfinite(state[2])):  # it is the next of random.gauss
        raise ValueError(state[2])


_PYTHON = Taken("a state of Python's random generator", _take_python)
_NUMPY = Row(Text(("MT19937",)), Arrays((624,), "<u4"), Whole(0, 624), Whole(0, 1), Number())


def torch_state(device: torch.device | str = "cpu") -> Taken:
    """Return the kind of a torch generator's state."""
    words = f"a state of torch's random generator on {device}"
    return Taken(words, lambda state: torch.Generator(device).set_state(state))


GENERATORS = {"python": _PYTHON, "numpy": _NUMPY, "torch": torch_state()}
CURSOR = {"micro": Whole(), "updates": Whole(), "pending?": Whole()}
META = {
    "plan": {"precision": Text(PRECISIONS)},
    "num_models": Whole(),
    "parameters?": Named(Each(Maybe(Text()))),
    "optimizers?": Each({"class": Text(), "options": Each(Text())}),
    "seed": Whole(-(2**63), 2**64 - 1),
    "processes?": Whole(1, 2**20),
}
SCALER = {
    "scale": Number(least=2**-126),
    "growth_factor": Number(least=1),
    "backoff_factor": Number(least=0, most=1),
    "growth_interval": Whole(1),
    "_growth_tracker": Whole(),
}
_LAYOUT = {
    "buckets": Each(Whole()),
    "batch_size": Whole(1),
    "step_size": Whole(1),
    "seed": Whole(-(2**63), 2**64 - 1),
    "cut": Maybe(Row(Whole(1), Whole(1), Whole())),
}


def check_loader(
    saved: Any, generator: torch.Generator | None, layout: Iterable[str], num_samples: int | None
) -> None:
    """Raise Misfit where the place in a loader's data cannot be taken.

    Its order is drawn from the generator, and follows from the named facts of a layout.
    """
    drawn = Maybe(torch_state("cpu" if generator is None else generator.device))
    fields = {
        "iteration": Whole(),
        "at_start": Maybe({**GENERATORS, "generator": drawn}),
        "generator": drawn,
        "seed": Maybe(Whole(-(2**63), 2**64 - 1)),
        "stream": Maybe(Named(Anything(), any_key=True)),
        "layout?": Maybe(_layout_of(saved, layout)),
    }
    check(saved, fields)
    place = {"ended": Flag(), "round_size": Whole(1), "reading": Row(Whole(), Whole())}
    most = MOST if num_samples is None else num_samples
    if "samples" not in saved:  # checkpoints of 0.1 count batches
        check(saved, {"done": Whole(0, most)})
        return
    check(saved, place)
    # What workers read of a stream counts in whole turns, also where the last ones are short.
    check(saved, {"samples": Whole(0, MOST if saved["reading"][1] else most)})
    check(saved, {"turned?": Maybe(Whole(0, saved["samples"]))})


def _layout_of(saved: Any, own: Iterable[str]) -> dict[str, Any]:
    """Return what a layout must hold: this loader's facts, or those of another kind of order."""
    given = saved.get("layout") if isinstance(saved, Mapping) else None
    is_other = isinstance(given, Mapping) and given.keys() <= _LAYOUT.keys()
    names = given if given is not None and is_other else own
    # Checkpoints of 0.1 know of no cut.
    return {"cut?" if name == "cut" else name: _LAYOUT[name] for name in names}


# -- schedules of the learning rate ------------------------------------------------------------

_RATE = Either(Tensors(shape=()), Number(-1e9, 1e9))
_COUNTS = {"last_epoch?": Number(-1, MOST), "_step_count?": Whole(), "num_bad_epochs?": Whole()}
_PROGRESS = ("last_epoch", "T_cur", "num_bad_epochs", "cooldown_counter", "best")
"""How far a schedule of torch's has come; one that lacks it would begin anew without a word."""
_PHASES = frozenset({"step_size", "T_max", "T_0", "T_i", "T_mult", "total_steps", "total_size"})
"""How long something of a schedule takes: it divides by them."""


def check_schedule(own: Any, saved: Any, where: str = "") -> None:
    """Raise Misfit where a schedule of this kind cannot have the saved state."""
    state, kind = own.state_dict(), type(own)
    check(saved, Named(Anything()), where)
    check(saved, _COUNTS, where)
    if kind.__module__.startswith("torch."):
        check(saved, {name: Anything() for name in _PROGRESS if name in state}, where)
    for name, value in saved.items():
        place = within(where, name)
        if name not in state and (name in vars(own) or callable(getattr(kind, name, None))):
            raise Misfit(f"{place} is nothing that a {kind.__name__} saves")
        if name in state:
            check(value, _in_schedule(name, state[name], kind), place)
    inner = getattr(own, "_schedulers", [])
    for number, (each, its) in enumerate(zip(inner, saved.get("_schedulers", []), strict=False)):
        check_schedule(each, its, f"{within(where, '_schedulers')}[{number}]")


def _in_schedule(name: str, own: Any, kind: type) -> Description:
    count = len(own) if isinstance(own, list) else None
    if name in ("base_lrs", "_last_lr", "min_lrs"):
        return Each(_RATE, count)
    if name in ("lr_lambdas", "_schedulers"):
        return Each(Maybe(Named(Anything())), count)
    if name in _PHASES:
        return Number(least=1e-9)
    if kind.__module__.startswith("torch."):
        return like(own, numbers_stay=True)
    return like(own) if kind.__module__.startswith("anytrain.") else Anything()


# -- optimizers --------------------------------------------------------------------------------

_OPTIONS = {
    "initial_lr?": _RATE,
    "betas?": Each(Either(Tensors(shape=()), Number(0, 1)), 2),
    "eps?": Either(Number(0, 2**63), Each(Maybe(Number(0, 2**63)))),
    "weight_decay?": Either(Tensors(shape=()), Number(-1e9, 1e9)),
    "momentum?": Either(Tensors(shape=()), Number(least=0)),
}
_LIKE_THE_PARAMETER = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg"}
    | {"grad_avg", "acc_delta", "sum", "prev", "ax"}
)
_MAY_BE_UNSET = ("foreach", "fused")
"""Flags of torch's that None leaves to it."""


def check_optimizer(own: Any, saved: Any, needed: frozenset[str] = frozenset()) -> None:
    """Raise Misfit where an optimizer with these parameters cannot have the saved state.

    `needed` are the options that each group must have. Of tensors the outlines are enough.
    """
    state = own.state_dict()
    if not isinstance(state, dict) or not isinstance(state.get("param_groups"), list):
        return  # one that only looks like torch's: nobody else knows what it saves
    groups = state["param_groups"]
    number = {"params": Each(Whole())}
    check(saved, {"state": Named(Anything(), any_key=True), "param_groups": Each(number)})
    check(saved["param_groups"], Each(number, len(groups)), "param_groups")
    is_torchs = type(own).__module__.startswith(("torch.", "anytrain."))
    for place, (mine, its) in enumerate(zip(groups, saved["param_groups"], strict=True)):
        where = f"param_groups[{place}]"
        check(its["params"], Each(Whole(), len(mine["params"])), f"{where}.params")
        check(its, {name: Anything() for name in needed & set(mine)}, where)
        check(its, {"lr": Anything() if mine.get("lr") is None else _RATE}, where)
        if is_torchs:
            _check_group(mine, its, saved["state"], where)
    listed = [each for its in saved["param_groups"] for each in its["params"]]
    if len(set(listed)) != len(listed):
        raise Misfit("param_groups names a parameter twice")
    parameters = [each for group in own.param_groups for each in group["params"]]
    if is_torchs:
        is_plain = type(own).__module__.startswith("torch.")
        own_names = [name for name in saved["state"] if isinstance(name, str) and is_plain]
        if own_names:
            raise Misfit(f"{within('state', own_names[0])} is nothing that torch keeps there")
        _check_kept(saved["state"], dict(zip(listed, parameters, strict=True)), kept_by(own))


def _check_group(
    own: Mapping[str, Any], its: Mapping[str, Any], state: Mapping[Any, Any], where: str
) -> None:
    """Check the options of a group of torch's optimizers, and what they need to be remembered."""
    check(its, _OPTIONS, where)
    known = {f"{n}?": _in_group(n, value) for n, value in own.items() if n != "params"}
    check(its, known, where)
    for option, name in KEPT_FOR.items():
        for number in its["params"] if its.get(option) else ():
            kept = state.get(number, {})
            if isinstance(kept, Mapping) and kept and name not in kept:
                raise Misfit(f"state.{number} lacks {name}, which {where}.{option} needs")


def _in_group(name: str, own: Any) -> Description:
    """Return the kind of an option of a group, which has this value here."""
    if isinstance(own, bool) and name not in _MAY_BE_UNSET:
        return Either(Whole(0, 1), Flag())
    return like(own)


def _check_kept(
    state: Mapping[Any, Any], parameters: Mapping[int, torch.Tensor], always: tuple[str, ...]
) -> None:
    """Check what an optimizer remembers of each parameter.

    It remembers the same of all that are matrices, or of all that are not: some factor matrices.
    `always` is what it surely remembers.
    """
    everything: dict[bool, set[Any]] = {True: set(), False: set()}
    # What an optimizer keeps under a name of its own, only it knows.
    numbered = {n: kept for n, kept in state.items() if not isinstance(n, str)}
    for number, kept in numbered.items():
        where = f"state.{number}" if isinstance(number, int) else within("state", number)
        if number not in parameters:
            raise Misfit(f"{where} belongs to no parameter in param_groups")
        check(kept, Named(Anything()), where)
        check(kept, {"step?": Either(Tensors(shape=(), least=0), Number(least=0))}, where)
        if kept and always:
            check(kept, {name: Anything() for name in (*always, "step")}, where)
        shape = tuple(parameters[number].shape)
        for name in _LIKE_THE_PARAMETER & set(kept):
            fits: Description = Tensors(shape=shape, floats=True)
            if name == "momentum_buffer":  # none before there was a gradient
                fits = Maybe(fits)
            check(kept[name], fits, within(where, name))
        everything[len(shape) > 1] |= (_LIKE_THE_PARAMETER | {"step"}) & set(kept)
    for number, kept in numbered.items():
        lacking = everything[parameters[number].ndim > 1] - set(kept)
        if lacking:
            raise Misfit(f"state.{number} lacks {', '.join(sorted(lacking))}, which others have")


def check_gradients(own: Mapping[str, torch.Tensor], saved: Any) -> None:
    """Raise Misfit where a gradient fits no parameter; names are `<model>.<parameter>`."""
    check(saved, Named(Tensors()))
    for name, gradient in saved.items():
        if name not in own:
            raise Misfit(f"{within('', name)} is a gradient of no parameter")
        check(gradient, Tensors(shape=tuple(own[name].shape)), within("", name))
