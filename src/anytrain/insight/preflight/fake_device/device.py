"""A fake device: tensors that hold no data, and the device that they claim to be on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from anytrain.insight.preflight.recorder import OpRecorder

META = torch.device("meta")
NOT_KNOWN = object()
LARGE = 2**16
"""Elements from which a float tensor that is made on the CPU, and not from data, is claimed."""


class Storage:
    """What is known of a claimed tensor's memory; it is freed when that memory would be."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.device, self.num_bytes = device, num_bytes
        self.value: Any = NOT_KNOWN
        """Its one value, where it is known."""
        self.is_full: bool | None = None
        """Whether no value of the data in it is 0: a mask of padding; None if not known."""
        self.truth: bool | None = None
        """Whether all that is in it is true, or none is; None where that is not known."""
        self.born: Any = None
        """What the recorder keeps of it."""
        self.on_death: Callable[[Any], None] | None = None

    def __del__(self) -> None:
        if self.on_death is not None:
            self.on_death(self.born)


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


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Return arguments or results with each tensor changed.

    Not the engine's own: a frame of the engine's would mark the operation as this library's.
    """
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(change, value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(change, item) for item in tree)
    return tree


class FakeDevice:
    """The device that tensors claim to be on, and who records what happens there."""

    recorder: OpRecorder
    """Records every operation and new memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.intent: torch.device | None = None
        """The device that the function being called was asked to put its result on."""

    def claim(self, tensor: torch.Tensor) -> torch.device:
        """Return the device that a tensor claims to be on; a real one is where it is."""
        if not tensor.is_meta:
            return tensor.device
        known = storage_of(tensor)
        return self.device if known is None else known.device

    def adopt(self, tensor: torch.Tensor, device: torch.device) -> None:
        """Let a tensor without data claim a device, unless its memory is known already."""
        if not tensor.is_meta or tensor.layout is not torch.strided:
            return
        memory = tensor.untyped_storage()
        if "_claimed" in memory.__dict__:
            return
        known = Storage(device, memory.nbytes())
        memory.__dict__["_claimed"] = known
        if device == self.device:
            self.recorder.born(known)

    def names(self, wanted: Any) -> torch.device | None:
        """Return the device that a script names; the claimed one gets its index."""
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
