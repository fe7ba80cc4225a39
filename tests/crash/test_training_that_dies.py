"""A training that is killed, interrupted or starved ends as the same training left alone, bit for
bit.

The training is mortal.py. Most lives are forked and killed by killing.py; the ones under a launcher
are processes of their own.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import random
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from anytrain.engine.checkpoint import Store
from checkpoints import digest, fingerprint, hidden
from launching import child_environment

PROGRAM = Path(__file__).with_name("killing.py")
SCRIPT = Path(__file__).with_name("mortal.py")
TESTS = PROGRAM.parents[1]
LAUNCH = [sys.executable, "-m", "anytrain", "launch", "--cpu", "--num_processes", "2"]
LAST = 14  # updates in two epochs of one process
LAST_OF_TWO = 8  # of two processes: 7 batches for each, 4 updates an epoch
MEMORY = Path("/dev/shm")


class Killer:
    """The program killing.py; it loads torch once for all that is asked of it."""

    def __init__(self, *before: str) -> None:
        path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [*before, sys.executable, PROGRAM],
            env=child_environment({"PYTHONPATH": path}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, folder: Path, **asked: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({"folder": str(folder), **asked}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "it died; its error is above"
        return json.loads(answer)

    def kill(self, folder: Path, *kinds: str, **env: str) -> dict[str, Any]:
        """Kill trainings of the kinds; return how it went, once nothing went wrong."""
        found: dict[str, Any] = self.ask(folder, kill=kinds, env=env)
        assert {kind: result["wrong"] for kind, result in found.items() if result["wrong"]} == {}
        for kind, result in found.items():
            assert sum(result["kills"].values()) == int(kind.split(":")[1])
            assert result["ends"] > 0
        return found

    def live(self, folder: Path, *lives: dict[str, Any]) -> list[dict[str, Any]]:
        """Run lives one after the other, and return how each went."""
        found: list[dict[str, Any]] = self.ask(folder, live=lives)
        return found

    def close(self) -> None:
        self._process.communicate(timeout=240)


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    started = Killer()
    yield started
    started.close()


def life(folder: str, *words: object, ranks: int = 1) -> dict[str, Any]:
    return {"folder": folder, "words": [str(word) for word in words], "ranks": ranks}


# Killed at random.


def test_killed_at_random_moments_it_ends_as_if_left_alone(killer: Killer, tmp_path: Path) -> None:
    found = killer.kill(tmp_path, "plain:20:0", "workers:20:1")
    phases = {phase for result in found.values() for phase in result["kills"]}
    assert {"saving", "batch"} <= phases
    assert any(phase.startswith("last step") for phase in phases)
    # The next save clears what a killed one has left.
    for run in tmp_path.glob("*/run-*/checkpoints"):
        assert hidden(run) == []
        assert len(list(run.iterdir())) <= 2


def test_one_of_two_ranks_killed_at_random_moments(killer: Killer, tmp_path: Path) -> None:
    killer.kill(tmp_path, "two-ranks:5:2")


def test_killed_around_the_ends_of_epochs(killer: Killer, tmp_path: Path) -> None:
    killer.kill(tmp_path, "epoch-ends:10:20", "two-ranks-epoch-ends:5:21")
    killer.kill(tmp_path, "between-epochs:10:22", "two-ranks-between-epochs:5:23")


def test_an_order_from_a_generator_of_the_users_own(killer: Killer, tmp_path: Path) -> None:
    killer.kill(tmp_path, "own-generator:10:24")


def test_a_background_save_killed_halfway(killer: Killer, tmp_path: Path) -> None:
    found = killer.kill(tmp_path, "behind:20:3")
    assert "handed over" in found["behind:20:3"]["kills"]


def test_killed_with_temporary_files_on_another_filesystem(killer: Killer, tmp_path: Path) -> None:
    if not MEMORY.is_dir() or MEMORY.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip(f"{MEMORY} is no filesystem of its own here")
    with tempfile.TemporaryDirectory(dir=MEMORY) as other:
        killer.kill(tmp_path, "plain:10:4", TMPDIR=other)
        killer.kill(Path(other), "plain:10:5", TMPDIR=str(tmp_path))


def test_a_training_with_something_unsaved_would_be_caught(killer: Killer, tmp_path: Path) -> None:
    (result,) = killer.ask(tmp_path, kill=["careless:10:6"]).values()
    assert any("another end" in wrong for wrong in result["wrong"])


@pytest.mark.full
@pytest.mark.parametrize(
    "kind",
    [
        "plain:200:10",
        "workers:200:11",
        "behind:200:12",
        "two-ranks:100:13",
        "two-ranks-behind:50:14",
        "epoch-ends:50:15",
        "two-ranks-epoch-ends:50:16",
        "two-ranks-between-epochs:50:17",
        "own-generator:50:18",
        "two-ranks-own-generator:50:19",
    ],
)
def test_killed_at_random_moments_many_times(killer: Killer, tmp_path: Path, kind: str) -> None:
    phases = killer.kill(tmp_path, kind)[kind]["kills"]
    assert len(phases) >= 5, phases
    assert any("last step" in phase for phase in phases)


# Killed at a certain moment.


def test_killed_in_the_very_last_step(killer: Killer, tmp_path: Path) -> None:
    # A batch is told of before its update is counted.
    moments = [f"{what}:{LAST}" for what in ("update", "saving", "saved", "done")]
    asked = [life("whole")]
    for number, moment in enumerate([f"batch:{LAST - 1}", *moments]):
        asked += [life(str(number), "--die", moment), life(str(number))]
    whole, *rest = killer.live(tmp_path, *asked)
    for first, second in zip(rest[::2], rest[1::2], strict=True):
        assert first["codes"] == [-signal.SIGKILL]
        assert second["codes"] == [0], second["told"]
        assert second["final"] == whole["final"]


# Another number of processes.


def batches(marks: list[dict[str, Any]], *, up_to: int | None = None) -> list[list[int]]:
    """Return the batches of the first epoch in their global order, as the ranks consumed them."""
    seen = [m for m in marks if m["what"] == "batch" and m["epoch"] == 0]
    if up_to is not None:
        seen = [m for m in seen if m["updates"] < up_to]
    ranks = sorted({m["rank"] for m in seen})
    each = [[m["ids"] for m in seen if m["rank"] == rank] for rank in ranks]
    return [ids for turn in zip(*each, strict=True) for ids in turn]


def test_two_then_one_then_three_processes_go_through_one_order(
    killer: Killer, tmp_path: Path
) -> None:
    long = ("--samples", 190, "--epochs", 1)
    whole, two, one, three = killer.live(
        tmp_path,
        life("whole", *long, ranks=2),
        life("changing", *long, "--die", "saved:6", ranks=2),
        life("changing", *long, "--die", "saved:9", ranks=1),
        life("changing", *long, ranks=3),
    )
    assert [one["marks"][1][name] for name in ("what", "updates")] == ["begun", 6]
    assert {m["updates"] for m in three["marks"] if m["what"] == "begun"} == {9}
    assert three["codes"] == [0, 0, 0], three["told"]
    order = [i for ids in batches(whole["marks"]) for i in ids][:190]
    assert sorted(order) == list(range(190))
    consumed = batches(two["marks"], up_to=6) + batches(one["marks"], up_to=9)
    assert len(consumed) == 6 * 2 * 2 + 3 * 2  # updates, batches that make one, ranks
    consumed += batches(three["marks"])
    flat = [i for ids in consumed for i in ids]
    # Every sample once, in the order that was begun; then the last round is filled up.
    assert flat[:190] == order
    assert flat[190:] == order[: len(flat) - 190]
    assert len(flat) - 190 < 3 * 4


# No room, and not a number.


def test_a_full_disk_stops_no_training_and_it_saves_when_there_is_room(
    killer: Killer, tmp_path: Path
) -> None:
    whole, starved = killer.live(tmp_path, life("whole"), life("starved", "--no-room", "5:10"))
    check_starved(whole, starved, "was not saved", "File too large")


def test_a_disk_that_is_really_full(tmp_path: Path, needs_tool: Callable[[str], str]) -> None:
    apart = (needs_tool("unshare"), *(["-m"] if os.geteuid() == 0 else ["-Urm"]), "sh", "-c")
    mount = f"mount -t tmpfs -o size=4m none {tmp_path}"
    if subprocess.run([*apart, mount], capture_output=True).returncode:
        pytest.skip("no filesystem can be mounted here")
    killer = Killer(*apart, f'{mount} && exec "$0" "$@"')
    starved = life("starved", "--no-room", "5:10", "--full-disk")
    whole, starved = killer.live(tmp_path, life("whole"), starved)
    killer.close()
    check_starved(whole, starved, "No room to save the checkpoint", "bytes, and")


def check_starved(whole: dict[str, Any], starved: dict[str, Any], what: str, why: str) -> None:
    assert starved["codes"] == [0], starved["told"]
    assert what in starved["told"]
    assert why in starved["told"]
    saves = {m["updates"]: m["whole"] for m in starved["marks"] if m["what"] == "saved"}
    assert saves == {3: [3], 6: [3], 9: [3], 12: [3, 12], LAST: [12, LAST]}
    assert starved["final"] == whole["final"]


def test_a_step_that_is_not_a_number_is_skipped(killer: Killer, tmp_path: Path) -> None:
    words = ("--poisoned", 7)
    whole, killed_once, resumed = killer.live(
        tmp_path,
        life("whole", *words),
        life("killed", *words, "--die", "update:8"),
        life("killed", *words),
    )
    assert whole["codes"] == [0], whole["told"]
    assert whole["marks"][-1]["skipped"] == 2  # once in each epoch
    losses = [m["loss"] for m in whole["marks"] if m["what"] == "batch"]
    assert sum(loss != loss for loss in losses) == 2
    assert whole["newest"] == LAST  # what is not finite is not saved: these weights are
    assert killed_once["newest"] == 6
    assert resumed["final"] == whole["final"]


def test_weights_that_are_not_numbers_are_not_saved(killer: Killer, tmp_path: Path) -> None:
    (poisoned,) = killer.live(tmp_path, life("poisoned", "--poison-weights", 7))
    assert poisoned["codes"] == [0], poisoned["told"]
    assert "was not saved: it would be poisoned" in poisoned["told"]
    assert "head.weight (in model.safetensors) holds NaN" in poisoned["told"]
    assert [m["whole"] for m in poisoned["marks"] if m["what"] == "saved"][-1] == [3, 6]


# Under a launcher.


def final(folder: Path) -> tuple[int, str, str]:
    """Return what the newest checkpoint holds, to the last bit."""
    store = Store(folder / "checkpoints")
    loaded = store.load(store.newest_whole())
    rngs = [loaded.rank_part("rng", rank) for rank in range(loaded.world_size)]
    return loaded.step, fingerprint(loaded), digest(rngs)


def marks(folder: Path) -> list[dict[str, Any]]:
    path = folder / "marks"
    text = path.read_text() if path.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def wait_for(folder: Path, what: str, updates: int, life: int, process: Any) -> dict[str, Any]:
    """Return the mark once rank 0 has set it in that life of the training."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        pids: list[int] = []
        for mark in marks(folder):
            if mark["what"] == "begun" and mark["rank"] == 0:
                pids.append(mark["pid"])
            found = len(pids) == life and mark["pid"] == pids[-1]
            if found and (mark["what"], mark["updates"]) == (what, updates):
                return mark
        assert process.poll() is None, f"it ended before {what} {updates}: {process.told()}"
        time.sleep(0.002)
    raise AssertionError(f"waited in vain for {what} {updates} of life {life}: {process.told()}")


def rank_pids(folder: Path) -> list[int]:
    """Return the ranks' processes of the newest life."""
    begun = [m for m in marks(folder) if m["what"] == "begun"]
    return [m["pid"] for m in sorted(begun[-2:], key=lambda m: m["rank"])]


@pytest.fixture(scope="module")
def alone(killer: Killer, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, str]:
    """How the training of two processes ends that nobody disturbs."""
    folder = tmp_path_factory.mktemp("alone")
    killer.live(folder, life("run", ranks=2))
    assert final(folder / "run")[0] == LAST_OF_TWO
    return final(folder / "run")


class Started(subprocess.Popen[str]):
    """A training in processes of its own, in a terminal of its own if asked for."""

    def __init__(self, command: list[object], *, terminal: bool = False) -> None:
        self.keyboard, theirs = pty.openpty() if terminal else (-1, subprocess.DEVNULL)
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        super().__init__(
            [str(word) for word in command],
            env=child_environment(),
            stdin=theirs,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
            preexec_fn=_take_terminal if terminal else None,
        )
        if terminal:
            os.close(theirs)

    def told(self) -> str:
        self._output.seek(0)
        return self._output.read()

    def everyone(self) -> list[psutil.Process]:
        """Return its processes, the first one first."""
        try:
            first = psutil.Process(self.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def __exit__(self, *error: object) -> None:
        for process in self.everyone():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.wait()
        self._output.close()
        if self.keyboard >= 0:
            os.close(self.keyboard)


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def begun_pids(folder: Path) -> list[int]:
    """Return the ranks that have begun, in all lives of a training."""
    return [mark["pid"] for mark in marks(folder) if mark["what"] == "begun"]


def kill_ranks(folder: Path, kills: int, seed: int, *words: object) -> None:
    """Kill a random rank at random moments; the launcher starts both again."""
    rng = random.Random(seed)
    command = [*LAUNCH, "--max_restarts", kills, SCRIPT, folder, *words]
    with Started(command) as process:
        done = 0
        for number in range(kills):
            what = rng.choice(["begun", "batch", "update", "saving", "saved"])
            updates = done + rng.randint(1, 3)
            if what in ("saving", "saved"):
                updates = done + 3
            wait_for(folder, what, done if what == "begun" else updates, number + 1, process)
            while len(pids := begun_pids(folder)) < 2 * (number + 1):  # both are to be counted
                assert process.poll() is None, process.told()
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.03))
            os.kill(rng.choice(pids[-2:]), signal.SIGKILL)
            while any(map(psutil.pid_exists, pids[-2:])):  # the survivor may see a save through
                time.sleep(0.02)
            newest = Store(folder / "checkpoints").newest_whole()
            assert not newest.passed_over
            done = newest.manifest.step if newest.manifest else 0
        code = process.wait(timeout=240)
        assert code == 0, process.told()
    begun = [m["updates"] for m in marks(folder) if m["what"] == "begun"]
    assert len(begun) == 2 * (kills + 1)
    assert begun[::2] == begun[1::2], "both ranks begin at the same update"


@pytest.mark.parametrize(
    ("kills", "seed"),
    [(5, 0), *(pytest.param(10, seed, marks=pytest.mark.full) for seed in (1, 2))],
)
def test_one_rank_killed_again_and_again_and_restarted_by_the_launcher(
    killer: Killer, tmp_path: Path, kills: int, seed: int
) -> None:
    long = ("--epochs", kills + 1)  # of four updates each
    killer.live(tmp_path, life("whole", *long, ranks=2))
    # Slowly: it must be alive yet when the one that kills it gets to run.
    kill_ranks(tmp_path / "run", kills, seed, *long, "--pause", 0.05)
    assert final(tmp_path / "run") == final(tmp_path / "whole")


def check_preempted(process: Started, folder: Path, code: int, ranks: int = 2) -> None:
    """It left with that code and one whole checkpoint of its last update, and stayed away."""
    assert process.wait(timeout=240) == code, process.told()
    told = process.told()
    assert "Traceback" not in told, told
    newest = Store(folder / "checkpoints").newest_whole()
    assert newest.manifest is not None and not newest.passed_over
    last = max(m["updates"] for m in marks(folder))
    assert newest.manifest.step == last, told
    assert hidden(folder / "checkpoints") == []
    saved = [e.manifest.step for e in Store(folder / "checkpoints").entries() if e.manifest]
    assert sorted(saved) == sorted({last, *range(3, last, 3)})[-2:], "one more than by itself"
    assert len([m for m in marks(folder) if m["what"] == "begun"]) == ranks, "started again"


def goes_on(killer: Killer, folder: Path, ranks: int = 2) -> tuple[int, str, str]:
    """Let the training run to its end, and return that."""
    (rest,) = killer.live(folder.parent, life(folder.name, "--workers", 2, ranks=ranks))
    assert rest["codes"] == [0] * ranks, rest["told"]
    return final(folder)


SLOW = ("--workers", 2, "--pause", 0.1)


def test_ctrl_c_in_the_terminal_saves_once_and_the_rest_is_the_same_run(
    killer: Killer, tmp_path: Path, alone: tuple[int, str, str]
) -> None:
    folder = tmp_path / "run"
    with Started([*LAUNCH, SCRIPT, folder, *SLOW], terminal=True) as process:
        wait_for(folder, "batch", 4, 1, process)
        os.write(process.keyboard, b"\x03")
        check_preempted(process, folder, 130)
    assert goes_on(killer, folder) == alone


def test_ctrl_c_without_a_launcher(killer: Killer, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Started([sys.executable, SCRIPT, folder, *SLOW], terminal=True) as process:
        wait_for(folder, "batch", 4, 1, process)
        os.write(process.keyboard, b"\x03")
        check_preempted(process, folder, 130, ranks=1)
    killer.live(tmp_path, life("whole"))
    assert goes_on(killer, folder, ranks=1) == final(tmp_path / "whole")


@pytest.mark.parametrize(
    "whom",
    [
        "one rank",
        "every process",
        pytest.param("the launcher", marks=pytest.mark.full),
    ],
)
def test_a_termination_ends_both_ranks_after_the_same_step(
    killer: Killer, tmp_path: Path, alone: tuple[int, str, str], whom: str
) -> None:
    folder = tmp_path / "run"
    with Started([*LAUNCH, SCRIPT, folder, *SLOW]) as process:
        wait_for(folder, "batch", 4, 1, process)
        while len(everyone := process.everyone()) < 1 + 2 + 2 * 2:  # each rank has two workers
            assert process.poll() is None, process.told()
            time.sleep(0.01)
        if whom == "one rank":
            os.kill(rank_pids(folder)[1], signal.SIGTERM)
        for one in everyone if whom == "every process" else everyone[: whom == "the launcher"]:
            with suppress(psutil.NoSuchProcess):
                one.terminate()
        check_preempted(process, folder, 143)
    assert goes_on(killer, folder) == alone
