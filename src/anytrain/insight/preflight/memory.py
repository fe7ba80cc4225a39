"""Forecast the memory of a run on a device that is not here.

Each part of a forecast says whether it was counted from the trace, follows from a rule that is
known, or is a margin for what nobody can count. What decides if a run fits is what the allocator
takes from the device, not what tensors ask for: see `allocator.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from anytrain.insight.preflight.allocator import MIB, Event, play, rounded
from anytrain.insight.preflight.targets import Target
from anytrain.insight.preflight.trace import Op, Trace, num_bytes

GIB = 2**30
How = Literal["counted", "rule", "margin"]

_CUDA_CONTEXT = 600 * MIB
"""What a process holds of a GPU beside its tensors: the context, and kernels as they are loaded."""
_WORKSPACE = 8 * MIB + 128 * 1024
_WORKSPACE_HOPPER = 32 * MIB
_HOPPER = ("h100", "h200")
_LEAST_HOPPER = 75 * GIB
_CUDA_MARGIN = 16 * MIB
_METAL_PAGE = 16 * 1024
_METAL_SHARE = 0.10
_MAC_LARGE = 36 * GIB
_MAC_SYSTEM = 3 * GIB
_PROCESS = int(1.5 * GIB)
_XLA_SHARE = 0.05
_NUM_AHEAD = 2
_WHY_BLOCKS = (
    "torch hands out blocks of 512 bytes, and of large ones up to 1 MiB more than was asked for; "
    "attention's kernels take scratch"
)
_WHY_CUDNN = (
    "convolutions may turn tensors around in scratch memory; where there is none, cuDNN takes "
    "another way, so that it decides on speed and not on fitting"
)
_PRODUCTS = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "_addmm_activation", "linear")
)
_FORWARD, _BACKWARD = ("forward", "evaluate"), ("backward",)


@dataclass(frozen=True, slots=True)
class MemoryPart:
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
    parts: tuple[MemoryPart, ...]
    """All but the margins add up to the peak."""
    activations_by_module: dict[str, int]
    peak_bytes: int
    """The most that tensors hold: what torch's own counter will show."""
    needed_bytes: int
    """What the allocator takes from the device for it, with the margins."""
    limit: Limit | None
    fits: bool | None
    """None where the memory of the target is not known."""
    length: int = 0
    """How long its batch is, where it is as long as the data's longest; 0 where it came first."""
    records: bool | None = None
    """Whether there is room to record the step too; None where steps are not recorded."""


def limit_of(target: Target) -> Limit | None:
    """Return what a run may use of the target's memory; None where its memory is not known.

    >>> round(limit_of(Target("mps", "mps:16GB", 16 * GIB, "2.13")).usable_bytes / GIB, 2)
    10.67
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
    trace: Trace, target: Target, parts: tuple[MemoryPart, ...], needed: int, limit: Limit | None
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
        length=job.length,
    )


def _counted(trace: Trace) -> tuple[MemoryPart, ...]:
    held = trace.held.by_owner
    known = tuple(MemoryPart(owner, size, "counted") for owner, size in held.items() if size)
    rest = trace.held.peak_bytes - sum(held.values())
    return (*known, MemoryPart("not told apart", rest, "counted")) if rest > 0 else known


# -- CUDA -----------------------------------------------------------------------------------------


def _on_cuda(
    trace: Trace,
    target: Target,
    limit: Limit | None,
    counted: tuple[MemoryPart, ...],
    *,
    is_recorded: bool,
) -> Forecast:
    spaces, ahead = workspaces(trace.ops, target), _ahead(trace)
    buckets = _buckets(trace, target)
    stays = (*spaces, ahead, buckets)
    usable = None if limit is None else limit.usable_bytes - _CUDA_MARGIN
    steady = steps_of(trace, stays)
    free = play(steady)
    found = free if usable is None else play(steady, usable)
    peak = sum(part.num_bytes for part in counted)
    parts = [
        *counted,
        MemoryPart("batches ahead", ahead, "rule", "two are on their way while one is computed"),
        MemoryPart(
            "gradient buckets", buckets, "rule", "several processes keep all gradients always"
        ),
        MemoryPart(
            "workspaces", sum(spaces), "rule", "cuBLAS keeps one for forward, one for backward"
        ),
        MemoryPart("blocks", max(free.allocated_bytes - peak - sum(stays), 0), "rule", _WHY_BLOCKS),
    ]
    records = None
    if is_recorded:
        again = sum(spaces) + trace.held.by_owner.get("batch", 0)
        why = "while a step is recorded it has workspaces and inputs of its own"
        parts.append(MemoryPart("graph pool", again, "rule", why))
        records = found.fits and _has_room(trace, stays, again, usable)
    guessed = play(steps_of(trace, stays, with_guesses=True)).allocated_bytes
    if guessed > free.allocated_bytes:
        parts.append(MemoryPart("cuDNN", guessed - free.allocated_bytes, "margin", _WHY_CUDNN))
    parts.append(
        MemoryPart("margin", _CUDA_MARGIN, "margin", "generators, events, and what is unknown")
    )
    needed = (found if found.fits else free).reserved_bytes + _CUDA_MARGIN
    told = _forecast(trace, target, tuple(part for part in parts if part.num_bytes), needed, limit)
    return replace(told, fits=None if usable is None else found.fits, records=records)


def _ahead(trace: Trace) -> int:
    """Return the bytes of the batches that are sent before they are asked for."""
    sent = sum(
        op.calls * num_bytes(made)
        for op in trace.ops
        if op.phase == "data" and any(given.device == "cpu" for given in op.inputs)
        for made in op.outputs
        if made.device != "cpu"
    )
    whole = sent or trace.held.by_owner.get("batch", 0)
    return _NUM_AHEAD * whole // max(trace.job.accumulation, 1)


def _buckets(trace: Trace, target: Target) -> int:
    """Return the gradients that several processes hold while one would hold none yet."""
    job, held = trace.job, trace.held.by_owner
    if max(job.world_size, target.num_devices) == 1 or not job.num_parameters:
        return 0
    whole = held.get("parameters", 0) * job.num_trainable // job.num_parameters
    return max(whole - held.get("gradients", 0), 0)


def fits_within(trace: Trace, target: Target, limit: Limit) -> bool:
    """Return `forecast(...).fits`, at a fraction of its cost."""
    if target.kind != "cuda":
        return bool(forecast(trace, target, limit).fits)
    stays = (*workspaces(trace.ops, target), _ahead(trace), _buckets(trace, target))
    steady = steps_of(trace, stays)
    return play(steady, limit.usable_bytes - _CUDA_MARGIN).fits


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


def steps_of(
    trace: Trace, stays: Iterable[int] = (), num_more: int = 1, *, with_guesses: bool = False
) -> list[Event]:
    """Return all that the run takes and gives back, with more steps like the last one behind it.

    `stays` is memory that is there from the beginning and that no tensor of the trace holds.

    >>> from anytrain.insight.preflight.trace import Held, TracedJob
    >>> held = Held(3, {}, {}, (), events=((0, 1), (1, 2), (1, 0)), step=(1, 3))
    >>> steps_of(Trace(TracedJob(), (), held, 0.0))
    [(0, 1), (1, 2), (1, 0), (4, 2), (4, 0)]
    """
    held, (begin, end) = trace.held, trace.held.step
    if not held.events:  # only the peak is known
        return [*enumerate(filter(None, stays), 1), (0, held.peak_bytes)]
    events = [event for event in held.events if with_guesses or event[0] >= 0]
    step = [event for event in held.events[begin:end] if with_guesses or event[0] >= 0]
    passing = {which for which, size in step if size} & {which for which, size in step if not size}
    length = len(held.events)
    again = [
        (which + number * length if which >= 0 else which - number * length, size)
        for number in range(1, num_more + 1)
        for which, size in step
        if which in passing
    ]
    first = (num_more + 1) * length
    return [*enumerate(filter(None, stays), first), *events, *again]


def _has_room(trace: Trace, stays: tuple[int, ...], more: int, usable: int | None) -> bool | None:
    """Whether the pool of a recorded step fits beside what stays: it cannot use the cache.

    `more` is what the pool holds beside the step's tensors.
    """
    if usable is None:
        return None
    begin, end = trace.held.step
    alive: dict[int, int] = {}
    for which, size in trace.held.events[:begin]:
        if size:
            alive[which] = size
        else:
            alive.pop(which, None)
    born = {which for which, size in trace.held.events[begin:end] if size and which >= 0}
    step = [event for event in trace.held.events[begin:end] if event[0] in born]
    beside = play([*enumerate(filter(None, stays), -len(stays)), *alive.items()])
    return beside.reserved_bytes + play(step).reserved_bytes + more <= usable


# -- other devices --------------------------------------------------------------------------------


def _margins_elsewhere(target: Target, peak: int, trace: Trace) -> list[MemoryPart]:
    if target.kind == "mps":
        pages = _highest(trace, _METAL_PAGE) - _highest(trace, 1)
        heaps = int(peak * _METAL_SHARE)
        why = "Metal's heaps and MPSGraph's caches: a tenth, which is a rule of thumb"
        return [
            MemoryPart("page rounding", pages, "margin", "Metal's buffers are pages of 16 KiB"),
            MemoryPart("heaps", heaps, "margin", why),
        ]
    if target.kind in ("tpu", "xla"):
        why = "the compiler lays memory out anew: only compiling for the chip tells"
        return [MemoryPart("layout", int(peak * _XLA_SHARE), "margin", why)]
    return []


def _highest(trace: Trace, page: int) -> int:
    """Return the most that is held where memory comes in pages of this size."""
    held: dict[int, int] = {}
    total = highest = 0
    for which, size in trace.held.events:
        if size:
            held[which] = rounded(size, page)
            total += held[which]
            highest = max(highest, total)
        else:
            total -= held.pop(which, 0)
    return highest
