"""Choose the backend and the number of processes of a launch, or say why it cannot be."""

from __future__ import annotations

from dataclasses import dataclass

from anytrain.core import environment
from anytrain.core.errors import BadInput
from anytrain.core.facts import Found
from anytrain.core.notices import give_notice
from anytrain.core.plan import Wish, Wishes, check_downcast, check_processes
from anytrain.machine.backends import probe
from anytrain.machine.backends.base import Backend
from anytrain.machine.backends.capabilities import TWO_DEVICE_TPU, tpu_chips
from anytrain.machine.backends.cpu import usable_cores

_THREADS = "OMP_NUM_THREADS"
_WAITING = "OMP_WAIT_POLICY"
_SPMD = "--strategy spmd to split each batch over all devices, "


@dataclass(frozen=True, slots=True)
class LaunchTarget:
    """The backend of a job and its number of processes on this machine."""

    backend: Backend
    num_processes: int


def choose_target(wishes: Wishes, asked: int | None) -> LaunchTarget:
    """Return the backend and the count: as asked, or one process for each device."""
    backend = probe.choose(_present_tpu(wishes.device))
    check_downcast(wishes.downcast_bf16, backend.name)
    if wishes.strategy is not None and wishes.strategy.value == "spmd":
        return _one_process(backend, asked)
    if asked is None:
        _tell_unused(backend)
        # Every core could run a rank, but torch uses all of them from one process already.
        return LaunchTarget(backend, 1 if backend.name == "cpu" else backend.process_counts()[-1])
    check_processes(backend.name, backend.process_group, asked)
    counts = backend.process_counts()
    if asked not in counts:
        raise BadInput(
            f"Cannot start {asked} processes on {backend.name!r} here.",
            why=f"this machine can run {_words(counts)} there, one for each device.",
            fix=f"pass --num_processes {counts[-1]}, {_SPMD if _needs_spmd(backend) else ''}"
            "or --cpu for CPU processes.",
        )
    return LaunchTarget(backend, asked)


def _one_process(backend: Backend, asked: int | None) -> LaunchTarget:
    """Return the one process that holds all devices."""
    if asked not in (None, 1):
        raise BadInput(
            f"Cannot start {asked} processes with --strategy spmd.",
            why="one process holds all devices, and its compiler splits each batch over them.",
            fix="leave --num_processes out, or --strategy.",
        )
    return LaunchTarget(backend, 1)


def _needs_spmd(backend: Backend) -> bool:
    """Whether there are devices that only one process for all of them reaches: TPU v2 and v3."""
    is_tpu = backend.name == "xla" and backend.process_group is not None
    return is_tpu and tpu_chips()[:1] == (TWO_DEVICE_TPU,)


def _tell_unused(backend: Backend) -> None:
    if _needs_spmd(backend):
        give_notice(
            "One process starts and trains on one device: a TPU v2 or v3 chip is two, which one "
            "process holds. Pass --strategy spmd to split each batch over all devices.",
            stacklevel=3,
        )


def threads(num_processes: int, asked: int | None) -> dict[str, str]:
    """Return the variables that keep several processes from fighting over the cores.

    Threads that wait for work give their core away: spinning, they burn several times the time
    of a busy machine. Who has set one of them keeps it.
    """
    found: dict[str, str] = {}
    if num_processes > 1:
        each = int(usable_cores().value) // num_processes
        found = {_THREADS: str(max(1, each)), _WAITING: "PASSIVE"}
        found = {name: v for name, v in found.items() if environment.variable(name) is None}
    return found if asked is None else {**found, _THREADS: str(asked)}


def _present_tpu(device: Wish | None) -> Wish | None:
    """Return the TPU engine that is here when "a TPU" was asked for."""
    if device is not None and device.value == "tpu":
        for name in ("tpu", "xla"):
            if isinstance(probe.get(name).probe(), Found):
                return Wish(name, device.source)
    return device


def _words(counts: tuple[int, ...]) -> str:
    if len(counts) > 3 and counts == tuple(range(counts[0], counts[-1] + 1)):
        return f"{counts[0]} to {counts[-1]} processes"
    return " or ".join(map(str, counts)) + (" process" if counts == (1,) else " processes")
