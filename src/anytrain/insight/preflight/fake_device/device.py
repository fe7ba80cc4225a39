"""A fake device: tensors that hold no data, and the device that they claim to be on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

META = torch.device("meta")
NOT_KNOWN = object()
LARGE = 2**16
"""Elements from which a float tensor that is made on the CPU, and not from data, is claimed."""


class Storage:
    """What is known of a claimed tensor's memory; it lives as long as that memory would."""

    __slots__ = (
        *("device", "num_bytes", "value", "is_full", "truth", "born", "on_death"),
        "__weakref__",
    )

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.device, self.num_bytes = device, num_bytes
        self.value: Any = NOT_KNOWN
        """The one value that is in it, where somebody knows."""
        self.is_full: bool | None = None
        """Whether no value of the data in it is 0: a mask of padding; None where nobody knows."""
        self.truth: bool | None = None
        """Whether all that is in it is true, or none is; None where nobody knows."""
        self.born: Any = None
        """What the watcher keeps of it."""
        self.on_death: Callable[[Any], None] | None = None

    def __del__(self) -> None:
        if self.on_death is not None:
            self.on_death(self.born)


class Watcher(Protocol):
    """What is told of everything that the claimed device does."""

    def ran(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[torch.Tensor],
        made: list[torch.Tensor],
        host_read: str,
        is_dynamic: bool,
    ) -> None:
        """Take an operation down."""

    def born(self, storage: Storage) -> None:
        """Take new memory down, and be told of its end."""


class Nobody:
    """Watch nothing."""

    def ran(self, *args: Any) -> None:
        """Do nothing."""

    def born(self, storage: Storage) -> None:
        """Do nothing."""


def storage_of(tensor: torch.Tensor) -> Storage | None:
    """Return what is known of a tensor's memory; None where it is none of ours."""
    try:
        found: Storage | None = tensor.untyped_storage().__dict__.get("_claimed")
    except (NotImplementedError, RuntimeError):  # a sparse tensor: its parts have storages
        return None
    return found


def flat(tree: Any, into: list[torch.Tensor]) -> list[torch.Tensor]:
    """Append the tensors of an operation's arguments or results to a list, and return it."""
    if isinstance(tree, torch.Tensor):
        into.append(tree)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            flat(item, into)
    return into


class Device:
    """The claimed device: who claims it, and what happens there."""

    def __init__(self, device: torch.device, watcher: Watcher | None = None) -> None:
        self.device = device
        self.watcher: Watcher = watcher or Nobody()
        self.intent: torch.device | None = None
        """The device that the function being called was asked to put its result on."""

    def claim(self, tensor: torch.Tensor) -> torch.device:
        """Return the device that a tensor claims to be on; a real one is where it is."""
        if not tensor.is_meta:
            return tensor.device
        known = storage_of(tensor)
        return self.device if known is None else known.device

    def adopt(self, tensor: torch.Tensor, device: torch.device) -> None:
        """Note what a tensor without data claims, unless its memory is known already."""
        if not tensor.is_meta or tensor.layout is not torch.strided:
            return
        memory = tensor.untyped_storage()
        if "_claimed" in memory.__dict__:
            return
        known = Storage(device, memory.nbytes())
        memory.__dict__["_claimed"] = known
        if device == self.device:
            self.watcher.born(known)

    def names(self, wanted: Any) -> torch.device | None:
        """Return the device that somebody wrote, the claimed one with its number."""
        if wanted is None or isinstance(wanted, torch.Tensor):
            return None
        if isinstance(wanted, int):
            return self.device
        found = torch.device(wanted)
        return self.device if found.type == self.device.type else found

    def standing_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor without data in the place of a real one."""
        if tensor.is_meta or tensor.layout is not torch.strided:
            return tensor
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)
