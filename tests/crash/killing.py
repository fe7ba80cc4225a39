"""Kill the training of mortal.py at random moments until it has finished, again and again.

A program that answers each line of JSON with one. {"kill": ["KIND:KILLS:SEED", ...]} says what
went wrong for each kind and where the kills fell; {"live": [...]} runs lives one after the other
and says how each ended. "folder" is where, "env" what to add to the environment. It forks a
child for each life, since loading torch anew would take seconds each; it has one thread, so
forking is safe.

A moment is drawn in two steps, so that all of the training gets its share: what the training has
just told of (its start, a batch, an update, a save, its end), and how long after that.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import mortal
import torch

import anytrain.doors.accelerator  # noqa: F401  loaded before the first fork
from anytrain.engine.checkpoint import Store
from anytrain.engine.checkpoint.catalog import Newest, entries
from checkpoints import digest, fingerprint
from launching import free_port

KINDS: dict[str, tuple[list[str], int]] = {
    "plain": ([], 1),
    "workers": (["--workers", "2"], 1),
    "behind": (["--behind"], 1),
    "two-ranks": ([], 2),
    "two-ranks-behind": (["--behind", "--workers", "2"], 2),
    # Saves in the last step of an epoch, and between two epochs.
    "epoch-ends": (["--samples", "48", "--epochs", "3"], 1),
    "two-ranks-epoch-ends": (["--samples", "48", "--epochs", "5"], 2),
    "between-epochs": (["--save-epochs", "--epochs", "4"], 1),
    "two-ranks-between-epochs": (["--save-epochs", "--epochs", "4"], 2),
    "own-generator": (["--own-generator", "--epochs", "3"], 1),
    "two-ranks-own-generator": (["--own-generator", "--epochs", "4"], 2),
    "careless": (["--careless"], 1),
}
AHEAD = 5  # a life is killed within so many updates, or a training would see few kills
WEIGHTS = {"saving": 8.0, "handed over": 8.0, "done": 4.0}  # else most kills fall on batches
MANY = 5  # what went wrong so often is told well enough


@dataclass
class Job:
    """A training in one process or in several, that is started until it is done."""

    folder: Path
    words: list[str] = field(default_factory=list)
    ranks: int = 1
    env: dict[str, str] = field(default_factory=dict)
    pids: list[int] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)
    lives: int = 0

    def start(self) -> None:
        """Start the training in children of their own."""
        self.lives += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        port = free_port() if self.ranks > 1 else 0
        self.codes = {}
        self.pids = [os.fork() or self._live(rank, port) for rank in range(self.ranks)]

    def _live(self, rank: int, port: int) -> NoReturn:
        code = 1
        try:
            os.setsid()
            output = os.open(self.folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ.update(self.env)
            if self.ranks > 1:
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.ranks}
                os.environ.update({name: str(value) for name, value in place.items()})
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            mortal.main([str(self.folder), *self.words])
            # What an interpreter does that ends: wait for threads, say goodbye to the others.
            threading._shutdown()
            atexit._run_exitfuncs()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def ended(self) -> bool:
        """Whether every child has ended; `codes` says how."""
        for pid in self.pids:
            if pid not in self.codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self.codes[pid] = os.waitstatus_to_exitcode(status)
        return len(self.codes) == len(self.pids)

    def finish(self) -> list[int]:
        """Wait for the end; return the exit codes. One that died takes the others with it."""
        while not self.ended():
            if any(self.codes.values()):
                self.kill(random.Random(0))
            time.sleep(0.001)
        return [self.codes[pid] for pid in self.pids]

    def reaches(self, what: str, updates: int) -> bool:
        """Wait until this life tells of that; False if it ends first."""
        while not self.ended():
            for mark in reversed(self.marks()):
                if mark["pid"] not in self.pids:
                    break
                if mark["what"] == what and mark["updates"] == updates:
                    return True
            time.sleep(0.0005)
        return False

    def kill(self, rng: random.Random) -> None:
        """Kill one process; the others a moment later, as whoever watches over them would."""
        for pid in rng.sample(self.pids, len(self.pids)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if self.ranks > 1:
                time.sleep(rng.uniform(0, 0.05))
        while not self.ended():
            time.sleep(0.001)
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # its loader's workers

    @property
    def root(self) -> Path:
        return self.folder / "checkpoints"

    def newest(self) -> Newest:
        return Store(self.root).newest_whole()

    def marks(self) -> list[dict[str, Any]]:
        return mortal.read_marks(self.folder)

    def told(self) -> str:
        return (self.folder / "output").read_text()[-4000:]


@dataclass
class Campaign:
    """Trainings of one kind, killed until enough kills are counted; all must end alike."""

    base: Path
    words: list[str]
    ranks: int
    rng: random.Random
    env: dict[str, str] = field(default_factory=dict)
    kills: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    ends: int = 0

    def run(self, kills: int) -> dict[str, Any]:
        began = time.monotonic()
        whole = Job(self.base / "uninterrupted", self.words, self.ranks, self.env)
        whole.start()
        if any(whole.finish()):
            return {"wrong": [f"uninterrupted: {whole.told()}"], "kills": {}, "ends": 0}
        self.expected = final(whole)
        self.moments = moments(whole)
        while sum(self.kills.values()) < kills and len(self.wrong) < MANY:
            run = self.base / f"run-{self.ends}"
            self.train(Job(run, self.words, self.ranks, self.env), kills)
        seconds = round(time.monotonic() - began, 2)
        kills_at = dict(sorted(self.kills.items()))
        return {"wrong": self.wrong, "kills": kills_at, "ends": self.ends, "seconds": seconds}

    def train(self, job: Job, kills: int) -> None:
        """Start, kill and start again until it is done; then compare."""
        while True:
            before = self.look(job)
            job.start()
            killed = sum(self.kills.values()) < kills and self.strike(job, before)
            if not killed:
                job.finish()
            self.check_resumed(job, before, killed)
            if not killed:
                break
        if any(job.codes.values()):
            self.wrong.append(f"{job.folder.name}, life {job.lives}: {job.codes} {job.told()}")
        elif final(job) != self.expected:
            self.wrong.append(f"{job.folder.name}: another end after {job.lives} lives")
        self.ends += 1

    def strike(self, job: Job, done: int) -> bool:
        """Kill the life at a random moment of what is left; say whether it still lived."""
        soon = [m for m in self.moments if done < m[1] <= done + AHEAD or m[0] == "started"]
        if len(soon) == 1 and self.rng.random() < 0.5:  # it is as good as done: let it end
            return False
        weights = [WEIGHTS.get(what, 1.0) for what, _, _ in soon]
        ((what, updates, gap),) = self.rng.choices(soon, weights)
        if not job.reaches(what, updates):
            return False
        time.sleep(self.rng.uniform(0, gap))
        if job.ended():
            return False
        job.kill(self.rng)
        self.kills[self.phase(job)] += 1
        return True

    def look(self, job: Job) -> int:
        """Return the newest checkpoint's step; it is whole, and no committed one is newer."""
        newest, marks = job.newest(), job.marks()
        step = newest.manifest.step if newest.manifest else 0
        saved = [m["updates"] for m in marks if m["what"] == "saved"]
        begun = [m["updates"] for m in marks if m["what"] == "saving"]
        handed = [m["updates"] for m in marks if m["what"] == "handed over"]
        # One save at a time: once the next is handed over, the one before is committed.
        least = max([0, *saved, *(u for u in handed if u < max(handed))])
        if newest.passed_over or not least <= step <= max([0, *begun]):
            self.wrong.append(f"{job.folder.name}: found {step}, saved {least}, {newest}")
        for entry in entries(job.root):
            if entry.manifest is None:
                self.wrong.append(f"{job.folder.name}: a partial checkpoint {entry}")
        return step

    def check_resumed(self, job: Job, newest: int, killed: bool) -> None:
        """The life began where the newest checkpoint was, on every rank that got so far."""
        begun = [m for m in job.marks() if m["what"] == "begun" and m["pid"] in job.pids]
        for mark in begun:
            if mark["updates"] != newest or mark["resumed"] != (newest > 0):
                self.wrong.append(f"{job.folder.name}: began at {mark}, newest was {newest}")
        if not killed and len(begun) != job.ranks:
            self.wrong.append(f"{job.folder.name}: ended and had not begun: {job.told()}")

    def phase(self, job: Job) -> str:
        """Say what the life had told of last when it was killed."""
        last = [m for m in job.marks() if m["pid"] in job.pids][-1]
        final_one = last["updates"] == self.expected[0] and last["what"] != "begun"
        return f"last step, {last['what']}" if final_one else str(last["what"])


def moments(whole: Job) -> list[tuple[str, int, float]]:
    """Return what a training tells of, at which update, and how long until it tells more."""
    own = [m for m in whole.marks() if m["rank"] == 0 and m["pid"] == whole.pids[0]]
    ends = [m["at"] for m in own[1:]] + [own[-1]["at"] + 0.01]
    return [
        (mark["what"], mark["updates"], 1.2 * (end - mark["at"]))
        for mark, end in zip(own, ends, strict=True)
    ]


def final(job: Job) -> list[Any]:
    """Return what the last checkpoint holds, to the last bit, with every generator's state."""
    loaded = Store(job.root).load(job.newest())
    rngs = [loaded.rank_part("rng", rank) for rank in range(loaded.world_size)]
    return [loaded.step, fingerprint(loaded), digest(rngs)]


def warm_up() -> None:
    """Load what every life needs before the first fork: an optimizer pulls in a compiler."""
    optimizer = torch.optim.AdamW(torch.nn.Linear(1, 1).parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)


def kill(base: Path, wanted: list[str], env: dict[str, str]) -> dict[str, Any]:
    """Kill trainings of each kind as often as asked."""
    found = {}
    for word in wanted:
        kind, kills, seed = word.split(":")
        words, ranks = KINDS[kind]
        campaign = Campaign(base / kind, words, ranks, random.Random(int(seed)), env)
        found[word] = campaign.run(int(kills))
    return found


def live(base: Path, lives: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run lives one after the other: {"folder": name, "words": [...], "ranks": 1}."""
    found = []
    for asked in lives:
        job = Job(base / asked["folder"], asked.get("words", []), asked.get("ranks", 1))
        before = len(job.marks())
        job.start()
        codes, newest = job.finish(), job.newest()
        found.append(
            {
                "codes": codes,
                "marks": job.marks()[before:],
                "told": job.told(),
                "newest": newest.manifest.step if newest.manifest else None,
                "final": final(job) if newest.manifest else None,
            }
        )
    return found


def main() -> None:
    torch.set_num_threads(1)
    warm_up()
    for line in sys.stdin:
        asked = json.loads(line)
        folder = Path(asked["folder"])
        if "kill" in asked:
            answer: Any = kill(folder, asked["kill"], asked.get("env", {}))
        else:
            answer = live(folder, asked["live"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
