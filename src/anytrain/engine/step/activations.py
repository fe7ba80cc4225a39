"""Keep fewer activations, so that the batch that was asked for fits.

Blocks are checkpointed one level at a time: none, every other, all. What a step learns stays the
same: a block that is computed again draws the same dropout. A block's call is replaced in the slot
that torch keeps for compiled modules: hooks, parameters and `forward` stay as they are, and a
pickled or copied block has its own call again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from anytrain.engine.tree import leaves


class Activations:
    """Which of a model's repeated blocks keep only their inputs for backward.

    >>> activations = Activations(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))))
    >>> activations.fewer(), activations.num_checkpointed
    (True, 2)
    >>> activations.fewer(), activations.fewer(), activations.num_checkpointed
    (True, False, 4)
    """

    def __init__(
        self, model: nn.Module, tell: Callable[[int, int], None] = lambda number, total: None
    ) -> None:
        self._tell = tell
        """Told how many blocks of how many are checkpointed from here on."""
        self._blocks = tuple(filter(is_free, repeated(model)))
        self._every = 0

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return len(self._blocks)

    @property
    def num_checkpointed(self) -> int:
        """How many of them are computed again in backward."""
        return len(self._blocks[:: self._every]) if self._every else 0

    def fewer(self) -> bool:
        """Checkpoint more blocks; False where all are."""
        if self._every == 1 or not self._blocks:
            return False
        self._every = 1 if self._every else 2
        for block in self._blocks[:: self._every]:
            set_checkpointed(block, True)
        self._tell(self.num_checkpointed, self.num_blocks)
        return True

    def restore(self) -> None:
        """Let every block keep its activations again."""
        self._every = 0
        for block in self._blocks:
            set_checkpointed(block, False)


MIN_BLOCKS = 3
_PLAIN = (type(None), bool, int, float, str, torch.Tensor, torch.dtype, torch.device)


def repeated(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the blocks that a model repeats, in order; empty where it repeats none.

    They are of one class, at least three stand side by side, and together they hold half of the
    parameters that are no embedding's.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Sequential(*(nn.Linear(4, 4) for _ in "abc")))
    >>> len(repeated(model))
    3
    """
    found: dict[type, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            counts = Counter(type(child) for child in module)
            for child in module:
                if counts[type(child)] >= MIN_BLOCKS:
                    found[type(child)].append(child)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    best = max(found.values(), key=lambda blocks: _size(blocks, tables), default=[])
    if 2 * _size(best, tables) < _size([model], tables) or not _size(best, tables):
        return ()
    return tuple(dict.fromkeys(best))


def _size(modules: Iterable[nn.Module], without: set[int]) -> int:
    held = {id(p): p.numel() for module in modules for p in module.parameters()}
    return sum(number for key, number in held.items() if key not in without)


class BlockCall:
    """How a checkpointed block is called while it trains; otherwise it is called as ever."""

    __slots__ = ("block",)

    def __init__(self, block: nn.Module) -> None:
        self.block = block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the block."""
        if not (self.block.training and torch.is_grad_enabled()):
            return self.block._call_impl(*args, **kwargs)
        if not is_plain((args, kwargs)):
            return self.block._call_impl(*args, **kwargs)
        # torch keeps the random state of the devices that it sees in positional arguments.
        seen = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        return checkpoint(self._run, seen, args, kwargs, use_reentrant=False)

    def _run(self, seen: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        return self.block._call_impl(*args, **kwargs)


def is_compiled(module: nn.Module) -> bool:
    """Whether a user has compiled the module: to change a layer would compile it again."""
    call = getattr(module, "_compiled_call_impl", None)
    return hasattr(module, "_orig_mod") or (call is not None and not isinstance(call, BlockCall))


def is_plain(tree: Any) -> bool:
    """Whether a call with these arguments may be made twice: a cache among them would grow."""
    return all(isinstance(leaf, _PLAIN) for leaf in leaves(tree))


def has_hooks(block: nn.Module) -> bool:
    """Whether somebody looks at the block's calls."""
    return bool(
        block._forward_hooks
        or block._forward_pre_hooks
        or block._backward_hooks
        or block._backward_pre_hooks
    )


def set_checkpointed(block: nn.Module, is_checkpointed: bool) -> None:
    """Let a block keep only its inputs for backward, or all its activations again."""
    if is_checkpointed:
        block.__dict__["_compiled_call_impl"] = BlockCall(block)
    elif isinstance(block._compiled_call_impl, BlockCall):
        del block.__dict__["_compiled_call_impl"]


def is_free(block: nn.Module) -> bool:
    """Whether nobody else has replaced the block's call."""
    call = block._compiled_call_impl
    return call is None or isinstance(call, BlockCall)
