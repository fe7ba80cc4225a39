"""Our own CUDA kernels, compiled by the driver's compiler when they are first wanted.

That takes a fraction of a second and needs no toolkit. They work on all of a model's tensors in
one launch: torch's own need several, and a pass over the gradients for each question.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import resources
from typing import Any, NamedTuple

import torch

from anytrain.core import environment

_NAMES = (
    *("squares", "norm", "rates", "adam", "count"),
    *("halve", "column_sums", "tanh_gelu_backward", "erf_gelu_backward", "fold"),
    *("loss_forward", "loss_backward"),
)
_PREFIX = "step_"  # CUDA has functions of its own of such names
_CHUNK = 16384
_THREADS = 256
_COLUMNS = 256
_BLOCKS = 144
"""Enough blocks to fill a large GPU."""
_GELU_BLOCKS = 528
"""Four on each processor of a large GPU."""
_SLICES = 48
_NORM_THREADS, _FOLD_THREADS = 128, 512
ROW = 8
NORM_PART = 128
"""A layer norm's width is a multiple of this, up to 8 of them."""
_NARROW = 3 * NORM_PART
"""Layer norms up to this width have three blocks on a processor at once, wider ones two."""
_HAS_ADDEND = 8
"""As the kernels call it."""


_loaded: dict[tuple[int, tuple[int, ...]], Any] = {}
"""What this process has given to each GPU, once for all its trainings: it stays there."""


class Kernels:
    """The kernels of one GPU; they are compiled behind the run that will want them.

    `norms` are the widths of the layer norms they are for, in parts of 128.
    """

    def __init__(self, device: torch.device, norms: Sequence[int] = ()) -> None:
        self._device, self._norms = device, sorted(set(norms))
        self.num_processors: int = torch.cuda.get_device_properties(device).multi_processor_count
        self._found: dict[str, Any] | None = None
        self.problem: str | None = None
        """Why they are not there."""
        self._thread = threading.Thread(target=self._compile, name="anytrain-nvrtc", daemon=True)
        self._thread.start()

    def _compile(self) -> None:
        both = [f"norm_{way}_{parts}" for parts in self._norms for way in ("forward", "backward")]
        names = [_PREFIX + name for name in (*_NAMES, *both)]
        try:
            if torch.version.cuda is None:
                raise RuntimeError("written for NVIDIA's GPUs: warps of 32 threads")
            from torch.cuda import _utils

            torch.cuda.set_device(self._device)
            key = torch.cuda.current_device(), tuple(self._norms)
            if key not in _loaded:
                _loaded[key] = _utils._cuda_load_module(self._binary(names[0]), names)
            self._found = _loaded[key]
        except Exception as error:  # noqa: BLE001  torch's own kernels do it all too, slower
            self.problem = str(error)

    def _binary(self, name: str) -> bytes:
        """Return the compiled kernels, from the user's cache where they were made before."""
        from torch.cuda import _utils

        source = resources.files("anytrain.machine.backends").joinpath("cuda_step.cu").read_text()
        source += "".join(f"NORMS({parts})\n" for parts in self._norms)
        chip = torch.cuda.get_device_capability(self._device)
        key = hashlib.sha256(f"{source}{chip}{torch.version.cuda}".encode()).hexdigest()[:24]
        kept = environment.cache_folder() / "kernels" / f"{key}.cubin"
        with suppress(OSError):
            return kept.read_bytes()
        binary, _ = _utils._nvrtc_compile(source, name)
        with suppress(OSError):  # a cache that cannot be written is no error
            kept.parent.mkdir(parents=True, exist_ok=True)
            made = kept.with_suffix(f".{os.getpid()}")
            made.write_bytes(binary)
            made.replace(kept)
        return binary

    def is_done(self) -> bool:
        """Whether the compiler has come to an end, good or bad."""
        return not self._thread.is_alive()

    def are_there(self) -> bool:
        """Whether they can be used; waits for the compiler."""
        self._thread.join()
        return self._found is not None

    def launch(
        self, name: str, grid: tuple[int, int], args: Sequence[Any], threads: int = _THREADS
    ) -> None:
        """Start a kernel on the current stream."""
        assert self._found is not None
        self._found[_PREFIX + name](grid=(*grid, 1), block=(threads, 1, 1), args=list(args))

    def knows_norm(self, width: int) -> bool:
        """Whether layer norms of this width are among the kernels."""
        return width % NORM_PART == 0 and width // NORM_PART in self._norms


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
    means: torch.Tensor
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
    """Normalize an input, or the sum of it and of an addend in bfloat16."""
    width = inputs.shape[-1]
    rows = inputs.numel() // width
    read = inputs if addend is None else torch.empty_like(inputs)
    result, rounded = torch.empty_like(inputs), torch.empty_like(inputs, dtype=torch.bfloat16)
    means, scales = inputs.new_empty(rows), inputs.new_empty(rows)
    made = [result, rounded, means, scales]
    flags = 0 if addend is None else _HAS_ADDEND
    given = [inputs, inputs if addend is None else addend, read, weight, bias]
    lines = _NORM_THREADS // 32
    kernels.launch(
        f"norm_forward_{width // NORM_PART}",
        (-(-rows // lines), 1),
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
    bias: torch.Tensor
    addend: torch.Tensor | None
    """In bfloat16; of what a dropout has read, if there was one."""
    addend_sums: torch.Tensor | None
    """The sum of its rows."""


def norm_backward(
    kernels: Kernels,
    saved: tuple[torch.Tensor, Any, torch.Tensor, torch.Tensor],
    sent: Sent,
    *,
    has_addend: bool = False,
    mask: torch.Tensor | None = None,
    factor: float = 1.0,
) -> NormGradients:
    """Return the gradients of what a layer norm has read, and of its own.

    `saved` are what it has read, the weight, and the rows' means and scales. The addend may have
    gone through a dropout with this mask and factor.
    """
    inputs, weight, means, scales = saved
    width = inputs.shape[-1]
    rows = inputs.numel() // width
    at_once = kernels.num_processors * (3 if width <= _NARROW else 2)
    blocks = min(at_once, -(-rows // (_NORM_THREADS // 32)))
    folded = (3 if has_addend else 2) * width
    result, parts = torch.empty_like(inputs), inputs.new_empty(blocks, folded)
    of_addend = torch.empty_like(inputs, dtype=torch.bfloat16) if has_addend else None
    optional = [*sent, of_addend, mask]  # in the order of the kernel's flags
    flags = sum(1 << bit for bit, tensor in enumerate(optional) if tensor is not None)
    whole, rounded, of_sum, into, kept = (inputs if t is None else t for t in optional)
    args = [inputs, weight, means, scales, whole, rounded, of_sum, kept, result, into, parts]
    kernels.launch(
        f"norm_backward_{width // NORM_PART}",
        (blocks, 1),
        [*args, rows, flags, float(factor)],
        _NORM_THREADS,
    )
    own, sums = inputs.new_empty(2, width), inputs.new_empty(width, dtype=torch.bfloat16)
    args = [parts, own, sums, blocks, folded, 2 * width]
    kernels.launch("fold", (folded // 32, 1), args, _FOLD_THREADS)
    return NormGradients(result, own[0], own[1], of_addend, sums if has_addend else None)


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
