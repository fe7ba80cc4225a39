"""Hand an object over to other processes, its tensors in one file that all of them map.

A pickle would hold every tensor by value, once for each process. Here each storage is written
once, and whoever receives it maps the file copy-on-write: what nobody writes to exists once.
Storages keep their identity, so ties and views stay what they are. Arrays of numpy and others
that pickle offers as buffers travel the same way. Nothing here imports torch: without it there
are no tensors to hand over.
"""

from __future__ import annotations

import ctypes
import io
import linecache
import mmap
import os
import pickle
import struct
import sys
import tempfile
from dataclasses import dataclass, field
from typing import IO, Any

import cloudpickle

from anytrain.machine.processes import importable, tracked

_ALIGNMENT = 64  # what torch's own allocator gives
_LENGTH = struct.Struct("<q")
_WITHOUT_STORAGE = ("xla", "tpu")
_CHUNK = 2**26


@dataclass(frozen=True, slots=True)
class Piece:
    """Memory that lies beside the pickle."""

    source: Any
    """A view of memory, or a storage of torch's."""
    num_bytes: int
    is_read_only: bool = False


@dataclass(slots=True)
class Parcel:
    """An object packed for other processes: its pickle, and the pieces that lie beside it."""

    pickled: memoryview = field(default_factory=lambda: memoryview(b""))
    pieces: list[Piece] = field(default_factory=list)
    buffers: list[int] = field(default_factory=list)
    """Which pieces are pickle's own buffers, in its order; the others are storages."""
    devices: set[str] = field(default_factory=set)
    """Where tensors live that arrive on the CPU instead."""
    surroundings: dict[str, Any] = field(default_factory=dict)
    """For a fresh process: where the sender looks for modules, its words, its notebook's cells."""

    @property
    def num_bytes(self) -> int:
        """How many bytes it takes: the pieces, and the pickle."""
        return sum(piece.num_bytes for piece in self.pieces) + self.pickled.nbytes

    def write(self, file: IO[bytes]) -> None:
        """Write all of it; `receive` reads it."""
        pieces = [*self.pieces, Piece(self.pickled, self.pickled.nbytes)]
        offsets, end = [], 0
        for piece in pieces:
            offsets.append((end, piece.num_bytes, piece.is_read_only))
            end = _aligned(end + piece.num_bytes)
        head = {
            "surroundings": self.surroundings,
            "pieces": offsets,
            "buffers": self.buffers,
        }
        raw = pickle.dumps(head)
        file.write(_LENGTH.pack(len(raw)) + raw)
        begin = _aligned(_LENGTH.size + len(raw))
        for piece, (offset, _, _) in zip(pieces, offsets, strict=True):
            file.seek(begin + offset)
            _write(piece.source, file)
        file.truncate(max(begin + end, _LENGTH.size + len(raw)))
        file.flush()


def pack(thing: Any) -> Parcel:
    """Pack an object; whatever pickle raises says what cannot travel."""
    parcel = Parcel()
    out = io.BytesIO()
    packer = _Packer(out, parcel)
    with packer.homes.open():
        packer.dump(thing)
    parcel.pickled = out.getbuffer()  # not a copy: it may be large
    return parcel


def nameless_file(folder: str) -> IO[bytes]:
    """Return a file that is gone as soon as nobody holds it open, even after a SIGKILL."""
    return tempfile.TemporaryFile(dir=folder)


def receive(number: int, settles: bool = False) -> Any:
    """Return the object that lies in the open file, whose memory stays mapped copy-on-write.

    Where it `settles`, the functions and classes of the sender's `__main__` become this one's.
    """
    size = os.fstat(number).st_size
    held = memoryview(mmap.mmap(number, size, access=mmap.ACCESS_COPY))
    (length,) = _LENGTH.unpack_from(held)
    head = pickle.loads(held[_LENGTH.size : _LENGTH.size + length])
    # This process must look for modules where the sender does before it unpacks the rest.
    sys.path[:] = head["surroundings"].get("path", sys.path)
    sys.argv[:] = head["surroundings"].get("argv", sys.argv)
    linecache.cache.update(head["surroundings"].get("cells", {}))
    begin = _aligned(_LENGTH.size + length)
    *pieces, pickled = (_part(held[begin:], *place) for place in head["pieces"])
    unpacker = _Unpacker(pickled, pieces, head["buffers"])
    thing = unpacker.load()
    if settles:
        unpacker.settle()
    return thing


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """A pickler that lays storages and buffers beside the pickle, each once."""

    def __init__(self, file: IO[bytes], parcel: Parcel) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._keep_buffer)
        self._parcel = parcel
        self.homes = importable.Homes()
        self._known: dict[int, int] = {}
        torch = sys.modules.get("torch")
        self._torch = torch
        self._typed = getattr(getattr(torch, "storage", None), "TypedStorage", ())
        self._untyped = getattr(torch, "UntypedStorage", ())
        self._bare = torch.storage._new_dtypes() if torch is not None and self._typed else set()

    def persistent_id(self, thing: Any) -> tuple[Any, ...] | None:
        """Return a storage's place among the pieces; None for anything else."""
        if self._torch is None:
            return None
        if isinstance(thing, self._typed):
            storage = thing._untyped_storage
            if storage.device.type != "meta":
                return thing.dtype, True, self._keep_storage(storage)
        elif isinstance(thing, self._untyped) and thing.device.type != "meta":
            return self._torch.uint8, False, self._keep_storage(thing)
        return None

    def reducer_override(self, thing: Any) -> Any:
        """Bring what a fresh process cannot import, and tensors of devices without a storage."""
        self.homes.look(thing)
        torch = self._torch
        if torch is None or type(thing) is not torch.Tensor:
            return super().reducer_override(thing)
        near = thing
        if thing.device.type in _WITHOUT_STORAGE:
            self._parcel.devices.add(str(thing.device))
            near = thing.detach().cpu().requires_grad_(thing.requires_grad)
        if near.dtype in self._bare and near.device.type != "meta":
            # torch's own way asks for a storage that knows its dtype, which these have none of.
            place = near.storage_offset(), tuple(near.size()), near.stride()
            flags = near.requires_grad, torch._utils.get_tensor_metadata(near)
            return _bare_tensor, (near.untyped_storage(), near.dtype, place, flags, vars(near))
        return NotImplemented if near is thing else near.__reduce_ex__(5)

    def _keep_storage(self, storage: Any) -> int:
        found = self._known.get(storage._cdata)
        if found is None:
            if storage.device.type != "cpu":
                self._parcel.devices.add(str(storage.device))
            # The piece keeps the storage: its address is not given to another one meanwhile.
            found = self._known[storage._cdata] = len(self._parcel.pieces)
            self._parcel.pieces.append(Piece(storage, storage.nbytes()))
        return found

    def _keep_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes == 0:
            return True  # by value: nothing can be mapped
        self._parcel.buffers.append(len(self._parcel.pieces))
        self._parcel.pieces.append(Piece(view, view.nbytes, view.readonly))
        return False


class _Unpacker(tracked.Unpickler):
    """The other end: storages and buffers are parts of the mapped file."""

    def __init__(self, pickled: memoryview, pieces: list[memoryview], buffers: list[int]) -> None:
        super().__init__(_Reader(pickled), buffers=[pieces[number] for number in buffers])
        self._pieces = pieces
        self._storages: dict[int, Any] = {}

    def persistent_load(self, place: tuple[Any, ...]) -> Any:
        """Return the storage at its place; the same one whenever it is asked for."""
        dtype, is_typed, number = place
        torch = sys.modules["torch"]  # loading the dtype has imported it
        if number not in self._storages:
            self._storages[number] = _storage(torch, self._pieces[number])
        storage = self._storages[number]
        if not is_typed:
            return storage
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


class _Reader:
    """Memory that is read like a file, without a copy of the whole."""

    def __init__(self, memory: memoryview) -> None:
        self._memory, self._at = memory, 0

    def read(self, size: int) -> bytes:
        """Return the next bytes, up to so many."""
        part = self._memory[self._at : self._at + size]
        self._at += part.nbytes
        return bytes(part)

    def readinto(self, target: memoryview) -> int:
        """Fill the target with the next bytes; return how many there were."""
        part = self._memory[self._at : self._at + len(target)]
        target[: part.nbytes] = part
        self._at += part.nbytes
        return part.nbytes

    def readline(self) -> bytes:
        """Return the next bytes up to an end of line: pickle's oldest words are lines."""
        line = bytearray()
        while (byte := self.read(1)) and byte != b"\n":
            line += byte
        return bytes(line + byte)


def _bare_tensor(
    storage: Any,
    dtype: Any,
    place: tuple[int, tuple[int, ...], tuple[int, ...]],
    flags: tuple[bool, dict[str, bool]],
    attributes: dict[str, Any],
) -> Any:
    """Make a tensor of a dtype that torch keeps in storages without one."""
    torch = sys.modules["torch"]
    found = torch.empty(0, dtype=dtype).set_(storage, *place)
    needs_gradient, marks = flags
    if marks:
        torch._utils.set_tensor_metadata(found, marks)
    vars(found).update(attributes)
    return found.requires_grad_(needs_gradient)


def _part(held: memoryview, offset: int, length: int, is_read_only: bool) -> memoryview:
    part = held[offset : offset + length]
    return part.toreadonly() if is_read_only else part


def _storage(torch: Any, part: memoryview) -> Any:
    if part.nbytes == 0:
        return torch.UntypedStorage(0)
    return torch.frombuffer(part, dtype=torch.uint8).untyped_storage()


def _write(source: Any, file: IO[bytes]) -> None:
    """Write a view or a storage; one that lives on a device comes to the host here."""
    if isinstance(source, memoryview):
        view = source
    else:
        near = source if source.device.type == "cpu" else source.cpu()
        view = memoryview((ctypes.c_char * near.nbytes()).from_address(near.data_ptr())).cast("B")
    # One write call of the system takes less than 2 GiB.
    for begin in range(0, view.nbytes, _CHUNK):
        file.write(view[begin : begin + _CHUNK])


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


def surroundings() -> dict[str, Any]:
    """Return what a fresh process must know of this one before it unpacks a parcel."""
    path = [folder for folder in sys.path if isinstance(folder, str)]
    return {"path": path, "argv": list(sys.argv), "cells": _cells()}


def _cells() -> dict[str, Any]:
    """Return the source of a notebook's cells, which no file holds, for tracebacks."""
    found = {}
    for name, entry in linecache.cache.items():
        is_ours = not name.startswith("<") or name.startswith(("<ipython-input", "<python-input"))
        if is_ours and len(entry) == 4 and entry[1] is None:
            found[name] = entry
    return found
