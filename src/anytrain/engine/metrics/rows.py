"""Count every sample once: cut repeats off, and join ranks with unlike numbers of rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from anytrain.core.errors import ShapesDiffer
from anytrain.engine.objective import IGNORED
from anytrain.engine.tree import batch_size, put_together, take_apart, take_rows
from anytrain.machine.backends import running_sum
from anytrain.machine.parallel.world import World


def own_rows(batch: Any, remainder: int, rank: int, rows_per_rank: int) -> tuple[Any, int]:
    """Return the batch of the last round without its repeats, and its true rows (maybe 0).

    The round holds `remainder` true samples, dealt to rank 0 first; 0 or less means that it was
    full. Tensors and lists with as many rows as the batch are cut, other things stay.

    >>> own_rows([10, 11, 12, 13], remainder=6, rank=1, rows_per_rank=4)
    ([10, 11], 2)
    """
    held, kept = num_own_rows(batch, remainder, rank, rows_per_rank)
    return (batch if kept == held else take_rows(batch, slice(0, kept), held)), kept


def num_own_rows(batch: Any, remainder: int, rank: int, rows_per_rank: int) -> tuple[int, int]:
    """Return how many rows a batch of the last round has, and how many of them are no repeats."""
    found = batch_size(batch)
    held = rows_per_rank if found is None else found
    if remainder <= 0:
        return held, held
    return held, min(max(remainder - rank * rows_per_rank, 0), rows_per_rank, held)


@dataclass(frozen=True, slots=True)
class _Held:
    """What one rank has to give: how its tree is built, and its tensors' kinds and shapes."""

    skeleton: Any
    dtypes: list[torch.dtype]
    shapes: list[tuple[int, ...]]


def gather_rows(tree: Any, world: World, device: torch.device | None = None) -> Any:
    """Return the rows of every rank in rank order, on every rank.

    Ranks may hold different numbers of rows; one that has none may pass a tree without tensors,
    such as None. Shorter rows are padded with -100 to the longest. `device` is where a rank
    without tensors gets the result.
    """
    if world.size == 1:
        return tree
    skeleton, tensors = take_apart(tree)
    tensors = [t.detach().reshape(1) if t.ndim == 0 else t.detach() for t in tensors]
    own = _Held(skeleton, [t.dtype for t in tensors], [tuple(t.shape) for t in tensors])
    # A rank without rows may not know what the others' trees look like.
    held = world.gather_object(own if tensors else None)
    givers = [each for each in held if each is not None]
    if not givers:
        return tree
    _check_alike(held)
    first = givers[0]
    if not tensors:
        tensors = [torch.empty(0, device=device) for _ in first.shapes]
    everyone = [[each.shapes[i] if each else None for each in held] for i in range(len(tensors))]
    dtypes = [_common([each.dtypes[i] for each in givers]) for i in range(len(tensors))]
    joined = [
        _gather_one(tensor, shapes, dtype, world)
        for tensor, shapes, dtype in zip(tensors, everyone, dtypes, strict=True)
    ]
    return put_together(first.skeleton, joined)


def _gather_one(
    tensor: torch.Tensor, shapes: list[tuple[int, ...] | None], dtype: torch.dtype, world: World
) -> torch.Tensor:
    known = [shape for shape in shapes if shape is not None]
    longest = tuple(max(sizes) for sizes in zip(*known, strict=True))
    fill = 0
    if any(shape[1:] != longest[1:] for shape in known):
        # Bytes and booleans widen: they cannot hold -100.
        dtype, fill = torch.promote_types(dtype, torch.int8), IGNORED
    block = torch.full(longest, fill, dtype=dtype, device=tensor.device)
    if tensor.numel():
        block[tuple(slice(0, size) for size in tensor.shape)] = tensor.to(dtype)
    joined = world.gather(block)
    starts = range(0, len(shapes) * longest[0], longest[0]) if longest[0] else [0] * len(shapes)
    pieces = [
        joined[start : start + shape[0]]
        for start, shape in zip(starts, shapes, strict=True)
        if shape is not None
    ]
    return torch.cat(pieces)


def _common(dtypes: list[torch.dtype]) -> torch.dtype:
    return reduce(torch.promote_types, dtypes)


def _check_alike(held: list[_Held | None]) -> None:
    """Refuse trees that are built differently; every rank sees the same and refuses together."""
    first = next(each for each in held if each is not None)
    for rank, each in enumerate(held):
        if each is None:
            continue
        ranks_differ = [len(s) for s in each.shapes] != [len(s) for s in first.shapes]
        if each.skeleton != first.skeleton or ranks_differ:
            raise ShapesDiffer(
                "Cannot join the outputs of all ranks: they are built differently.",
                why=f"rank {rank} holds {each.skeleton} with shapes {each.shapes}, another "
                f"{first.skeleton} with shapes {first.shapes}.",
                fix="return the same keys and numbers of dimensions for every batch.",
            )


class LossMean:
    """A mean of batch losses, each weighing as many rows as it was taken over."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._rows = 0

    def add(self, loss: torch.Tensor, rows: int) -> None:
        """Add the mean loss of `rows` rows, without reading it; one of no rows counts nothing."""
        if rows == 0:
            return
        loss = loss.detach().mean()  # a replicated model may give one loss a replica
        if self._sum is None:
            self._sum = _zero(loss.device)
        running_sum.add(self._sum, loss, rows)
        self._rows += rows

    def value(self, world: World) -> float | None:
        """Return the mean over every rank's rows; None where there are none.

        Every rank must ask. It is the first time that the device is read.
        """
        own = 0.0 if self._sum is None else float(running_sum.readable(self._sum))
        both = torch.tensor([own, float(self._rows)], dtype=torch.float64)
        total, rows = world.reduce(both, "sum").tolist()
        return total / rows if rows else None


def _zero(device: torch.device) -> torch.Tensor:
    """Return a zero to add to: in float64, or in float32 where the device has no other."""
    if device.type == "xla":
        return running_sum.zero(device)
    try:
        return torch.zeros((), dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.zeros((), dtype=torch.float32, device=device)
