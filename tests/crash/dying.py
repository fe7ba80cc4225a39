"""Die at every single touch of the disk that a save makes, and look at what is left.

A program: `python dying.py FOLDER SCENARIO...` prints one JSON object with what went wrong in
each scenario and how many deaths it took. It forks a child for each death, since loading torch
anew would take a second each; it has one thread, so forking is safe.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from anytrain.engine.checkpoint import (
    Retention,
    Saved,
    SaveFailed,
    Snapshot,
    Store,
    Writer,
    files,
    load,
)
from checkpoints import fingerprint, hidden, small_run

OPERATIONS = (
    "make_folder",
    "create",
    "write",
    "sync",
    "sync_folder",
    "rename",
    "swap_names",
    "link",
    "unlink",
    "remove_folder",
)
Strike = Callable[[int, str, tuple[Any, ...]], None]


OWN = {"rng": {"state": torch.arange(4)}}
FIRST = small_run(0).snapshot(1, rank_parts=OWN)
SECOND = small_run(7).snapshot(2, rank_parts=OWN)


class Disk:
    """Stands between the file layer and the disk; counts, notes, and strikes."""

    def __init__(self, strike: Strike, note: Callable[[str], None]) -> None:
        self.numbers = itertools.count()
        self.strike, self.note = strike, note

    @contextmanager
    def between(self) -> Iterator[None]:
        real = {name: getattr(files, name) for name in OPERATIONS}
        for name in OPERATIONS:
            setattr(files, name, self._wrapped(name, real[name]))
        try:
            yield
        finally:
            for name in OPERATIONS:
                setattr(files, name, real[name])

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def touch(*args: Any) -> Any:
            number = next(self.numbers)
            self.strike(number, name, args)
            words = [
                os.readlink(f"/proc/self/fd/{a}") if isinstance(a, int) else str(a) for a in args
            ]
            result = real(*args)
            self.note("\t".join([name, *words[: 1 if name == "write" else None]]))
            return result

        return touch


class Scenario:
    """A store with something in it, and one save that may die on the way."""

    retention: Retention | None = None
    name = "b"

    def prepare(self, root: Path) -> None:
        assert isinstance(Store(root).save("a", FIRST), Saved)

    def save(self, root: Path) -> Saved | SaveFailed:
        return Store(root, retention=self.retention).save(self.name, self.snapshot())

    def snapshot(self) -> Any:
        return SECOND

    def patch(self) -> None:
        """Change the file layer for the whole scenario."""


class New(Scenario):
    """A second checkpoint."""


class Hooked(Scenario):
    """A hook writes files of its own."""

    def snapshot(self) -> Any:
        def take(folder: Path) -> Snapshot:
            (folder / "own").mkdir()
            (folder / "own" / "file").write_bytes(b"x" * 1000)
            return SECOND

        return take


class Overwrite(Scenario):
    """The same name again; somebody has put a file beside the first."""

    name = "a"

    def prepare(self, root: Path) -> None:
        super().prepare(root)
        (root / "a" / "notes.md").write_text("mine")


class OverwriteWithoutSwap(Overwrite):
    """The same name again, on a filesystem that cannot swap two names."""

    def patch(self) -> None:
        files.swap_names = lambda one, other: False


class Retained(Scenario):
    """Old checkpoints go once the new one is there."""

    retention = Retention(keep_last=1)

    def prepare(self, root: Path) -> None:
        super().prepare(root)
        assert isinstance(Store(root).save("a2", FIRST), Saved)


class Behind(Scenario):
    """A save in the background."""

    def save(self, root: Path) -> Saved | SaveFailed:
        writer = Writer(Store(root))
        writer.begin(self.name, self.snapshot())
        return writer.finish()[0]


class Sharded(Scenario):
    """Many files."""

    def save(self, root: Path) -> Saved | SaveFailed:
        return Store(root, most_shard_bytes=150).save(self.name, self.snapshot())


SCENARIOS: dict[str, type[Scenario]] = {
    kind.__name__: kind
    for kind in (New, Hooked, Overwrite, OverwriteWithoutSwap, Retained, Behind, Sharded)
}


class Trial:
    """Everything about one scenario that does not change from death to death."""

    def __init__(self, kind: type[Scenario], base: Path) -> None:
        self.scenario, self.base = kind(), base
        self.scenario.patch()
        self.template = base / "template"
        self.scenario.prepare(self.template)
        self.old = fingerprint(load(self.template / "a"))
        done = self.fresh("done")
        log: list[str] = []
        with Disk(lambda *args: None, log.append).between():
            assert isinstance(self.scenario.save(done), Saved)
        self.log = log
        self.new = fingerprint(load(done / self.scenario.name))
        target = str(done / self.scenario.name)
        commits = [
            i
            for i, line in enumerate(log)
            if line.split("\t")[0] in ("rename", "swap_names") and line.split("\t")[2] == target
        ]
        if isinstance(self.scenario, OverwriteWithoutSwap):
            commits = commits[-1:]
        (self.commit,) = [i for i in commits if not log[i].startswith("swap_names")] or commits[:1]
        self.wrong: list[str] = []

    def fresh(self, name: str) -> Path:
        root = self.base / name
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(self.template, root)
        return root

    def look(self, root: Path, label: str, committed: bool) -> None:
        """The newest is whole, and it is the one that was committed last."""
        newest = Store(root).newest_whole()
        if newest.path is None or newest.passed_over:
            self.wrong.append(f"{label}: newest {newest.path}, passed over {newest.passed_over}")
            return
        found = fingerprint(Store(root).load(newest))
        if found != (self.new if committed else self.old):
            self.wrong.append(f"{label}: not the newest committed, {newest.path}")
        named = root / (self.scenario.name if committed else "a")
        if isinstance(self.scenario, Overwrite) and fingerprint(load(named)) != found:
            self.wrong.append(f"{label}: another one by its name")

    def recover(self, root: Path, label: str) -> None:
        """The next save works and clears what is left."""
        outcome = Store(root).save("z", Snapshot(step=9, parts={"x": 1}))
        if not isinstance(outcome, Saved) or hidden(root):
            self.wrong.append(f"{label}: no recovery, {outcome}, left {hidden(root)}")
        notes = root / self.scenario.name / "notes.md"
        if isinstance(self.scenario, Overwrite) and notes.read_text() != "mine":
            self.wrong.append(f"{label}: the user's own file is lost")


def deaths(trial: Trial) -> int:
    """Die before each operation, and in the middle of each write; then lose power as well."""
    count = 0
    for number, line in enumerate(trial.log):
        for torn in (False, True) if line.startswith("write\t") else (False,):
            label = f"dead at {number} ({line.split(chr(9))[0]}{', torn' if torn else ''})"
            root, log = trial.fresh("dying"), trial.base / "log"
            _die(trial, root, log, number, torn)
            trial.look(root, label, committed=number > trial.commit)
            if _lose_power(root, log, trial.scenario.name):
                trial.look(root, f"{label}, power lost", committed=number > trial.commit)
            trial.recover(root, label)
            count += 1
    return count


def _die(trial: Trial, root: Path, log: Path, number: int, torn: bool) -> None:
    log.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:

        def strike(now: int, name: str, args: tuple[Any, ...]) -> None:
            if now == number:
                if torn:
                    os.write(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)

        paper = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        with Disk(strike, lambda line: os.write(paper, line.encode() + b"\n")).between():
            trial.scenario.save(root)
        os._exit(77)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        trial.wrong.append(f"the child outlived operation {number}: {status}")


def _lose_power(root: Path, log: Path, name: str) -> bool:
    """Cut every file whose bytes nobody had waited for; say whether there was one."""
    lines = [line.split("\t") for line in log.read_text().splitlines()] if log.exists() else []
    unsynced = {words[1] for words in lines if words[0] in ("create", "write")}
    unsynced -= {words[1] for words in lines if words[0] == "sync"}
    for text in unsynced:
        path = Path(text)
        moved = root / name / path.relative_to(root / path.relative_to(root).parts[0])
        place = path if path.exists() else moved
        if place.exists():
            os.truncate(place, place.stat().st_size // 2)
    return bool(unsynced)


def no_space(trial: Trial) -> int:
    """Run out of space at each operation, once and for good: training goes on."""
    growing = ("make_folder", "create", "write", "sync", "link", "sync_folder")
    count = 0
    for number, lasting in itertools.product(range(len(trial.log)), (False, True)):
        label = f"no space {'from' if lasting else 'at'} {number} ({trial.log[number]})"

        def strike(
            now: int,
            name: str,
            args: tuple[Any, ...],
            number: int = number,
            lasting: bool = lasting,
        ) -> None:
            if now == number or (lasting and now > number and name in growing):
                raise OSError(errno.ENOSPC, "No space left on device")

        root = trial.fresh("full")
        with Disk(strike, lambda line: None).between():
            outcome = trial.scenario.save(root)
        if isinstance(outcome, SaveFailed) and outcome.kind != "space":
            trial.wrong.append(f"{label}: {outcome}")
        if isinstance(outcome, SaveFailed) == (number > trial.commit + 1):
            trial.wrong.append(f"{label}: unexpected {outcome}")
        trial.look(root, label, committed=number > trial.commit)
        trial.recover(root, label)
        count += 1
    return count


def small_limit(trial: Trial) -> int:
    """Let the kernel itself refuse to make any file larger than a limit."""
    count = 0
    done = trial.base / "done" / trial.scenario.name
    for limit in sorted({1, *(file.stat().st_size - 1 for file in done.iterdir())}):
        root = trial.fresh("limited")
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            outcome = trial.scenario.save(root)
            os._exit(0 if isinstance(outcome, SaveFailed) and outcome.kind == "space" else 1)
        _, status = os.waitpid(child, 0)
        if status:
            trial.wrong.append(f"limit {limit}: the save ended with {status}")
        if hidden(root):
            trial.wrong.append(f"limit {limit}: {hidden(root)} was left")
        trial.look(root, f"limit {limit}", committed=False)
        trial.recover(root, f"limit {limit}")
        count += 1
    return count


def at_random(base: Path, times: int, behind: bool) -> dict[str, Any]:
    """Save in a loop, die at a random moment, go on from what is left; again and again."""
    rng, wrong, root = random.Random(5), [], base / "random"
    committed = base / "committed"
    committed.write_text("0")
    start = 0
    for number in range(times):
        newest = Store(root).newest_whole()
        last = max(int(committed.read_text()), start)  # a life may end before it tells of a save
        start = newest.manifest.step if newest.manifest else 0
        if newest.passed_over or not last <= start <= last + 1:
            wrong.append(f"death {number}: found {start} after {last}, {newest.passed_over}")
        child = os.fork()
        if child == 0:
            _save_forever(root, start, committed, behind)
        time.sleep(rng.uniform(0.002, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return {"deaths": times, "wrong": wrong, "reached": start}


def _save_forever(root: Path, start: int, committed: Path, behind: bool) -> None:
    store = Store(root, retention=Retention(keep_last=2))
    writer, run = Writer(store), small_run(1)
    for step in itertools.count(start + 1):
        if behind:
            writer.begin(f"step-{step}", run.snapshot(step))
            (outcome,) = writer.finish()
        else:
            outcome = store.save(f"step-{step}", run.snapshot(step))
        if not isinstance(outcome, Saved):
            os._exit(9)
        aside = committed.with_name("aside")
        aside.write_text(str(step))
        aside.rename(committed)


def main(base: Path, wanted: list[str]) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for word in wanted:
        what, _, name = word.partition(":")
        folder = base / word.replace(":", "-")
        folder.mkdir()
        if what == "random":
            found[word] = at_random(folder, int(name), behind=False)
            continue
        if what == "random-behind":
            found[word] = at_random(folder, int(name), behind=True)
            continue
        real = files.swap_names
        trial = Trial(SCENARIOS[name], folder)
        count = {"deaths": deaths, "no-space": no_space, "limit": small_limit}[what](trial)
        files.swap_names = real
        found[word] = {"deaths": count, "wrong": trial.wrong, "log": trial.log}
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
