"""A world of many over torch.distributed: gloo, nccl, tpu_dist, xla.

A group, once joined, stays until the process ends: torch cannot meet twice at one store.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from anytrain.core import environment
from anytrain.core.environment import RankPlace
from anytrain.core.errors import WrongOrder
from anytrain.machine.parallel import rendezvous
from anytrain.machine.parallel.roll_call import RollCall
from anytrain.machine.parallel.world import ReduceOp, Solo, World
from anytrain.machine.processes.error_hooks import ErrorHooks
from anytrain.machine.processes.heartbeat import Beat, Pulse
from anytrain.machine.processes.stalls import PeerBeat, RankWatch

T = TypeVar("T")

# What gloo and nccl both carry; other dtypes travel as one of these.
_CARRIED = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.complex128,
}
_GOODBYE_S = 10.0
_GLOO_THREAD = "pt_gloo_runloop"
_GLOO_TASKS = Path("/proc/self/task")
_POLL_S = 0.002
_GLOO_REST_S = 2.0
_GLOO_UNSEEN_S = 0.05
"""How long to wait where a thread's state cannot be read."""


def join(
    place: RankPlace,
    transport: str,
    device: torch.device,
    *,
    timeout_s: float | None = None,
    stall_s: float = 60.0,
    init_method: str | None = None,
    beats: str | None = None,
) -> World:
    """Join the job that the launcher described; a job of one process is a world of one.

    A process group that the script has made itself is used as it is. `stall_s` is the time
    after which a rank without a sign of life ends the job; 0 waits on. `beats` is the folder
    where a launcher of ours listens.
    """
    if place.size == 1 and not dist.is_initialized():
        return _solo(beats)
    let_gloo_rest_at_exit()
    if not dist.is_initialized():
        rendezvous.meet(place, transport, device, timeout_s, init_method, stall_s, beats)
        atexit.register(_leave_group)
    if dist.get_world_size() == 1:
        return _solo(beats)
    return _one_per_group(place, device, stall_s, beats)


def _one_per_group(
    place: RankPlace, device: torch.device, stall_s: float, beats: str | None
) -> TorchWorld:
    """Return the world that watches this group; a second run in a process shares the first's.

    Each world opens connections to the store, which now and then takes seconds.
    """
    group = dist.group.WORLD
    known = _worlds.get(id(group))
    if known is None or known.is_closed or known.stall_s != stall_s:
        if known is not None:
            known.close()
        known = TorchWorld(place, device, stall_s, beats)
        _worlds.clear()
        _worlds[id(group)] = known
    known.follow(device)
    return known


_worlds: dict[int, TorchWorld] = {}


class TorchWorld:
    """One rank of a process group."""

    is_watched = True

    def __init__(
        self, place: RankPlace, device: torch.device, stall_s: float, beats: str | None
    ) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        # A script that made its group by hand has told nobody which host a rank is on.
        known = place.size == self.size
        self.local_rank = place.local_rank if known else self.rank
        self.local_size = place.local_size if known else self.size
        self.carrier = make_xla_group() if device.type == "xla" else None
        self.transport: str | None = dist.get_backend(self.carrier)
        self.board = StoreBoard("board")
        self.stall_s = stall_s
        self.is_closed = False
        self._device = device
        self._pulse = Pulse(self.rank, beats)
        self._watch = self._start_watch(stall_s)
        self._roll_call = RollCall(self.board, self._pulse, self.size, self._hear)
        debug = environment.read().debug
        self._error_hooks = ErrorHooks(self._pulse, self.size, self._hush, debug, self._gone)
        # Threads that talk to the store must be gone before the interpreter is taken down.
        atexit.register(self.close)

    def reduce(self, value: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Return the sum, mean or maximum over the ranks; the mean of whole numbers is a float."""
        own = value.detach().clone(memory_format=torch.contiguous_format)
        carried = self._carry(own, _carrier(value.dtype, op))
        with self._pulse.waiting("reduce"):
            kind = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
            dist.all_reduce(carried, kind, group=self._group(carried))
        if op == "mean":
            carried = carried / self.size
            kept = value.is_floating_point() or value.is_complex()
            return carried.to(value.device, value.dtype if kept else carried.dtype)
        counted = value.dtype is torch.bool and op == "sum"
        return carried.to(value.device, carried.dtype if counted else value.dtype)

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        piece = value.detach().reshape(1) if value.ndim == 0 else value.detach()
        shape = (self.size * piece.shape[0], *piece.shape[1:])
        if piece.numel() == 0:
            return piece.new_empty(shape)
        piece = self._carry(piece.contiguous().reshape(-1))
        raw = piece if piece.dtype in _CARRIED else piece.view(torch.uint8)
        joined = raw.new_empty(self.size * raw.numel())
        with self._pulse.waiting("gather"):
            _all_gather(joined, raw, self._group(raw))
        return joined.view(piece.dtype).reshape(shape).to(value.device)

    def gather_object(self, value: T) -> list[T]:
        everyone: list[Any] = [None] * self.size
        with self._pulse.waiting("gather_object"):
            dist.all_gather_object(everyone, value)
        return everyone

    def broadcast(self, value: torch.Tensor, source: int = 0) -> torch.Tensor:
        flat = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
        flat = self._carry(flat)
        raw = flat if flat.dtype in _CARRIED else flat.view(torch.uint8)
        with self._pulse.waiting("broadcast"):
            dist.broadcast(raw, source, group=self._group(raw))
        return raw.view(flat.dtype).reshape(value.shape).to(value.device)

    def broadcast_object(self, value: T, source: int = 0) -> T:
        box = [value if self.rank == source else None]
        with self._pulse.waiting("broadcast_object"):
            dist.broadcast_object_list(box, source, device=self._carrier_device())
        return box[0]  # type: ignore[return-value]  # `source` has put a T in the box

    def barrier(self, why: str) -> None:
        with self._pulse.waiting(f"barrier {why!r}"):
            dist.barrier()

    def muster(self, what: str) -> str | None:
        """Return None once every rank has come to this call; else say where the others are.

        Where ranks do not watch each other there is nothing to tell it by, and it waits.
        """
        return self._roll_call.call(what)

    def mark(self, step: int, doing: str) -> None:
        self._pulse.mark(step, doing)

    def waiting(self, what: str) -> AbstractContextManager[None]:
        return self._pulse.waiting(what)

    def follow(self, device: torch.device) -> None:
        """Use another device from now on, for a second run in this process."""
        self._device = device

    def close(self) -> None:
        """Stop watching and being watched; the group itself ends with the process."""
        self.is_closed = True
        if self._watch is not None:
            self._watch.leave()
        self._error_hooks.restore()
        atexit.unregister(self.close)

    def __reduce__(self) -> tuple[Any, ...]:
        # Sockets and threads do not travel: wherever it is unpickled, it is that process's world.
        return _world_here, ()

    def _start_watch(self, stall_s: float) -> RankWatch | None:
        if stall_s <= 0:
            return None
        return RankWatch(
            self._pulse, StoreBoard("beats"), self.size, stall_s, rendezvous.store_holder()
        )

    def _hear(self, rank: int) -> PeerBeat | None:
        return None if self._watch is None else self._watch.heard(rank)

    def _hush(self) -> None:
        if self._watch is not None:
            self._watch.hush()

    def _gone(self) -> list[Beat]:
        return [] if self._watch is None else self._watch.gone()

    def _carry(self, value: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the tensor where the transport can take it, in a dtype that it knows."""
        return value.to(self._carrier_device() or value.device, dtype or value.dtype)

    def _group(self, value: torch.Tensor) -> dist.ProcessGroup | None:
        """Return what carries a tensor: torch_xla's own group its own, the first one the rest."""
        return self.carrier if value.device.type == "xla" else None

    def _carrier_device(self) -> torch.device | None:
        if self.transport == "gloo":
            return torch.device("cpu")
        return self._device if self.transport in ("nccl", "tpu_dist") else None


def _world_here() -> TorchWorld:
    """Return this process's world, for whatever was pickled with one."""
    for world in _worlds.values():
        return world
    raise WrongOrder(
        "Cannot unpickle an object of a run of several processes here.",
        why="this process belongs to no such run.",
        fix="make an Accelerator first, in a process that a launcher started.",
    )


def _solo(beats: str | None) -> Solo:
    """Return the world of one; a launcher that listens hears it too."""
    return Solo() if beats is None else Solo(_lone_pulse(beats).mark)


@cache
def _lone_pulse(beats: str) -> Pulse:
    """Return the one pulse of this process, whose last words its launcher waits for."""
    pulse = Pulse(0, beats)
    ErrorHooks(pulse, 1, lambda: None, environment.read().debug)
    return pulse


def _leave_group() -> None:
    """Take the group down in order, so that nobody's last words are a broken connection."""
    if not dist.is_initialized():
        return
    # Python keeps here the error that ends it; then the peers are not going to say goodbye.
    failed = getattr(sys, "last_value", None) is not None
    if not failed:
        _say_goodbye()
    if not failed or dist.get_backend() == "gloo":
        dist.destroy_process_group()


def _say_goodbye() -> None:
    """Let the rank that holds the store be the last to go."""
    holder = rendezvous.store_holder()
    if holder is None:
        return
    try:
        board = StoreBoard("goodbye")
        rank, size = dist.get_rank(), dist.get_world_size()
        board.post(str(rank), "bye")
        if rank != holder:
            return
        deadline = time.monotonic() + _GOODBYE_S
        while None in board.read_all([str(r) for r in range(size)]):
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
    except dist.DistError:
        return  # the store is gone, and with it everyone who could wait


def _all_gather(joined: torch.Tensor, piece: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    # torch 2.13 renamed it and warns at the old name; 2.9 has only that one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(joined, piece, group=group)


def _carrier(dtype: torch.dtype, op: ReduceOp) -> torch.dtype:
    """Return the dtype in which a reduction travels."""
    if dtype is torch.bool:
        return torch.uint8 if op == "max" else torch.int64
    if dtype.is_floating_point or dtype.is_complex:
        return dtype if dtype in _CARRIED else torch.float32
    return dtype if dtype in _CARRIED and op != "mean" else torch.int64


class StoreBoard:
    """A Board, and a Wire for beats, over the process group's store.

    Each channel has a connection of its own, because a store's connection answers one call at a
    time: a beat must not wait for a main thread that waits for its peers. It is opened by the
    first message, because opening one asks the system for host names, which can take seconds.
    """

    def __init__(self, channel: str) -> None:
        self._prefix = f"anytrain/{channel}"
        self._group_store = _get_default_store()
        self._connection: PrefixStore | None = None
        self._opening = threading.Lock()
        self._seen: set[str] = set()

    def post(self, key: str, value: str) -> None:
        """Publish a value for every rank to read; it can be read when this returns."""
        store = self._store()
        store.set(key, value)
        # Setting waits for no answer: a peer could come and ask before the store has heard.
        store.check([key])

    def read(self, key: str) -> str | None:
        """Return what was posted under the key, or None; never wait for it."""
        return self._store().get(key).decode() if self._is_there(key) else None

    def read_all(self, keys: Sequence[str]) -> list[str | None]:
        """Return what was posted under each key, in one round trip once all are known."""
        store = self._store()
        if not store.has_extended_api():  # type: ignore[attr-defined]  # not in stubs
            return [self.read(key) for key in keys]
        there = [key for key in keys if self._is_there(key)]
        values = store.multi_get(there) if there else []
        found = {key: value.decode() for key, value in zip(there, values, strict=True)}
        return [found.get(key) for key in keys]

    def _is_there(self, key: str) -> bool:
        """Whether the key was ever posted; `get` on one that was not would wait."""
        if key not in self._seen and self._store().check([key]):
            self._seen.add(key)
        return key in self._seen

    def _store(self) -> PrefixStore:
        with self._opening:
            if self._connection is None:
                own = self._group_store.clone()  # type: ignore[attr-defined]  # not in stubs
                self._connection = PrefixStore(self._prefix, own)
        return self._connection


@cache
def let_gloo_rest_at_exit() -> None:
    """Have this process wait at its end, after whatever is registered later than this.

    A gloo thread drops a collective's tensors some time after the collective has been waited for.
    If it holds the last reference it needs Python's lock for that, and a thread that asks for the
    lock while Python goes down is ended where it stands: the process then dies by SIGABRT
    ("terminate called without an active exception") with all its work done. Leaving the group does
    not help: a model in DDP keeps it, and with it the threads, to the very end.
    """
    atexit.register(_await_gloo)


def _await_gloo() -> None:
    """Return once gloo's threads sleep; while this sleeps, they can have Python's lock."""
    if not _GLOO_TASKS.is_dir():
        time.sleep(_GLOO_UNSEEN_S)
        return
    deadline = time.monotonic() + _GLOO_REST_S
    looks_asleep = 0
    # Twice: at the first look a thread may be asleep because it waits for the lock.
    while looks_asleep < 2 and time.monotonic() < deadline and (states := list(_thread_states())):
        looks_asleep = looks_asleep + 1 if set(states) == {"S"} else 0
        time.sleep(_POLL_S)


def _thread_states() -> Iterator[str]:
    for task in _GLOO_TASKS.iterdir():
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # it ended meanwhile
        if name == _GLOO_THREAD:
            yield rest.split()[0]


def make_xla_group() -> dist.ProcessGroup:
    """Return torch_xla's group of all ranks, one process a TPU device; tensors stay in graphs.

    It has never run on more than one device here: on CPUs its collectives abort.
    """
    from torch_xla.distributed import xla_backend  # noqa: F401  # registers the name

    group: dist.ProcessGroup = dist.new_group(backend="xla")
    return group
