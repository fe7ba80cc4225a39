"""Foretell the memory of a run on a device that is not here.

Each part of a forecast says whether it was counted from the trace, follows from a rule that is
known, or is a margin for what nobody can count. What decides if a run fits is what the allocator
takes from the device, not what tensors ask for: see `allocator.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from anytrain.insight.preflight.allocator import MIB, Event, Played, play, rounded
from anytrain.insight.preflight.targets import Target
from anytrain.insight.preflight.traced import Op, Trace

GIB = 2**30
How = Literal["counted", "rule", "margin"]

_CUDA_CONTEXT = 600 * MIB
"""What a process holds of a GPU beside its tensors: the context, and kernels as they are loaded."""
_WORKSPACE = 8 * MIB + 128 * 1024
_WORKSPACE_HOPPER = 32 * MIB
_HOPPER = ("h100", "h200", "b200")
_LEAST_HOPPER = 75 * GIB
_CUDA_MARGIN = 16 * MIB
_METAL_PAGE = 16 * 1024
_METAL_SHARE = 0.10
_MAC_LARGE = 36 * GIB
_MAC_SYSTEM = 3 * GIB
_PROCESS = int(1.5 * GIB)
_XLA_SHARE = 0.05
_PRODUCTS = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "_addmm_activation", "linear")
)
_FORWARD, _BACKWARD = ("forward", "evaluate"), ("backward",)


@dataclass(frozen=True, slots=True)
class Part:
    """One share of the memory."""

    name: str
    num_bytes: int
    how: How
    why: str = ""


@dataclass(frozen=True, slots=True)
class Limit:
    """How much of a target's memory a run may use."""

    usable_bytes: int
    whole_bytes: int
    because: str
    is_rule_of_thumb: bool = False


@dataclass(frozen=True, slots=True)
class Forecast:
    """The memory of one run on one target."""

    target: str
    batch_size: int
    precision: str
    is_checkpointed: bool
    parts: tuple[Part, ...]
    """All but the margins add up to the peak."""
    activations_by_module: dict[str, int]
    peak_bytes: int
    """The most that tensors hold: what torch's own counter will show."""
    needed_bytes: int
    """What the allocator takes from the device for it, with the margins."""
    limit: Limit | None
    fits: bool | None
    """None where nobody said how much memory there is."""
    records: bool | None = None
    """Whether there is room to record the step too; None where steps are not recorded."""

    @property
    def margin_bytes(self) -> int:
        """What was added for things that cannot be counted."""
        return sum(part.num_bytes for part in self.parts if part.how == "margin")


def limit_of(target: Target) -> Limit | None:
    """Return what a run may use of the target's memory; None where nobody said how much it has.

    >>> limit_of(Target("mps", "mps:16GB", 16 * GIB, "2.13")).usable_bytes / GIB
    10.66...
    """
    whole = target.memory_bytes
    if whole is None:
        return None
    if target.kind == "mps":
        return _limit_of_mac(whole)
    if target.kind == "cuda":
        kept, why = _CUDA_CONTEXT, "all but about 0.6 GiB for the CUDA context and its kernels"
    elif target.kind == "cpu":
        kept, why = _PROCESS, "all but about 1.5 GiB for Python, torch and the system"
    else:
        kept, why = int(whole * _XLA_SHARE), "all but about 5 % that the program itself takes"
    return Limit(max(whole - kept, 0), whole, why, is_rule_of_thumb=True)


def capped(num_bytes: int) -> Limit:
    """Return the limit that torch.cuda.set_per_process_memory_fraction sets to its allocator."""
    return Limit(num_bytes, num_bytes, "torch's own cap on what its allocator takes")


def _limit_of_mac(whole: int) -> Limit:
    """Return Metal's recommended working set, or what the system leaves of a small Mac."""
    share, told = (3 / 4, "3/4") if whole >= _MAC_LARGE else (2 / 3, "2/3")
    advised = int(whole * share)
    left = max(whole - _MAC_SYSTEM - _PROCESS, 0)
    if left < advised:
        because = "macOS keeps about 3 GiB and the process itself about 1.5 GiB of the one memory"
        return Limit(left, whole, because, is_rule_of_thumb=True)
    because = (
        f"Metal's recommended working set, about {told} of this Mac's memory; torch raises an "
        "error only at 1.7 times that (PYTORCH_MPS_HIGH_WATERMARK_RATIO), when macOS has long "
        "begun to swap"
    )
    return Limit(advised, whole, because, is_rule_of_thumb=True)


def forecast(
    trace: Trace, target: Target, limit: Limit | None = None, *, is_recorded: bool = False
) -> Forecast:
    """Return what a traced run will hold at its peak on the target, and whether it fits.

    `limit` takes the place of the target's own. `is_recorded` says that steps will be recorded as
    CUDA graphs.
    """
    limit = limit or limit_of(target)
    counted = _counted(trace)
    if target.kind == "cuda":
        return _on_cuda(trace, target, limit, counted, is_recorded=is_recorded)
    peak = sum(part.num_bytes for part in counted)
    margins = _margins_elsewhere(target, peak, trace)
    needed = peak + sum(part.num_bytes for part in margins)
    return _forecast(trace, target, (*counted, *margins), needed, limit)


def _forecast(
    trace: Trace, target: Target, parts: tuple[Part, ...], needed: int, limit: Limit | None
) -> Forecast:
    job = trace.job
    return Forecast(
        target=target.name,
        batch_size=job.batch_size,
        precision=job.precision,
        is_checkpointed=bool(job.checkpointed_modules),
        parts=parts,
        activations_by_module=dict(trace.held.activations_by_module),
        peak_bytes=sum(part.num_bytes for part in parts if part.how != "margin"),
        needed_bytes=needed,
        limit=limit,
        fits=None if limit is None else needed <= limit.usable_bytes,
    )


def _counted(trace: Trace) -> tuple[Part, ...]:
    held = trace.held.by_owner
    known = tuple(Part(owner, size, "counted") for owner, size in held.items() if size)
    rest = trace.held.peak_bytes - sum(held.values())
    return (*known, Part("not told apart", rest, "counted")) if rest > 0 else known


# -- CUDA -----------------------------------------------------------------------------------------


def _on_cuda(
    trace: Trace,
    target: Target,
    limit: Limit | None,
    counted: tuple[Part, ...],
    *,
    is_recorded: bool,
) -> Forecast:
    spaces = workspaces(trace.ops, target)
    usable = None if limit is None else limit.usable_bytes - _CUDA_MARGIN
    steady = steps_of(trace, spaces)
    free = play(steady)
    found = free if usable is None else play(steady, usable)
    peak = sum(part.num_bytes for part in counted)
    blocks = max(free.allocated_bytes - peak - sum(spaces), 0)
    parts = [
        *counted,
        Part("workspaces", sum(spaces), "rule", "cuBLAS keeps one for forward, one for backward"),
        Part("block rounding", blocks, "rule", "torch hands out blocks of 512 bytes and more"),
    ]
    needed = (free if usable is None or not found.fits else found).reserved_bytes
    records = None
    if is_recorded:
        again = sum(spaces) + trace.held.by_owner.get("batch", 0)
        why = "while a step is recorded it has workspaces and inputs of its own"
        parts.append(Part("graph pool", again, "rule", why))
        records = _has_room(trace, spaces, found, usable)
    parts.append(Part("margin", _CUDA_MARGIN, "margin", "events, generators, kernels' scratch"))
    parts += _scratch(trace.ops)
    told = _forecast(trace, target, tuple(parts), needed + _CUDA_MARGIN, limit)
    return replace(told, fits=None if usable is None else found.fits, records=records)


def workspaces(ops: Iterable[Op], target: Target) -> tuple[int, ...]:
    """Return the bytes of each workspace that cuBLAS keeps: one for each thread that multiplies.

    The forward pass runs in the caller's thread, the backward pass in autograd's own.
    """
    large = target.chip in _HOPPER or (
        not target.chip and (target.memory_bytes or 0) >= _LEAST_HOPPER
    )
    size = _WORKSPACE_HOPPER if large else _WORKSPACE
    phases = {op.phase for op in ops if op.name.split(".")[0] in _PRODUCTS}
    return tuple(size for group in (_FORWARD, _BACKWARD) if phases.intersection(group))


def steps_of(trace: Trace, spaces: Iterable[int] = (), num_more: int = 1) -> list[Event]:
    """Return all that the run takes and gives back, with more steps like the last one behind it.

    >>> from anytrain.insight.preflight.traced import Held, Job
    >>> held = Held(3, {}, {}, (), events=((0, 1), (1, 2), (1, 0)), step=(1, 3))
    >>> steps_of(Trace(Job(), (), held, 0.0))
    [(0, 1), (1, 2), (1, 0), (3, 2), (3, 0)]
    """
    held = trace.held
    if not held.events:  # only the peak is known
        return [(0, held.peak_bytes)]
    known = [(-1 - number, size) for number, size in enumerate(spaces)]
    begin, end = held.step
    born = {which for which, size in held.events[begin:end] if size}
    died = {which for which, size in held.events[begin:end] if not size}
    passing = born & died
    again = [(which, size) for which, size in held.events[begin:end] if which in passing]
    highest = 1 + max(which for which, _ in held.events)
    more = [
        (which + highest * number, size)
        for number in range(1, num_more + 1)
        for which, size in again
    ]
    return [*known, *held.events, *more]


def _has_room(
    trace: Trace, spaces: tuple[int, ...], found: Played, usable: int | None
) -> bool | None:
    """Whether the pool of a recorded step fits beside what stays: it cannot use the cache."""
    if usable is None:
        return None
    begin, end = trace.held.step
    alive: dict[int, int] = {}
    for which, size in trace.held.events[:begin]:
        alive.pop(which, None) if not size else alive.update({which: size})
    stays = play(list(alive.items())).reserved_bytes
    born = [(which, size) for which, size in trace.held.events[begin:end] if size]
    inside = {which for which, _ in born}
    step = [event for event in trace.held.events[begin:end] if event[0] in inside]
    pool = play([(-1 - n, size) for n, size in enumerate(spaces)] + step).reserved_bytes
    return found.fits and stays + sum(spaces) + pool <= usable


_ATTENTION_BACKWARD = ("attention_backward", "flash_attention_backward")


def _scratch(ops: Iterable[Op]) -> list[Part]:
    """Return margins for what kernels take for themselves: nobody sees it, and it is soon over."""
    convolution = attention = 0
    for op in ops:
        name = op.name.split(".")[0]
        if "convolution" in name:
            tensors = (*op.inputs, *op.outputs)
            convolution = max(convolution, sum(_size(t.dtype, t.shape) for t in tensors))
        elif name.endswith(_ATTENTION_BACKWARD) and len(op.inputs) > 1:
            attention = max(attention, _size("float32", op.inputs[1].shape))
    found = []
    if convolution:
        why = "cuDNN's scratch: at most a copy of what its largest convolution reads and writes"
        found.append(Part("convolutions", convolution, "margin", why))
    if attention:
        why = "attention sums the queries' gradients in float32 beside them"
        found.append(Part("attention", attention, "margin", why))
    return found


def _size(dtype: str, shape: tuple[int, ...]) -> int:
    size = _SIZES.get(dtype, 4)
    for length in shape:
        size *= length
    return size


_SIZES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "float64": 8,
    "int64": 8,
    "complex64": 8,
}


# -- other devices --------------------------------------------------------------------------------


def _margins_elsewhere(target: Target, peak: int, trace: Trace) -> list[Part]:
    if target.kind == "mps":
        pages = sum(rounded(size, _METAL_PAGE) - size for _, size in trace.held.events if size)
        pages = min(pages, peak)
        heaps = int(peak * _METAL_SHARE)
        why = "Metal's heaps and MPSGraph's caches: a tenth, which is a rule of thumb"
        return [
            Part("page rounding", pages, "margin", "Metal's buffers are pages of 16 KiB"),
            Part("heaps", heaps, "margin", why),
        ]
    if target.kind in ("tpu", "xla"):
        why = "the compiler lays memory out anew: only compiling for the chip tells"
        return [Part("layout", int(peak * _XLA_SHARE), "margin", why)]
    return []
