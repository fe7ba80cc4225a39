"""Pickle an object for another process, its tensors in one file that all of them map.

A pickle would hold every tensor by value, once for each process. Here each storage is written
once, and whoever receives it maps the file copy-on-write: what nobody writes to exists once.
Storages keep their identity, so ties and views stay what they are. Arrays of numpy and others
that pickle offers as buffers travel the same way. Functions, classes and modules that a fresh
process cannot import travel by value. Nothing here imports torch: without it there are no tensors.
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
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ModuleSpec
from typing import IO, Any

import cloudpickle
from cloudpickle import cloudpickle as registry

from anytrain.core import bytecode

_ALIGNMENT = 64  # what torch's own allocator gives
_LENGTH = struct.Struct("<q")
_WITHOUT_STORAGE = ("xla", "tpu")
_CHUNK = 2**26
_DEEPEST = 6
_MOST_MEMBERS = 1000


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
    """For a fresh process: the sender's sys.path and sys.argv, and its notebook's cells."""

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
        self.homes = ModulesByValue()
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


class Unpickler(pickle.Unpickler):
    """An unpickler that leaves the classes alone that were known before it began.

    cloudpickle knows a class of a notebook again when it comes back from a child, and then writes
    the child's attributes and methods over the notebook's own.
    """

    def __init__(self, file: Any, *, buffers: Iterable[Any] | None = None) -> None:
        super().__init__(file, buffers=buffers)
        self.made: list[Any] = []
        """The functions and classes that came by value."""
        with registry._DYNAMIC_CLASS_TRACKER_LOCK:
            # Held, so that none of their numbers is given to a new one meanwhile.
            self._held = list(registry._DYNAMIC_CLASS_TRACKER_BY_CLASS)
        self._before = {id(known) for known in self._held}

    def find_class(self, module: str, name: str) -> Any:
        """Return what the pickle names, but our own way to fill in a class or a function."""
        found = super().find_class(module, name)
        if module.startswith("cloudpickle") and name in ("_class_setstate", "_function_setstate"):
            return partial(self._fill, found)
        return found

    def settle(self) -> None:
        """Let `__main__` have the notebook's functions and classes, as it does in the notebook.

        So they can be pickled by name, as `torch.save(model)` and forked pools do.
        """
        main = vars(sys.modules["__main__"])
        for thing in self.made:
            if thing.__module__ == "__main__" and thing.__qualname__.isidentifier():
                main[thing.__qualname__] = thing

    def _fill(self, fill: Callable[[Any, Any], Any], thing: Any, state: Any) -> Any:
        self.made.append(thing)
        return thing if id(thing) in self._before else fill(thing, state)


class _Unpacker(Unpickler):
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


class ModulesByValue:
    """The modules that a pickle refers to; the contents of those that exist here alone travel.

    A module may have come here in ways that a fresh process knows nothing of: by its file's path,
    by pytest, by a line of a notebook, from a folder that was the working folder once.
    """

    def __init__(self) -> None:
        self._known: dict[str, bool] = {}
        self._registered: list[types.ModuleType] = []

    @contextmanager
    def open(self) -> Iterator[None]:
        """Let cloudpickle know of such modules inside the block, and of none afterwards."""
        try:
            yield
        finally:
            for module in self._registered:
                cloudpickle.unregister_pickle_by_value(module)

    def look(self, thing: Any) -> None:
        """Take note of where a function, a class or a module is at home."""
        if isinstance(thing, types.ModuleType):
            name = thing.__name__
        elif isinstance(thing, (types.FunctionType, type)):
            name = thing.__module__
        else:
            return
        module = sys.modules.get(name) if isinstance(name, str) else None
        if module is None or name in self._known or name == "__main__":
            return
        self._known[name] = can_import(name)
        if not self._known[name] and name not in registry.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            self._registered.append(module)


def can_import(name: str) -> bool:
    """Whether a fresh process with this one's paths would find the same module by its name."""
    path: Sequence[str] | None = None
    parts = name.split(".")
    for number in range(1, len(parts) + 1):
        part = ".".join(parts[:number])
        spec = _find_spec(part, path)
        if spec is None:
            # What a module has made inside itself comes with it; a file of its own does not.
            file = getattr(sys.modules[name], "__file__", None)
            return number > 1 and (path is None or not str(file).endswith(".py"))
        if not _is_same_file(spec, sys.modules.get(part)):
            return False
        path = spec.submodule_search_locations
    return True


def _find_spec(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Return what an import would find now, had the module not been imported yet."""
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path)
        except Exception:  # noqa: BLE001  anybody may add a finder; a broken one finds nothing
            continue
        if spec is not None:
            return spec
    return None


def _is_same_file(spec: ModuleSpec, module: types.ModuleType | None) -> bool:
    file = getattr(module, "__file__", None)
    if file is None or not spec.has_location or spec.origin is None:
        return True
    return bool(os.path.realpath(file) == os.path.realpath(spec.origin))


def culprit(function: Callable[..., Any], args: tuple[Any, ...]) -> str | None:
    """Return words for the first thing that cannot be pickled; None where none is found alone."""
    for words, path, thing in _candidates(function, args):
        if not _is_picklable(thing):
            inner, found = _deepest(path, thing)
            return f"{words} `{inner}` (a {_kind(found)})"
    return None


def culprit_within(thing: Any, path: str) -> str:
    """Return words for what in a thing that cannot be pickled is to blame."""
    inner, found = _deepest(path, thing)
    return f"`{inner}` (a {_kind(found)})"


def _candidates(
    function: Callable[..., Any], args: tuple[Any, ...]
) -> Iterator[tuple[str, str, Any]]:
    code = getattr(function, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code else ()
    for number, thing in enumerate(args):
        yield "the argument", names[number] if number < len(names) else f"args[{number}]", thing
    for path, thing in _captured(function, set()):
        yield "the variable", path, thing


def _captured(function: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the variables around a function, and those around the functions among them."""
    if not isinstance(function, types.FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    known = function.__globals__
    around = bytecode.enclosed(function)
    around |= {name: known[name] for name in bytecode.names(function) if name in known}
    for thing in around.values():
        if isinstance(thing, types.FunctionType):
            yield from _captured(thing, seen)
    for variable, thing in around.items():
        if not isinstance(thing, (types.FunctionType, types.ModuleType)):
            yield variable, thing


def _deepest(path: str, thing: Any) -> tuple[str, Any]:
    """Follow what cannot be pickled inwards, as far as one member alone is to blame."""
    for _ in range(_DEEPEST):
        if type(thing).__module__.startswith("multiprocessing"):
            break  # a queue is known to people, its semaphores are not
        for part, member in _members_of(thing):
            if not _is_picklable(member):
                path, thing = path + part, member
                break
        else:
            break
    return path, thing


def _members_of(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, Mapping):
        pairs = list(thing.items())[:_MOST_MEMBERS]
        yield from ((f"[{key!r}]", value) for key, value in pairs)
    elif isinstance(thing, (list, tuple)):
        yield from ((f"[{n}]", value) for n, value in enumerate(thing[:_MOST_MEMBERS]))
    elif isinstance(thing, types.FunctionType):
        yield from ((f" -> {name}", value) for name, value in _captured(thing, set()))
    elif not isinstance(thing, (type, types.ModuleType)):
        yield from ((f".{name}", value) for name, value in getattr(thing, "__dict__", {}).items())


def _is_picklable(thing: Any) -> bool:
    try:
        pack(thing)
    except Exception:  # noqa: BLE001  any class may have any trouble with its own pickling
        return False
    return True


def _kind(thing: Any) -> str:
    kind = type(thing)
    home = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return f"{home}{kind.__qualname__}"
