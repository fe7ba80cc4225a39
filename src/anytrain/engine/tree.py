"""Walk the tensors of a batch, whatever it is made of.

A tree is a tensor, or a list, tuple, named tuple or mapping of trees; other leaves pass through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from anytrain.core.errors import BadInput, BadType

Leaf = Callable[[torch.Tensor], Any]


def map_tensors(
    function: Leaf,
    tree: Any,
    *,
    skip_keys: tuple[str, ...] = (),
    movable: Callable[[Any], Any] | None = None,
) -> Any:
    """Return the same tree with `function` applied to each tensor.

    `movable` is applied to other things that have a `.to`, such as a graph library's batches.

    >>> map_tensors(lambda t: t * 2, {"a": torch.tensor(1), "b": ["x", torch.tensor(2)]})
    {'a': tensor(2), 'b': ['x', tensor(4)]}
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if type(tree) is dict and not skip_keys:  # nearly every batch: none of the questions below
        return {key: map_tensors(function, value, movable=movable) for key, value in tree.items()}
    if movable is not None and hasattr(tree, "to") and not _is_plain(tree):
        return movable(tree)
    if isinstance(tree, Mapping):
        # Items outside the tree's own type's reach (BatchEncoding, ModelOutput) survive by type().
        return _like(
            tree,
            {
                key: value if key in skip_keys else map_tensors(function, value, movable=movable)
                for key, value in tree.items()
            },
        )
    if isinstance(tree, (list, tuple)):
        return _like(tree, [map_tensors(function, value, movable=movable) for value in tree])
    return tree


def _is_plain(tree: Any) -> bool:
    """Whether it is one of Python's containers, and no object that moves itself."""
    return type(tree) in (dict, list, tuple) or isinstance(tree, (str, bytes))


def _like(original: Any, values: Any) -> Any:
    """Return `values` in the container type of `original`."""
    kind = type(original)
    if kind is dict or kind is list:
        return values
    if isinstance(original, tuple) and hasattr(original, "_fields"):
        return kind(*values)
    return kind(values)


def leaves(tree: Any) -> Iterator[Any]:
    """Yield every leaf of the tree, tensor or not, in order."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from leaves(value)
    else:
        yield tree


def is_all_tensors(tree: Any) -> bool:
    """Whether every leaf is a tensor (an empty tree is)."""
    return all(isinstance(leaf, torch.Tensor) for leaf in leaves(tree))


def require_tensors(tree: Any, doing: str) -> None:
    """Refuse a tree with leaves that are no tensors."""
    for leaf in leaves(tree):
        if not isinstance(leaf, torch.Tensor):
            raise BadType(
                f"Cannot {doing} a {type(leaf).__name__}.",
                why="it takes tensors, or nested lists, tuples and dicts of tensors.",
                fix="pass tensors, or use `gather_object` for other values.",
            )


def batch_size(tree: Any) -> int | None:
    """Return the length of the first tensor's first dimension; None where there is none.

    >>> batch_size({"ids": torch.zeros(3, 7)})
    3
    """
    for leaf in leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.ndim > 0:
            return int(leaf.shape[0])
    return None


def num_rows(tree: Any) -> int | None:
    """Return the length of the first tensor's or numpy array's first dimension, if there is one.

    >>> num_rows({"lr": 0.1, "ids": torch.zeros(3, 7)})
    3
    """
    for leaf in leaves(tree):
        if isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim > 0:
            return int(leaf.shape[0])
    return None


def rows(tree: Any, part: slice) -> Any:
    """Return the given rows of every tensor."""
    return map_tensors(lambda tensor: tensor[part], tree)


def join_rows(trees: list[Any], dim: int = 0) -> Any:
    """Return one tree whose tensors are the given trees' tensors, one after the other."""
    first = trees[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(trees, dim=dim)
    if isinstance(first, Mapping):
        return _like(first, {key: join_rows([t[key] for t in trees], dim) for key in first})
    if isinstance(first, (list, tuple)):
        return _like(first, [join_rows([t[i] for t in trees], dim) for i in range(len(first))])
    raise BadInput(
        f"Cannot join batches that hold a {type(first).__name__}.",
        why="joining needs tensors, or nested lists, tuples and dicts of tensors.",
        fix="return tensors alone from the collate function, or pass dispatch_batches=False.",
    )


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one tensor in a tree that was taken apart."""

    index: int


def take_apart(tree: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return the tree with slots in place of its tensors, and the tensors in order.

    Skeletons of trees that are built alike are equal.

    >>> take_apart({"a": torch.tensor(1), "b": None})
    ({'a': Slot(index=0), 'b': None}, [tensor(1)])
    """
    tensors: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> Slot:
        tensors.append(tensor)
        return Slot(len(tensors) - 1)

    return map_tensors(keep, tree), tensors


def put_together(skeleton: Any, values: Sequence[Any]) -> Any:
    """Return the skeleton's tree with the values in its slots."""
    if isinstance(skeleton, Slot):
        return values[skeleton.index]
    if isinstance(skeleton, Mapping):
        return _like(skeleton, {key: put_together(v, values) for key, v in skeleton.items()})
    if isinstance(skeleton, (list, tuple)):
        return _like(skeleton, [put_together(v, values) for v in skeleton])
    return skeleton


def take_rows(tree: Any, part: slice, num_rows: int) -> Any:
    """Return the given rows of all that has `num_rows` rows; the rest stays whole.

    A list of `num_rows` things is sliced too, unless a tensor in it has rows of its own: then it
    is one of the tree's containers.

    >>> take_rows({"ids": torch.zeros(3, 7), "text": ["a", "b", "c"], "lr": 0.1}, slice(1), 3)
    {'ids': tensor([[0., 0., 0., 0., 0., 0., 0.]]), 'text': ['a'], 'lr': 0.1}
    """
    if isinstance(tree, (torch.Tensor, np.ndarray)):
        return tree[part] if tree.ndim > 0 and tree.shape[0] == num_rows else tree
    if isinstance(tree, Mapping):
        return _like(tree, {key: take_rows(v, part, num_rows) for key, v in tree.items()})
    if isinstance(tree, list) and len(tree) == num_rows and not _holds_rows(tree, num_rows):
        return tree[part]
    if isinstance(tree, (list, tuple)):
        return _like(tree, [take_rows(v, part, num_rows) for v in tree])
    return tree


def _holds_rows(tree: Any, num_rows: int) -> bool:
    """Whether a tensor in the tree has that many rows."""
    return any(
        isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim > 0 and leaf.shape[0] == num_rows
        for leaf in leaves(tree)
    )
