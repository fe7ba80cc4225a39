"""A folder of checkpoints: save at once or behind the loop, find the newest whole one, load.

INVARIANT: what `newest_whole` names is whole, whatever instruction the process died on.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from anytrain.core.errors import BadInput, CheckpointError, NoCheckpoint, PeerLost
from anytrain.core.text import amount
from anytrain.engine.checkpoint import catalog, encode, manifest, saving, tensors
from anytrain.engine.checkpoint.catalog import Entry, Newest, Retention
from anytrain.engine.checkpoint.files import Damaged, read_checked
from anytrain.engine.checkpoint.manifest import MANIFEST, Manifest, PartFiles
from anytrain.engine.checkpoint.model import Load, load_weights
from anytrain.engine.checkpoint.saving import Exchange, Job, Saved, SaveFailed, SavePlace
from anytrain.engine.checkpoint.schema import Anything, Description, Misfit, Named, check
from anytrain.engine.checkpoint.snapshot import MOST_SHARD_BYTES, Contents, SnapshotSource
from anytrain.engine.checkpoint.tensors import nonfinite
from anytrain.machine.parallel.world import Solo, World
from anytrain.machine.strategies.solo import load_whole

_Reader: TypeAlias = Callable[[Path, str], Mapping[str, torch.Tensor]]
_LOOK_EVERY_S = 0.02


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
        return here.broadcast_object(
            catalog.newest_whole(self.root) if here.rank == 0 else Newest(None)
        )

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

    @property
    def is_idle(self) -> bool:
        """Whether no save is under way, and every outcome was polled."""
        is_over = self._thread is None or not self._thread.is_alive()
        return is_over and not self._outcomes

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


class Loaded:
    """A whole checkpoint; each part is read, and checked once more, when it is asked for."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self.step = manifest.step
        self.world_size = manifest.world_size
        self.metrics: Mapping[str, float] = manifest.metrics
        self.part_names = tuple(manifest.parts)
        self.rank_part_names = tuple(manifest.rank_parts)
        self.num_models = len(manifest.models)

    @property
    def meta(self) -> dict[str, Any]:
        """What the snapshot's meta held."""
        try:
            meta: dict[str, Any] = encode.decode(self.manifest.meta, {}, MANIFEST)
        except Damaged as damage:
            raise self._damaged(damage) from damage
        return meta

    def part(self, name: str) -> Any:
        """Return a part's state, or raise CheckpointError naming the parts there are."""
        if name not in self.manifest.parts:
            raise self._absent(f"part {name!r}", f"it holds {_listed(self.part_names)}")
        return self._state(self.manifest.parts[name])

    def rank_part(self, name: str, rank: int) -> Any:
        """Return what one rank put into a part of its own."""
        if name not in self.manifest.rank_parts:
            names = _listed(self.rank_part_names)
            raise self._absent(f"part {name!r} of a rank", f"its ranks hold {names}")
        if not 0 <= rank < self.world_size:
            raise self._absent(
                f"part {name!r} of rank {rank}",
                f"it was written by {amount(self.world_size, 'rank')}",
            )
        return self._state(self.manifest.rank_parts[name][rank])

    def outline(self, name: str) -> Any:
        """Return a part's state with large tensors as outlines, which have no values."""
        if name not in self.manifest.parts:
            return self.part(name)
        return self._state(self.manifest.parts[name], tensors.outline)

    def model(self, index: int = 0, *, outline: bool = False) -> dict[str, Any]:
        """Return a model's state dict; names that shared a tensor share it again.

        Its outline has tensors without values: nothing but the files' headers is read.
        """
        if not 0 <= index < self.num_models:
            raise self._absent(f"model {index}", f"it holds {amount(self.num_models, 'model')}")
        files = self.manifest.models[index]
        read = tensors.outline if outline else None
        weights: dict[str, Any] = dict(self._tensors(files.tensors, read))
        if files.extra is not None:
            extra = self._state(files.extra, read)
            with blaming(self.path, str(files.extra)):
                check(extra, Named(Anything()))
            weights.update(extra)
        for name, kept in files.ties.items():
            with blaming(self.path, MANIFEST):
                check(weights, {kept: Anything()}, f"models[{index}].ties.{name}")
            weights[name] = weights[kept]
        return weights

    def check(self, name: str, wanted: Description | Callable[[Any], None]) -> None:
        """Raise CheckpointError, naming file and field, where a part is not as described."""
        self._check(self.manifest.parts.get(name), self.outline(name), wanted)

    def check_rank(self, name: str, rank: int, wanted: Description | Callable[[Any], None]) -> None:
        """Do the same for what one rank put into a part of its own."""
        state = self.rank_part(name, rank)
        self._check(self.manifest.rank_parts[name][rank], state, wanted)

    def _check(
        self, part: PartFiles | None, state: Any, wanted: Description | Callable[[Any], None]
    ) -> None:
        with blaming(self.path, "" if part is None else str(part)):
            if callable(wanted):
                wanted(state)
            else:
                check(state, wanted)

    def load_model(
        self, model: nn.Module, index: int = 0, *, strict: bool = True, load: Load = load_whole
    ) -> tuple[list[str], list[str]]:
        """Put a model's weights into a module; see `load_weights`.

        No save writes a parameter that is not finite or a buffer with a NaN: neither is loaded.
        """
        weights = self.model(index)
        self._check_finite(model, weights, self.manifest.models[index].tensors)
        source = self.source(index)
        return load_weights(model, weights, strict=strict, source=source, load=load)

    def _check_finite(
        self, model: nn.Module, weights: Mapping[str, Any], files: Sequence[str]
    ) -> None:
        own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        held = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
        if (broken := nonfinite(held, own, held)) is None:
            return
        name, value = broken
        file = next((f for f in files if name in tensors.outline(self.path, f)), MANIFEST)
        raise misfit_error(self.path, file, Misfit(f"{name} holds {value}"))

    def source(self, index: int) -> str:
        """Return where a model's weights are, to name it in an error."""
        files = self.manifest.models[index].tensors if index < self.num_models else ()
        return str(self.path / (files[0] if files else MANIFEST))

    def _state(self, part: PartFiles, read: _Reader | None = None) -> Any:
        held = self._tensors(part.tensors, read)
        try:
            raw = read_checked(self.path, part.document, self.manifest.files[part.document])
            document = encode.from_json(raw, part.document)
            if part.key is not None:
                document, held = _of_part(document, held, part.key, part.document)
            return encode.decode(document, held, str(part))
        except Damaged as damage:
            raise self._damaged(damage) from damage

    def _tensors(
        self, names: Sequence[str], read: _Reader | None = None
    ) -> dict[str, torch.Tensor]:
        held: dict[str, torch.Tensor] = {}
        try:
            for name in names:
                if read is not None:
                    held.update(read(self.path, name))
                    continue
                raw = read_checked(self.path, name, self.manifest.files[name])
                held.update(tensors.read(raw, name))
        except Damaged as damage:
            raise self._damaged(damage) from damage
        return held

    def _absent(self, what: str, why: str) -> CheckpointError:
        return CheckpointError(
            f"Checkpoint {self.path} has no {what}.",
            why=f"{why}, says {MANIFEST}.",
            fix="resume with the objects that were saved; starting one of them afresh would be "
            "another run.",
        )

    def _damaged(self, damage: Damaged) -> CheckpointError:
        return damaged_error(self.path, [(damage.file, damage.why)], len(self.manifest.files))


def _of_part(
    document: Any, held: dict[str, torch.Tensor], key: str, file: str
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return what files of several parts hold of one, its tensors under their own names."""
    if not isinstance(document, dict) or key not in document:
        raise Damaged(file, f"it holds nothing of {key!r}")
    start = f"{key}/"
    return document[key], {n.removeprefix(start): t for n, t in held.items() if n.startswith(start)}


def damaged_error(
    path: Path, problems: Sequence[tuple[str, str]], num_files: int
) -> CheckpointError:
    """Return the error for a checkpoint that must not be loaded."""
    good = max(num_files - len(problems), 0)
    count = f": {good} of its {num_files} files match the manifest" if num_files else ""
    return CheckpointError(
        f"Checkpoint {path} is not whole{count}.",
        why="; ".join(f"{file}: {why}" for file, why in problems) + ".",
        fix="resume from an earlier one: `anytrain checkpoint list` shows which there are.",
    )


@contextmanager
def blaming(path: Path, file: str) -> Iterator[None]:
    """Turn a Misfit of the block into the error that names the file."""
    try:
        yield
    except Misfit as misfit:
        raise misfit_error(path, file, misfit) from misfit


def misfit_error(path: Path, file: str, misfit: Misfit) -> CheckpointError:
    """Return the error for a file that is whole and holds what no run has saved."""
    return CheckpointError(
        f"Cannot load {path}: {file} does not hold what it must.",
        why=f"{file}: {misfit}. The file is as its checksum says, so it was written like this.",
        fix="resume from another one: `anytrain checkpoint list` shows which there are.",
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"
