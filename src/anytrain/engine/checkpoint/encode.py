"""A nested state to a JSON document and named tensors, and back. No pickle.

What JSON has goes as it is. Everything else is an object with the key "~" that names its kind,
from a fixed list: reading one back looks its kind up in a table of our own and calls nothing
that the document names. Tensors and arrays go beside the document, once each: two places that
hold one tensor hold one tensor again after a load. Subclasses are refused unless listed, since
what they add would be lost without a word; named tuples become tuples, and default dicts whose
default is a function of the user's become dicts.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
import pathlib
import struct
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from anytrain.core.errors import CheckpointError
from anytrain.engine.checkpoint.files import Damaged
from anytrain.engine.checkpoint.tensors import CODES, to_bytes
from anytrain.machine.backends import xla

_TAG = "~"
_DEEPEST = 100
_JSON_INT = 2**63
_ARRAY_KINDS = "biufcSUmM"
_DEFAULTS = {kind.__name__: kind for kind in (int, float, bool, str, list, dict, set)}
_DICTS = (dict, OrderedDict, defaultdict, Counter, types.MappingProxyType)
_DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if type(v) is torch.dtype}


@dataclass(frozen=True, slots=True)
class Encoded:
    """A state as a JSON-able document and the tensors it refers to by name."""

    document: Any
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def encode(state: object, name: str = "state") -> Encoded:
    """Return the state as a document and tensors, or raise CheckpointError with the path.

    The tensors are the state's own, not copies.

    >>> encode({"betas": (0.9, 0.999), 3: None}).document
    {'~': 'dict', 'items': [['betas', {'~': 'tuple', 'items': [0.9, 0.999]}], [3, None]]}
    """
    encoder = _Encoder(name)
    return Encoded(encoder.value(state, ()), encoder.tensors)


def check(state: object, name: str) -> None:
    """Raise CheckpointError, with the path of the value, if a checkpoint can't hold the state."""
    encode(state, name)


def decode(document: Any, tensors: Mapping[str, torch.Tensor], file: str = "document") -> Any:
    """Return the state that `encode` was given; Damaged where the document has no meaning."""
    try:
        return _Decoder(dict(tensors)).value(document)
    except Damaged:
        raise
    except Exception as error:  # whatever Python, numpy or torch say of values that are none
        raise Damaged(file, f"it has no meaning: {type(error).__name__}: {error}") from error


def to_json(document: Any) -> bytes:
    """Return a document's bytes."""
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def from_json(data: bytes | bytearray, file: str) -> Any:
    """Return the document in a file's bytes, or raise Damaged."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(file, f"it is not JSON: {error}") from error


class _Encoder:
    def __init__(self, name: str) -> None:
        self.name = name
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[object, ...], str] = {}
        self._open: list[int] = []

    def value(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if -_JSON_INT <= value < _JSON_INT else _tagged("int", value=hex(value))
        if kind is float:
            return value if math.isfinite(value) else _tagged("float", value=_bits(value))
        if kind in _DICTS or kind in (list, set, frozenset, deque) or isinstance(value, tuple):
            return self._container(value, path)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if kind is np.ndarray:
            return self._array(value, path)
        return self._plain(value, path)

    def _container(self, value: Any, path: tuple[Any, ...]) -> Any:
        if id(value) in self._open:
            raise self._refused(path, "a value that contains itself")
        if len(path) > _DEEPEST:
            raise self._refused(path, f"a value nested more than {_DEEPEST} deep")
        self._open.append(id(value))
        try:
            if type(value) in _DICTS:
                return self._dict(value, path)
            items = [self.value(item, (*path, i)) for i, item in enumerate(value)]
        finally:
            self._open.pop()
        if type(value) is list:
            return items
        if isinstance(value, torch.Size):
            return _tagged("size", items=items)
        if isinstance(value, tuple):
            return _tagged("tuple", items=items)
        if isinstance(value, deque):
            return _tagged("deque", items=items, most=value.maxlen)
        return _tagged(type(value).__name__, items=sorted(items, key=json.dumps))

    def _dict(self, value: Mapping[Any, Any], path: tuple[Any, ...]) -> Any:
        kind = _kind_of(value)
        if not kind and all(type(key) is str for key in value) and _TAG not in value:
            return {key: self.value(item, (*path, key)) for key, item in value.items()}
        items = []
        for key, item in value.items():
            if isinstance(key, torch.Tensor | np.ndarray):
                raise self._refused(path, f"a dict with a {_type_name(key)} as its key")
            items.append([self.value(key, (*path, "a key")), self.value(item, (*path, key))])
        return _tagged("dict", items=items, **kind)

    def _tensor(self, value: torch.Tensor, path: tuple[Any, ...]) -> Any:
        odd = oddity(value)
        if odd is not None:
            raise self._refused(path, odd)
        if value.dtype in CODES:
            return _tagged("tensor", name=self._named(value.detach(), path, identity(value)))
        data = bytearray(to_bytes(value))
        view = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0).byte()
        name = self._named(view, path, identity(value))
        return _tagged("tensor", name=name, dtype=_name_of(value.dtype), shape=list(value.shape))

    def _named(self, tensor: torch.Tensor, path: tuple[Any, ...], key: tuple[object, ...]) -> str:
        """Return the tensor's name beside the document; one memory has one name."""
        if key not in self._names:
            base = ".".join(str(step) for step in path) or self.name
            name, count = base, 1
            while name in self.tensors or name == "__metadata__":
                count += 1
                name = f"{base}#{count}"
            self._names[key] = name
            self.tensors[name] = tensor
        return self._names[key]

    def _array(self, value: np.ndarray[Any, Any], path: tuple[Any, ...]) -> Any:
        if value.dtype.kind not in _ARRAY_KINDS:
            raise self._refused(path, f"a numpy array of {value.dtype}")
        data = bytearray(value.tobytes())
        tensor = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0).byte()
        name = self._named(tensor, path, (id(value),))
        return _tagged("array", name=name, dtype=value.dtype.str, shape=list(value.shape))

    def _plain(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, np.generic) and value.dtype.kind in _ARRAY_KINDS:
            array = np.asarray(value)  # an empty string has no bytes, and its array has one place
            return _tagged("scalar", dtype=array.dtype.str, value=_base64(array.tobytes()))
        if isinstance(value, pathlib.PurePath):
            return _tagged("path", value=str(value))
        kind = type(value)
        if kind not in _WORDS:
            raise self._refused(path, _type_name(value))
        return _tagged(kind.__name__, value=_WORDS[kind](value))

    def _refused(self, path: tuple[Any, ...], kind: str) -> CheckpointError:
        where = self.name + "".join(f"[{step!r}]" for step in path)
        return CheckpointError(
            f"Cannot hold {where}: {kind}.",
            why="a checkpoint holds plain values, containers, numpy arrays and tensors; anything "
            "else would have to be run to be loaded.",
            fix="return something plainer from state_dict(), and rebuild it in load_state_dict().",
        )


class _Decoder:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._shaped: dict[str, torch.Tensor] = {}

    def value(self, document: Any) -> Any:
        if isinstance(document, list):
            return [self.value(item) for item in document]
        if not isinstance(document, dict):
            return document
        if _TAG not in document:
            return {key: self.value(item) for key, item in document.items()}
        kind = document[_TAG]
        if kind == "dict":
            found = {self.value(key): self.value(item) for key, item in document["items"]}
            return _of_kind(found, document)
        if kind == "deque":
            return deque((self.value(item) for item in document["items"]), document["most"])
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](self.value(item) for item in document["items"])
        if kind in ("tensor", "array"):
            return self._tensor(document) if kind == "tensor" else self._array(document)
        return _PLAIN[kind](document)

    def _array(self, document: Mapping[str, Any]) -> np.ndarray[Any, Any]:
        held, dtype = self._held(document["name"]), _array_dtype(document["dtype"])
        if held.is_meta:  # an outline
            return np.broadcast_to(np.zeros((), dtype), document["shape"])
        return np.frombuffer(held.numpy().tobytes(), dtype).reshape(document["shape"]).copy()

    def _tensor(self, document: Mapping[str, Any]) -> torch.Tensor:
        name = document["name"]
        if "dtype" not in document:
            return self._held(name)
        if name not in self._shaped:
            dtype = _DTYPES[document["dtype"]]
            flat = self._held(name).view(dtype) if self._held(name).numel() else None
            empty = torch.empty(document["shape"], dtype=dtype)
            self._shaped[name] = empty if flat is None else flat.reshape(document["shape"])
        return self._shaped[name]

    def _held(self, name: Any) -> torch.Tensor:
        if name not in self._tensors:
            raise ValueError(f"no file holds its tensor {name!r}")
        return self._tensors[name]


def _kind_of(value: Mapping[Any, Any]) -> dict[str, Any]:
    """Return what tells a mapping from a plain dict; nothing of one whose default is unknown."""
    if isinstance(value, defaultdict):
        default = value.default_factory
        known = default is None or default in _DEFAULTS.values()
        return {"of": "defaultdict", "default": default and default.__name__} if known else {}
    names = {OrderedDict: "OrderedDict", Counter: "Counter"}
    return {"of": names[type(value)]} if type(value) in names else {}


def _of_kind(found: dict[Any, Any], document: Mapping[str, Any]) -> dict[Any, Any]:
    kind = document.get("of")
    if kind == "defaultdict":
        default = document["default"]
        return defaultdict(None if default is None else _DEFAULTS[default], found)
    kinds: dict[Any, Callable[[dict[Any, Any]], dict[Any, Any]]]
    kinds = {None: dict, "OrderedDict": OrderedDict, "Counter": Counter}
    return kinds[kind](found)


def oddity(tensor: torch.Tensor) -> str | None:
    """Return what keeps a tensor out of a file, or None for a plain one."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return _type_name(tensor)
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.is_meta:
        return "a tensor on the meta device, which has no values"
    if tensor.layout != torch.strided:
        return f"a {str(tensor.layout).removeprefix('torch.')} tensor"
    return None


def identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what two tensors have in common when they are one memory seen the same way."""
    try:
        address = tensor.data_ptr() if tensor.numel() else 0
    except RuntimeError:  # some devices hide their addresses
        address = 0
    if not address and tensor.device.type == "xla":
        address = xla.number(tensor)
    if not address:
        return (id(tensor),)
    view = tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg()
    return (str(tensor.device), address, *view)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tagged(kind: str, **values: Any) -> dict[str, Any]:
    return {_TAG: kind, **values}


def _type_name(value: object) -> str:
    kind = type(value)
    if kind.__module__ in ("builtins", "numpy"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _bits(value: float) -> str:
    """Return a float's 64 bits: a NaN carries more than its name."""
    return struct.pack(">d", value).hex()


def _from_bits(text: str) -> float:
    number: float = struct.unpack(">d", bytes.fromhex(text))[0]
    return number


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _array_dtype(text: str) -> np.dtype[Any]:
    dtype = np.dtype(text)
    if dtype.kind not in _ARRAY_KINDS or dtype.str != text:
        raise ValueError(f"no numpy type {text!r}")
    return dtype


def _scalar(document: Mapping[str, Any]) -> Any:
    data = base64.b64decode(document["value"])
    return np.frombuffer(data, _array_dtype(document["dtype"]))[0]


_WORDS: dict[type, Callable[[Any], Any]] = {
    bytes: _base64,
    bytearray: _base64,
    complex: lambda value: [_bits(value.real), _bits(value.imag)],
    torch.dtype: _name_of,
    torch.device: str,
    datetime.timedelta: lambda value: [value.days, value.seconds, value.microseconds],
    range: lambda value: [value.start, value.stop, value.step],
}
_SEQUENCES: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": lambda items: torch.Size(list(items)),
}
_PLAIN: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "int": lambda d: int(d["value"], 16),
    "float": lambda d: _from_bits(d["value"]),
    "bytes": lambda d: base64.b64decode(d["value"]),
    "bytearray": lambda d: bytearray(base64.b64decode(d["value"])),
    "complex": lambda d: complex(*map(_from_bits, d["value"])),
    "scalar": _scalar,
    "dtype": lambda d: _DTYPES[d["value"]],
    "device": lambda d: torch.device(d["value"]),
    "path": lambda d: pathlib.Path(d["value"]),
    "timedelta": lambda d: datetime.timedelta(*d["value"]),
    "range": lambda d: range(*d["value"]),
}
