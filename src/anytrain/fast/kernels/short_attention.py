"""Attention over short texts in one kernel each way: scores never leave the processor.

The gradients of queries, keys and values that were computed as one tensor come as one tensor. What
is dropped follows from a number that is drawn for each call; its bits are kept for the way back. A
mask is turned to bits first, once for all layers that share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from anytrain.fast.kernels.compiled import Compiled

MOST = 128
"""Queries and keys."""
WIDTHS = (32, 64)
"""Of a head."""
_HAS_MASK, _IS_CAUSAL, _DROPS = 1, 2, 4
"""As the kernels call them."""
_TILE = 16
"""A warp's queries or keys."""
_LINES = 8
"""Of a mask, that a block turns to bits."""
_ODDS = 1 << 16
"""What is dropped is counted in parts of this."""
_PAD = 8
_ALIGNED = 8
"""Values that are read at once: 16 bytes."""
_WORDS = 4
"""Of a query: the bits of its keys."""
_packed: WeakIdKeyDictionary | None = None
"""The bits of masks while they are shared: of a version, for as many keys, made on a stream."""


class ShortAttention(Compiled):
    """The kernels for one GPU."""

    def __init__(self, device: torch.device) -> None:
        names = [f"attend{way}_{width}" for width in WIDTHS for way in ("", "_backward")]
        super().__init__(device, "attention.cu", ["pack", *names])


class Wanted(NamedTuple):
    """What is asked of one call, besides its tensors."""

    dropout: float
    is_causal: bool
    scale: float

    @property
    def dropped(self) -> int:
        """How many of 65,536 are dropped."""
        return min(round(self.dropout * _ODDS), _ODDS - 1)

    @property
    def factor(self) -> float:
        """What turns scores to powers of 2."""
        return self.scale * math.log2(math.e)


def fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> bool:
    """Whether the kernels know such a case; it follows from shapes and types alone."""
    given = (query, key, value)
    if any(type(tensor) is not torch.Tensor or tensor.is_nested for tensor in given):
        return False
    if any(tensor.dtype != torch.bfloat16 or tensor.dim() != 4 for tensor in given):
        return False
    rows, heads, queries, width = query.shape
    keys = key.shape[2]
    is_known = width in WIDTHS and 0 < queries <= MOST and 0 < keys <= MOST and rows * heads > 0
    is_even = key.shape == value.shape == (rows, heads, keys, width)
    is_there = query.is_cuda and query.device == key.device == value.device
    return is_known and is_even and is_there and _is_plain(mask, query.device)


def _is_plain(mask: Any, device: torch.device) -> bool:
    """Whether a mask only says what is seen, or there is none."""
    is_bool = type(mask) is torch.Tensor and mask.dtype == torch.bool
    return mask is None or (is_bool and mask.device == device and 2 <= mask.dim() <= 4)


def attend(
    kernels: ShortAttention,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    wanted: Wanted,
) -> torch.Tensor:
    """Attend as torch's scaled_dot_product_attention does; see `fits`.

    A query that sees no key gets zeros.
    """
    return _attend(*given, mask, (kernels, wanted))


@contextmanager
def shared_masks() -> Iterator[None]:
    """Turn each mask to bits once in the block, which must be all of a step or a recording."""
    global _packed
    before, _packed = _packed, WeakTensorKeyDictionary()
    try:
        yield
    finally:
        _packed = before


def _seen(kernels: ShortAttention, mask: torch.Tensor, keys: int) -> torch.Tensor:
    """Return the bits of a mask, with four dimensions as it may have."""
    kept = None if mask.is_inference() else _packed  # such a tensor has no versions
    state = None if kept is None else (mask._version, keys, torch.cuda.current_stream())
    known = None if kept is None else kept.get(mask)
    if known is not None and known[0] == state:
        found: torch.Tensor = known[1]
        return found
    lines = mask[(None,) * (4 - mask.dim())]
    if lines.shape[-1] != keys or lines.stride(-1) != 1:
        lines = lines.expand(*lines.shape[:-1], keys).contiguous()
    made = lines.new_empty(*lines.shape[:-1], _WORDS, dtype=torch.int32)
    count = made.numel() // _WORDS
    args = [lines, made, *lines.shape[1:], *lines.stride()[:3], count]
    kernels.launch("pack", (-(-count // _LINES), 1), args, 32 * _LINES)
    if kept is not None:
        kept[mask] = state, made
    return made


class _Attend(torch.autograd.Function):
    """Attention that keeps its result, a number for each query, and bits."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any, how: Any) -> Any:
        kernels, wanted = how
        query, key, value = (_readable(tensor) for tensor in (query, key, value))
        (rows, heads, queries, width), keys = query.shape, key.shape[2]
        flags = (_IS_CAUSAL if wanted.is_causal else 0) | (_DROPS if wanted.dropped else 0)
        flags |= 0 if mask is None else _HAS_MASK
        made = _laid_out(query)
        logs = query.new_empty(rows, heads, queries, dtype=torch.float32)
        seen = kept = draw = logs  # what is not read
        if mask is not None:
            seen = _seen(kernels, mask, keys).expand(rows, heads, queries, _WORDS)
        if flags & _DROPS:
            kept = query.new_empty(rows, heads, queries, _WORDS, dtype=torch.int32)
            draw = query.new_empty(1, dtype=torch.int64).random_()
        steps = [step for tensor in (query, key, value, seen) for step in _steps(tensor)]
        args = [query, key, value, seen, draw, made, logs, kept, heads, queries, keys, *steps]
        kernels.launch(
            f"attend_{width}",
            (rows * heads, 1),
            [*args, flags, wanted.dropped, wanted.factor],
            32 * -(-queries // _TILE),
        )
        ctx.save_for_backward(query, key, value, seen, made, logs, kept)
        ctx.how = kernels, wanted, flags
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, sent: Any) -> Any:
        kernels, wanted, flags = ctx.how
        query, key, value, seen, *more = ctx.saved_tensors
        sent = _readable(sent)
        (rows, heads, queries, width), keys = query.shape, key.shape[2]
        made = _gradients(query, key, value)
        placed = (query, key, value, seen, sent, *made[:2])
        steps = [step for tensor in placed for step in _steps(tensor)]
        args = [query, key, value, seen, *more, sent, *made, heads, queries, keys, *steps, flags]
        kernels.launch(
            f"attend_backward_{width}",
            (rows * heads, 1),
            [*args, wanted.dropped, wanted.factor],
            32 * -(-max(queries, keys) // _TILE),
            _shared_bytes(queries, keys, width),
        )
        return *made, None, None


def _steps(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor.stride()[:3] if tensor.dim() == 4 else (0, 0, 0)


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose rows the kernels can read."""
    rows, heads, lines, values = tensor.stride()
    is_even = (rows | heads | lines) % _ALIGNED == 0  # each of them is
    if values == 1 and is_even and tensor.data_ptr() % (2 * _ALIGNED) == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _gradients(query: Any, key: Any, value: Any) -> tuple[torch.Tensor, ...]:
    """Return empty gradients; as parts of one tensor where what they are of may be that."""
    given = (query, key, value)
    rows, heads, length, width = query.shape
    is_one = query.shape == key.shape and len({t.untyped_storage()._cdata for t in given}) == 1
    if is_one:
        line = heads * width
        whole, shape = query.new_empty(rows, length, 3, line), query.shape
        steps = (3 * length * line, width, 3 * line, 1)
        return tuple(whole.as_strided(shape, steps, part * line) for part in range(3))
    return tuple(map(_laid_out, given))


def _laid_out(like: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor whose heads lie beside each other, as layers read them."""
    rows, heads, length, width = like.shape
    steps = (length * heads * width, width, heads * width, 1)
    return torch.empty_strided(like.shape, steps, dtype=like.dtype, device=like.device)


def _shared_bytes(queries: int, keys: int, width: int) -> int:
    """Return what the way back needs, as the kernel lays it out."""
    all_queries, all_keys = (_TILE * -(-count // _TILE) for count in (queries, keys))
    halves = (2 * all_queries + all_keys) * (width + _PAD) + all_keys * (all_queries + _PAD)
    return 2 * halves + 4 * 10 * all_queries


_attend: Callable[..., torch.Tensor] = _Attend.apply
