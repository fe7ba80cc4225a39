"""Which checkpoints a folder holds, which are whole, which is the newest, and which to keep.

INVARIANT: what `newest_whole` names is whole, whatever instruction the process died on.
Reads only, and needs no torch.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from anytrain.core.errors import BadInput
from anytrain.engine.checkpoint import files, manifest
from anytrain.engine.checkpoint.files import Damaged
from anytrain.engine.checkpoint.locks import claims_in
from anytrain.engine.checkpoint.manifest import MANIFEST, Manifest

_HASHING_THREADS = 4
_NUMBERED = re.compile(r"(checkpoint|step|epoch)[-_]?\d")
"""How the folders of checkpoints are called."""
_STATE = re.compile(r"(state|optimizer)(-rank\d+)?[.-]")
"""Files of a checkpoint that no model alone has."""
_commits: dict[Path, tuple[tuple[int, ...], int]] = {}
"""Manifests that were read: the state of the file, and when its checkpoint was committed."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A file of a checkpoint that is not what it should be."""

    file: str
    why: str

    def __str__(self) -> str:
        return f"{self.file}: {self.why}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint's folder, with its manifest or with what is wrong about that."""

    name: str
    path: Path
    manifest: Manifest | None
    problem: Problem | None = None


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A newer checkpoint that was not taken, the file at fault, and why."""

    path: Path
    file: str
    why: str

    def __str__(self) -> str:
        return f"{self.path} was passed over: {self.file}: {self.why}"


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest whole checkpoint, None if there is none, and what was passed over for it."""

    path: Path | None
    manifest: Manifest | None = None
    passed_over: tuple[PassedOver, ...] = ()

    @property
    def created_ns(self) -> int:
        """When it was committed; 0 where there is none."""
        return 0 if self.manifest is None else self.manifest.created_ns


def entries(root: Path) -> list[Entry]:
    """Return the checkpoints in a folder, newest first; those without a manifest come last."""
    if not root.is_dir():
        return []
    names = sorted(e.name for e in os.scandir(root) if e.is_dir() and not e.name.startswith("."))
    found = [_entry(name, root / name) for name in names if _looks_like_one(root / name)]
    found += [_entry(c.name, c.path) for c in claims_in(root) if is_stranded(root, c.name, c.path)]
    return sorted(found, key=_age)


def last_commit_ns(root: Path) -> int:
    """Return when the newest checkpoint was committed, by its manifest; 0 where there is none.

    A manifest is read once for as long as its file stays the same: a run that keeps all it saves
    would read ever more of them at each save.
    """
    if not root.is_dir():
        return 0
    return max((_committed_ns(Path(entry.path)) for entry in os.scandir(root)), default=0)


def _committed_ns(folder: Path) -> int:
    try:
        found = os.stat(folder / MANIFEST, follow_symlinks=False)
        mark = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        known = _commits.get(folder)
        if known is None or known[0] != mark:
            known = _commits[folder] = (mark, manifest.read(folder).created_ns)
    except (OSError, Damaged):
        return 0
    return known[1]


def newest_whole(root: Path, named: re.Pattern[str] | None = None) -> Newest:
    """Return the newest checkpoint whose every file matches its manifest.

    The newest is the one that was committed last, whatever its step: a run that went on from an
    older one has left later steps behind. `named` leaves out what has another name.
    """
    passed_over: list[PassedOver] = []
    found = [each for each in entries(root) if named is None or named.fullmatch(each.name)]
    for entry in sorted(found, key=lambda e: e.manifest is not None):
        problems = verify(entry.path) if entry.manifest else [entry.problem]
        first = problems[0] if problems else None
        if first is not None:
            passed_over.append(PassedOver(entry.path, first.file, first.why))
            continue
        return Newest(entry.path, entry.manifest, tuple(passed_over))
    return Newest(None, None, tuple(passed_over))


def verify(folder: str | os.PathLike[str]) -> list[Problem]:
    """Return everything that is wrong with a checkpoint; reads and hashes every file."""
    path = Path(folder)
    try:
        contents = manifest.read(path)
    except Damaged as damage:
        return [Problem(damage.file, damage.why)]

    def problem(name: str) -> Problem | None:
        try:
            files.check_file(path, name, contents.files[name])
        except Damaged as damage:
            return Problem(damage.file, damage.why)
        return None

    # hashlib lets other threads run while it hashes, so several files share several cores.
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        return [found for found in threads.map(problem, sorted(contents.files)) if found]


def wrong_size(entry: Entry) -> Problem | None:
    """Return the first file that is missing or has another size; hashes nothing."""
    if entry.manifest is None:
        return entry.problem
    try:
        for name, expected in entry.manifest.files.items():
            files.check_size(entry.path, name, expected)
    except Damaged as damage:
        return Problem(damage.file, damage.why)
    return None


def unlisted(path: Path, listed: Sequence[str] | frozenset[str]) -> list[str]:
    """Return the files in a checkpoint's folder that its manifest does not know."""
    return [name for name in files.names_in(path) if name not in listed and name != MANIFEST]


def locate(path: Path) -> Path:
    """Return where a checkpoint is now.

    Where two names can't be swapped in one step, a process that died between the two renames
    of an overwrite left the earlier checkpoint under a hidden name.
    """
    if path.exists() or not path.parent.is_dir():
        return path
    stranded = [c for c in claims_in(path.parent) if is_stranded(path.parent, c.name, c.path)]
    return next((claim.path for claim in stranded if claim.name == path.name), path)


def is_stranded(root: Path, name: str, path: Path) -> bool:
    """Whether a hidden folder is a replaced checkpoint whose successor never came."""
    return path.name.startswith(f".{name}.replaced-") and not (root / name).exists()


def _entry(name: str, path: Path) -> Entry:
    try:
        return Entry(name, path, manifest.read(path))
    except Damaged as damage:
        return Entry(name, path, None, Problem(damage.file, damage.why))


def _looks_like_one(path: Path) -> bool:
    """Whether a folder is a checkpoint, though it may have lost its manifest.

    Tensors alone do not make one: a model that was exported beside checkpoints has them too.
    """
    try:
        held = os.listdir(path)
    except OSError:
        return True  # it will be reported as unreadable
    if MANIFEST in held:
        return True
    has_tensors = any(name.endswith(".safetensors") for name in held)
    is_named = _NUMBERED.match(path.name) is not None
    return has_tensors and (is_named or any(_STATE.match(name) for name in held))


def _age(entry: Entry) -> tuple[bool, int, str]:
    if entry.manifest is None:
        return (True, 0, entry.name)
    return (False, -entry.manifest.created_ns, entry.name)


_RUNS_NAME = re.compile(r"(checkpoint|step)[-_]\d+")


@dataclass(frozen=True, slots=True)
class Retention:
    """Keep the newest, the best, and every Nth; the default keeps everything.

    `keep_last` counts the newest. `metric` keeps the `keep_best` best by that metric as well,
    greater or lower being better. `keep_every` keeps each whose step it divides, for good.
    """

    keep_last: int | None = None
    metric: str | None = None
    greater_is_better: bool = False
    keep_best: int = 1
    keep_every: int | None = None
    best_counts: bool = False
    """Whether the best ones are counted among `keep_last`; the newest always stays."""
    known_best: Callable[[], str | None] | None = None
    """Names the best one where the run knows it better than the files, which an evaluation after
    the save does not reach."""

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_best", "keep_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadInput(
                    f"Cannot use {name}={value}.",
                    why="the newest whole checkpoint and the best one are never removed.",
                    fix=f"pass {name}=1 or more, or leave it out to keep everything.",
                )


def is_runs_own(path: Path) -> bool:
    """Whether a run has made a checkpoint under this name: copies of it have their owner's.

    >>> [is_runs_own(Path(name)) for name in ("checkpoint-7", "step-000012", "checkpoint-7-copy")]
    [True, True, False]
    """
    return _RUNS_NAME.fullmatch(path.name) is not None and not path.is_symlink()


def doomed(found: Sequence[Entry], rule: Retention) -> list[Entry]:
    """Return the checkpoints that the rule lets go, oldest first.

    Only whole ones count, and only whole ones go: a damaged one is left for its owner to see. So is
    what has a name that no run gives, or is a link.
    """
    if rule.keep_last is None:
        return []
    whole = [e for e in found if is_runs_own(e.path) and wrong_size(e) is None]
    kept = {entry.path for entry in best(whole, rule)}
    room = max(1, rule.keep_last - len(kept)) if rule.best_counts else rule.keep_last
    newest = [entry for entry in whole if not rule.best_counts or entry.path not in kept]
    kept |= {entry.path for entry in newest[:room]}
    kept |= {entry.path for entry in whole[:1]}
    return [e for e in reversed(whole) if e.path not in kept and not _is_milestone(e, rule)]


def prunable(root: Path, rule: Retention) -> list[Entry]:
    """Return what the rule lets go in a folder, sparing the newest whose every byte checks."""
    spared = newest_whole(root).path
    return [entry for entry in doomed(entries(root), rule) if entry.path != spared]


def best(found: Sequence[Entry], rule: Retention) -> list[Entry]:
    """Return the best checkpoints by the rule's metric, best first; a NaN is never best."""
    if rule.known_best is not None:
        name = rule.known_best()
        return [entry for entry in found if entry.path.name == name]
    if rule.metric is None:
        return []
    scored = [(_score(entry, rule.metric), entry) for entry in found]
    valid = [(score, entry) for score, entry in scored if not math.isnan(score)]
    valid.sort(key=lambda pair: -pair[0] if rule.greater_is_better else pair[0])
    return [entry for _, entry in valid[: rule.keep_best]]


def _score(entry: Entry, metric: str) -> float:
    return entry.manifest.metrics.get(metric, math.nan) if entry.manifest else math.nan


def _is_milestone(entry: Entry, rule: Retention) -> bool:
    if rule.keep_every is None or entry.manifest is None:
        return False
    return entry.manifest.step % rule.keep_every == 0
