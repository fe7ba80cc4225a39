"""Meet the other ranks: find the store, call the roll, and only then make torch's group.

torch waits in native code for half an hour without a word, and names nobody. Here the lowest rank
that has come calls the roll: it says for whom it waits, and ends the wait where one cannot come.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import reprlib
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import psutil
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from anytrain.core import environment
from anytrain.core.environment import RankPlace
from anytrain.core.errors import AnytrainError, BadInput, PeerLost
from anytrain.machine.processes import notes, stack_dumps
from anytrain.machine.processes.heartbeat import name_ranks
from anytrain.machine.processes.stalls import RESUME, say

_LONGEST_S = 1800.0
_POLL_S = 0.1
_LOOK_S = 1.0
_SOON_S = 5.0
_AGAIN_S = 60.0
_HEARD_S = 2.0
"""How long the others may take to hear why the wait is over."""
_ENDED_S = 10.0
"""How long a launcher of ours may take to end the others."""
ENDED, STOPPED = "has ended", "is stopped (SIGSTOP, or Ctrl-Z)"
_COMING = "has started, and is on its way"
_UNSEEN = "cannot be seen from here: it was not started, has ended, or is on another machine"


def meet(
    place: RankPlace,
    transport: str,
    device: torch.device,
    timeout_s: float | None,
    init_method: str | None,
    stall_s: float,
    beats: str | None,
) -> None:
    """Make the process group, or say why the ranks could not meet."""
    options: dict[str, Any] = {"rank": place.rank, "world_size": place.size}
    if timeout_s is not None:
        options["timeout"] = timedelta(seconds=timeout_s)
    if transport == "nccl":
        # Connect now: a network that cannot carry the job shows at the start, not at step 1.
        options["device_id"] = device
    point = init_method or ""
    try:
        if init_method is None or init_method == "env://":
            address, port = meeting_point(place.launcher)
            point = f"{address}:{port}"
            longest_s = timeout_s or _LONGEST_S
            call = _Rendezvous(place, (address, port), longest_s, stall_s, beats)
            options["store"] = PrefixStore("default_pg", call.store())
        else:
            options["init_method"] = init_method
        # torch_xla's group carries its tensors alone: gloo has the rest, objects among it.
        dist.init_process_group("gloo" if transport == "xla" else transport, **options)
    except (dist.DistError, OSError) as error:
        raise _no_meeting(error, place, point) from error


def listening_store(address: str, port: int, timeout_s: float) -> Any:
    """Return a store that listens here; port 0 lets the system choose.

    Nobody asks who writes to it, so where all ranks are on this machine no other reaches it.
    """
    options: dict[str, Any] = {
        "is_master": True,
        "timeout": timedelta(seconds=timeout_s),
        "wait_for_workers": False,
    }
    here = loopback(address)
    if here is None:
        return dist.TCPStore(address, port, **options)  # type: ignore[attr-defined]
    family = socket.AF_INET6 if ":" in here else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((here, port))
        listener.listen(1024)
        bound = listener.getsockname()[1]
        # The store closes the descriptor when it ends.
        options["master_listen_fd"] = listener.detach()
        return dist.TCPStore(here, bound, **options)  # type: ignore[attr-defined]


class _Rendezvous:
    """One rank's part in the meeting."""

    def __init__(
        self,
        place: RankPlace,
        point: tuple[str, int],
        timeout_s: float,
        stall_s: float,
        beats: str | None,
    ) -> None:
        self._place, self._point, self._beats = place, point, beats
        self._timeout_s, self._stall_s = timeout_s, stall_s
        # Whom a launcher has started comes within seconds, or is busy with its imports.
        self._soon_s = min(_SOON_S, stall_s / 6) if stall_s > 0 else _SOON_S
        self._next_word = 2 * self._soon_s
        self._missing = PeerProcesses(place, beats)
        self._began = self._looked = time.monotonic()
        self._since: dict[int, tuple[str, float]] = {}
        """By rank: what was seen of it the last time, and since when."""

    def store(self) -> Store:
        """Return the store of the job, once every rank has come to it."""
        holder = store_holder()
        if holder == self._place.rank:
            base = listening_store(*self._point, self._timeout_s)
        else:
            base = self._found(holder)
        # A launcher's store outlives its ranks: those it starts again must not find what the
        # earlier ones left there, addresses among it.
        attempt = environment.variable("TORCHELASTIC_RESTART_COUNT") or "0"
        own = PrefixStore(f"anytrain/attempt/{attempt}", base)
        try:
            self._call(own)
        except dist.DistError as error:
            raise self._lost(holder, error) from error
        return own

    def _found(self, holder: int | None) -> Any:
        """Knock until the holder listens: the store's own knocking says nothing, and hears none."""
        address, port = loopback(self._point[0]) or self._point[0], self._point[1]
        while True:
            try:
                socket.create_connection((address, port), timeout=5.0).close()
                break
            except OSError:
                if holder is not None:
                    self._wait_for({holder: ""}, None)
                elif self._waited_s() > self._timeout_s:
                    raise
            time.sleep(_POLL_S)
        return dist.TCPStore(  # type: ignore[attr-defined]  # not in stubs
            address,
            port,
            timeout=timedelta(seconds=self._timeout_s),
            wait_for_workers=False,
        )

    def _call(self, base: Store) -> None:
        roll = PrefixStore("anytrain/roll", base)
        roll.set(str(self._place.rank), f"{os.getpid()} {socket.gethostname()}")
        while not roll.check(["all"]):
            if roll.check(["over"]):
                self._follow(json.loads(roll.get("over")))
            self._look_around(roll)
            time.sleep(_POLL_S)

    def _look_around(self, roll: Store) -> None:
        """As the lowest rank that has come: end the roll call, or wait for the others."""
        ranks = range(self._place.size)
        if next(r for r in ranks if roll.check([str(r)])) != self._place.rank:
            return
        came = {r: roll.get(str(r)).decode() for r in ranks if roll.check([str(r)])}
        if len(came) == len(ranks):
            roll.set("all", "here")
        else:
            self._wait_for({r: came.get(r, "") for r in ranks}, roll)

    def _waited_s(self) -> float:
        return time.monotonic() - self._began

    def _wait_for(self, came: dict[int, str], roll: Store | None) -> None:
        """Say for whom this rank waits, and end the wait where one of them cannot come.

        `came` holds for each rank what it left when it came, "" where it has not.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        self._missing.look()
        states = {r: self._missing.state(r, left) for r, left in came.items()}
        states = {r: state for r, state in states.items() if not came[r] or state == ENDED}
        self._since = {
            rank: (state, self._since[rank][1] if self._was(rank, state) else now)
            for rank, state in states.items()
        }
        lost = [rank for rank in states if self._is_lost(rank, now)]
        if lost or self._waited_s() >= self._timeout_s:
            self._end(lost or list(states), roll)
        if self._waited_s() >= self._next_word and self._missing.is_lowest_here():
            self._next_word = self._waited_s() + _AGAIN_S
            say(f"anytrain: rank {self._place.rank} has {self._told(list(states))}")

    def _was(self, rank: int, state: str) -> bool:
        return rank in self._since and self._since[rank][0] == state

    def _is_lost(self, rank: int, now: float) -> bool:
        """Whether a rank cannot come: it has ended, and no launcher acts; or it is stopped."""
        state, since = self._since[rank]
        if state == ENDED:
            # Twice: whoever fails is named by its launcher, with its error.
            return self._waited_s() >= self._soon_s and now > since
        return state == STOPPED and 0 < self._stall_s <= now - since

    def _told(self, ranks: list[int]) -> str:
        seen = "; ".join(
            f"rank {rank}{self._missing.pid(rank)} {self._since[rank][0]}" for rank in ranks[:8]
        )
        at = f"{self._point[0]}:{self._point[1]}"
        return f"waited {self._waited_s():.0f} s at {at} for {name_ranks(ranks)}: {seen}."

    def _end(self, ranks: list[int], roll: Store | None) -> None:
        words = [
            f"{name_ranks(ranks).capitalize()} of {self._place.size} did not come to the meeting "
            "of the ranks, so the job was ended.",
            f"rank {self._place.rank} {self._told(ranks)}",
            "look at what was printed above: every rank must come as far as its Accelerator or "
            f"Trainer. Then {RESUME}.",
        ]
        if roll is not None:
            roll.set("over", json.dumps(words))
        if self._beats is None and roll is not None:
            time.sleep(_HEARD_S)  # the store may end with this process
        self._leave(words)

    def _follow(self, words: list[str]) -> NoReturn:
        """End as the rank does that has called the roll."""
        if self._beats is not None:
            time.sleep(_ENDED_S)
        self._leave(words)

    def _leave(self, words: list[str]) -> NoReturn:
        what, why, fix = words
        if self._beats is not None:
            notes.leave(self._beats, self._place.rank, "stall", json.dumps(words))
            os._exit(1)
        raise PeerLost(what, why=why, fix=fix)

    def _lost(self, holder: int | None, error: Exception) -> Exception:
        """Return what to say of a store that went away under the roll call."""
        if holder is None or holder == self._place.rank:
            return error
        return PeerLost(
            f"Rank {holder} of {self._place.size} ended before all ranks had met.",
            why=f"it keeps their meeting point, {self._point[0]}:{self._point[1]}, and rank "
            f"{self._place.rank} lost the connection to it.",
            fix=f"look for its error, then {RESUME}.",
        )


def _no_meeting(error: Exception, place: RankPlace, point: str) -> AnytrainError:
    text = str(error)
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return BadInput(
            f"The meeting point {point} is in use.",
            why=f"rank {place.rank} must listen there for the others, and another program does.",
            fix="choose another: `anytrain launch --main_process_port 0`, "
            "`notebook_launcher(..., use_port=0)`, or export MASTER_PORT.",
        )
    return PeerLost(
        f"Rank {place.rank} of {place.size} could not meet the others at {point}.",
        why=text.strip().splitlines()[0] if text.strip() else type(error).__name__,
        fix="check that every rank was started and that this address is reachable from here.",
    )


def meeting_point(launcher: str, environ: Mapping[str, str] | None = None) -> tuple[str, int]:
    """Return the address and port where rank 0 listens.

    MASTER_ADDR and MASTER_PORT say it; an srun step can do without them.

    >>> meeting_point("srun", {"SLURM_STEP_NODELIST": "gpu[07-09,12]", "SLURM_JOB_ID": "41"})
    ('gpu07', 20041)
    """
    env = os.environ if environ is None else environ
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if launcher != "srun" and not (address and port):
        raise BadInput(
            "Cannot tell where the ranks of this job meet.",
            why="RANK and WORLD_SIZE are set, but MASTER_ADDR or MASTER_PORT is not.",
            fix="start the job with `anytrain launch` or torchrun, or export both.",
        )
    return address or _first_host(env), _port_number(port, "MASTER_PORT") if port else _slurm_port(
        env
    )


def store_holder(environ: Mapping[str, str] | None = None) -> int | None:
    """Return the rank whose process holds the store; None where a launcher holds it."""
    env = os.environ if environ is None else environ
    return None if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0


def loopback(address: str) -> str | None:
    """Return the number of an address that only this machine reaches; None for any other.

    A host's own name is none: other machines may find this one by it.

    >>> loopback("localhost"), loopback("127.0.0.1"), loopback("10.0.0.7"), loopback("gpu07")
    ('127.0.0.1', '127.0.0.1', None, None)
    """
    if address.lower() == "localhost":
        return "127.0.0.1"
    try:
        return address if ipaddress.ip_address(address).is_loopback else None
    except ValueError:
        return None


def _first_host(env: Mapping[str, str]) -> str:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
    if found is None:
        raise BadInput(
            "Cannot tell where the ranks of this job meet.",
            why="MASTER_ADDR, SLURM_STEP_NODELIST and SLURM_JOB_NODELIST are all unset.",
            fix="export MASTER_ADDR with the name of the first node.",
        )
    prefix, number, suffix = found.groups()
    return prefix + (number or "") + (suffix or "")


def _slurm_port(env: Mapping[str, str]) -> int:
    """Return a port of this step's own, so that two jobs on one node do not meet."""
    job, step = env.get("SLURM_JOB_ID", ""), env.get("SLURM_STEP_ID", "")
    mixed = (int(job) if job.isdigit() else 0) + 97 * (int(step) if step.isdigit() else 0)
    return 20000 + mixed % 12000


def _port_number(text: str, name: str) -> int:
    if not text.isdecimal() or len(text) > 5 or int(text) > 65535:
        raise BadInput(
            f"Cannot read {name}={reprlib.repr(text)}.",
            why="it must be a port number, up to 65535.",
            fix=f"export {name} with a free port, such as 29500.",
        )
    return int(text)


@dataclass(slots=True)
class PeerProcesses:
    """What one rank sees of those that its launcher started beside it."""

    place: RankPlace
    beats: str | None
    _seen: dict[int, list[int]] = field(default_factory=dict)
    """By rank: the numbers of its processes, wrappers among them, once they were seen."""

    def look(self) -> None:
        """Take down who is there: one that was seen and is gone has ended."""
        if self.beats is not None:
            self._seen.update(
                {rank: [pid] for rank, pid in stack_dumps.known_processes(self.beats)}
            )
        # These last: a rank that was started again has an earlier process in the folder.
        self._seen.update(_of_this_job())

    def state(self, rank: int, left: str = "") -> str:
        """Return in words what is known of the rank's process.

        `left` is the number and the host that it has left, if it has come at all.
        """
        pid, _, host = left.partition(" ")
        if left:
            return _state_of_all([int(pid)]) if host == socket.gethostname() else _UNSEEN
        if rank in self._seen:
            return _state_of_all(self._seen[rank])
        return ENDED if self._is_gone(rank) else _UNSEEN

    def pid(self, rank: int) -> str:
        """Return the number of the rank's process in parentheses; "" where it was not seen."""
        return f" (pid {self._seen[rank][-1]})" if rank in self._seen else ""

    def is_lowest_here(self) -> bool:
        """Whether this is the lowest of the ranks that are seen beside it, which speaks for all."""
        alive = [rank for rank, pids in self._seen.items() if _state_of_all(pids) == _COMING]
        return self.place.rank <= min(alive, default=self.place.rank)

    def _is_gone(self, rank: int) -> bool:
        """Whether a rank that was never seen has ended: a launcher starts all of them at once."""
        size = max(1, self.place.local_size)
        is_launched = self.beats is not None or environment.variable("TORCHELASTIC_RUN_ID")
        if not is_launched or rank // size != self.place.rank // size:
            return False
        return len([each for each in _siblings() if _state_of_all([each.pid]) != ENDED]) < size


def _of_this_job() -> dict[int, list[int]]:
    """Return the processes of this machine that are to meet here too, by rank."""
    found: dict[int, list[int]] = {}
    port = environment.variable("MASTER_PORT")
    for each in psutil.process_iter() if port else ():
        with suppress(psutil.Error, OSError):
            env = each.environ()
            if env.get("MASTER_PORT") == port and env.get("RANK", "").isdecimal():
                found.setdefault(int(env["RANK"]), []).append(each.pid)
    return found


def _state_of_all(pids: Sequence[int]) -> str:
    """Return in words how the processes of a rank are."""
    states = set(map(_state, pids))
    return next((words for words in (STOPPED, _COMING) if words in states), ENDED)


def _state(pid: int) -> str:
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return ENDED
    except psutil.Error:
        return _COMING
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return ENDED
    return STOPPED if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else _COMING


def _siblings() -> list[psutil.Process]:
    try:
        return psutil.Process(os.getppid()).children()
    except psutil.Error:
        return []
