"""What of other people's code is replaced while a run trains: which part, why, and how long.

INVARIANT: nothing of torch's, of transformers' or of a model's is replaced that is not in the
table, and each part is put back when what it is for ends, however it ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

_RECORDED = "while a step is recorded"
_WATCHED = "while a step is recorded, or runs op by op to be looked at first"
_RUN = "while a Trainer trains or evaluates; with an Accelerator until end_training()"
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Patch:
    """One replacement."""

    what: str
    why: str
    lasts: str
    devices: tuple[str, ...] = ()
    """The backends where it is made; none: all."""


TABLE: dict[str, Patch] = {
    "autocast": Patch(
        "forward of the prepared model",
        "mixed precision: it computes under autocast, and its outputs are float32",
        "until unwrap_model(keep_fp32_wrapper=False), or the model's next run",
    ),
    "checkpointed blocks": Patch(
        "the call of a model's repeated blocks",
        "activation_checkpointing: a block keeps only its inputs for backward",
        "from when the memory was full until the training ends",
    ),
    "short attention": Patch(
        "transformers' attention function 'sdpa'",
        "over at most 128 tokens other kernels than torch's first choice are faster",
        _RUN,
        ("cuda",),
    ),
    "mask values": Patch(
        "transformers.masking_utils.is_tracing",
        "to look at a mask's values would run a graph and wait, in each forward pass",
        _RUN,
        ("tpu", "xla"),
    ),
    "recorded masks": Patch(
        "is_tracing and find_packed_sequence_indices of transformers.masking_utils",
        "a recording has no values to look at: it builds no mask that hides nothing",
        _WATCHED,
        ("cuda",),
    ),
    "host draws": Patch(
        "torch.rand",
        "numbers that a step draws on the host are counted, and drawn again by each replay",
        _WATCHED,
        ("cuda",),
    ),
    "numbers": Patch(
        "torch.tensor and torch.as_tensor",
        "a recording cannot copy a number from the host: it is made on the device",
        _RECORDED,
        ("cuda",),
    ),
    "scripted functions": Patch(
        "functions of the model's own module that torch has scripted",
        "they are recorded as they are written, where a recording of them failed",
        _RECORDED,
        ("cuda",),
    ),
    "checkpoint draws": Patch(
        "get_device_states and set_device_states of torch.utils.checkpoint, torch.random.fork_rng",
        "a checkpointed block must draw the same numbers when it is computed again",
        _WATCHED,
        ("cuda",),
    ),
    "layers": Patch(
        "forward of linear layers, norms, embeddings, GELUs and gated blocks of the model",
        "in bfloat16 they compute by kernels of anytrain's",
        _RECORDED,
        ("cuda",),
    ),
    "cross-entropy": Patch(
        "torch.nn.functional.cross_entropy",
        "the loss over a vocabulary needs no float32 copy of its softmax",
        _RECORDED,
        ("cuda",),
    ),
    "dropout": Patch(
        "torch.nn.functional.dropout",
        "a dropout is joined with the sum and the norm that come after it",
        _RECORDED,
        ("cuda",),
    ),
    "rotary positions": Patch(
        "apply_rotary_pos_emb of the model's own module",
        "queries and keys are turned by one kernel each way",
        _RECORDED,
        ("cuda",),
    ),
    "gradient hooks": Patch(
        "torch.Tensor.register_hook and retain_grad, torch.autograd._engine_run_backward",
        "a gradient that kernels of anytrain's do not make is refused, not computed wrongly",
        _RECORDED,
        ("cuda",),
    ),
}

_in_force: Counter[str] = Counter()
_undo: dict[str, Callable[[], None]] = {}
"""What undoes those that several runs share."""


def in_force() -> list[str]:
    """Return the names of the replacements that are made just now."""
    return sorted(name for name, number in _in_force.items() if number)


def of(backend: str) -> dict[str, Patch]:
    """Return the replacements that a run on a backend may make."""
    return {name: p for name, p in TABLE.items() if not p.devices or backend in p.devices}


@contextmanager
def replaced(name: str, owner: Any, **values: Any) -> Iterator[None]:
    """Give an object other attributes in the block; `name` says which row of the table it is."""
    with counted(name), ExitStack() as put_back:
        for attribute, value in values.items():
            kept = vars(owner).get(attribute, _MISSING)
            put_back.callback(_put_back, owner, attribute, kept)
            setattr(owner, attribute, value)
        yield


@contextmanager
def counted(name: str) -> Iterator[None]:
    """Let a replacement count as made in the block."""
    assert name in TABLE, f"{name} is not declared"
    _in_force[name] += 1
    try:
        yield
    finally:
        _in_force[name] -= 1


@contextmanager
def shared(name: str, make: Callable[[], Callable[[], None] | None]) -> Iterator[None]:
    """Make a replacement that runs may need at once; the last one that ends undoes it.

    `make` returns what undoes it, or None where there is nothing to replace.
    """
    if name not in _undo:
        undo = make()
        if undo is None:
            yield
            return
        _undo[name] = undo
    try:
        with counted(name):
            yield
    finally:
        if not _in_force[name]:
            _undo.pop(name)()


def _put_back(owner: Any, attribute: str, kept: Any) -> None:
    if kept is _MISSING:  # it was a base's
        delattr(owner, attribute)
    else:
        setattr(owner, attribute, kept)
