"""Take what can safely be taken of a folder that HF's Trainer or Accelerate wrote.

Those folders hold pickles. They are read through torch.load(weights_only=True), which builds
tensors and plain containers and calls nothing else. Arrays of numpy are taken too, but never
through numpy's own unpickling, which trusts the sizes and flags that a file states: stand-ins
note what the file says, and a plain array is made from the bytes.
"""

from __future__ import annotations

import json
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError

from anytrain.core.documents import as_file
from anytrain.core.errors import CheckpointError, NotAFile
from anytrain.engine.checkpoint.files import Damaged
from anytrain.engine.checkpoint.manifest import MANIFEST, check_name

_NUMBER = r"(?:_(?P<index>\d+))?"
_STATES = {
    "optimizers": re.compile(rf"optimizer{_NUMBER}\.(?:bin|pt)"),
    "schedulers": re.compile(rf"scheduler{_NUMBER}\.(?:bin|pt)"),
    "samplers": re.compile(rf"sampler{_NUMBER}\.bin"),
    "loaders": re.compile(rf"dl_state_dict{_NUMBER}\.bin"),
    "custom": re.compile(rf"custom_checkpoint{_NUMBER}\.pkl"),
    "scalers": re.compile(r"scaler\.pt"),
    "rng": re.compile(rf"(?:random_states|rng_state){_NUMBER}\.(?:pkl|pth)"),
}
_WEIGHTS = re.compile(
    rf"(?:model|pytorch_model){_NUMBER}\.(?P<kind>safetensors|bin)(?P<many>\.index\.json)?"
)
_SHARD = re.compile(r".+-\d+-of-\d+\.(?:safetensors|bin)")
_RNG_NAMES = {
    "random_state": "python",
    "numpy_random_seed": "numpy",
    "torch_manual_seed": "torch",
    "cpu": "torch",
    "torch_cuda_manual_seed": "cuda",
    "xm_seed": "xla",
}
_NEVER_TAKEN = {"training_args.bin": "it is a pickled object; pass the arguments again"}
_LEFT = object()
_PICKLES = (".bin", ".pt", ".pth", ".pkl")
_GLOBAL = re.compile(r"GLOBAL\s+([\w.]+)")
_UNREADABLE = (
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    OSError,
    OverflowError,
    RuntimeError,
    SafetensorError,
    TypeError,
    UnpicklingError,
    ValueError,
    struct.error,
)


@dataclass(frozen=True, slots=True)
class NotTaken:
    """A file of the folder that was left, and why."""

    file: str
    why: str

    def __str__(self) -> str:
        return f"{self.file} was not taken: {self.why}"


@dataclass
class HFCheckpoint:
    """What was taken of a folder, by the number in each file's name; and what was not.

    `rng` is by rank, with the names python, numpy, torch, cuda and so on. `counters` holds
    Trainer's own state (global_step, epoch, log_history...) or Accelerate's step.
    """

    path: Path
    models: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    optimizers: dict[int, Any] = field(default_factory=dict)
    schedulers: dict[int, Any] = field(default_factory=dict)
    samplers: dict[int, Any] = field(default_factory=dict)
    loaders: dict[int, Any] = field(default_factory=dict)
    custom: dict[int, Any] = field(default_factory=dict)
    scalers: dict[int, Any] = field(default_factory=dict)
    rng: dict[int, dict[str, Any]] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)
    not_taken: list[NotTaken] = field(default_factory=list)


def is_hf_folder(folder: Path) -> bool:
    """Whether the folder holds weights or states as HF's libraries name them, and no manifest."""
    if not folder.is_dir() or (folder / MANIFEST).exists():
        return False
    return any(_kind_of(entry.name) or _WEIGHTS.fullmatch(entry.name) for entry in folder.iterdir())


def read(folder: str | Path) -> HFCheckpoint:
    """Return what can be taken of a Trainer's `checkpoint-*` or an Accelerate folder."""
    path = Path(folder)
    if not is_hf_folder(path):
        ours = (path / MANIFEST).exists()
        raise CheckpointError(
            f"Cannot read {path} as a checkpoint of another library.",
            why="it is one of anytrain's own." if ours else "it holds no file that they write.",
            fix="load it with load(path)."
            if ours
            else "pass a Trainer's checkpoint-* folder, or one that Accelerate's save_state wrote.",
        )
    found = HFCheckpoint(path)
    _take_models(found)
    for entry in sorted(path.iterdir()):
        _take(found, entry)
    return found


def read_model(folder: str | Path) -> dict[str, torch.Tensor]:
    """Return the weights of a model that lies in a folder as HF's libraries save one."""
    found = HFCheckpoint(Path(folder))
    _take_models(found)
    if 0 not in found.models:
        raise CheckpointError(
            f"There are no weights of a model in {folder}.",
            why="; ".join(map(str, found.not_taken)) or "it has no model.safetensors.",
            fix="load them as they were saved: a _load_from_checkpoint need not call super().",
        )
    return found.models[0]


def _take(found: HFCheckpoint, entry: Path) -> None:
    name = entry.name
    if _WEIGHTS.fullmatch(name) or _SHARD.fullmatch(name):
        return
    if entry.is_dir():
        found.not_taken.append(NotTaken(name, "it is a folder, as sharded strategies write"))
    elif name == "trainer_state.json":
        state = _attempt(found, name, partial(_json_object, entry))
        found.counters.update({} if state is _LEFT else state)
    elif kind := _kind_of(name):
        state = _attempt(found, name, partial(_unpickled, entry))
        if state is not _LEFT:
            _file_under(found, kind, _index(_STATES[kind], name), state)
    elif name.endswith(_PICKLES):
        known = _NEVER_TAKEN.get(name, "no part of a run's state is called so")
        found.not_taken.append(NotTaken(name, known))


def _file_under(found: HFCheckpoint, kind: str, index: int, state: Any) -> None:
    if kind == "rng" and isinstance(state, dict):
        state = {_RNG_NAMES.get(name, name): value for name, value in state.items()}
        step = state.pop("step", None)
        if index == 0 and isinstance(step, int):
            found.counters["step"] = step
    getattr(found, kind)[index] = state


def _take_models(found: HFCheckpoint) -> None:
    """Take each model from its index, its safetensors or its pickle, the first there is."""
    by_index: dict[int, list[str]] = {}
    for entry in sorted(found.path.iterdir()):
        if _WEIGHTS.fullmatch(entry.name):
            by_index.setdefault(_index(_WEIGHTS, entry.name), []).append(entry.name)
    for index, names in sorted(by_index.items()):
        chosen = min(names, key=lambda name: (".safetensors" not in name, "index" in name))
        weights = _attempt(found, chosen, partial(_weights, found.path, chosen))
        if weights is not _LEFT:
            found.models[index] = weights


def _weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    if name.endswith(".index.json"):
        weight_map = _json_object(folder / name)["weight_map"]
        joined: dict[str, torch.Tensor] = {}
        for shard in sorted(set(weight_map.values())):
            if "/" in check_name(shard):
                raise ValueError(f"the index names {shard!r}, which is not beside it")
            joined.update(_weights(folder, shard))
        lost = sorted(set(weight_map) - set(joined))
        if lost:
            raise ValueError(f"the shards lack {', '.join(lost[:5])}")
        return joined
    if name.endswith(".safetensors"):
        held: dict[str, torch.Tensor] = safetensors.torch.load_file(as_file(folder / name))
        return held
    loaded = _unpickled(folder / name)
    if not isinstance(loaded, Mapping):
        raise TypeError(f"it holds a {type(loaded).__name__} and no state dict")
    return dict(loaded)


def _json_object(path: Path) -> dict[str, Any]:
    found = json.loads(as_file(path).read_bytes())
    if not isinstance(found, dict):
        raise TypeError("it is not a JSON object")
    return found


def _attempt(found: HFCheckpoint, name: str, take: Callable[[], Any]) -> Any:
    try:
        return take()
    except Damaged as damage:
        found.not_taken.append(NotTaken(name, damage.why))
    except NotAFile as error:
        found.not_taken.append(NotTaken(name, error.why.rstrip(".")))
    except _UNREADABLE as error:
        found.not_taken.append(NotTaken(name, _explained(error)))
    return _LEFT


def _explained(error: BaseException) -> str:
    text = str(error)
    named = _GLOBAL.search(text)
    if named:
        return f"it holds a {named.group(1)}, which would have to be run to be loaded"
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    return f"it cannot be read: {first}"


def _unpickled(path: Path) -> Any:
    with torch.serialization.safe_globals(_STAND_INS):
        return _without_stand_ins(torch.load(as_file(path), map_location="cpu", weights_only=True))


def _kind_of(name: str) -> str | None:
    return next((kind for kind, pattern in _STATES.items() if pattern.fullmatch(name)), None)


def _index(pattern: re.Pattern[str], name: str) -> int:
    match = pattern.fullmatch(name)
    return int(match.groupdict().get("index") or 0) if match else 0


class _Dtype:
    """Notes which numpy type a file asks for."""

    def __init__(self, code: Any = None, *rest: Any) -> None:
        self.code, self.order = code, "="

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]

    def real(self) -> np.dtype[Any]:
        """Return the numpy type, if it is one of plain numbers."""
        order = {"<": "<", ">": ">", "|": "|", "=": "="}[self.order]
        if not isinstance(self.code, str) or not re.fullmatch(r"[biufc]\d{1,2}", self.code):
            raise ValueError(f"it holds a numpy array of {self.code!r}")
        return np.dtype(order + self.code)


class _Array:
    """Notes what a file says of a numpy array."""

    def __init__(self) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def real(self) -> np.ndarray[Any, Any]:
        """Return an array made of the noted bytes."""
        _, shape, dtype, is_fortran, data = self.state
        flat = np.frombuffer(bytes(data), dtype.real())
        return flat.reshape(shape, order="F" if is_fortran else "C").copy()


def _reconstruct(kind: Any, shape: Any, code: Any) -> _Array:
    if kind is not _Array:
        raise TypeError("it holds a subclass of numpy's array")
    return _Array()


def _scalar(dtype: _Dtype, data: bytes) -> Any:
    return np.frombuffer(bytes(data), dtype.real())[0]


def _encode(text: str, encoding: str = "latin1") -> bytes:
    return text.encode("latin1")  # how pickle's second protocol writes bytes


def _without_stand_ins(value: Any) -> Any:
    if isinstance(value, _Array):
        return value.real()
    if isinstance(value, _Dtype):
        return value.real()
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _without_stand_ins(item)) for key, item in value.items())
    if type(value) in (list, tuple, set):
        return type(value)(_without_stand_ins(item) for item in value)
    return value


_NUMPY = ("numpy._core.multiarray", "numpy.core.multiarray")
_STAND_INS: list[Any] = [
    *((_reconstruct, f"{module}._reconstruct") for module in _NUMPY),
    *((_scalar, f"{module}.scalar") for module in _NUMPY),
    (_Array, "numpy.ndarray"),
    (_Dtype, "numpy.dtype"),
    (_encode, "_codecs.encode"),
]
