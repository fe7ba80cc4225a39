"""Compare two states, checkpoints or folders of tensor files to the last bit; name what differs."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from anytrain.engine.checkpoint import Loaded
from anytrain.engine.checkpoint.manifest import MANIFEST

KeyPath = tuple[Any, ...]
InWords = Callable[[KeyPath], str]
# What a Trainer's history tells of the clock, and where its folder lay: no part of the training.
_OF_THE_CLOCK = ("_runtime", "_per_second")
_OF_THE_PLACE = ("best_model_checkpoint",)
_TORCH = (".pt", ".pth", ".bin")
_ENDINGS = (".safetensors", *_TORCH)


# -- names of an optimizer's parameters -----------------------------------------------------------


def parameter_names(
    models: Sequence[Mapping[str, Any]], optimizer: Mapping[str, Any]
) -> dict[int, str]:
    """Return the names of an optimizer's parameters by number, as far as they are certain.

    torch records them when the optimizer was built from named parameters; else a shape that occurs
    once tells.
    """
    recorded = {
        number: name
        for group in optimizer["param_groups"]
        for number, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }
    return recorded or _by_shape(models, optimizer)


def _by_shape(models: Sequence[Mapping[str, Any]], optimizer: Mapping[str, Any]) -> dict[int, str]:
    weights: dict[tuple[int, ...], set[str]] = defaultdict(set)
    for model in models:
        for name, value in model.items():
            if isinstance(value, torch.Tensor):
                weights[tuple(value.shape)].add(name)
    numbers: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for number, state in optimizer["state"].items():
        numbers[_shape(state)].add(number)
    return {
        min(held): min(weights[shape])
        for shape, held in numbers.items()
        if shape and len(held) == len(weights[shape]) == 1
    }


def _shape(state: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the one shape of a parameter's state; () where it has none, or several."""
    shapes = {tuple(v.shape) for v in state.values() if isinstance(v, torch.Tensor) and v.ndim}
    return shapes.pop() if len(shapes) == 1 else ()


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that is not the same in both."""

    where: str
    """Where it is, such as "optimizer state of encoder.weight: exp_avg"."""
    what: str
    """How the two differ, such as "differs in 3 of 4096 values; first at [0, 5]"."""

    def __str__(self) -> str:
        return f"{self.where} {self.what}"


@dataclass(slots=True)
class PartDiff:
    """How one part of a checkpoint compares."""

    name: str
    num_tensors: int = 0
    differences: list[Difference] = field(default_factory=list)


def compare_checkpoints(one: Loaded, other: Loaded) -> list[PartDiff]:
    """Return every part of two checkpoints compared: models, then parts, then the ranks' own."""
    parts = [PartDiff("checkpoint")]
    parts[0].differences += [
        Difference(f"the checkpoint's {name}", f"is {a} and {b}")
        for name, a, b in (
            ("step", one.step, other.step),
            ("number of ranks", one.world_size, other.world_size),
            ("list of parts", ", ".join(one.part_names), ", ".join(other.part_names)),
            ("number of models", one.num_models, other.num_models),
        )
        if a != b
    ]
    for index in range(min(one.num_models, other.num_models)):
        name = "model" if index == 0 else f"model_{index}"
        say = "weight {}" if index == 0 else f"model {index}, weight {{}}"
        parts.append(_part(name, one.model(index), other.model(index), _weights(say)))
    models = [one.model(index) for index in range(one.num_models)]
    for name in one.part_names:
        if name in other.part_names:
            states = one.part(name), other.part(name)
            in_words = _plain(name)
            if _is_optimizer(states[0]):
                recorded = one.meta.get("parameters", {}).get(name)
                in_words = _optimizer(name, recorded or parameter_names(models, states[0]))
            parts.append(_part(name, *states, in_words))
    for name in one.rank_part_names:
        for rank in range(min(one.world_size, other.world_size)):
            if name in other.rank_part_names:
                states = one.rank_part(name, rank), other.rank_part(name, rank)
                parts.append(
                    _part(f"{name} of rank {rank}", *states, _plain(f"rank {rank}'s {name}"))
                )
    return parts


def compare_states(name: str, one: Any, other: Any) -> PartDiff:
    """Return two nested states compared under a name."""
    return _part(name, one, other, _plain(name))


def _part(name: str, one: Any, other: Any, in_words: InWords) -> PartDiff:
    found = PartDiff(name, num_tensors=sum(1 for _ in _tensors(one)))
    found.differences = [Difference(in_words(path), what) for path, what in differences(one, other)]
    return found


def differences(one: Any, other: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield the path of each value that differs, and how."""
    if type(one) is not type(other):
        yield path, f"is {_short(one)} and {_short(other)}"
    elif isinstance(one, torch.Tensor):
        yield from ((path, what) for what in _tensors_differ(one, other))
    elif isinstance(one, np.ndarray):
        yield from ((path, what) for what in _arrays_differ(one, other))
    elif isinstance(one, Mapping):
        yield from _mappings_differ(one, other, path)
    elif isinstance(one, list | tuple):
        yield from _sequences_differ(one, other, path)
    elif not _same(one, other):
        yield path, f"is {_short(one)} and {_short(other)}"


def _sequences_differ(
    one: Sequence[Any], other: Sequence[Any], path: KeyPath
) -> Iterator[tuple[KeyPath, str]]:
    if len(one) != len(other):
        yield path, f"has {len(one)} and {len(other)} items"
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        yield from differences(a, b, (*path, index))


def _mappings_differ(
    one: Mapping[Any, Any], other: Mapping[Any, Any], path: KeyPath
) -> Iterator[tuple[KeyPath, str]]:
    for key in one:
        if str(key).endswith(_OF_THE_CLOCK):
            continue
        if key in _OF_THE_PLACE and one[key] and other.get(key):
            a, b = (str(state[key]).rstrip("/").rpartition("/")[2] for state in (one, other))
            yield from differences(a, b, (*path, key))
        elif key in other:
            yield from differences(one[key], other[key], (*path, key))
        else:
            yield (*path, key), "is missing in the second"
    for key in other:
        if key not in one:
            yield (*path, key), "is missing in the first"


def _tensors_differ(one: torch.Tensor, other: torch.Tensor) -> Iterator[str]:
    if one.dtype != other.dtype or one.shape != other.shape:
        yield f"is {_kind(one)} and {_kind(other)}"
        return
    if not one.numel():
        return
    unlike = (_bytes(one) != _bytes(other)).any(1).reshape(one.shape)
    if unlike.any():
        first = [int(i) for i in unlike.nonzero()[0]]
        a, b = one[tuple(first)].item(), other[tuple(first)].item()
        counted = f"differs in {int(unlike.sum())} of {one.numel()} values"
        where = f"first at {first}: " if first else ""
        yield f"{counted}; {where}{a!r} and {b!r}"


def _arrays_differ(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> Iterator[str]:
    if one.dtype != other.dtype or one.shape != other.shape:
        yield f"is {one.dtype}{list(one.shape)} and {other.dtype}{list(other.shape)}"
    elif one.tobytes() != other.tobytes():
        unlike = np.frombuffer(one.tobytes(), np.uint8) != np.frombuffer(other.tobytes(), np.uint8)
        values = unlike.reshape(-1, max(one.itemsize, 1)).any(1)
        where = [int(i) for i in np.unravel_index(int(values.argmax()), one.shape)]
        yield f"differs in {int(values.sum())} of {one.size} values; first at {where}"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return each value's bytes as a row."""
    flat = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(tensor.numel(), -1)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    return bool(one == other)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _short(value: Any) -> str:
    text = _kind(value) if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _tensors(state: Any) -> Iterator[Any]:
    if isinstance(state, torch.Tensor | np.ndarray):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, list | tuple | set | frozenset):
        for value in state:
            yield from _tensors(value)


# Paths in words.


def _weights(say: str) -> InWords:
    return lambda path: say.format(".".join(str(step) for step in path))


def _plain(name: str) -> InWords:
    return lambda path: name + "".join(f"[{step!r}]" for step in path)


def _is_optimizer(state: Any) -> bool:
    return isinstance(state, Mapping) and {"state", "param_groups"} <= set(state)


def _optimizer(name: str, names: Mapping[int, str | None] | Sequence[str | None]) -> InWords:
    named = names if isinstance(names, Mapping) else dict(enumerate(names))
    plain = _plain(name)

    def in_words(path: KeyPath) -> str:
        if len(path) < 3 or path[0] != "state":
            return plain(path)
        parameter = named.get(path[1]) or f"parameter {path[1]}"
        rest = "".join(f"[{step!r}]" for step in path[3:])
        return f"{name} state of {parameter}: {path[2]}{rest}"

    return in_words


# -- files beside checkpoints ---------------------------------------------------------------------


def compare_artifacts(one: Path, other: Path) -> list[PartDiff]:
    """Return every tensor file outside the checkpoints compared, by its path in the project."""
    mine, theirs = _files(one), _files(other)
    parts = []
    for name in sorted(mine | theirs):
        if name in mine and name in theirs:
            parts.append(_compare(name, one / name, other / name))
        else:
            which = "second" if name in mine else "first"
            missing = Difference(f"the file {name}", f"is missing in the {which}")
            parts.append(PartDiff(name, differences=[missing]))
    return parts


def _files(project: Path) -> set[str]:
    return {
        str(path.relative_to(project))
        for path in project.rglob("*")
        if path.suffix in _ENDINGS and path.is_file() and not _in_checkpoint(path, project)
    }


def _in_checkpoint(path: Path, project: Path) -> bool:
    inner = path.relative_to(project)
    hidden = any(part.startswith(".") for part in inner.parts[:-1])
    return hidden or any((project / p / MANIFEST).exists() for p in inner.parents if p.parts)


def _compare(name: str, one: Path, other: Path) -> PartDiff:
    if one.read_bytes() == other.read_bytes():
        return PartDiff(name, num_tensors=compare_states(name, _read(one), {}).num_tensors)
    found = compare_states(name, _read(one), _read(other))
    if not found.differences and not found.num_tensors:
        found.differences.append(Difference(f"the file {name}", "differs"))
    return found


def _read(path: Path) -> Any:
    """Return a file's tensors; nothing where reading it would mean running it."""
    try:
        if path.suffix in _TORCH:
            return torch.load(path, map_location="cpu", weights_only=True)
        return load_file(path)
    except Exception:  # noqa: BLE001 -- a file of any kind may have such a name
        return {}
