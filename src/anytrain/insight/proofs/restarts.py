"""Run a script, see its checkpoints come, and kill it at random moments."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from anytrain.core.errors import BadInput
from anytrain.engine.checkpoint import manifest
from anytrain.engine.checkpoint.files import Damaged
from anytrain.engine.checkpoint.manifest import MANIFEST, Manifest

PLACEHOLDER = "{project}"
_LOOK_EVERY_S = 0.002
_DEEPEST = 4


@dataclass(frozen=True, slots=True)
class TrainingScript:
    """The command to run, and how it learns where its project folder is."""

    path: str
    args: tuple[str, ...] = ()
    project_dir: Path | None = None
    """The folder that the script always uses, seen from the working folder."""
    num_processes: int | None = None
    cpu: bool = False

    def check(self) -> None:
        """Refuse a script that is not there, or whose project folder is not known."""
        if not Path(self.path).is_file():
            raise BadInput(
                f"There is no script {self.path}.",
                why=f"no such file, seen from {Path.cwd()}.",
                fix="pass the path of a Python file.",
            )
        told = any(PLACEHOLDER in word for word in self.args)
        if told == (self.project_dir is not None):
            raise BadInput(
                f"Cannot tell where {self.path} keeps its checkpoints.",
                why=f"neither {PLACEHOLDER} is among its arguments, nor --project-dir was passed."
                if not told
                else f"both {PLACEHOLDER} and --project-dir say so.",
                fix=f"write {PLACEHOLDER} for the folder in the script's own arguments, as in "
                f"`train.py --output_dir {PLACEHOLDER}`; or, where the script has a fixed folder, "
                "pass --project-dir with it.",
            )
        if self.project_dir is not None and not _is_inside(self.project_dir):
            raise BadInput(
                f"Cannot use --project-dir {self.project_dir}.",
                why="each run gets a working folder of its own, and this one lies outside.",
                fix="pass the folder as the script names it, seen from here; a script with a "
                f"path from / must take it as an argument: {PLACEHOLDER}.",
            )

    def command(self, project: Path) -> list[str]:
        args = [word.replace(PLACEHOLDER, str(project)) for word in self.args]
        launch: list[str] = []
        if self.num_processes is not None:
            launch = ["-m", "anytrain", "launch", "--num_processes", str(self.num_processes)]
            launch += ["--cpu"] if self.cpu else []
        return [sys.executable, *launch, self.path, *args]


@dataclass(frozen=True, slots=True)
class Commit:
    """A checkpoint that was seen: its path in the project, its manifest, and when it came."""

    name: str
    manifest: Manifest
    seconds: float
    """Since the life in which it came began."""


@dataclass(slots=True)
class RestartedRun:
    """One training in a folder of its own, started as often as it takes."""

    script: TrainingScript
    folder: Path
    commits: list[Commit] = field(default_factory=list)
    lives: int = 0
    _known: set[tuple[str, int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        if self.script.project_dir is not None:
            mirror(Path.cwd(), self.folder / "working", self.script.project_dir)
        self.project.mkdir(parents=True, exist_ok=True)

    @property
    def project(self) -> Path:
        """The script's project folder in this trial."""
        own = self.script.project_dir
        return self.folder / "project" if own is None else self.folder / "working" / own

    @property
    def log(self) -> Path:
        """What the newest life has printed."""
        return self.folder / f"life-{self.lives}.log"

    def live(self, kill_when: Callable[[OneStart], bool] | None = None) -> int | None:
        """Start the script; return its exit code, or None where it was killed on the way."""
        self.lives += 1
        with _started(self.script, self) as process:
            life = OneStart(self, time.monotonic(), len(self.commits))
            while True:
                code = process.poll()
                self.look(life.began)
                if code is not None:
                    return code
                if kill_when is not None and kill_when(life):
                    break
                time.sleep(_LOOK_EVERY_S)
        self.look(life.began)  # a last one may have come before the kill did
        return None

    def look(self, began: float) -> None:
        """Take note of checkpoints that have come since the last look."""
        seconds = time.monotonic() - began
        new: list[Commit] = []
        for folder in _checkpoints(self.project, _DEEPEST):
            with suppress(Damaged, OSError):
                status = (folder / MANIFEST).stat()
                key = (str(folder), status.st_ino, status.st_mtime_ns)
                if key not in self._known:
                    found = manifest.read(folder)
                    self._known.add(key)
                    name = str(folder.relative_to(self.project))
                    new.append(Commit(name, found, seconds))
        self.commits += sorted(new, key=lambda commit: commit.manifest.created_ns)

    @property
    def newest(self) -> Commit | None:
        return max(self.commits, key=lambda c: c.manifest.created_ns, default=None)


@dataclass(frozen=True, slots=True)
class OneStart:
    """One start of a script."""

    trial: RestartedRun
    began: float
    """On the monotonic clock."""
    num_before: int
    """The checkpoints that earlier lives had left."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def own_commits(self) -> list[Commit]:
        """The checkpoints that came in this life."""
        return self.trial.commits[self.num_before :]


@contextmanager
def _started(script: TrainingScript, trial: RestartedRun) -> Iterator[subprocess.Popen[bytes]]:
    """Run the script; whatever of it is left in the end is killed, with all its children."""
    working = trial.folder / "working"
    with trial.log.open("wb") as log:
        process = subprocess.Popen(
            script.command(trial.project),
            cwd=working if working.is_dir() else None,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        kill(process.pid)
        process.wait()


def kill(pid: int) -> None:
    """Kill a process and all its descendants with SIGKILL, as a machine that fails does."""
    with suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        first.suspend()  # finding the others takes a while, in which it could go on
        for process in [first, *first.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def mirror(source: Path, target: Path, own: Path) -> None:
    """Make a folder of links to everything in `source`, except for the path `own` inside it."""
    target.mkdir(parents=True, exist_ok=True)
    first = own.parts[0]
    for entry in sorted(os.listdir(source)) if source.is_dir() else []:
        if entry != first:
            (target / entry).symlink_to(source / entry)
    if len(own.parts) > 1:
        mirror(source / first, target / first, Path(*own.parts[1:]))


def _is_inside(folder: Path) -> bool:
    return not folder.is_absolute() and ".." not in folder.parts and bool(folder.parts)


def _checkpoints(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the folders below that hold a manifest; hidden ones are not committed."""
    try:
        inside = [e for e in os.scandir(folder) if e.is_dir() and not e.name.startswith(".")]
    except OSError:
        return  # it went while we looked
    for entry in inside:
        path = Path(entry.path)
        if (path / MANIFEST).exists():
            yield path
        elif depth:
            yield from _checkpoints(path, depth - 1)


def last_lines(log: Path, most: int = 20) -> Sequence[str]:
    """Return the end of what a script has printed."""
    return log.read_text(errors="replace").splitlines()[-most:]


# -- when to kill ---------------------------------------------------------------------------------


@dataclass(slots=True)
class KillTrap:
    """A kill that waits for a checkpoint, and then for a random while."""

    after_step: int | None
    """The step whose checkpoint must be there; None: a life that has saved nothing."""
    gap_s: float
    """How long an undisturbed run takes from there to its next save."""
    start_s: float
    """How long an undisturbed run takes from its start to its first save."""
    share: float
    """How much of that time to let pass."""
    _due: float | None = None

    def __call__(self, life: OneStart) -> bool:
        if self._due is None:
            self._due = self._when(life)
        return self._due is not None and life.seconds >= self._due

    def _when(self, life: OneStart) -> float | None:
        if self.after_step is None or self._was_there(life):
            return self.share * self.start_s
        reached = [c.seconds for c in life.own_commits if c.manifest.step >= self.after_step]
        return reached[0] + self.share * self.gap_s if reached else None

    def _was_there(self, life: OneStart) -> bool:
        before = life.trial.commits[: life.num_before]
        return any(c.manifest.step >= (self.after_step or 0) for c in before)


def plan(commits: Sequence[Commit], kills: int, rng: random.Random) -> list[KillTrap]:
    """Return traps in the order of training, for a run that makes these saves.

    Each has its stretch of the run. The last waits for the second save, if there is a third: a
    script that starts anew instead of resuming is then seen to save an earlier step again.
    """
    chosen = [int((i + rng.random()) * len(commits) / kills) - 1 for i in range(kills)]
    if len(commits) > 2:
        chosen[-1] = max(chosen[-1], 1)
    times = [0.0, *(commit.seconds for commit in commits)]
    return [
        KillTrap(
            after_step=None if place < 0 else commits[place].manifest.step,
            gap_s=max(times[place + 2] - times[place + 1], 0.0),
            start_s=times[1],
            share=rng.random(),
        )
        for place in chosen
    ]


def at_once(traps: Sequence[KillTrap]) -> list[KillTrap]:
    """Return the same traps without the random while, nor what they have noted."""
    return [replace(trap, share=0.0, _due=None) for trap in traps]
