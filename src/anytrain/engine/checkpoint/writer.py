"""Save behind the loop: the loop waits only while tensors are copied to the host.

At most one save is under way. The ranks of a save in the background agree over the board and
not over the process group, whose operations the loop goes on using.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from anytrain.core.errors import PeerLost
from anytrain.engine.checkpoint import saving
from anytrain.engine.checkpoint.outcome import Saved, SaveFailed
from anytrain.engine.checkpoint.saving import Exchange, Job
from anytrain.engine.checkpoint.snapshot import Contents, SnapshotSource
from anytrain.engine.checkpoint.store import Store, collective
from anytrain.machine.parallel.world import Solo, World

_LOOK_EVERY_S = 0.02


class Writer:
    """Saves one checkpoint at a time in a thread of its own.

    `synchronize` waits for the device whose tensors are saved; leave it out on the CPU.
    The host copy of one save is kept as the memory of the next.
    `patience_s` is how long a rank waits for its peers' word before it gives the save up.
    """

    def __init__(
        self,
        store: Store,
        *,
        world: World | None = None,
        synchronize: Callable[[], None] | None = None,
        patience_s: float = 600.0,
    ) -> None:
        self._store, self._world = store, world or Solo()
        self._synchronize = synchronize or _nothing
        self._patience_s = patience_s
        self._staged: dict[tuple[str, str], torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._outcomes: list[Saved | SaveFailed | BaseException] = []

    @property
    def root(self) -> Path:
        """The folder that the checkpoints go to."""
        return self._store.root

    def begin(self, name: str, snapshot: SnapshotSource) -> None:
        """Copy the snapshot and return; its outcome comes from `poll` or `finish`.

        Every rank calls it. A save that is still under way is waited for first.
        """
        self._wait()
        place = self._store.place(name, self._world)
        job = saving.prepare(place, snapshot, collective(self._world))
        if isinstance(job, SaveFailed):
            self._outcomes.append(job)
            return
        try:
            self._stage(job.contents)
            # Not a daemon: an interpreter that exits waits for the commit.
            self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint")
            self._thread.start()
        except BaseException:
            saving.discard(place, job.folder)
            raise

    def poll(self) -> Saved | SaveFailed | None:
        """Return how the oldest save that has ended went, or None; never wait."""
        if not self._outcomes:
            return None
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def finish(self) -> list[Saved | SaveFailed]:
        """Wait for the save under way, and return every outcome not yet polled."""
        self._wait()
        found = []
        while (outcome := self.poll()) is not None:
            found.append(outcome)
        return found

    def _run(self, job: Job) -> None:
        exchange = over_board(self._world, job.folder.name, self._patience_s)
        try:
            self._outcomes.append(saving.write(job, exchange))
        except BaseException as error:  # noqa: BLE001  # raised again by poll, in the loop's thread
            self._outcomes.append(error)

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _stage(self, contents: Contents) -> None:
        """Put host copies in the place of the tensors, in the memory of the save before."""
        staged: dict[tuple[str, str], torch.Tensor] = {}
        for file in contents.tensors:
            for name, tensor in file.tensors.items():
                key = (file.name, name)
                staged[key] = _copied(tensor, self._staged.get(key))
        self._synchronize()
        self._staged = staged
        for file in contents.tensors:
            file.tensors = {name: staged[file.name, name] for name in file.tensors}


def over_board(world: World, save: str, patience_s: float) -> Exchange:
    """Return an exchange among the ranks that posts and reads words on the board."""

    def exchange(step: str, value: Any) -> list[Any]:
        world.board.post(f"checkpoint/{save}/{step}/{world.rank}", json.dumps(value))
        deadline = time.monotonic() + patience_s
        found: list[Any] = []
        while len(found) < world.size:
            text = world.board.read(f"checkpoint/{save}/{step}/{len(found)}")
            if text is not None:
                found.append(json.loads(text))
            elif time.monotonic() > deadline:
                raise PeerLost(
                    f"Rank {len(found)} did not report on the checkpoint within {patience_s:g} s.",
                    why=f"it is to say how it went with {step!r}; it may be dead or stalled.",
                    fix="see that rank's own output; the earlier checkpoints are untouched.",
                )
            else:
                time.sleep(_LOOK_EVERY_S)
        return found

    return exchange


def _copied(tensor: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """Return a copy on the host; memory that was used before needs no new pages."""
    if before is not None and before.shape == tensor.shape and before.dtype == tensor.dtype:
        return before.copy_(tensor, non_blocking=True)
    if tensor.device.type == "cpu":
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return tensor.to("cpu", non_blocking=True)


def _nothing() -> None:
    """Wait for nothing: host tensors are ready."""
