"""A folder of checkpoints: save, find the newest whole one, load.

INVARIANT: what `newest_whole` names is whole, whatever instruction the process died on.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from anytrain.core.errors import BadInput, CheckpointError, NoCheckpoint
from anytrain.engine.checkpoint import catalog, manifest, saving
from anytrain.engine.checkpoint.catalog import Entry, Newest
from anytrain.engine.checkpoint.files import Damaged
from anytrain.engine.checkpoint.loaded import Loaded, damaged_error
from anytrain.engine.checkpoint.outcome import Saved, SaveFailed
from anytrain.engine.checkpoint.retention import Retention
from anytrain.engine.checkpoint.saving import Exchange, SavePlace
from anytrain.engine.checkpoint.snapshot import MOST_SHARD_BYTES, SnapshotSource
from anytrain.machine.parallel.world import Solo, World

T = TypeVar("T")


class Store:
    """The checkpoints of one folder."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        retention: Retention | None = None,
        most_shard_bytes: int = MOST_SHARD_BYTES,
    ) -> None:
        self.root = Path(root).expanduser().absolute()
        self.retention = retention or Retention()
        self.most_shard_bytes = most_shard_bytes

    def save(
        self, name: str, snapshot: SnapshotSource, *, world: World | None = None
    ) -> Saved | SaveFailed:
        """Commit a checkpoint, or say why not; every rank calls it and gets the same answer.

        A checkpoint of that name is replaced in one step, so that there is always a whole one.
        """
        exchange = collective(world or Solo())
        job = saving.prepare(self.place(name, world or Solo()), snapshot, exchange)
        return job if isinstance(job, SaveFailed) else saving.write(job, exchange)

    def refuse_unshared(self, world: World) -> None:
        """Raise CheckpointError on every rank unless all of them see this folder."""
        failed = saving.unshared(self.place("shared", world), collective(world))
        if failed is not None:
            raise CheckpointError(
                f"Cannot begin a run in {self.root}.", why=failed.why, fix=failed.fix
            )

    def newest_whole(self, *, world: World | None = None) -> Newest:
        """Return the newest checkpoint whose every byte checks, and what was passed over.

        Rank 0 looks, and every rank gets its answer.
        """
        here = world or Solo()
        return here.broadcast_object(catalog.newest_whole(self.root) if here.rank == 0 else _none())

    def load(self, which: str | Newest, *, world: World | None = None) -> Loaded:
        """Return a whole checkpoint by its name or as found; raise CheckpointError otherwise."""
        if isinstance(which, str):
            return load(self.root / _checked(which), world=world)
        if which.path is None or which.manifest is None:
            damage = [f"{p.path.name} ({p.file}: {p.why})" for p in which.passed_over]
            raise CheckpointError(
                f"There is no whole checkpoint in {self.root}.",
                why=f"passed over: {'; '.join(damage)}." if damage else "it holds none at all.",
                fix="start a new run, or pass the folder that holds the checkpoints.",
            )
        return Loaded(which.path, which.manifest)

    def entries(self) -> list[Entry]:
        """Return the checkpoints there are, newest first, with their manifests."""
        return catalog.entries(self.root)

    def place(self, name: str, world: World) -> SavePlace:
        """Return where a save of that name goes, for this rank."""
        return SavePlace(
            root=self.root,
            name=_checked(name),
            rank=world.rank,
            world_size=world.size,
            most_shard_bytes=self.most_shard_bytes,
            retention=self.retention,
        )


def save(
    path: str | os.PathLike[str], snapshot: SnapshotSource, *, world: World | None = None
) -> Saved | SaveFailed:
    """Commit a checkpoint to a folder anywhere; nothing beside it is removed."""
    target = Path(path).expanduser().absolute()
    return Store(target.parent).save(target.name, snapshot, world=world)


def load(path: str | os.PathLike[str], *, world: World | None = None) -> Loaded:
    """Return the checkpoint in a folder once every byte checks, or raise CheckpointError.

    Rank 0 checks, and every rank gets its answer. A part is checked again when it is read, on
    the very bytes that are used.
    """
    here = world or Solo()
    found = catalog.locate(Path(path).expanduser().absolute())
    problems = catalog.verify(found) if here.rank == 0 else []
    problems = here.broadcast_object(problems)
    if not found.is_dir():
        raise NoCheckpoint(
            f"Can't find a valid checkpoint at {found}.",
            why="there is no such folder.",
            fix="pass the folder of a checkpoint; `anytrain checkpoint list` shows what there is.",
        )
    try:
        contents = manifest.read(found)
    except Damaged as damage:
        first = (damage.file, damage.why)
        raise damaged_error(found, [first], 0) from damage
    if problems:
        told = [(problem.file, problem.why) for problem in problems]
        raise damaged_error(found, told, len(contents.files))
    return Loaded(found, contents)


def collective(world: World) -> Exchange:
    """Return an exchange among the ranks over the world's own collectives."""
    return lambda step, value: world.gather_object(value)


def _none() -> Newest:
    return Newest(None)


def _checked(name: str) -> str:
    try:
        plain = "/" not in manifest.check_name(name) and not name.startswith(".")
    except Damaged:
        plain = False
    if not plain:
        raise BadInput(
            f"Cannot name a checkpoint {name!r}.",
            why="it is one folder's name inside the store, and hidden names are the store's own.",
            fix="choose a plain name such as 'step-000100', or use save(path, ...).",
        )
    return name
