"""Look, in a loop of the user's own, for values of its batches that lie outside their tables.

On a claimed device no tensor has values, so nothing there is out of range. What a module or a loss
is called with is found again on the host, where the batch was read. A Trainer looks by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from anytrain.engine.assemble.input_errors import Fed, out_of_range
from anytrain.engine.data.prefetch import ReadBatch
from anytrain.engine.prepared.loader import PreparedLoader
from anytrain.engine.step import ranges
from anytrain.engine.tree import leaves, map_tensors
from anytrain.insight.preflight.observer import TraceObserver

_MOST_LOOKS = 2
"""How often the call of each kind of module is looked at: once for each update that is traced."""


class Indices:
    """The batch that the user's loop was handed last, and what is called with it."""

    def __init__(self, own: TraceObserver) -> None:
        self._own = own
        self._handed: tuple[PreparedLoader, int, list[Any]] | None = None
        self._looks: Counter[type[nn.Module]] = Counter()
        self._is_inside = False

    def hand(self, loader: PreparedLoader, number: int, batch: Any) -> None:
        """Note the batch that the loop gets next, and its number in the epoch."""
        self._handed = loader, number, list(leaves(batch))  # the loop may take the batch apart

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """Look at what modules and losses are called with in the block."""
        call, loss = nn.Module.__call__, torch._C._nn.cross_entropy_loss

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return call(module, *args, **kwargs)
            self._look(module, args, kwargs)
            self._is_inside = True
            try:
                return call(module, *args, **kwargs)
            finally:
                self._is_inside = False

        def lost(scores: Any, target: Any, weight: Any, reduction: Any, *rest: Any) -> Any:
            if not self._is_inside:  # torch's function gives all of them by their places
                self._look(nn.CrossEntropyLoss(ignore_index=rest[0]), (scores, target), {})
            return loss(scores, target, weight, reduction, *rest)

        with (
            mock.patch.object(nn.Module, "__call__", called),
            mock.patch.object(torch._C._nn, "cross_entropy_loss", lost),
        ):
            yield

    def _look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._handed is None or self._own.has_begun or self._own.setting is not None:
            return
        self._looks[type(module)] += 1
        if self._looks[type(module)] > _MOST_LOOKS:
            return
        loader, number, handed = self._handed
        with _disable_current_modes():  # no part of the step that is traced
            read = _read(loader, number)
            if read is None:
                return
            host = read.on_host()
            given = _on_host(handed, host, (args, kwargs))
            if given is None:
                return
            try:
                tables = ranges.tables(module)
            except NotImplementedError:  # a buffer without data, as a batch norm's count
                return
            outside = ranges.find(module, given, _run, tables)
        if outside is not None:
            fed = Fed(host, read.samples, loader.walk.cursor.updates + 1, read.number)
            raise out_of_range(fed, outside)


def _run(module: nn.Module, given: Any) -> Any:
    args, kwargs = given
    return module(*args, **kwargs)


def _read(loader: PreparedLoader, number: int) -> ReadBatch | None:
    """Return what was read for a batch of this epoch; None where nobody knows. Others are ahead."""
    known = reversed(loader.read_before())
    return next((each for each in known if each.number == number), None)


def _on_host(handed: list[Any], host: Any, given: Any) -> Any:
    """Return what is given with the host's values of a batch; None where some are unknown.

    `handed` are the tensors of the batch as it was handed out.
    """
    found = {
        id(claimed): own
        for claimed, own in zip(handed, leaves(host), strict=False)
        if isinstance(claimed, torch.Tensor) and getattr(own, "shape", None) == claimed.shape
    }
    has_unknown = False

    def taken(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal has_unknown
        has_unknown |= id(tensor) not in found and not tensor.is_floating_point()
        own: torch.Tensor = found.get(id(tensor), tensor)
        return own

    taken_all = map_tensors(taken, given)
    return None if has_unknown or not found else taken_all
