"""What a watcher tells of a run, from records that grow while they are read."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from anytrain.core.records import open_run
from anytrain.engine.recording.console import PlainDisplay
from anytrain.engine.recording.terminal import Terminal
from anytrain.insight.report.page import how_it_stands
from anytrain.insight.report.watch import RunView, SilentDisplay, follow, present, summary
from anytrain.insight.report.why import explain
from made_records import Record


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path / "run")


@pytest.fixture(scope="module")
def gone() -> int:
    """The id of a process that is no more."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def followed(record: Record, acts: list[Callable[[], None]], linger_s: float = 0.0):
    """Follow a run as plain lines; before each look but the first, the next act happens."""
    stream, said = io.StringIO(), []
    rest = iter(acts)

    def wait(seconds: float) -> bool:
        act = next(rest, None)
        if act is not None:
            act()
        return act is None

    well = follow(
        record.folder, lambda clock: PlainDisplay(stream, clock), wait, said.append, linger_s
    )
    return well, stream.getvalue().splitlines(), said


def test_it_waits_for_a_record_then_for_a_step_and_then_shows_entries_as_they_come(record) -> None:
    def first_life() -> None:
        record.begin()

    def first_steps() -> None:
        record.train(range(1, 21))

    def the_end() -> None:
        record.event("checkpoint", path="/somewhere/checkpoint-20", bytes=1)
        record.now += 2
        record.log(20, eval_loss=0.5, eval_runtime=2.0)
        record.end(20)

    well, lines, said = followed(record, [lambda: None, first_life, first_steps, the_end])
    assert well
    assert said == [f"Waiting for the record of a run in {record.folder} ... (q or Ctrl-C leaves)"]
    assert lines[0].startswith("step 10/1000  epoch 0.1  loss 0.09091  lr 0.001")
    assert "32.0 samples/s" in lines[1] and "peak 3.0 GiB" in lines[1]
    assert lines[2:4] == ["saved checkpoint-20", "step 20/1000  epoch 0.2  eval_loss 0.5"]
    assert "Training stopped early" in lines
    assert ["results", str(record.folder)] in [line.split() for line in lines]


def test_leaving_is_no_failure_and_says_nothing_of_an_end(record) -> None:
    record.begin()
    record.train(range(1, 11))
    well, lines, _ = followed(record, [])
    assert well and len(lines) == 1


def test_of_a_long_history_the_last_entries_are_shown_and_the_curve_has_all(record) -> None:
    record.begin()
    record.train(range(1, 501))
    watch = RunView(open_run(record.folder), lambda clock: PlainDisplay(io.StringIO(), clock))
    watch.look()
    lines = watch.view._stream.getvalue().splitlines()  # type: ignore[union-attr]
    assert lines[0] == "40 earlier entries are not shown"
    assert [line.split("/")[0] for line in lines[1:]] == [f"step {n}" for n in range(410, 501, 10)]
    assert len(watch.view.standing.losses.points()) == 50
    assert watch.view.speed() == "32.0 samples/s"


def test_a_killed_run_is_told_as_killed_and_is_no_success(record, gone: int) -> None:
    record.now -= 600
    record.begin(pid=gone)
    record.train(range(1, 31))
    well, lines, _ = followed(record, [])
    assert not well
    heading = next(line for line in lines if "killed" in line)
    assert heading.startswith("The run was killed after step 30; last heard 9:")


def test_a_run_that_is_killed_and_resumed_while_watched_goes_on(record, gone: int) -> None:
    running = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    record.now = time.time()  # a process is older than what it writes
    record.begin(pid=running.pid)
    record.train(range(1, 31))

    def kill() -> None:
        running.kill()
        running.wait()

    def resume() -> None:
        record.begin(20)
        record.train(range(21, 41))

    def finish() -> None:
        record.end(40)

    well, lines, _ = followed(record, [kill, resume, finish], linger_s=5.0)
    assert well
    where = [n for n, line in enumerate(lines) if "started again" in line]
    assert lines[where[0]].endswith("Waiting 5 s for it to be started again.")
    assert lines[where[1]] == "started again at step 20"
    steps = [line.split("/")[0] for line in lines if line.startswith("step ")]
    assert steps == ["step 10", "step 20", "step 30", "step 30", "step 40"]


def test_silence_is_told_and_told_again_when_it_has_lasted_twice_as_long(
    record, monkeypatch: pytest.MonkeyPatch
) -> None:
    record.begin()
    record.train(range(1, 31))
    stream = io.StringIO()
    watch = RunView(open_run(record.folder), lambda clock: PlainDisplay(stream, clock))
    heard = record.now
    for silent in (30, 90, 120, 200):
        monkeypatch.setattr(time, "time", lambda silent=silent: heard + silent)
        watch.look()
    told = [line for line in stream.getvalue().splitlines() if "nothing heard" in line]
    assert [line.split(";")[0] for line in told] == [
        "nothing heard for 1:30",
        "nothing heard for 3:20",
    ]


def test_a_run_of_another_host_is_followed_and_never_called_dead(record) -> None:
    record.now -= 600
    record.begin(host="elsewhere", pid=1)
    record.train(range(1, 31))
    watch = RunView(open_run(record.folder), SilentDisplay)
    watch.look()
    assert not watch.is_over
    assert "known on elsewhere only" in watch.view.standing.remark


def test_the_terminal_has_the_same_lines_as_the_run_itself(
    record, monkeypatch: pytest.MonkeyPatch
) -> None:
    record.begin()
    record.train(range(1, 31))
    monkeypatch.setattr(time, "time", lambda: record.now)
    watch = RunView(
        open_run(record.folder), lambda clock: Terminal(io.StringIO(), width=90, clock=clock)
    )
    watch.look()
    bar, figures, times = [line.plain for line in watch.view.bars(89, False)]  # type: ignore[union-attr]
    assert bar.startswith("training ━") and " 30/1000    3%  0:30, 16:10 left" in bar
    assert figures.startswith("loss 0.03226 █▃▁  lr 0.001  32.0 samples/s  peak 3.0 GiB")
    assert times == "time  step 80%  data 15%  start 5%"


def test_evaluations_do_not_slow_the_speed_that_is_shown(record) -> None:
    record.begin()
    record.train(range(1, 11))
    for step in (11, 21, 31):
        record.now += 100
        record.log(step - 1, eval_loss=0.4, eval_runtime=100.0)
        record.train(range(step, step + 10))
    watch = RunView(open_run(record.folder), SilentDisplay)
    watch.look()
    assert watch.view.speed() == "32.0 samples/s"


def test_the_present_state_is_a_few_lines(record, monkeypatch: pytest.MonkeyPatch) -> None:
    record.begin()
    record.train(range(1, 31))
    monkeypatch.setattr(time, "time", lambda: record.now)
    record.log(30, eval_loss=0.25, eval_accuracy=0.9, eval_runtime=1.0)
    lines = present(open_run(record.folder), 80, is_ascii=True)
    assert lines[0].startswith("run: running; process ") and "last heard 0:00 ago" in lines[0]
    assert lines[-1] == "eval_loss 0.25  eval_accuracy 0.9"
    assert all(line.isascii() for line in lines)


def test_a_run_that_is_over_has_no_time_left(record, gone: int) -> None:
    record.now -= 600
    record.begin(pid=gone)
    record.train(range(1, 31))
    lines = present(open_run(record.folder), 80, is_ascii=True)
    assert " 30/1000    3%  0:30" in lines[1] and "left" not in lines[1]


def test_a_run_that_was_started_over_between_two_looks_is_followed_anew(record) -> None:
    record.begin()
    record.train(range(1, 501))
    stream = io.StringIO()
    watch = RunView(open_run(record.folder), lambda clock: PlainDisplay(stream, clock))
    watch.look()
    shutil.rmtree(record.folder)
    record.begin()
    record.train(range(1, 31))
    watch.run.refresh()
    watch.look()
    assert watch.view.step == 30
    lines = stream.getvalue().splitlines()
    assert lines[-4] == "started again at step 0"
    assert [line.split("/")[0] for line in lines[-3:]] == ["step 10", "step 20", "step 30"]


def test_a_run_that_has_only_started_says_so(record) -> None:
    record.begin()
    (record.folder / "timesheet.jsonl").unlink()
    (record.folder / "metrics.jsonl").write_text("")
    assert present(open_run(record.folder), 80, is_ascii=False)[0].startswith("run: started")


def test_an_own_loop_shows_the_loss_under_the_name_it_was_logged_by(record) -> None:
    record.begin(max_steps=None, samples_per_step=None)
    for step in range(1, 4):
        record.now += 1
        record.log(step, **{"val/loss": 9.0, "train/loss": 1 / step})
    lines = present(open_run(record.folder), 100, is_ascii=False)
    assert "train/loss 0.3333 █▃▁" in lines[2]


def test_the_step_of_an_own_loop_is_its_updates_not_what_it_logs_at(record, gone: int) -> None:
    record.begin(pid=gone, max_steps=None, samples_per_step=None)
    for update in range(1, 10):  # of four batches each; the script counts batches
        record.train(range(update, update + 1))
        record.log(4 * update, loss=1 / update)
    run = open_run(record.folder)
    lines = present(run, 100, is_ascii=False)
    assert "killed after step 9;" in lines[0]
    assert lines[1].startswith("training 9 ") and "1.0 steps/s" in lines[2]
    assert lines[-1] == "last logged at step 36"
    watch = RunView(run, SilentDisplay)
    watch.look()
    assert summary(watch).steps == explain(run.lives)["step"] == 9
    assert "It is known up to step 9 (" in how_it_stands(run)


def test_nothing_that_a_run_wrote_can_move_the_cursor(record) -> None:
    record.begin()
    record.train(range(1, 11))
    record.log(10, **{"\x1b[2Jname": "\x1b]0;title\x07", "loss": 0.5})
    record.event("notice", text="\x1b[31mred\nline")
    stream = io.StringIO()
    watch = RunView(open_run(record.folder), lambda clock: PlainDisplay(stream, clock))
    record.event("notice", text="\x1b[31mred\rline")
    watch.run.refresh()
    watch.look()
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()
    assert r"notice: \x1b[31mred\rline" in stream.getvalue()


def test_the_summary_knows_the_best_and_the_lowest(record) -> None:
    record.begin()
    record.train(range(1, 31))
    record.log(30, loss=float("inf"))
    record.event("best", metric="eval_accuracy", value=0.9, step=20, path="runs/checkpoint-20")
    record.log(30, train_runtime=12.5, train_samples_per_second=80.0, train_loss=0.1)
    record.end(30, "failed")
    watch = RunView(open_run(record.folder), SilentDisplay)
    watch.look()
    told = summary(watch)
    assert told.lowest_loss == (pytest.approx(1 / 31), 30)
    assert told.best == ("eval_accuracy", 0.9, 20)
    assert (told.seconds, told.samples_per_second) == (12.5, 80.0)
    assert told.title == "The run failed at step 30."


def test_of_a_very_long_run_all_evaluations_and_the_newest_entries_are_read(record) -> None:
    record.begin()
    told = ({"step": n, "time": record.now + n / 100, "loss": 1 / n} for n in range(1, 50_001))
    lines = [json.dumps({**one, "eval_f1": 1, "eval_runtime": 0} if one["step"] == 7 else one)
             for one in told]  # fmt: skip
    with (record.folder / "metrics.jsonl").open("a") as file:
        file.write("\n".join(lines) + "\n")
    run = open_run(record.folder)
    began = time.process_time()
    watch = RunView(run, SilentDisplay)
    watch.look()
    assert time.process_time() - began < 2.0
    assert watch.view.step == 50_000 and watch.evaluated["eval_f1"] == "1"
    assert watch.view.speed() == "3,200 samples/s"


def test_an_evaluation_of_loaded_weights_is_told_as_such(record) -> None:
    record.begin()
    record.train(range(1, 21))
    record.log(20, eval_loss=0.5, eval_runtime=1.0)
    record.log(20, eval_loss=0.75, eval_runtime=1.0, event="loaded", of="checkpoint-10")
    record.end(20)
    _, lines, _ = followed(record, [])
    assert "evaluated checkpoint-10: eval_loss 0.75" in lines
    watch = RunView(open_run(record.folder), lambda clock: SilentDisplay(clock))
    watch.look()
    assert summary(watch).metrics == {"eval_loss": "0.5"}
