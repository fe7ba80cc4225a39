"""The CUDA kernels of a step's parts: update, roundings, layer norms, sums, GELU, the loss.

Those for the update work on all of a model's tensors in one launch: torch's own need several, and
a pass over the gradients for each question.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from anytrain.fast.kernels.compiled import Compiled

_NAMES = (
    *("squares", "norm", "rates", "adam", "count"),
    *("halve", "column_sums", "tanh_gelu_backward", "erf_gelu_backward", "fold"),
    *("gate", "gate_backward", "rotate", "rotate_backward"),
    *("loss_forward", "loss_backward"),
    *("sort", "add_rows", "join_rows"),
)
_CHUNK = 16384
_COLUMNS = 256
_BLOCKS = 144
"""Enough blocks to fill a large GPU."""
_GELU_BLOCKS = 528
"""Four on each processor of a large GPU."""
_SLICES = 48
_NORM_THREADS, _FOLD_THREADS = 128, 512
ROW = 8
_NORM_PART = 128
_MOST_PARTS = 8
"""Of a norm's width, that one warp has."""
_NARROW = 3
"""Norms whose warps have up to so many have three blocks on a processor at once, others two."""
_HAS_ADDEND = 8
"""As the kernels call it."""
MOST_LOOKUPS = 8192
"""Of a table in one step: each is compared with all others."""
MOST_COLUMNS = 3072
"""Of a table: a thread has four, and more threads have no registers for it in one block."""
_SORTED = 32
_SORTERS = 8


class Norm(NamedTuple):
    """A kind of norm: a layer norm, or one without mean and bias (RMS)."""

    width: int
    is_centered: bool = True

    @property
    def num_warps(self) -> int:
        """How many warps a row has: as few as hold it; 0 where there is no such kernel."""
        parts, rest = divmod(self.width, _NORM_PART)
        fits = (n for n in (1, 4, 2) if parts % n == 0 and 0 < parts // n <= _MOST_PARTS)
        return 0 if rest else next(fits, 0)

    @property
    def num_parts(self) -> int:
        """How many parts of a row a warp has."""
        return self.width // _NORM_PART // self.num_warps

    @property
    def rows(self) -> int:
        """How many a block has at once."""
        return _NORM_THREADS // 32 // self.num_warps

    def kernel(self, way: str) -> str:
        """Return the name of the kernel for a way, forward or backward."""
        return f"{'norm' if self.is_centered else 'rms'}_{way}_{self.width}"

    @property
    def code(self) -> str:
        """What is put behind the kernels' own text."""
        kind = "norm" if self.is_centered else "rms"
        centered = str(self.is_centered).lower()
        return f"NORM({kind}, {self.width}, {self.num_parts}, {self.num_warps}, {centered})\n"


class Kernels(Compiled):
    """The kernels of a whole step, for one GPU, and for these norms."""

    def __init__(self, device: torch.device, norms: Sequence[Norm] = ()) -> None:
        self._norms = sorted({norm for norm in norms if norm.num_warps})
        self.num_processors: int = torch.cuda.get_device_properties(device).multi_processor_count
        both = [norm.kernel(way) for norm in self._norms for way in ("forward", "backward")]
        more = "".join(norm.code for norm in self._norms)
        super().__init__(device, "step.cu", (*_NAMES, *both), more)

    def knows_norm(self, norm: Norm) -> bool:
        """Whether norms of this kind are among the kernels."""
        return norm in self._norms


def chunks_of(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return for each block its tensor and the part of it that it works on."""
    pairs = [
        (tensor, part) for tensor, count in enumerate(counts) for part in range(-(-count // _CHUNK))
    ]
    return torch.tensor(pairs, dtype=torch.int32).to(device)


def column_sums(kernels: Kernels, matrix: torch.Tensor, scratch: tuple[Any, Any]) -> torch.Tensor:
    """Return the sum of a bfloat16 matrix's rows; its width is a multiple of 8."""
    result = matrix.new_empty(matrix.shape[1])
    grid, more = _column_blocks(matrix, _BLOCKS)
    kernels.launch("column_sums", grid, [matrix, result, *scratch, *more])
    return result


def gelu_backward(
    kernels: Kernels,
    read: torch.Tensor,
    sent: torch.Tensor,
    scratch: tuple[Any, Any],
    *,
    by_tanh: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of the bfloat16 matrix that a GELU has read, and the sum of its rows.

    `sent` is the gradient of what it has made; the width is a multiple of 8.
    """
    made, sums = torch.empty_like(read), read.new_empty(read.shape[1])
    grid, more = _column_blocks(read, _GELU_BLOCKS)
    name = "tanh_gelu_backward" if by_tanh else "erf_gelu_backward"
    kernels.launch(name, grid, [read, sent, made, sums, *scratch, *more])
    return made, sums


def _column_blocks(matrix: torch.Tensor, most: int) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Return the grid for a matrix's columns, and the numbers that its kernel wants."""
    height, width = matrix.shape
    blocks = -(-width // _COLUMNS)
    slices = max(1, min(most // blocks, _SLICES, height // 16))
    return (blocks, slices), (height, width, slices)


def scratch_for(width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what sums of columns need for matrices up to this width."""
    blocks = -(-width // _COLUMNS)
    parts = torch.empty((_GELU_BLOCKS + blocks) * _COLUMNS, device=device)
    return parts, torch.zeros(blocks, dtype=torch.int32, device=device)


class Normed(NamedTuple):
    """What a layer norm has made."""

    inputs: torch.Tensor
    """What it has read: its input, or the sum of that and of the addend."""
    result: torch.Tensor
    rounded: torch.Tensor
    """The result in bfloat16."""
    means: torch.Tensor | None
    """Each row's; None where none is taken."""
    scales: torch.Tensor
    """Each row's."""


def norm_forward(
    kernels: Kernels,
    inputs: torch.Tensor,
    weight: Any,
    bias: Any,
    epsilon: float,
    addend: torch.Tensor | None = None,
) -> Normed:
    """Normalize an input, or the sum of it and of an addend in bfloat16.

    Without a bias it is an RMS norm.
    """
    norm = Norm(inputs.shape[-1], bias is not None)
    rows = inputs.numel() // norm.width
    read = inputs if addend is None else torch.empty_like(inputs)
    result, rounded = torch.empty_like(inputs), torch.empty_like(inputs, dtype=torch.bfloat16)
    scales = inputs.new_empty(rows)
    means = inputs.new_empty(rows) if norm.is_centered else None
    made = [result, rounded, scales if means is None else means, scales]
    flags = 0 if addend is None else _HAS_ADDEND
    own = [weight, weight if bias is None else bias]
    given = [inputs, inputs if addend is None else addend, read, *own]
    kernels.launch(
        norm.kernel("forward"),
        (-(-rows // norm.rows), 1),
        [*given, *made, rows, flags, float(epsilon)],
        _NORM_THREADS,
    )
    return Normed(read, result, rounded, means, scales)


class Sent(NamedTuple):
    """The gradients that come to a layer norm; each may be missing."""

    whole: torch.Tensor | None = None
    """Of its result."""
    rounded: torch.Tensor | None = None
    """Of its result, from those who read it rounded."""
    of_sum: torch.Tensor | None = None
    """Of the sum that it has read, from others who read that."""


class NormGradients(NamedTuple):
    """What a layer norm sends back."""

    inputs: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    addend: torch.Tensor | None
    """In bfloat16; of what a dropout has read, if there was one."""
    addend_sums: torch.Tensor | None
    """The sum of its rows."""


def norm_backward(
    kernels: Kernels,
    saved: tuple[torch.Tensor, Any, torch.Tensor | None, torch.Tensor],
    sent: Sent,
    *,
    has_addend: bool = False,
    mask: torch.Tensor | None = None,
    factor: float = 1.0,
) -> NormGradients:
    """Return the gradients of what a layer norm has read, and of its own.

    `saved` are what it has read, the weight, and the rows' means, if it takes them, and scales. The
    addend may have gone through a dropout with this mask and factor.
    """
    inputs, weight, means, scales = saved
    norm = Norm(inputs.shape[-1], means is not None)
    rows = inputs.numel() // norm.width
    at_once = kernels.num_processors * (3 if norm.num_parts <= _NARROW else 2)
    blocks = min(at_once, -(-rows // norm.rows))
    num_own = 2 if norm.is_centered else 1
    whole_width = num_own * norm.width
    folded = whole_width + (norm.width if has_addend else 0)
    result, parts = torch.empty_like(inputs), inputs.new_empty(blocks, folded)
    of_addend = torch.empty_like(inputs, dtype=torch.bfloat16) if has_addend else None
    optional = [*sent, of_addend, mask]  # in the order of the kernel's flags
    flags = sum(1 << bit for bit, tensor in enumerate(optional) if tensor is not None)
    whole, rounded, of_sum, into, kept = (inputs if t is None else t for t in optional)
    rows_own = [scales if means is None else means, scales]
    args = [inputs, weight, *rows_own, whole, rounded, of_sum, kept, result, into, parts]
    kernels.launch(
        norm.kernel("backward"),
        (blocks, 1),
        [*args, rows, flags, float(factor)],
        _NORM_THREADS,
    )
    own = inputs.new_empty(num_own, norm.width)
    sums = inputs.new_empty(norm.width, dtype=torch.bfloat16)
    args = [parts, own, sums, blocks, folded, whole_width]
    kernels.launch("fold", (folded // 32, 1), args, _FOLD_THREADS)
    of_bias = own[1] if norm.is_centered else None
    return NormGradients(result, own[0], of_bias, of_addend, sums if has_addend else None)


def loss_forward(
    kernels: Kernels, logits: torch.Tensor, width: int, targets: torch.Tensor, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's cross-entropy, and the logarithm of the sum of its exponentials.

    Of the rows of a bfloat16 matrix, the first `width` columns are logits.
    """
    losses, logs = (torch.empty(len(logits), device=logits.device) for _ in range(2))
    args = [logits, targets, losses, logs, *_layout(logits, width, ignored)]
    kernels.launch("loss_forward", (len(logits), 1), args)
    return losses, logs


def loss_backward(
    kernels: Kernels,
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    width: int,
    ignored: int,
    given: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of the logits, from that of each row's loss.

    `saved` are the logits, the targets and the rows' logarithms.
    """
    logits, targets, logs = saved
    result = torch.empty_like(logits)
    args = [logits, targets, logs, given, result, *_layout(logits, width, ignored)]
    kernels.launch("loss_backward", (len(logits), 1), args)
    return result


def _layout(logits: torch.Tensor, width: int, ignored: int) -> tuple[int, int, int, int]:
    stride = logits.shape[1]
    return width, stride, ignored, int(stride % 8 == 0)


def rows_added(
    kernels: Kernels, numbers: torch.Tensor, sent: torch.Tensor, height: int, left_out: int
) -> torch.Tensor:
    """Return the gradient of a table in which these rows were looked up.

    `sent` is a float32 matrix of their gradients. The row `left_out`, if there is one, gets none.
    """
    count, width = sent.shape
    made = sent.new_zeros(height, width)
    blocks = -(-count // _SORTED)
    sorted_, places = (sent.new_empty(count, dtype=torch.int32) for _ in range(2))
    parts = sent.new_empty(2 * blocks, width)
    kernels.launch(
        "sort", (-(-count // _SORTERS), 1), [numbers, sorted_, places, count], 32 * _SORTERS
    )
    threads = 32 * -(-width // 128)
    more = [count, width // 4, left_out]
    kernels.launch("add_rows", (blocks, 1), [sorted_, places, sent, made, parts, *more], threads)
    kernels.launch("join_rows", (blocks, 1), [sorted_, parts, made, *more], threads)
    return made
