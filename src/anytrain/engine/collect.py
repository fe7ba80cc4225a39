"""Collective operations over whole trees of tensors."""

from __future__ import annotations

from typing import Any

import torch

from anytrain.core.errors import BadInput, ShapesDiffer
from anytrain.engine.tree import leaves, map_tensors, require_tensors
from anytrain.machine.parallel.world import ReduceOp, World

_REDUCTIONS: dict[str, ReduceOp] = {"sum": "sum", "mean": "mean", "max": "max"}


def gather(tree: Any, world: World, *, check: bool = False) -> Any:
    """Return every rank's tensors, joined along the first dimension."""
    require_tensors(tree, "gather")
    if check:
        check_shapes(tree, world, "gather")
    return map_tensors(world.gather, tree)


def gather_objects(value: Any, world: World) -> Any:
    """Return every rank's list in one list; a value that is no list comes back as it is alone."""
    if world.size == 1:
        return value
    gathered = world.gather_object(value)
    if isinstance(value, (list, tuple)):
        return [item for part in gathered for item in part]
    return gathered


def reduce(tree: Any, world: World, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Return the sum, mean or maximum of every tensor over the ranks, times `scale`."""
    if reduction not in (*_REDUCTIONS, "none"):
        raise BadInput(
            f"Cannot reduce by {reduction!r}.",
            why="the known reductions are 'sum', 'mean', 'max' and 'none'.",
            fix='pass reduction="sum", "mean" or "max".',
        )
    require_tensors(tree, "reduce")
    if reduction == "none":
        return map_tensors(lambda tensor: tensor.clone(), tree)

    def one(tensor: torch.Tensor) -> torch.Tensor:
        total = world.reduce(tensor, _REDUCTIONS[reduction])
        return total if scale == 1.0 else total * scale

    return map_tensors(one, tree)


def broadcast(tree: Any, world: World, source: int = 0) -> Any:
    """Return `source`'s tensors on every rank."""
    require_tensors(tree, "broadcast")
    return map_tensors(lambda tensor: world.broadcast(tensor.clone(), source), tree)


def broadcast_object_list(values: list[Any], world: World, source: int = 0) -> list[Any]:
    """Fill the list, in place, with `source`'s values."""
    values[:] = world.broadcast_object(list(values), source)
    return values


def pad_across(
    tree: Any, world: World, dim: int = 0, pad_index: Any = 0, pad_first: bool = False
) -> Any:
    """Return the tensors padded to the longest rank's size along `dim`."""
    require_tensors(tree, "pad")

    def one(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 0 or not -tensor.ndim <= dim < tensor.ndim:
            return tensor
        longest = max(world.gather_object(int(tensor.shape[dim])))
        missing = longest - int(tensor.shape[dim])
        if missing == 0:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = missing
        padding = tensor.new_zeros(shape)
        padding[...] = pad_index
        return torch.cat([padding, tensor] if pad_first else [tensor, padding], dim=dim)

    return map_tensors(one, tree)


def check_shapes(tree: Any, world: World, doing: str) -> None:
    """Name the ranks whose shapes differ, where going on would crash or hang."""
    shapes = [tuple(leaf.shape) for leaf in leaves(tree)]
    everyone = world.gather_object(shapes)
    if any(other != shapes for other in everyone):
        listing = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(everyone))
        raise ShapesDiffer(
            f"Cannot {doing} tensors of different shapes.",
            why=listing + ".",
            fix="make them alike; pad_across_processes(tensor, dim=...) fills the short ones.",
        )
