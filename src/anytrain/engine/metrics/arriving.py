"""Bring tensors to the host one batch late, so that a device need not wait for its reader."""

from __future__ import annotations

from typing import Any

import torch

from anytrain.engine.tree import map_tensors


class Arrivals:
    """Hands out, on the host, the tree that was sent before the one being sent now.

    By then the device has been given the next batch: it works while the host reads.
    """

    def __init__(self) -> None:
        self._under_way: _Copy | None = None

    def send(self, tree: Any) -> Any:
        """Start copying the tree and return the one before it; None for the first.

        The tree's tensors may be overwritten in place afterwards.
        """
        before, self._under_way = self._under_way, _Copy(tree)
        return None if before is None else before.wait()

    def last(self) -> Any:
        """Return the tree that was sent last; None where it was handed out already."""
        before, self._under_way = self._under_way, None
        return None if before is None else before.wait()


class _Copy:
    """A tree on its way to the host."""

    def __init__(self, tree: Any) -> None:
        self._events: dict[torch.device, torch.Event] = {}
        self._tree = map_tensors(self._start, tree)
        for device, event in self._events.items():
            event.record(torch.accelerator.current_stream(device))

    def _start(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if not tensor.is_cuda:
            # The CPU's copy is made here. Elsewhere a copy without waiting may come back before
            # it is written, and nothing tells: those are cloned where they are, and read later.
            return tensor.clone()
        self._events.setdefault(tensor.device, torch.Event(tensor.device))
        return tensor.to("cpu", non_blocking=True)  # into pinned memory

    def wait(self) -> Any:
        for event in self._events.values():
            event.synchronize()
        if not self._events:
            return map_tensors(torch.Tensor.cpu, self._tree)
        return map_tensors(torch.clone, self._tree)  # pinned buffers serve the next batch
