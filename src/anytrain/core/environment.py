"""Read the environment once, into one frozen value.

Names of our own come first, then the ones that HF Accelerate's launcher and users set, so that
a job written for it keeps its settings. What `anytrain launch` decided travels to the children
under LAUNCH_PREFIX and beats what a user exported.
"""

from __future__ import annotations

import os
import re
import reprlib
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anytrain.core.errors import BadInput
from anytrain.core.plan import Choice, Wish, Wishes

LAUNCH_PREFIX = "ANYTRAIN_LAUNCH_"

_NAMES = {
    "device": ("ANYTRAIN_DEVICE", "ACCELERATE_TORCH_DEVICE"),
    "precision": ("ANYTRAIN_MIXED_PRECISION", "ACCELERATE_MIXED_PRECISION"),
    "accumulation": (
        "ANYTRAIN_GRADIENT_ACCUMULATION_STEPS",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    ),
    "compile": ("ANYTRAIN_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_BACKEND"),
    "step": ("ANYTRAIN_STEP",),
    "downcast_bf16": ("ANYTRAIN_DOWNCAST_BF16", "ACCELERATE_DOWNCAST_BF16"),
    "stall_s": ("ANYTRAIN_STALL_S",),
    "strategy": ("ANYTRAIN_STRATEGY",),
    "resume_from_checkpoint": ("ANYTRAIN_RESUME_FROM_CHECKPOINT",),
}
MPS_FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"
DOWNCAST = "XLA_DOWNCAST_BF16"
USE_BF16 = "XLA_USE_BF16"
_OURS = ("ANYTRAIN_", "ACCELERATE_")
_OTHERS = (
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "NCCL_DEBUG",
    MPS_FALLBACK,
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO",
    "PJRT_DEVICE",
    USE_BF16,
    DOWNCAST,
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "MKL_NUM_THREADS",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_PROCID",
    "SLURM_NTASKS",
)
STOP_SIGNALS = tuple(n for n in ("SIGTERM", "SIGINT", "SIGHUP") if n in signal.Signals.__members__)
"""Signals that save a run where nothing else is said: a request, Ctrl-C, a closed terminal."""
_TRUE = ("1", "true", "yes", "on", "y", "t")
_FALSE = ("", "0", "false", "no", "off", "n", "f")


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where this process stands among its peers, as its launcher said."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    launcher: str = "none"


@dataclass(frozen=True, slots=True)
class Environment:
    """Everything anytrain takes from environment variables."""

    wishes: Wishes
    place: RankPlace
    beats: str | None
    """The folder where a launcher of ours reads each rank's last sign of life."""
    debug: bool
    log_level: str | None
    stop_signals: tuple[str, ...] = STOP_SIGNALS
    """Signals that save the run between two steps and end it."""


def read(environ: Mapping[str, str] | None = None) -> Environment:
    """Return what the environment says now; `environ` stands in for it in tests."""
    env = os.environ if environ is None else environ
    return Environment(
        wishes=_wishes(env),
        place=_place(env),
        beats=env.get("ANYTRAIN_BEATS"),
        debug=flag(env, "ANYTRAIN_DEBUG") or flag(env, "ACCELERATE_DEBUG_MODE"),
        log_level=env.get("ANYTRAIN_LOG_LEVEL") or env.get("ACCELERATE_LOG_LEVEL"),
        stop_signals=_stop_signals(env),
    )


def resume_from(given: Any) -> Any:
    """Return what a run is to go on from: what it was given, else what its surroundings ask for.

    A folder, "auto", or yes or no; None where nobody asked.
    """
    asked = read().wishes.resume_from_checkpoint
    value = asked.value if given is None and asked is not None else given
    if isinstance(value, str) and value.lower() in (*_TRUE, *_FALSE):
        return value.lower() in _TRUE
    return value


def variable(name: str) -> str | None:
    """Return one variable that another library reads; None where it is not set."""
    return os.environ.get(name)


def narrowing() -> tuple[str, ...]:
    """Return the variables that are set and by which torch_xla narrows every float."""
    return tuple(name for name in (USE_BF16, DOWNCAST) if _is_set_for_xla(os.environ.get(name)))


def _is_set_for_xla(value: str | None) -> bool:
    """Whether torch_xla takes a variable for a yes: "true", or a text that begins with a number.

    >>> [_is_set_for_xla(value) for value in ("1", "true", " 2", "0", "True", "yes", None)]
    [True, True, True, False, False, False, False]
    """
    number = re.match(r"\s*[+-]?\d+", value or "")
    return value == "true" or (number is not None and int(number[0]) != 0)


def downcast() -> None:
    """Let torch_xla take float32 for bfloat16 in this process; refuse where it is too late."""
    if _is_set_for_xla(os.environ.get(DOWNCAST)):
        return
    if "torch_xla" in sys.modules:
        raise BadInput(
            "Cannot use downcast_bf16 in this process.",
            why=f"torch_xla is loaded already, and reads {DOWNCAST} when it loads.",
            fix=f"start with `anytrain launch --downcast_bf16` or notebook_launcher(..., "
            f"downcast_bf16=True), export {DOWNCAST}=1, or make the Accelerator before torch_xla "
            "is imported.",
        )
    os.environ[DOWNCAST] = "1"


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return where things are kept that can be made again: ANYTRAIN_CACHE, or the user's own."""
    env = os.environ if environ is None else environ
    if env.get("ANYTRAIN_CACHE"):
        return Path(env["ANYTRAIN_CACHE"]).expanduser()
    shared = env.get("XDG_CACHE_HOME")
    return Path(shared or os.path.expanduser("~/.cache")) / "anytrain"


def relevant(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that are set and change what a run does, by name."""
    env = os.environ if environ is None else environ
    return {name: env[name] for name in sorted(env) if name.startswith(_OURS) or name in _OTHERS}


_torch_came_first: bool | None = None


def enable_mps_fallback() -> None:
    """On macOS, let ops that mps lacks run on the CPU, unless the user has said otherwise."""
    global _torch_came_first
    if _torch_came_first is None:  # anytrain's own import calls first; only that call can tell
        _torch_came_first = "torch" in sys.modules
    if sys.platform == "darwin" and "torch" not in sys.modules:
        os.environ.setdefault(MPS_FALLBACK, "1")


def torch_came_first() -> bool:
    """Whether torch was imported before anytrain, which is too late for its variables."""
    return bool(_torch_came_first)


def mps_fallback() -> Choice:
    """Return whether torch runs ops that mps lacks on the CPU ("on", "off"), and why.

    libtorch reads the variable once, when it is loaded: what counts is which came first.
    """
    value = os.environ.get(MPS_FALLBACK)
    if value is None and _torch_came_first:
        return Choice("off", f"torch was imported before anytrain, without {MPS_FALLBACK}=1")
    if value is None or value.strip() in ("", "0"):
        return Choice("off", f"{MPS_FALLBACK} is {'not set' if value is None else repr(value)}")
    if _torch_came_first:
        return Choice("on", f"{MPS_FALLBACK}={value}, if it was set before torch was imported")
    return Choice("on", f"{MPS_FALLBACK}={value} was set before torch was imported")


def flag(env: Mapping[str, str], name: str) -> bool:
    """Return a yes-or-no variable, refusing what is neither."""
    value = env.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise BadInput(
        f"Cannot read {name}={env[name]!r}.",
        why="it is a yes-or-no variable.",
        fix=f"set {name}=1 or {name}=0, or unset it.",
    )


def launch_variables(wishes: Wishes) -> dict[str, str]:
    """Return the variables that carry a launcher's options to its children."""
    chosen = {name: getattr(wishes, name) for name in _NAMES}
    return {LAUNCH_PREFIX + name.upper(): w.value for name, w in chosen.items() if w is not None}


def _wishes(env: Mapping[str, str]) -> Wishes:
    launched = Wishes(**{name: _launch_option(env, name) for name in _NAMES})
    exported = Wishes(**{name: _first(env, names) for name, names in _NAMES.items()})
    if exported.device is None and flag(env, "ACCELERATE_USE_CPU"):
        cpu = Wishes(device=Wish("cpu", "environment variable ACCELERATE_USE_CPU"))
        exported = exported.over(cpu)
    return launched.over(exported)


def _stop_signals(env: Mapping[str, str]) -> tuple[str, ...]:
    """Read ANYTRAIN_STOP_SIGNALS: SLURM sends SIGUSR1 where --signal asks for it."""
    told = env.get("ANYTRAIN_STOP_SIGNALS", ",".join(STOP_SIGNALS))
    names = tuple(name.strip().upper() for name in told.split(",") if name.strip())
    known = set(signal.Signals.__members__) - {"SIGKILL", "SIGSTOP"}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BadInput(
            f"Cannot stop on {', '.join(unknown)}.",
            why="ANYTRAIN_STOP_SIGNALS holds names of signals that a process may answer, with "
            "commas between them.",
            fix='set it to "SIGTERM,SIGINT,SIGUSR1", for example.',
        )
    return names


def _launch_option(env: Mapping[str, str], name: str) -> Wish | None:
    value = env.get(LAUNCH_PREFIX + name.upper())
    return Wish(value, "launch option") if value else None


def _first(env: Mapping[str, str], names: tuple[str, ...]) -> Wish | None:
    for name in names:
        if env.get(name):
            return Wish(env[name], f"environment variable {name}")
    return None


def _place(env: Mapping[str, str]) -> RankPlace:
    """Read torchrun's variables, else srun's; neither means one process."""
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, size = _int(env, "RANK"), _int(env, "WORLD_SIZE")
        local_rank = _int(env, "LOCAL_RANK", rank)
        return RankPlace(rank, local_rank, size, _int(env, "LOCAL_WORLD_SIZE", size), "torchrun")
    # SLURM_NTASKS is also set in an sbatch script that runs plain python: only srun sets PROCID
    # together with a step, and only a step of several tasks is a world.
    if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env and _int(env, "SLURM_NTASKS", 1) > 1:
        size = _int(env, "SLURM_NTASKS")
        local = _int(env, "SLURM_NTASKS_PER_NODE", size)
        return RankPlace(_int(env, "SLURM_PROCID"), _int(env, "SLURM_LOCALID"), size, local, "srun")
    return RankPlace()


def _int(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if name not in env and default is not None:
        return default
    try:
        return int(env[name])
    except (KeyError, ValueError):
        raise BadInput(
            f"Cannot read {name}={reprlib.repr(env.get(name))}.",
            why="the launcher's variables must all be set, to whole numbers.",
            fix="start the job with `anytrain launch`, torchrun or srun, or unset them.",
        ) from None


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel.

    IPython in a terminal is none, nor is a script that has only imported ipykernel.
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in getattr(shell, "config", {})
