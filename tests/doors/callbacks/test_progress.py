"""Progress from outside: in a terminal, in a pipe, on other ranks, and when it is broken off."""

from __future__ import annotations

import ast
import os
import pty
import re
import select
import signal
import struct
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from anytrain.doors.callbacks import (
    Callbacks,
    DefaultFlowCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerState,
)
from anytrain.doors.callbacks.progress import summarize
from anytrain.engine.recording.console import Course
from anytrain.engine.recording.formatting import LogEntry, Summary
from launching import child_environment, run_script, script_file

ARGS = SimpleNamespace(
    logging_first_step=False,
    logging_strategy="steps",
    eval_strategy="steps",
    eval_delay=0,
    save_strategy="no",
    output_dir="runs/mrpc",
    metric_for_best_model="accuracy",
)

SCRIPT = """
import os, sys, time
from types import SimpleNamespace
from anytrain.doors.callbacks import Callbacks, DefaultFlowCallback, ProgressCallback, TrainerState

args = SimpleNamespace(
    logging_first_step=False, logging_strategy="steps", eval_strategy="steps", eval_delay=0,
    save_strategy="no", output_dir="runs/mrpc", metric_for_best_model="accuracy",
)
state = TrainerState(max_steps=20, logging_steps=5, eval_steps=10)
callbacks = Callbacks([DefaultFlowCallback, ProgressCallback])
callbacks.eval_dataloader = [0, 1, 2]

def log(values):
    state.log_history.append({**values, "step": state.global_step})
    callbacks.tell("log", args, state, logs=values)

callbacks.tell("train_begin", args, state, facts=lambda: {"samples_per_step": 8})
try:
    for step in range(1, 21):
        time.sleep(PAUSE)
        state.global_step, state.epoch = step, step / 10
        asked = callbacks.tell("step_end", args, state)
        if step == 7:
            print("a line of the user's", flush=True)
            if os.fork() == 0:
                print("a line of a worker's", flush=True)
                os._exit(0)
            os.wait()
        if "log" in asked:
            log({"loss": 1 / step, "grad_norm": 1.5, "learning_rate": 2e-5})
        if "evaluate" in asked:
            for _ in range(3):
                callbacks.tell("prediction_step", args, state)
            found = {"eval_loss": 0.5, "eval_accuracy": 0.75, "eval_runtime": 1.0}
            log(found)
            callbacks.tell("evaluate", args, state, metrics=found)
    log({"train_runtime": 2.0, "train_samples_per_second": 80.0, "train_loss": 0.4})
    callbacks.tell("train_end", args, state)
except BaseException:
    callbacks.close()
    raise
assert "torch" not in sys.modules
"""


def in_terminal(script: str, width: int, interrupt_after: bytes | None = None) -> tuple[str, int]:
    """Run a script on a terminal of its own; return all it wrote and its exit status."""
    import fcntl
    import termios

    with script_file(script) as path:
        pid, terminal = pty.fork()
        if pid == 0:
            size = struct.pack("HHHH", 24, width, 0, 0)
            fcntl.ioctl(1, termios.TIOCSWINSZ, size)
            environ = child_environment({"TERM": "xterm-256color", "PYTHONUTF8": "1"})
            os.execve(sys.executable, [sys.executable, str(path)], environ)
        written, deadline = b"", time.monotonic() + 240
        while time.monotonic() < deadline:
            if not select.select([terminal], [], [], 1.0)[0]:
                continue
            try:
                chunk = os.read(terminal, 65536)
            except OSError:  # the other side is closed
                break
            written += chunk
            if interrupt_after is not None and interrupt_after in written:
                interrupt_after = os.write(terminal, b"\x03") and None
        else:
            os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(terminal)
    return written.decode(), status


def test_a_terminal_shows_bars_lines_above_them_and_a_table_at_the_end() -> None:
    drawn, status = in_terminal(SCRIPT.replace("PAUSE", "0.01"), width=80)
    assert status == 0, drawn
    assert "\x1b[Jstep  5  epoch 0.50  loss 0.2  lr 2e-05  grad_norm 1.5\r\n" in drawn
    assert "eval_loss 0.5  eval_accuracy 0.75" in drawn
    assert "a line of the user's\r\n" in drawn
    assert "a line of a worker's\x1b[K\r\n" in drawn
    assert "evaluating" in drawn and "20/20" in drawn
    assert "Training done" in drawn and "│ results" in drawn
    assert "\x1b[?25l" not in drawn
    assert drawn.endswith("\r\x1b[J")


def test_ctrl_c_leaves_a_terminal_in_order() -> None:
    drawn, status = in_terminal(SCRIPT.replace("PAUSE", "0.1"), 60, interrupt_after=b"step  5")
    assert status == -signal.SIGINT
    assert "KeyboardInterrupt" in drawn.rpartition("\r\x1b[J")[2]
    assert "\x1b[?25l" not in drawn


def test_a_pipe_gets_plain_lines() -> None:
    told = run_script(SCRIPT.replace("PAUSE", "0.01")).stdout
    assert "\x1b" not in told and "\r" not in told
    lines = told.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step")] == [
        "5/20",
        "10/20",
        "10/20",
        "15/20",
        "20/20",
        "20/20",
    ]
    assert re.search(r"samples/s  ETA \d:\d\d", lines[0])
    assert lines[-1].split() == ["results", "runs/mrpc"]


class Seen:
    """A console that keeps what it is told."""

    def __init__(self) -> None:
        self.courses: list[Course] = []
        self.steps: list[int] = []
        self.entries: list[LogEntry] = []
        self.evaluations: list[tuple[int, int | None]] = []
        self.summaries: list[Summary] = []
        self.num_evaluated = self.num_closed = 0

    def begin(self, course: Course) -> None:
        self.courses.append(course)

    def advance(self, step: int) -> None:
        self.steps.append(step)

    def note(self, entry: LogEntry) -> None:
        self.entries.append(entry)

    def evaluating(self, done: int, total: int | None) -> None:
        self.evaluations.append((done, total))

    def evaluated(self) -> None:
        self.num_evaluated += 1

    def end(self, summary: Summary) -> None:
        self.summaries.append(summary)

    def close(self) -> None:
        self.num_closed += 1


def shown(state: TrainerState) -> tuple[Seen, Callbacks]:
    seen = Seen()
    return seen, Callbacks([DefaultFlowCallback, ProgressCallback(20, console=lambda: seen)])


def test_other_ranks_show_nothing() -> None:
    state = TrainerState(max_steps=5, is_world_process_zero=False)
    seen, callbacks = shown(state)
    callbacks.tell("train_begin", ARGS, state)
    callbacks.tell("step_end", ARGS, state)
    callbacks.tell("prediction_step", ARGS, state)
    callbacks.tell("log", ARGS, state, logs={"loss": 1.0})
    callbacks.tell("train_end", ARGS, state)
    assert vars(seen) == vars(Seen())


def test_facts_of_the_run_reach_the_console() -> None:
    state = TrainerState(max_steps=5, global_step=2)
    seen, callbacks = shown(state)
    facts = {"samples_per_step": 64, "device_memory": {"cuda:0": 5}}
    callbacks.tell("train_begin", ARGS, state, facts=lambda: facts)
    (course,) = seen.courses
    assert (course.total, course.step, course.samples_per_step) == (5, 2, 64)
    assert course.evaluates
    assert course.memory is not None and course.memory() == {"cuda:0": 5}


def test_entries_are_translated_and_long_texts_cut() -> None:
    state = TrainerState(max_steps=5, global_step=3, epoch=0.6)
    seen, callbacks = shown(state)
    callbacks.tell("train_begin", ARGS, state)
    logs = {"grad_norm": 1.0, "learning_rate": 0.1, "loss": 0.5, "note": "x" * 50, "epoch": 0.6}
    callbacks.tell("log", ARGS, state, logs=logs)
    callbacks.tell("log", ARGS, state, logs={"eval_f1": 0.9, "eval_loss": 0.4, "eval_runtime": 1.0})
    callbacks.tell("log", ARGS, state, logs={"train_runtime": 9.0})
    first, second = seen.entries
    assert list(first.values) == ["loss", "lr", "grad_norm", "note"]
    assert first.values["note"] == "x" * 20 + "... (50 characters)"
    assert (first.step, first.epoch, first.is_evaluation) == (3, 0.6, False)
    assert dict(second.values) == {"eval_loss": 0.4, "eval_f1": 0.9} and second.is_evaluation


def test_an_evaluation_counts_its_batches_with_or_without_a_length() -> None:
    state = TrainerState()
    seen, callbacks = shown(state)
    for callbacks.eval_dataloader in ([0, 1], iter([0, 1])):
        callbacks.tell("prediction_step", ARGS, state)
        callbacks.tell("prediction_step", ARGS, state)
        callbacks.tell("evaluate", ARGS, state, metrics={})
    assert seen.evaluations == [(1, 2), (2, 2), (1, None), (2, None)]
    assert seen.num_evaluated == 2


def test_closing_ends_the_display_and_a_later_training_starts_anew() -> None:
    state = TrainerState(max_steps=5)
    seen, callbacks = shown(state)
    callbacks.tell("train_begin", ARGS, state)
    callbacks.close()
    callbacks.tell("step_end", ARGS, state)
    assert (seen.num_closed, seen.steps) == (1, [])
    callbacks.tell("train_begin", ARGS, state)
    callbacks.tell("train_end", ARGS, state)
    assert len(seen.courses) == 2 and len(seen.summaries) == 1


def test_the_summary_tells_the_last_and_the_best_of_the_history() -> None:
    history: list[dict[str, Any]] = [
        {"loss": float("nan"), "step": 10},
        {"loss": 0.2, "step": 20},
        {"eval_first_loss": 0.3, "eval_first_runtime": 1.0, "step": 20},
        {"eval_second_loss": 0.4, "step": 20},
        {"loss": 0.3, "step": 30},
        {"train_runtime": 12.0, "train_samples_per_second": 99.0, "step": 30},
    ]
    state = TrainerState(
        global_step=30,
        max_steps=30,
        epoch=1.0,
        log_history=history,
        best_metric=0.9,
        best_global_step=20,
        best_model_checkpoint="runs/mrpc/checkpoint-20",
    )
    told = summarize(ARGS, state, 1.0)
    assert (told.loss, told.lowest_loss, told.seconds) == (0.3, (0.2, 20), 12.0)
    assert told.samples_per_second == 99.0
    assert told.metrics == {"eval_first_loss": 0.3, "eval_second_loss": 0.4}
    assert told.best == ("eval_accuracy", 0.9, 20)
    assert (told.best_checkpoint, told.results) == ("runs/mrpc/checkpoint-20", "runs/mrpc")


def test_the_printer_prints_what_hfs_prints(capsys: pytest.CaptureFixture[str]) -> None:
    import transformers.trainer_callback as theirs

    logs = {"loss": 0.123456789, "epoch": 1.0, "step": 3, "total_flos": 10.0}
    callbacks = Callbacks([DefaultFlowCallback, PrinterCallback])
    callbacks.tell("log", ARGS, TrainerState(), logs=dict(logs))
    ours = capsys.readouterr().out
    theirs.PrinterCallback().on_log(ARGS, TrainerState(), None, logs=dict(logs))
    assert ours == capsys.readouterr().out
    assert ast.literal_eval(ours) == {"loss": "0.1235", "epoch": "1", "step": 3}
    callbacks.tell("log", ARGS, TrainerState(is_local_process_zero=False), logs=dict(logs))
    assert capsys.readouterr().out == ""
