"""Read and write a launch as a YAML file; HF Accelerate's own files are read too."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from anytrain.core import documents
from anytrain.core.errors import BadInput, Unsupported
from anytrain.core.nearest import nearest
from anytrain.doors.launch.options import LaunchOptions

_INTS = (
    "num_processes",
    "num_machines",
    "machine_rank",
    "main_process_port",
    "gradient_accumulation_steps",
    "num_cpu_threads_per_process",
    "max_restarts",
)
_REFUSED = {
    "deepspeed_config": "DeepSpeed",
    "fsdp_config": "FSDP",
    "megatron_lm_config": "Megatron-LM",
    "fp8_config": "fp8 training",
    "parallelism_config": "several kinds of parallelism at once",
    "mpirun_config": "starting through mpirun",
    "tpu_use_cluster": "starting a TPU pod over ssh",
}
_TYPES: dict[str, dict[str, bool]] = {
    "NO": {},
    "MULTI_GPU": {"multi_gpu": True},
    "MULTI_CPU": {"cpu": True},
    "MPS": {},
    "XLA": {"tpu": True},
    "TPU": {"tpu": True},
}
# These say nothing that changes a run here, at least with the values that HF writes by itself.
_HARMLESS: dict[str, tuple[object, ...]] = {
    "compute_environment": ("LOCAL_MACHINE",),
    "main_training_function": ("main", "", None),
    "rdzv_backend": ("static", "", None),
    "same_network": (True,),
    "enable_cpu_affinity": (False,),
    "tpu_env": ([], None),
    "tpu_use_sudo": (False,),
    "tpu_use_cluster": (False,),
}


@dataclass(frozen=True, slots=True)
class ReadConfig:
    """A file's options, and the keys in it that nothing here listens to."""

    options: LaunchOptions
    ignored: list[str]

    def not_used(self) -> str:
        """Return the keys that nothing listens to, with what may have been meant by each."""
        return ", ".join(map(_with_a_guess, self.ignored))


def _with_a_guess(key: str) -> str:
    # Only a slip of the keys is one: HF's files hold keys of their own.
    near = nearest(key, (f.name for f in fields(LaunchOptions)), alike=0.85)
    return f"{key} (did you mean {near}?)" if near else key


def read(path: str) -> ReadConfig:
    """Return what the file asks for, refusing what anytrain does not do."""
    content = _load(path)
    options: dict[str, Any] = {}
    ignored: list[str] = []
    for key, value in content.items():
        found = _understand(str(key), value, path)
        if found is None:
            ignored.append(str(key))
        else:
            options.update(found)
    if options.get("cpu"):
        options.pop("multi_gpu", None)
    return ReadConfig(LaunchOptions(**options), sorted(ignored))


def with_file(asked: LaunchOptions, path: str | None) -> LaunchOptions:
    """Return the options over those of the file, if there is one; say what of it is not used."""
    if path is None:
        return asked
    found = read(path)
    if found.ignored:
        sys.stderr.write(f"anytrain: {path}: not used here: {found.not_used()}.\n")
    lower = found.options
    if asked.device() is not None:
        # A device that is asked for replaces the file's, whatever that was called.
        lower = replace(lower, cpu=None, multi_gpu=None, tpu=None)
    return asked.over(lower)


def write(options: LaunchOptions, path: str, force: bool = False) -> None:
    """Write the options where the user says, in words that HF Accelerate reads as well."""
    file = Path(path)
    if file.exists() and not force:
        raise BadInput(
            f"Cannot write {path}: it exists.",
            why="a configuration is not replaced without being asked.",
            fix="pass another --output, or --force.",
        )
    try:
        file.write_text(yaml.safe_dump(to_mapping(options), sort_keys=True))
    except OSError as error:
        raise BadInput(
            f"Cannot write {path}.",
            why=f"{error.strerror or error}.",
            fix="pass an --output in a folder that exists and is yours.",
        ) from None


def to_mapping(options: LaunchOptions) -> dict[str, Any]:
    """Return the options under the names that the file uses."""
    given = options.given()
    named: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE"}
    named["distributed_type"] = _distributed_type(options)
    for name in ("multi_gpu", "tpu", "module"):
        given.pop(name, None)
    named["use_cpu"] = bool(given.pop("cpu", False))
    if "downcast_bf16" in given:
        named["downcast_bf16"] = "yes" if given.pop("downcast_bf16") else "no"
    if "dynamo_backend" in given:
        named["dynamo_config"] = {"dynamo_backend": str(given.pop("dynamo_backend")).upper()}
    return {**named, **given}


def _distributed_type(options: LaunchOptions) -> str:
    if options.tpu:
        return "XLA"
    if options.multi_gpu:
        return "MULTI_GPU"
    return "MULTI_CPU" if options.cpu and (options.num_processes or 1) > 1 else "NO"


def _load(path: str) -> Mapping[Any, Any]:
    try:
        content = documents.from_yaml(Path(path).read_text())
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise BadInput(
            f"Cannot read the config file {path}.",
            why=f"{said}.",
            fix="pass the path of a YAML file, such as one written by `anytrain config`.",
        ) from None
    if not isinstance(content, Mapping):
        raise BadInput(
            f"Cannot read the config file {path}.",
            why="it must hold names and values, such as `num_processes: 2`.",
            fix="write one with `anytrain config --output my.yaml`.",
        )
    return content


def _understand(key: str, value: Any, path: str) -> dict[str, Any] | None:
    """Return the options that one key stands for; None where nothing here listens to it."""
    if key in _REFUSED and value:
        raise Unsupported(
            f"Cannot launch with {key}, from {path}.",
            why=f"anytrain does not do {_REFUSED[key]}.",
            fix=f"remove {key} from the file, or start the job with the tool it was made for.",
        )
    if value in _HARMLESS.get(key, ()) or (key in _REFUSED and not value):
        return {}
    if value is None and key in (*_INTS, *_READERS):
        return {}
    if key in _INTS:
        return {key: _int(key, value, path)}
    if key in _READERS:
        return _READERS[key](value, path)
    return None


def _int(key: str, value: Any, path: str) -> int:
    try:
        if isinstance(value, bool) or (isinstance(value, float) and value % 1):
            raise ValueError
        return int(value)
    except (TypeError, ValueError, OverflowError):
        raise BadInput(
            f"Cannot read {key}: {reprlib.repr(value)} in {path}.",
            why="it must be a whole number.",
            fix=f"write `{key}: 1`, or remove the line.",
        ) from None


def _bool(value: Any) -> bool:
    return value if isinstance(value, bool) else str(value).lower() in ("yes", "true", "1")


def _text(name: str) -> Callable[[Any, str], dict[str, Any]]:
    return lambda value, path: {name: str(value)}


def _flag(name: str) -> Callable[[Any, str], dict[str, Any]]:
    return lambda value, path: {name: True} if _bool(value) else {}


def _type(value: Any, path: str) -> dict[str, Any]:
    word = str(value).upper()
    if value is False or word in _TYPES:  # YAML reads a bare NO as false
        return dict(_TYPES.get(word, {}))
    raise Unsupported(
        f"Cannot launch distributed_type {value}, from {path}.",
        why=f"anytrain trains with {', '.join(_TYPES)}.",
        fix="write one of these, or start the job with the tool it was made for.",
    )


def _environment(value: Any, path: str) -> dict[str, Any]:
    raise Unsupported(
        f"Cannot launch in compute_environment {value}, from {path}.",
        why="anytrain launches on machines that it is started on.",
        fix="write `compute_environment: LOCAL_MACHINE`.",
    )


def _dynamo(value: Any, path: str) -> dict[str, Any]:
    backend = value.get("dynamo_backend") if isinstance(value, Mapping) else value
    if backend is None or backend is False or str(backend).lower() == "no":
        return {}
    return {"dynamo_backend": str(backend).lower()}


def _stall(value: Any, path: str) -> dict[str, Any]:
    try:
        return {"stall_timeout": float(value)}
    except (TypeError, ValueError):
        raise BadInput(
            f"Cannot read stall_timeout: {reprlib.repr(value)} in {path}.",
            why="it must be a number of seconds.",
            fix="write `stall_timeout: 60`, or 0 to wait on.",
        ) from None


_READERS: dict[str, Callable[[Any, str], dict[str, Any]]] = {
    "distributed_type": _type,
    "compute_environment": _environment,
    "main_process_ip": _text("main_process_ip"),
    "mixed_precision": lambda value, path: {
        "mixed_precision": "no" if value is False else str(value)
    },
    "use_cpu": _flag("cpu"),
    "gpu_ids": _text("gpu_ids"),
    "downcast_bf16": lambda value, path: {"downcast_bf16": _bool(value)},
    "dynamo_config": _dynamo,
    "dynamo_backend": _dynamo,
    "debug": _flag("debug"),
    "stall_timeout": _stall,
    "strategy": _text("strategy"),
}
