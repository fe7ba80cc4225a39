"""One save: a hidden folder, its files, the manifest, one rename.

The order is the trick. The other ranks bring their files to the disk first; then rank 0 its own
and the manifest, together; then one rename to the final name. Whoever dies on the way leaves a
hidden folder and the earlier checkpoints as they were.

Every rank takes every step, and the ranks exchange how each step went before the next, so that
all of them give the same answer.
"""

from __future__ import annotations

import errno
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from anytrain._version import __version__
from anytrain.core.errors import CheckpointError
from anytrain.engine.checkpoint import catalog, files, locks, manifest
from anytrain.engine.checkpoint.catalog import Retention, doomed
from anytrain.engine.checkpoint.files import Damaged, Fingerprint
from anytrain.engine.checkpoint.manifest import MANIFEST, Manifest
from anytrain.engine.checkpoint.snapshot import Contents, Snapshot, SnapshotSource, lay_out

Exchange: TypeAlias = Callable[[str, Any], list[Any]]
"""Give a step's name and a JSON-able value, get every rank's value in rank order."""

FailureKind = Literal["space", "disk", "nonfinite", "occupied", "not-shared", "peer"]
_Report: TypeAlias = dict[str, Any]
_LEAST_SPARE_BYTES, _MOST_SPARE_BYTES = 1 << 14, 1 << 20
"""What is kept free beside a save's files, for the manifest and small writes."""
_SEEN_WITHIN_S = 3.0


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint is committed; whatever happens now, it is whole."""

    path: Path
    step: int
    num_bytes: int
    seconds: float
    removed: tuple[Path, ...] = ()
    """What retention removed after the commit."""
    notes: tuple[str, ...] = ()
    """What went wrong after the commit, such as an old checkpoint that can't be removed."""


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """No checkpoint was committed; the earlier ones are as they were."""

    path: Path
    kind: FailureKind
    what: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}\n  why: {self.why}\n  fix: {self.fix}"

    def error(self) -> CheckpointError:
        """Return the failure as an error, for a caller that must stop on it."""
        return CheckpointError(self.what, why=self.why, fix=self.fix)


@dataclass(frozen=True, slots=True)
class SavePlace:
    """Where a save goes, and which rank of how many takes part in it."""

    root: Path
    name: str
    rank: int
    world_size: int
    most_shard_bytes: int
    retention: Retention

    @property
    def target(self) -> Path:
        """The checkpoint's final path."""
        return self.root / self.name


@dataclass
class Job:
    """A save that is laid out and not yet written."""

    place: SavePlace
    folder: Path
    contents: Contents
    began: float


def prepare(place: SavePlace, source: SnapshotSource, exchange: Exchange) -> Job | SaveFailed:
    """Open the hidden folder, take the snapshot, and see that there is room for it."""
    began = time.monotonic()
    folder = _seen_by_all(place, exchange)
    if not isinstance(folder, Path):
        return _failure(place, folder)
    taken: list[Contents] = []

    def take() -> _Report:
        try:
            snapshot = source if isinstance(source, Snapshot) else source(folder)
        except OSError as error:  # of a file that the source itself writes into the folder
            return {"failure": _disk_failure(place, error)}
        taken.append(lay_out(snapshot, place.rank, place.most_shard_bytes))
        return {"bytes": taken[0].num_bytes, "rank_parts": sorted(taken[0].rank_parts)}

    try:
        reports = _agreed(place, "taken", take, exchange)
        failure = _first_failure(reports) or _room(place, reports, exchange)
    except BaseException:
        discard(place, folder)
        raise
    if failure:
        discard(place, folder)
        return _failure(place, failure)
    return Job(place, folder, taken[0], began)


def write(job: Job, exchange: Exchange) -> Saved | SaveFailed:
    """Write this rank's files, and commit once every rank has written its own."""
    place, contents = job.place, job.contents
    try:
        reports = _agreed(place, "written", lambda: _write_files(job), exchange)
        failure = _first_failure(reports)
        if failure:
            discard(place, job.folder)
            return _failure(place, failure)
        result = _on_rank_0(place, "committed", lambda: _commit(job, reports), exchange)
    except BaseException:
        discard(place, job.folder)
        raise
    finally:
        locks.let_go(job.folder)
    if "failure" in result:
        return _failure(place, result["failure"])
    return Saved(
        path=place.target,
        step=contents.step,
        num_bytes=result["num_bytes"],
        seconds=time.monotonic() - job.began,
        removed=tuple(place.root / name for name in result["removed"]),
        notes=tuple(result["notes"]),
    )


def unshared(place: SavePlace, exchange: Exchange) -> SaveFailed | None:
    """Return why no save can succeed, where a rank does not see what another writes."""
    folder = _seen_by_all(place, exchange)
    if isinstance(folder, Path):
        discard(place, folder)
        return None
    return _failure(place, folder) if folder["kind"] == "not-shared" else None


def discard(place: SavePlace, folder: Path) -> None:
    """Remove the hidden folder; what can't be removed now is cleared by a later save."""
    locks.let_go(folder)
    if place.rank == 0 and folder.exists():
        with suppress(OSError):
            files.remove_tree(folder)


# Steps that the ranks take together.


def _agreed(
    place: SavePlace, step: str, action: Callable[[], _Report], exchange: Exchange
) -> list[_Report]:
    """Do a step here, and return how it went on every rank; an error on one is one on all."""
    try:
        report = action()
    except Exception as error:
        exchange(step, {"error": f"{type(error).__name__}: {error}"})
        raise
    reports = exchange(step, report)
    for rank, theirs in enumerate(reports):
        if "error" in theirs:
            raise CheckpointError(
                f"Cannot save the checkpoint {place.target}.",
                why=f"rank {rank} stopped with {theirs['error']}",
                fix=f"see rank {rank}'s own error; nothing was saved.",
            )
    return reports


def _on_rank_0(
    place: SavePlace, step: str, action: Callable[[], _Report], exchange: Exchange
) -> _Report:
    return _agreed(place, step, action if place.rank == 0 else dict, exchange)[0]


def _first_failure(reports: Sequence[_Report]) -> _Report | None:
    return next((report["failure"] for report in reports if "failure" in report), None)


# Before writing.


def _opened(place: SavePlace) -> _Report:
    """Make the hidden folder; say its name, or why there is none."""
    try:
        files.make_folders(place.root)
        locks.clear_abandoned(place.root)
        taken = _occupied(place)
        if taken:
            return {"failure": taken}
        folder = place.root / locks.hidden_name(place.name, "saving")
        files.make_folder(folder)
        locks.hold(folder)
    except OSError as error:
        return {"failure": _disk_failure(place, error)}
    return {"folder": folder.name, "root": str(place.root)}


def _seen_by_all(place: SavePlace, exchange: Exchange) -> Path | _Report:
    """Make the hidden folder, and return it once every rank sees it, else what failed.

    Nothing is taken before: the ranks may have to do that together.
    """
    opened = _on_rank_0(place, "folder", lambda: _opened(place), exchange)
    if "failure" in opened:
        failure: _Report = opened["failure"]
        return failure
    folder = place.root / opened["folder"]

    def look() -> _Report:
        return {} if _sees(folder) else {"failure": _not_shared(place, opened["root"])}

    try:
        unseen = _first_failure(_agreed(place, "seen", look, exchange))
    except BaseException:
        discard(place, folder)
        raise
    if unseen is not None:
        discard(place, folder)
    return folder if unseen is None else unseen


def _sees(folder: Path) -> bool:
    """Whether this rank sees rank 0's folder; a network filesystem may show it a little late."""
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while not folder.is_dir():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _occupied(place: SavePlace) -> _Report | None:
    """Refuse to replace what is no checkpoint of ours."""
    target = place.target
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        held = "a link" if target.is_symlink() else "a file"
    elif target.is_dir() and any(target.iterdir()) and not (target / MANIFEST).exists():
        held = "a folder with other files"
    else:
        return None
    return _told(
        "occupied",
        f"Cannot save the checkpoint {target}.",
        f"there is {held} of that name, and saving there would destroy it.",
        "choose another name, or move what is there.",
    )


def _room(place: SavePlace, reports: Sequence[_Report], exchange: Exchange) -> _Report | None:
    """Agree that the ranks hold the same parts and that the disk has room for them all."""
    if any(report["rank_parts"] != reports[0]["rank_parts"] for report in reports):
        raise CheckpointError(
            f"Cannot save the checkpoint {place.target}.",
            why="the ranks name different parts of their own: "
            + "; ".join(f"rank {r}: {t['rank_parts']}" for r, t in enumerate(reports)),
            fix="register the same objects on every rank.",
        )
    needed = sum(report["bytes"] for report in reports)
    return _on_rank_0(place, "room", lambda: _enough(place, needed), exchange).get("failure")


def _enough(place: SavePlace, needed: int) -> _Report:
    try:
        free = files.free_bytes(place.root)
    except OSError as error:
        return {"failure": _disk_failure(place, error)}
    spare = min(max(needed // 16, _LEAST_SPARE_BYTES), _MOST_SPARE_BYTES)
    if free >= needed + spare:
        return {}
    why = f"it is {needed:,} bytes, and {place.root} has {free:,} left."
    if free >= needed:
        why = f"{why[:-1]}; {spare:,} of them are kept for the list of its files and the like."
    return {"failure": _space_failure(place, why)}


# Writing.


def _write_files(job: Job) -> _Report:
    """Write this rank's files; report their fingerprints, or what kept one from being written."""
    place, contents = job.place, job.contents
    for guard in contents.guards:
        broken = guard.broken()
        if broken:
            return {"failure": _nonfinite_failure(place, guard.file.name, *broken)}
    written = {}
    try:
        for file in contents.files:
            path = job.folder / file.name
            written[file.name] = asdict(files.write_file(path, file.chunks(), wait=False))
        if place.rank:  # the first rank waits for its own with the manifest
            files.sync_files(job.folder, written)
    except OSError as error:
        return {"failure": _disk_failure(place, error)}
    kinds: dict[str, Mapping[str, Any]] = {
        "models": contents.models,
        "parts": contents.parts,
        "rank_parts": contents.rank_parts,
    }
    told = {kind: {name: asdict(f) for name, f in held.items()} for kind, held in kinds.items()}
    return {"files": written, **told}


def _commit(job: Job, reports: Sequence[_Report]) -> _Report:
    """Seal the folder with its manifest and give it its name."""
    place = job.place
    try:
        sealed = _seal(job, reports)
        replaced = _put_in_place(job)
    except (OSError, Damaged) as error:
        discard(place, job.folder)
        return {"failure": _disk_failure(place, error)}
    try:
        files.sync_folder(place.root)
    except OSError as error:  # the earlier one stays too: nobody knows which name is on the disk
        return {"failure": _disk_failure(place, error)}
    removed, notes = _tidy(place, replaced)
    return {"num_bytes": sealed.num_bytes, "removed": removed, "notes": notes}


def _seal(job: Job, reports: Sequence[_Report]) -> Manifest:
    place, contents, folder = job.place, job.contents, job.folder
    listed = {n: Fingerprint(**f) for report in reports for n, f in report["files"].items()}
    own = [MANIFEST, *reports[0]["files"]]
    for name in files.names_in(folder):  # what hooks have written
        if name not in listed:
            listed[manifest.check_name(name)] = files.fingerprint(folder, name)
            own.append(name)
    models = {int(i): m for report in reports for i, m in report["models"].items()}
    parts = {name: part for report in reports for name, part in report["parts"].items()}
    sealed = Manifest(
        step=contents.step,
        created_ns=_now_ns(place.root),
        world_size=place.world_size,
        files=listed,
        models=tuple(manifest.model_files(models[index]) for index in sorted(models)),
        parts={name: manifest.part_files(part) for name, part in parts.items()},
        rank_parts={
            name: tuple(manifest.part_files(report["rank_parts"][name]) for report in reports)
            for name in contents.rank_parts
        },
        metrics=contents.metrics,
        meta=contents.meta,
        versions={
            "anytrain": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
        },
    )
    _keep_unlisted(place.target, folder, frozenset(listed))
    files.write_file(folder / MANIFEST, [manifest.to_bytes(sealed)], wait=False)
    files.sync_files(folder, own)
    return sealed


def _keep_unlisted(target: Path, folder: Path, listed: frozenset[str]) -> None:
    """Take what others put beside an earlier checkpoint of this name into its successor."""
    if not target.is_dir():
        return
    try:
        known = frozenset(manifest.read(target).files)
    except Damaged:
        known = frozenset()
    names = catalog.unlisted(target, known | listed)
    files.link_tree(target, folder, names)


def _put_in_place(job: Job) -> Path | None:
    """Rename the folder to its final name; return where an earlier one of that name is now."""
    target, folder = job.place.target, job.folder
    if not target.is_dir() or not any(target.iterdir()):
        files.rename(folder, target)
        return None
    if files.swap_names(folder, target):
        return folder
    aside = target.with_name(locks.hidden_name(target.name, "replaced"))
    files.rename(target, aside)
    try:
        files.rename(folder, target)
    except OSError:
        files.rename(aside, target)
        raise
    return aside


def _tidy(place: SavePlace, replaced: Path | None) -> tuple[list[str], list[str]]:
    """Remove what the new checkpoint makes superfluous; failing to is only worth a note."""
    removed: list[str] = []
    notes: list[str] = []
    if replaced is not None:
        try:
            files.remove_tree(replaced)
        except OSError as error:
            notes.append(f"cannot remove the earlier {place.name}: {error}")
    if place.retention.keep_last is None:
        return removed, notes
    try:
        going = doomed(catalog.entries(place.root), place.retention)
    except OSError as error:
        return removed, [*notes, f"cannot look for old checkpoints: {error}"]
    for entry in going:
        if entry.path == place.target:
            continue
        try:
            locks.remove(place.root, entry.name)
            removed.append(entry.path.name)
        except OSError as error:
            notes.append(f"cannot remove {entry.path}: {error}")
    return removed, notes


def _now_ns(root: Path) -> int:
    """Return the time, later than every checkpoint's there, whatever the clock was set to."""
    return max(time.time_ns(), catalog.last_commit_ns(root) + 1)


# What failed, in words.


def _failure(place: SavePlace, told: Mapping[str, Any]) -> SaveFailed:
    return SaveFailed(path=place.target, **told)


def _told(kind: FailureKind, what: str, why: str, fix: str) -> _Report:
    return {"kind": kind, "what": what, "why": why, "fix": fix}


def _disk_failure(place: SavePlace, error: OSError | Damaged) -> _Report:
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return _told(
            "space",
            f"The checkpoint {place.target} was not saved; the earlier ones are untouched.",
            "a file of it is larger than this process, or the disk, lets a file become "
            f"({error.strerror}).",
            "raise the limit (`ulimit -f unlimited`), or save where such files can be; the next "
            "save tries again.",
        )
    if isinstance(error, OSError) and error.errno in files.NO_ROOM:
        return _space_failure(place, f"the disk said: {error.strerror}.")
    why = f"{error.file}: {error.why}" if isinstance(error, Damaged) else str(error)
    return _told(
        "disk",
        f"The checkpoint {place.target} was not saved; the earlier ones are untouched.",
        f"rank {place.rank}: {why}.",
        "see that the disk is there and writable; the next save tries again.",
    )


def _space_failure(place: SavePlace, why: str) -> _Report:
    return _told(
        "space",
        f"No room to save the checkpoint {place.target}; the earlier ones are untouched.",
        why,
        "free some space; the next save tries again. `anytrain checkpoint prune` removes old "
        "checkpoints.",
    )


def _nonfinite_failure(place: SavePlace, file: str, tensor: str, value: str) -> _Report:
    return _told(
        "nonfinite",
        f"The checkpoint {place.target} was not saved: it would be poisoned.",
        f"{tensor} (in {file}) holds {value}.",
        "resume from the newest checkpoint, which is finite; lower the learning rate or clip the "
        "gradients.",
    )


def _not_shared(place: SavePlace, root: str) -> _Report:
    is_same = root == str(place.root)
    where = "another folder of that name" if is_same else f"its own folder {place.root}"
    return _told(
        "not-shared",
        f"Cannot save the checkpoint {place.target}.",
        f"rank {place.rank} does not see what rank 0 writes to {root}: it has {where}.",
        "save to a filesystem that all machines share, and to the same folder on every rank.",
    )
