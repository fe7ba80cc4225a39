"""Read on the main process, hand the other ranks their rows.

For streams that must be read once: rank 0 reads one batch per rank (or one to be split), the
joined rows are broadcast, and each rank keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from anytrain.core.errors import BadInput
from anytrain.engine.tree import batch_size, is_all_tensors, join_rows, map_tensors, rows
from anytrain.machine.parallel.world import World


@dataclass(frozen=True, slots=True)
class _Shape:
    """A tensor less its values, as it travels ahead of them."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Rounds:
    """How what rank 0 reads is dealt to the ranks."""

    world: World
    device: torch.device
    split_batches: bool
    """Whether a round is one batch, split; else it is one batch a rank."""
    drop_last: bool
    slice_fn: Callable[..., Any] | None


def dispatch(
    source: Iterator[Any],
    rounds: Rounds,
    *,
    report: Callable[[int], None],
    place: Callable[[], Any] = lambda: None,
    reach: Callable[[Any], None] = lambda place: None,
) -> Iterator[Any]:
    """Yield this rank's rows of every round; `report` learns the size of the last one.

    A short last round is filled from the first, so that every rank has rows. One round is read
    ahead: `reach` learns what `place` said before that, so where each round has ended.
    """
    first, world = None, rounds.world
    current = _read_round(source, rounds)
    while current is not None:
        batch = _spread(current, world, rounds.device)
        size = batch_size(batch) or 0
        if first is None:
            first = rows(batch, slice(0, world.size))
        reached = place()
        following = _read_round(source, rounds)
        if following is None:
            report(size)
        while not rounds.drop_last and size % world.size:  # of a worker that is through, too
            missing = world.size - size % world.size
            batch = join_rows([batch, rows(first, slice(0, missing))])
            size = batch_size(batch) or 0
        part = size // world.size
        reach(reached)
        yield _cut(batch, slice(world.rank * part, (world.rank + 1) * part), rounds)
        current = following


def _cut(batch: Any, own: slice, rounds: Rounds) -> Any:
    if rounds.slice_fn is None:
        return rows(batch, own)
    world = rounds.world
    return rounds.slice_fn(batch, own, process_index=world.rank, num_processes=world.size)


def _read_round(source: Iterator[Any], rounds: Rounds) -> Any | None:
    """Return (on every rank) the shapes of the next round, with the values on rank 0."""
    batch, shapes, world = None, None, rounds.world
    if world.rank == 0:
        wanted = 1 if rounds.split_batches else world.size
        batches = [b for _, b in zip(range(wanted), source, strict=False)]
        if batches and not (rounds.drop_last and len(batches) < wanted):
            batch = _joined(batches)
            shapes = map_tensors(lambda t: _Shape(tuple(t.shape), t.dtype), batch)
    shapes = world.broadcast_object(shapes)
    return None if shapes is None else (shapes, batch)


def _joined(batches: list[Any]) -> Any:
    if not is_all_tensors(batches):
        raise BadInput(
            "Cannot dispatch batches that hold other things than tensors.",
            why="the main process reads them and broadcasts tensors to the other ranks.",
            fix="return tensors alone from the collate function, or pass dispatch_batches=False.",
        )
    try:
        return join_rows(batches)
    except RuntimeError as error:
        raise BadInput(
            "Cannot dispatch batches of different shapes.",
            why=f"the batches of one round are joined before they are dealt: {error}",
            fix="pad to one length, or pass dispatch_batches=False or split_batches=True.",
        ) from error


def _spread(current: tuple[Any, Any], world: World, device: torch.device) -> Any:
    """Return the round's values on every rank."""
    shapes, batch = current
    if world.rank != 0:
        batch = _empty(shapes, device)
    return map_tensors(lambda tensor: world.broadcast(tensor.to(device)), batch)


def _empty(shapes: Any, device: torch.device) -> Any:
    if isinstance(shapes, _Shape):
        return torch.empty(shapes.shape, dtype=shapes.dtype, device=device)
    if isinstance(shapes, dict):
        return {key: _empty(value, device) for key, value in shapes.items()}
    if hasattr(shapes, "_fields"):
        return type(shapes)(*(_empty(value, device) for value in shapes))
    if isinstance(shapes, (list, tuple)):
        return type(shapes)(_empty(value, device) for value in shapes)
    return type(shapes)({key: _empty(value, device) for key, value in shapes.items()})
