"""What a run looks like in plain lines, in a terminal and in a notebook."""

from __future__ import annotations

import io
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from typing import Any

import pytest

from anytrain.core.errors import Notice
from anytrain.engine.recording import console as consoles
from anytrain.engine.recording.console import (
    BoundedCurve,
    Course,
    GuardedConsole,
    Pace,
    PlainDisplay,
    in_notebook,
    is_terminal,
    pick,
)
from anytrain.engine.recording.formatting import LogEntry, Summary
from anytrain.engine.recording.notebook import NotebookBar
from anytrain.engine.recording.small_charts import chart
from anytrain.engine.recording.terminal import Terminal

SUMMARY = Summary(
    steps=60,
    max_steps=60,
    epochs=3.0,
    seconds=75.0,
    samples_per_second=312.0,
    loss=0.25,
    lowest_loss=(0.2, 50),
    metrics={"eval_accuracy": 0.86},
    best=("eval_accuracy", 0.87, 40),
    best_checkpoint="runs/mrpc/checkpoint-40",
    results="runs/mrpc",
)


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def trained(seen: Any, clock: Clock) -> None:
    """Ten steps of one second after a first one of a minute; 32 samples each."""
    seen.begin(Course(total=60, samples_per_step=32, memory=lambda: {"cuda:0": 3 * 2**30}))
    clock.now += 60
    seen.advance(1)
    for step in range(2, 11):
        clock.now += 1
        seen.advance(step)
    seen.note(LogEntry(10, 0.5, {"loss": 0.693147, "lr": 2e-05, "grad_norm": 1.5}))


def test_the_first_step_counts_neither_for_the_speed_nor_for_the_time_left() -> None:
    pace = Pace(0.0, 0)
    pace.mark(60.0, 1)
    assert pace.seconds_left(10) is None and pace.steps_per_second() is None
    pace.mark(61.0, 2)
    assert pace.seconds_left(10) is None
    pace.mark(62.0, 3)
    assert pace.seconds_left(10) == pytest.approx(7.0)
    assert pace.steps_per_second() == pytest.approx(1.0)


def test_an_evaluation_does_not_slow_the_training_but_delays_its_end() -> None:
    pace = Pace(0.0, 0)
    for step in range(1, 6):
        pace.mark(float(step), step)
    pace.pause(5.0)
    pace.go_on(25.0)
    pace.mark(26.0, 6)
    assert pace.steps_per_second() == pytest.approx(1.0)
    assert pace.seconds_left(11) == pytest.approx(25.0)


def test_speed_is_that_of_the_last_seconds() -> None:
    pace = Pace(0.0, 0)
    for step in range(1, 100):
        pace.mark(10.0 * step, step)
    for step in range(100, 200):
        pace.mark(990.0 + 0.5 * (step - 99), step)
    assert pace.steps_per_second() == pytest.approx(2.0)


def test_plain_is_one_line_an_entry_and_no_control_characters() -> None:
    stream, clock = io.StringIO(), Clock()
    plain = PlainDisplay(stream, clock)
    trained(plain, clock)
    plain.evaluating(1, 13)
    plain.evaluated()
    plain.note(LogEntry(10, 0.5, {"eval_loss": 0.5}, is_evaluation=True))
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(
        r"step 10/60  epoch 0\.5  loss 0\.6931  lr 2e-05  grad_norm 1\.5  32\.0 samples/s  "
        r"ETA 0:50  host [\d.]+ [MG]iB  cuda:0 3\.0 GiB",
        first,
    )
    assert second == "step 10/60  epoch 0.5  eval_loss 0.5"


def test_plain_ends_with_the_summary() -> None:
    stream = io.StringIO()
    PlainDisplay(stream).end(SUMMARY)
    assert stream.getvalue() == (
        "Training done\n"
        "  steps               60\n"
        "  epochs              3\n"
        "  time                1:15\n"
        "  samples/s           312\n"
        "  last loss           0.25 (lowest 0.2 at step 50)\n"
        "  eval_accuracy       0.86\n"
        "  best eval_accuracy  0.87 at step 40\n"
        "  best checkpoint     runs/mrpc/checkpoint-40\n"
        "  results             runs/mrpc\n"
    )


def test_a_training_that_was_cut_short_says_so() -> None:
    stream = io.StringIO()
    PlainDisplay(stream).end(Summary(steps=5, max_steps=60, epochs=None, seconds=1.0))
    assert "Training stopped early\n  steps  5 of 60\n" in stream.getvalue()


def test_a_reader_that_went_away_does_not_stop_the_run() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream, clock = os.fdopen(writing, "w"), Clock()
    plain = PlainDisplay(stream, clock)
    with pytest.warns(Notice, match="no longer shown") as told:
        trained(plain, clock)
        plain.end(SUMMARY)
    assert len(told) == 1
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_a_stream_that_knows_only_ascii_gets_ascii() -> None:
    buffer = io.BytesIO()
    plain = PlainDisplay(io.TextIOWrapper(buffer, encoding="ascii"))
    plain.begin(Course(total=1))
    plain.note(LogEntry(1, None, {"größe": 1.0}))
    assert buffer.getvalue().startswith(b"step 1/1  gr??e 1")


def bars(width: int, is_ascii: bool = False) -> list[str]:
    stream, clock = io.StringIO(), Clock()
    terminal = Terminal(stream, width=width, clock=clock)
    trained(terminal, clock)
    terminal.evaluating(4, 13)
    return [line.plain for line in terminal.bars(width - 1, is_ascii)]


def test_the_bars_show_steps_time_left_loss_rate_speed_and_memory_in_80_columns() -> None:
    training, figures, evaluating = bars(80)
    assert re.fullmatch(r"training ━+╌+ 10/60   17%  1:09, 0:50 left", training)
    assert re.match(r"loss 0\.6931  lr 2e-05  32\.0 samples/s  host .*  cuda:0 3\.0 GiB", figures)
    assert re.fullmatch(r"evaluating ━+╌+  4/13   31%  0:00", evaluating)
    assert len(training) == len(evaluating) == 79


def test_the_figures_hold_the_curve_of_the_loss_and_where_the_time_went() -> None:
    clock = Clock()
    terminal = Terminal(io.StringIO(), width=80, clock=clock)
    spent = {"start": 0.1, "data": 0.004, "step": 0.7, "evaluate": 0.196}
    terminal.begin(Course(total=60, shares=lambda: spent))
    for step, loss in enumerate([0.9, 0.6, float("nan"), 0.4, 0.3, 0.2], start=1):
        terminal.note(LogEntry(step, None, {"loss": loss}))
    _, figures, times = [line.plain for line in terminal.bars(79, is_ascii=False)]
    assert figures.startswith("loss 0.2 █▅▃▂▁  ")
    assert times == "time  step 70%  evaluate 20%  start 10%"
    terminal.standing.remark = "nothing heard for 2:00"
    assert terminal.bars(79, is_ascii=False)[-1].plain == "nothing heard for 2:00"
    assert all(line.plain.isascii() for line in terminal.bars(79, is_ascii=True))


def test_a_long_run_keeps_a_bounded_number_of_losses_and_both_ends_of_its_curve() -> None:
    trail = BoundedCurve()
    for step in range(1, 100_001):
        trail.add(step, 1 / step)
    points = trail.points()
    assert 256 <= len(points) <= 512
    assert points[0][1] > 0.01 and points[-1] == (100_000, pytest.approx(1e-5, rel=0.01))
    between = [late - early for (early, _), (late, _) in zip(points, points[1:-1], strict=False)]
    assert len(set(between)) == 1


@pytest.mark.parametrize("width", [6, 10, 20, 33, 50, 80, 300])
@pytest.mark.parametrize("is_ascii", [True, False])
def test_no_bar_is_wider_than_the_terminal(width: int, is_ascii: bool) -> None:
    drawn = bars(width, is_ascii)
    assert all(len(line) < width for line in drawn)
    assert not is_ascii or all(line.isascii() for line in drawn)
    if width >= 20:
        assert "10/60" in drawn[0]


def test_a_bar_without_a_total_counts() -> None:
    stream, clock = io.StringIO(), Clock()
    terminal = Terminal(stream, width=40, clock=clock)
    terminal.evaluating(7, None)
    assert terminal.bars(39, False)[0].plain == "evaluating 7  0:00"


def test_five_drawings_a_second_at_most() -> None:
    stream, clock = io.StringIO(), Clock()
    terminal = Terminal(stream, width=80, clock=clock)
    terminal.begin(Course(total=10_000))
    for step in range(1, 1001):
        clock.now += 0.001
        terminal.advance(step)
    assert 4 <= stream.getvalue().count("training") <= 7
    terminal.close()


def test_a_step_between_two_drawings_costs_little() -> None:
    terminal = Terminal(io.StringIO(), width=80)
    terminal.begin(Course(total=10**9))
    terminal.advance(1)
    terminal._due = float("inf")
    best = float("inf")
    for _ in range(5):  # the quietest of five: other work shares these cores
        began = time.perf_counter()
        for step in range(2000):
            terminal.advance(step)
        best = min(best, (time.perf_counter() - began) / 2000)
    terminal.close()
    assert best < 20e-6


def test_lines_go_above_the_bars_and_the_cursor_is_never_hidden() -> None:
    stream, clock = io.StringIO(), Clock()
    terminal = Terminal(stream, width=80, clock=clock)
    trained(terminal, clock)
    terminal.above(stream, "a line\n")
    terminal.end(SUMMARY)
    drawn = stream.getvalue()
    assert "\r\x1b[Ja line\n\r\x1b[Jtraining" in drawn
    assert "Training done" in drawn and drawn.endswith("\r\x1b[J")
    assert "\x1b[?25l" not in drawn


def test_a_terminal_that_knows_only_ascii_shows_the_rest_as_question_marks() -> None:
    buffer = io.BytesIO()
    terminal = Terminal(io.TextIOWrapper(buffer, encoding="ascii"), width=80)
    terminal.begin(Course(total=10))
    terminal.note(LogEntry(1, None, {"loss": 1.0, "précision": 0.5}))
    terminal.say("Größe")
    terminal.end(replace(SUMMARY, results="/home/josé/run"))
    drawn = buffer.getvalue()
    assert b"pr?cision 0.5" in drawn and b"Gr??e" in drawn and b"/home/jos?/run" in drawn
    assert not terminal.is_broken


def test_a_terminal_that_is_closed_meanwhile_is_told_of_once() -> None:
    with own_streams() as (out, err):
        terminal = Terminal(width=80)
        terminal.begin(Course(total=10))
        print("a line that is not whole", end="")
        out.close()
        with pytest.warns(Notice, match="no longer shown") as told:
            terminal.note(LogEntry(1, None, {"loss": 1.0}))
        terminal.end(SUMMARY)
        assert len(told) == 1 and terminal.is_broken
        assert (sys.stdout, sys.stderr) == (out, err)


def test_losses_as_large_as_floats_get_are_drawn() -> None:
    terminal = Terminal(io.StringIO(), width=80)
    terminal.begin(Course(total=10))
    for step, loss in enumerate([1e308, -1e308, 1.7e308, 1.7e308], 1):
        terminal.note(LogEntry(step, None, {"loss": loss}))
    assert "loss 1.7e+308 ▆▁██" in terminal.bars(79, False)[1].plain


def test_a_display_that_fails_ends_and_the_run_goes_on() -> None:
    def no_memory() -> dict[str, int]:
        raise RuntimeError("no such device")

    with own_streams() as (out, err):
        guarded = GuardedConsole(Terminal(width=80))
        with pytest.warns(Notice, match="no longer shown: no such device") as told:
            guarded.begin(Course(total=10, memory=no_memory))
        guarded.advance(1)
        guarded.note(LogEntry(1, None, {"loss": 1.0}))
        guarded.end(SUMMARY)
        guarded.close()
        assert len(told) == 1 and (sys.stdout, sys.stderr) == (out, err)


def test_a_print_never_meets_what_went_wrong_with_the_bars() -> None:
    def no_shares() -> dict[str, float]:
        raise ZeroDivisionError

    with own_streams() as (out, _):
        terminal = Terminal(width=80)
        terminal.begin(Course(total=10))
        terminal.course = Course(total=10, shares=no_shares)
        with pytest.warns(Notice, match="no longer shown: ZeroDivisionError"):
            print("a line")
        print("another")
        assert out.getvalue().endswith("a line\nanother\n")


def test_the_summary_of_a_resumed_run_says_what_its_time_is_of() -> None:
    told = dict(
        Summary(
            steps=9, max_steps=9, epochs=None, seconds=1.0, samples_per_second=8.0, since=4
        ).rows()
    )
    assert told["time since step 4"] and told["samples/s since step 4"]
    assert "time" not in told and "samples/s" not in told


def test_a_start_that_had_nothing_left_to_do_tells_no_speed() -> None:
    nothing = Summary(
        steps=9, max_steps=9, epochs=1.0, seconds=0.1, samples_per_second=0.0, since=9
    )
    assert dict(nothing.rows()) == {"steps": "9", "epochs": "1"}


def test_a_narrow_terminal_gets_the_summary_as_lines() -> None:
    stream = io.StringIO()
    terminal = Terminal(stream, width=30)
    terminal.begin(Course(total=60))
    terminal.end(SUMMARY)
    assert "results: runs/mrpc" in stream.getvalue()
    assert "│" not in stream.getvalue()


@contextmanager
def own_streams() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """Stand in for standard output and error, later than pytest's own capture does."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        yield out, err


def test_what_is_printed_meanwhile_goes_above_the_bars() -> None:
    with own_streams() as (out, err):
        terminal = Terminal(width=60)
        terminal.begin(Course(total=10))
        print("half", end="")
        assert "half" not in out.getvalue()
        print(" and whole")
        print("to stderr", file=sys.stderr)
        sys.stderr.write("old\rnew")
        terminal.close()
        assert "\r\x1b[Jhalf and whole\n\r\x1b[Jtraining" in out.getvalue()
        assert err.getvalue() == "to stderr\nnew\n"
        assert (sys.stdout, sys.stderr) == (out, err)


def test_a_logger_that_kept_the_stand_in_still_writes_after_the_end() -> None:
    with own_streams() as (_, err):
        terminal = Terminal(width=60)
        terminal.begin(Course(total=10))
        kept = sys.stderr
        terminal.close()
        kept.write("later")
        assert err.getvalue() == "later"


def test_an_evaluation_alone_has_a_bar_and_leaves_nothing_behind() -> None:
    with own_streams() as (out, _):
        terminal = Terminal(width=60)
        terminal.evaluating(1, 2)
        terminal.evaluated()
        assert "evaluating" in out.getvalue()
        assert out.getvalue().endswith("\r\x1b[J")
        assert sys.stdout is out


class Page:
    """What a notebook shows, each update kept."""

    def __init__(self) -> None:
        self.shown: list[list[dict[str, str]]] = []

    def show(self, rendering: Any) -> Any:
        updates = [rendering]
        self.shown.append(updates)

        class Handle:
            def update(self, rendering: Any, raw: bool) -> None:
                assert raw
                updates.append(rendering)

        return Handle()


def test_a_notebook_gets_one_output_with_a_table_like_hfs() -> None:
    page, clock = Page(), Clock()
    bar = NotebookBar(page.show, clock)
    bar.begin(Course(total=60, samples_per_step=32, evaluates=True))
    for step in range(1, 61):
        clock.now += 1
        bar.advance(step)
        if step % 10 == 0:
            bar.note(LogEntry(step, None, {"loss": 1 / step}))
        if step % 30 == 0:
            bar.evaluating(1, 13)
            found = {"eval_loss": 0.5, "eval_f1_<b>": 0.75}
            bar.note(LogEntry(step, None, found, is_evaluation=True))
            bar.evaluated()
    running = page.shown[0][-1]
    bar.end(SUMMARY)
    assert len(page.shown) == 1
    assert '<progress value="60" max="60"' in running["text/html"]
    last = page.shown[0][-1]
    assert last["text/plain"].splitlines()[:3] == [
        "Step  Training Loss  Validation Loss  F1 <b>",
        "30  0.03333  0.5  0.75",
        "60  0.01667  0.5  0.75",
    ]
    assert "F1 &lt;b&gt;" in last["text/html"] and "<progress" not in last["text/html"]
    assert "runs/mrpc/checkpoint-40" in last["text/html"]


def test_curves_of_losses_and_figures_stand_below_the_notebook_bar_and_stay() -> None:
    page, clock = Page(), Clock()
    bar = NotebookBar(page.show, clock)
    bar.begin(Course(total=4, evaluates=True))
    assert "<svg" not in page.shown[0][-1]["text/html"]
    for step in range(1, 5):
        bar.note(LogEntry(step, None, {"loss": 4.0 - step}))
        found = {"eval_loss": 0.5, "eval_f1_<b>": math.nan if step == 1 else step / 4}
        bar.note(LogEntry(step, None, found, is_evaluation=True))
    bar.end(SUMMARY)
    shown = [each["text/html"] for each in page.shown[0]]
    counts = [each.count("<svg") for each in shown]
    assert counts == sorted(counts)
    assert counts[-1] == 2
    assert shown[-1].count("<polyline") == 3
    assert "training</span>" not in shown[-1]
    assert "</span> training 0<" in shown[-1]
    assert "</span> validation 0.5<" in shown[-1]
    assert "<b>F1 &lt;b&gt;</b>" in shown[-1]
    assert "nan" not in shown[-1].partition("<table")[0]
    assert "<svg" not in "".join(each["text/plain"] for each in page.shown[0])


def test_a_curve_of_one_value_or_of_huge_ones_is_drawn() -> None:
    flat = chart("Loss", {"training": [(1, 2.0), (2, 2.0)]})
    huge = chart("Loss", {"training": [(1, -1.7e308), (2, 1.7e308)]})
    for drawn in (flat, huge):
        (points,) = re.findall('points="([^"]*)"', drawn)
        assert all(math.isfinite(float(value)) for value in re.split("[ ,]", points))
    assert chart("Loss", {"training": [(1, 2.0)]}) == ""


def test_a_notebook_without_evaluations_lists_the_training_loss() -> None:
    page = Page()
    bar = NotebookBar(page.show)
    bar.begin(Course(total=1000))
    for step in range(1, 301):
        bar.note(LogEntry(step, None, {"loss": 0.5}))
    table = page.shown[0][-1]["text/html"]
    assert table.count("<tr><td") == 200
    assert "100 earlier entries are not shown." in table


def test_a_real_ipython_display_is_updated_in_place() -> None:
    capture = pytest.importorskip("IPython.utils.capture", reason="IPython is not installed here")
    from IPython.core.interactiveshell import InteractiveShell

    InteractiveShell.instance()
    try:
        with capture.capture_output() as captured:
            bar = NotebookBar()
            bar.begin(Course(total=3))
            bar.note(LogEntry(1, None, {"loss": 0.5}))
            bar.end(SUMMARY)
    finally:
        InteractiveShell.clear_instance()
    ids = {output.transient["display_id"] for output in captured.outputs}
    assert len(ids) == 1
    assert [output.update for output in captured.outputs] == [False, True, True]


def test_pick_takes_plain_lines_where_either_stream_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Tty())
    monkeypatch.setattr(sys, "stderr", Tty())
    assert isinstance(pick(), Terminal)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(pick(), PlainDisplay)
    monkeypatch.setattr(sys, "stderr", Tty())
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(pick(), PlainDisplay)
    assert not is_terminal(None)
    monkeypatch.setattr(consoles, "in_notebook", lambda: True)
    assert isinstance(pick(), NotebookBar)


def test_a_python_without_a_kernel_is_no_notebook() -> None:
    assert not in_notebook()
