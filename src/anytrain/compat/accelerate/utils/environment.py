"""Read, set and put back environment variables, the way scripts for HF Accelerate do it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

from anytrain.compat.accelerate import refused
from anytrain.compat.accelerate.utils.versions import compare_versions
from anytrain.core import environment
from anytrain.core.errors import BadInput
from anytrain.machine.backends import probe

__all__ = [
    "are_libraries_initialized",
    "check_cuda_fp8_capability",
    "check_cuda_p2p_ib_support",
    "clear_environment",
    "convert_dict_to_env_variables",
    "get_cpu_distributed_information",
    "get_current_device_type",
    "get_gpu_info",
    "get_int_from_env",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "purge_accelerate_environment",
    "str_to_bool",
]

__getattr__ = refused.module_getattr(__name__)

logger = logging.getLogger(__name__)

_TRUE = ("1", "true", "yes", "on", "y", "t")
_FALSE = ("0", "false", "no", "off", "n", "f")
# Two of these cards talk to each other only from this driver on.
_CARDS_WITHOUT_P2P, _DRIVER_WITH_P2P = "RTX 40", "550.40.07"
_FIRST_WITH_FP8 = (8, 9)


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return 1 or 0 for a word such as "yes" or "off"; True or False with `to_bool`.

    >>> str_to_bool("on"), str_to_bool("No", to_bool=True)
    (1, False)
    """
    word = value.lower()
    if word not in _TRUE + _FALSE:
        raise BadInput(
            f"Cannot read {value!r} as yes or no.",
            why=f"the known words are {', '.join(_TRUE + _FALSE)}.",
            fix="use one of them.",
        )
    return word in _TRUE if to_bool else int(word in _TRUE)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return a yes-or-no variable, or the default where it is not set."""
    return bool(str_to_bool(os.environ.get(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return a variable, or the default where it is not set."""
    return os.environ.get(key, str(default))


def get_int_from_env(env_keys: Sequence[str], default: int) -> int:
    """Return the first variable that holds a whole number of 0 or more, or the default."""
    for key in env_keys:
        if int(os.environ.get(key, "-1")) >= 0:
            return int(os.environ[key])
    return default


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Return lines of an environment file; a value that would break one is left out and named."""
    lines = []
    for key, value in current_env.items():
        if key and value and not set(";\n<> ") & set(key + value):
            lines.append(f"{key}={value}\n")
        else:
            logger.warning(
                f"Left out {key}={value}: empty, or with a character that has a meaning there."
            )
    return lines


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return those of the libraries that were imported already."""
    return [name for name in library_names if name in sys.modules]


@contextmanager
def clear_environment() -> Iterator[None]:
    """Empty the environment inside the block."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set variables inside the block; names are written in capitals, values as text."""
    wanted = {key.upper(): str(value) for key, value in kwargs.items()}
    before = {key: os.environ.get(key) for key in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        _put_back(before)


def _put_back(before: Mapping[str, str | None]) -> None:
    for key, value in before.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Decorate a function, or a class of tests, to leave no ACCELERATE_ variable behind."""
    if not isinstance(func_or_cls, type):
        return _purging(func_or_cls)
    cls: Any = func_or_cls
    _purge_tests(cls)
    cls.__init_subclass__ = classmethod(lambda heir, **options: _purge_tests(heir))
    return cls


def _purge_tests(cls: Any) -> None:
    for name in dir(cls):
        method = getattr(cls, name)
        if name.startswith("test") and callable(method) and not hasattr(method, "_purges"):
            setattr(cls, name, _purging(method))


def _purging(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def purged(*args: Any, **kwargs: Any) -> Any:
        before = _accelerate_variables()
        try:
            return function(*args, **kwargs)
        finally:
            _put_back({**dict.fromkeys(_accelerate_variables()), **before})

    purged.__dict__["_purges"] = True
    return purged


def _accelerate_variables() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key.startswith("ACCELERATE_")}


@dataclass
class CPUInformation:
    """Where this process stands among its peers."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Return where this process stands among its peers, as its launcher said."""
    place = environment.read().place
    return CPUInformation(place.rank, place.size, place.local_rank, place.local_size)


def get_current_device_type() -> tuple[str, str]:
    """Return the device that a run would take here, and what several of them would be called."""
    name = probe.choose(environment.read().wishes.device).name
    return name, {"cuda": "MULTI_GPU", "tpu": "XLA", "xla": "XLA"}.get(name, "MULTI_CPU")


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of the NVIDIA GPUs and their number, without starting CUDA."""
    names = _nvidia_smi("name")
    return names, len(names)


def get_driver_version() -> str:
    """Return the version of the NVIDIA driver."""
    return _nvidia_smi("driver_version")[0]


def check_cuda_p2p_ib_support() -> bool:
    """Whether the GPUs here can talk to each other directly; True where nobody knows."""
    try:
        names, count = get_gpu_info()
        if count < 2 or not any(_CARDS_WITHOUT_P2P in name for name in names):
            return True
        from torch.torch_version import TorchVersion

        return compare_versions(TorchVersion(get_driver_version()), ">=", _DRIVER_WITH_P2P)
    except (OSError, subprocess.SubprocessError):
        return True


def check_cuda_fp8_capability() -> bool:
    """Whether the first GPU here computes in fp8; anytrain itself does not."""
    try:
        major, minor = _nvidia_smi("compute_cap")[0].split(".")
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return False
    return (int(major), int(minor)) >= _FIRST_WITH_FP8


def _nvidia_smi(question: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={question}", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line.strip() for line in said.splitlines() if line.strip()]
