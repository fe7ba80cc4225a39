"""Run a job's processes on this machine with torch's own elastic agent.

What is ours: the agent says nothing itself, a rank's death ends the others in about two
seconds, and what each rank left behind is collected for whoever explains it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from anytrain.core.errors import AnytrainError, BadInput, PeerLost
from anytrain.machine.parallel import rendezvous
from anytrain.machine.processes import notes, supervise
from anytrain.machine.processes.crashes import Ending, ending

_STUCK_S = 60.0
_MEET_S, _RESTART_MEET_S = 900.0, 120.0
"""How long the machines wait for one another, at the start and after a failure."""
_RUN_ID = "anytrain"


@dataclass(frozen=True, slots=True)
class ElasticJob:
    """What to run, how often, and where the machines meet."""

    command: Sequence[str]
    local_size: int
    beats: str
    num_machines: int = 1
    machine_rank: int = 0
    address: str = "127.0.0.1"
    port: int = 0
    """Where the machines meet; 0 lets the system choose, on one machine alone."""
    max_restarts: int = 0
    on_restart: Callable[[list[Ending], int], None] = lambda endings, left: None

    @property
    def size(self) -> int:
        """The number of ranks on all machines."""
        return self.local_size * self.num_machines


@dataclass(slots=True)
class ElasticResult:
    """How the job ended here: nothing failed, or these did; or a signal ended it."""

    endings: list[Ending] = field(default_factory=list)
    signum: int | None = None
    returned: list[int] = field(default_factory=list)
    """The ranks of this machine that were done when the first failed."""


def run(job: ElasticJob) -> ElasticResult:
    """Run the job on this machine until it succeeds, fails or is stopped."""
    agent: _Agent | None = None
    # torch's agent takes the signals over once its processes run; before that they are ours. Of
    # those that are ignored here it must not make handlers: ranks inherit that they are ignored.
    names = ",".join(signum.name for signum in supervise.stop_signals())
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = names
    with supervise.hearing_signals(lambda: [] if agent is None else agent.processes()):
        try:
            meeting = _Meeting(job)
            agent = _Agent(_spec(job, meeting), job)
            agent.run()
        except (SignalException, supervise.Stopped) as stop:
            signum = stop.signum if isinstance(stop, supervise.Stopped) else int(stop.sigval)
            return ElasticResult([] if agent is None else agent.endings, signum)
        except dist.DistError as error:
            raise _no_meeting(job, error) from error
    return ElasticResult(agent.endings, returned=agent.returned)


def _spec(job: ElasticJob, meeting: _Meeting) -> WorkerSpec:
    return WorkerSpec(
        role=_RUN_ID,
        local_world_size=job.local_size,
        rdzv_handler=meeting,
        entrypoint=job.command[0],
        # torch expands ${local_rank} in arguments; the script's own must arrive as they are.
        args=tuple(word.replace("$", "$$") for word in job.command[1:]),
        max_restarts=job.max_restarts,
        monitor_interval=0.1,
        master_addr=job.address,  # the port is the meeting's, which chooses another at a restart
    )


def quiet() -> None:
    """Keep torch's elastic loggers from telling the story a second time."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.nn.jit")):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


class _Agent(LocalElasticAgent):
    """torch's agent, which ends the others at once when a rank has died."""

    def __init__(self, spec: WorkerSpec, job: ElasticJob) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=f"{job.beats}/agent"))
        self._job = job
        self.endings: list[Ending] = []
        """What failed in the latest attempt, in the order in which it was noticed."""
        self.returned: list[int] = []

    def processes(self) -> list[supervise.Process]:
        """Return the processes of this machine's ranks, in their order."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return [handlers[local_rank].proc for local_rank in sorted(handlers)]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self.endings:
            self._job.on_restart(self.endings, self._remaining_restarts)
        self.endings = []
        notes.clear_flag(self._job.beats, notes.PEER_DIED)
        for worker in worker_group.workers:
            notes.clear(self._job.beats, worker.global_rank)
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        processes = self.processes()
        self._kill_the_stuck(worker_group, processes)
        self._note_endings(worker_group, processes)
        if any(each.was_preempted for each in self.endings):
            self._await_the_preempted(processes)
        if self.endings:
            self._await_cause(worker_group, processes)
            ranks = [worker.global_rank for worker in worker_group.workers]
            codes = [supervise.poll(process) for process in processes]
            self.returned = [rank for rank, code in zip(ranks, codes, strict=True) if code == 0]
            notes.set_flag(self._job.beats, notes.PEER_DIED)
            supervise.end(processes, signal.SIGTERM, supervise.SURVIVOR_GRACE_S)
            self._note_endings(worker_group, processes, only_own_errors=True)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, *rest: Any, **more: Any
    ) -> None:
        asked, beats = supervise.passed_on(death_sig), self._job.beats
        supervise.end(self.processes(), asked, supervise.GRACE_S, beats=beats)
        super()._shutdown(death_sig)

    def _note_endings(
        self,
        group: WorkerGroup,
        processes: list[supervise.Process],
        only_own_errors: bool = False,
    ) -> None:
        known = {each.rank for each in self.endings}
        for worker, process in zip(group.workers, processes, strict=True):
            code = supervise.poll(process)
            if code and worker.global_rank not in known:
                found = ending(self._job.beats, worker.global_rank, process.pid, code)
                if found.failed_by_itself or not only_own_errors:
                    self.endings.append(found)

    def _await_the_preempted(self, processes: list[supervise.Process]) -> NoReturn:
        """Let every rank leave after the common save; such an end is no failure to start over."""
        code = next(each.code for each in self.endings if each.was_preempted)
        deadline = time.monotonic() + supervise.GRACE_S
        while time.monotonic() < deadline and any(supervise.poll(p) is None for p in processes):
            time.sleep(0.05)
        supervise.end(processes, signal.SIGTERM, 0)
        raise supervise.Stopped(code - 128)

    def _await_cause(self, group: WorkerGroup, processes: list[supervise.Process]) -> None:
        """Give the rank that died first a moment to show, where a consequence came first."""
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline and all(_is_consequence(e) for e in self.endings):
            time.sleep(0.05)
            self._note_endings(group, processes)

    def _kill_the_stuck(self, group: WorkerGroup, processes: list[supervise.Process]) -> None:
        """Kill a rank that has told of its error and cannot leave, as transports sometimes do."""
        for worker, process in zip(group.workers, processes, strict=True):
            if supervise.poll(process) is None:
                note = notes.read(self._job.beats, worker.global_rank)
                if note is not None and time.time() - note.written > _STUCK_S:
                    supervise.end([process], signal.SIGTERM, supervise.SURVIVOR_GRACE_S)


class _Meeting(RendezvousHandler):
    """Where the machines meet: a store in machine 0's launcher, which its ranks use too.

    A machine's rank is the one that the user gave, so ranks are the same in every run.
    """

    def __init__(self, job: ElasticJob) -> None:
        self._job = job
        self._attempt = 0
        if job.machine_rank != 0:
            _await_listener(job)
        try:
            self._store = self._open()
        except (dist.DistNetworkError, OSError) as error:
            raise _no_meeting(job, error) from error
        self.port: int = self._store.port

    def _open(self) -> Any:
        job = self._job
        if job.machine_rank == 0:
            return rendezvous.listening_store(job.address, job.port, _MEET_S)
        return dist.TCPStore(  # type: ignore[attr-defined]  # not in stubs
            job.address,
            job.port,
            job.num_machines,
            timeout=timedelta(seconds=_MEET_S),
            wait_for_workers=False,
        )

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks meet at the launcher's own store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until every machine is here."""
        meet_s = _RESTART_MEET_S if self._attempt else _MEET_S
        store = PrefixStore(f"{_RUN_ID}/attempt-{self._attempt}", self._store)
        self._attempt += 1
        store.set(f"machine-{self._job.machine_rank}", "here")
        self._await_machines(store, time.monotonic() + meet_s)
        point = RendezvousStoreInfo(self._job.address, self._ranks_port(store))
        return RendezvousInfo(store, self._job.machine_rank, self._job.num_machines, point)

    def _ranks_port(self, store: Store) -> int:
        """Return where the ranks meet: at a restart a fresh store, without the dead ones' words.

        In the old one a rank finds the addresses of its dead predecessors and knocks there.
        """
        if self._attempt == 1:
            return self.port
        if self._job.machine_rank == 0:
            self._fresh = rendezvous.listening_store(self._job.address, 0, _MEET_S)
            store.set("port", str(self._fresh.port))
        return int(store.get("port"))

    def _await_machines(self, store: Store, deadline: float) -> None:
        """Ask again and again: one long wait inside the store would not hear a Ctrl-C."""
        for machine in range(self._job.num_machines):
            while not store.check([f"machine-{machine}"]):
                if time.monotonic() > deadline:
                    raise PeerLost(
                        f"Machine {machine} of {self._job.num_machines} did not come.",
                        why=f"its launcher has not reached {self._job.address}:{self.port}.",
                        fix="start `anytrain launch` on every machine with the same "
                        "--num_machines, its own --machine_rank and machine 0's address.",
                    )
                time.sleep(0.1)

    def get_backend(self) -> str:
        """Return the name torch puts in its records."""
        return "static"

    def get_run_id(self) -> str:
        """Return the name of the run."""
        return _RUN_ID

    def is_closed(self) -> bool:
        """Return False: nobody closes it but the end of the launcher."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """Return 0: the number of machines is fixed."""
        return 0

    def shutdown(self) -> bool:
        """Return True: the store goes with the launcher."""
        return True


def _await_listener(job: ElasticJob) -> None:
    """Knock at machine 0 until it listens: the store's own knocking would not hear a Ctrl-C."""
    deadline = time.monotonic() + _MEET_S
    while True:
        try:
            socket.create_connection((job.address, job.port), timeout=5.0).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise _no_meeting(job, error) from error
            time.sleep(0.2)


def _no_meeting(job: ElasticJob, error: Exception) -> AnytrainError:
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "EADDRINUSE" in text or "already in use" in text:
        return BadInput(
            f"Port {job.port} is in use.",
            why="the ranks meet there, and another program listens on it, perhaps another job.",
            fix="pass another --main_process_port; 0 picks a free one.",
        )
    return PeerLost(
        f"Machine {job.machine_rank} cannot reach machine 0 at {job.address}:{job.port}.",
        why=f"its launcher has ended, was not started, or cannot be reached: {text}",
        fix="start `anytrain launch --machine_rank 0` there, and check the address and the port.",
    )


def _is_consequence(end: Ending) -> bool:
    return end.note is not None and end.note.kind == "peer lost"
