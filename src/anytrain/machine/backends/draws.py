"""Draw dropout's masks on the CPU from a quarter of the random numbers.

torch draws a number for each value, one after the other in one thread: with two cores a sixth of a
small BERT's step. Here one number of 64 bits decides on four values. The masks are other ones, just
as random; they come from torch's own generator, so that a run resumes to the bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_PARTS = 1 << 16
_RAREST = 64 / _PARTS
"""The rarest that 16 bits tell well enough: nearer to never or always, each value has its own."""


@contextmanager
def quick_dropout() -> Iterator[None]:
    """Draw masks the quick way inside the block, in the whole process."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning)  # it replaces a kernel: yes
            library.impl("bernoulli_.float", _draw, "CPU")
        yield
    finally:
        library._destroy()


def _draw(
    values: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Set each value to 1 with probability `p`, to the nearest of 65,536 parts, else to 0."""
    if not _RAREST <= p <= 1 - _RAREST:
        return values.copy_(torch.rand(values.shape, generator=generator) < p)
    numbers = torch.empty(-(-values.numel() // 4), dtype=torch.int64)
    numbers.random_(-(2**63), None, generator=generator)
    parts = numbers.view(torch.int16)[: values.numel()].view(values.shape)
    return values.copy_(parts < round(p * _PARTS) - _PARTS // 2)
