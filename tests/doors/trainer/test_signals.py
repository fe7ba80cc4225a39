"""A signal is answered once, by a save or by its own effect, and handlers are given back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from anytrain.core import records
from anytrain.doors.callbacks import TrainerCallback
from anytrain.engine.interrupts import Interrupted
from equivalence import twins


class Told(Exception):
    """What a script's own handler of a signal raises."""


class Signals(TrainerCallback):
    """Send this process a signal at the end of an epoch, or of the training."""

    def __init__(self, moment: str, epoch: float, number: int = signal.SIGTERM) -> None:
        self.moment, self.epoch, self.number = moment, epoch, number

    def _send(self, moment: str, state: Any) -> None:
        if moment == self.moment and state.epoch == self.epoch:
            os.kill(os.getpid(), self.number)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self._send("epoch_end", state)

    def on_train_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self._send("train_end", state)


@pytest.fixture
def own_handler() -> Iterator[Any]:
    def tell(number: int, frame: Any) -> None:
        raise Told

    before = signal.signal(signal.SIGTERM, tell)
    yield tell
    signal.signal(signal.SIGTERM, before)


def trainer(folder: Path, *callbacks: TrainerCallback, **more: Any) -> Any:
    return twins.build(
        twins.OURS,
        folder,
        model=twins.regression(),
        train_dataset=twins.points(22),
        eval_dataset=twins.points(9),
        callbacks=list(callbacks),
        **more,
    )


def test_handlers_are_given_back_and_an_evaluation_takes_none(
    tmp_path: Path, own_handler: Any
) -> None:
    made = trainer(tmp_path)
    made.train()
    assert signal.getsignal(signal.SIGTERM) is own_handler
    made.evaluate()
    assert signal.getsignal(signal.SIGTERM) is own_handler


def test_handlers_are_given_back_when_training_fails(tmp_path: Path, own_handler: Any) -> None:
    class Fails(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            raise ZeroDivisionError

    made = trainer(tmp_path, Fails())
    with pytest.raises(ZeroDivisionError):
        made.train()
    made.evaluate()
    assert signal.getsignal(signal.SIGTERM) is own_handler


def test_a_signal_in_a_prediction_after_training_has_its_own_effect(
    tmp_path: Path, own_handler: Any
) -> None:
    class Sends(TrainerCallback):
        def on_prediction_step(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    made = trainer(tmp_path, Sends())
    made.train()
    with pytest.raises(Told):
        made.predict(twins.points(9))


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_signal_at_an_epochs_end_saves_the_run_and_ends_it(tmp_path: Path, epoch: int) -> None:
    whole = trainer(tmp_path / "whole", Signals("", 0))
    whole.train()
    first = trainer(tmp_path / "cut", Signals("epoch_end", epoch))
    with pytest.raises(Interrupted):
        first.train()
    assert (tmp_path / "cut" / f"checkpoint-{6 * epoch}").is_dir()
    second = trainer(tmp_path / "cut", Signals("", 0))
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == whole.state.global_step
    for mine, yours in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, yours)


def test_a_signal_after_the_last_save_has_its_own_effect(tmp_path: Path, own_handler: Any) -> None:
    with pytest.raises(Told):
        trainer(tmp_path, Signals("train_end", 2)).train()
    assert signal.getsignal(signal.SIGTERM) is own_handler


SCRIPT = """
import sys, time
import torch
from torch import nn
from anytrain import Trainer, TrainerCallback, TrainingArguments

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)
    def forward(self, x, labels):
        return {"loss": (self.linear(x) - labels).square().mean()}

class Slowly(TrainerCallback):
    def on_step_end(self, args, state, control, **known):
        open(sys.argv[1] + "/began", "w").close()
        time.sleep(0.05)

rows = [{"x": torch.ones(1), "labels": torch.ones(1)}] * 64
args = TrainingArguments(sys.argv[1] + "/run", max_steps=100_000, use_cpu=True, report_to="none")
Trainer(Net(), args, train_dataset=rows, callbacks=[Slowly()]).train()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_also_ends_who_reads_the_output_saves(number: int, tmp_path: Path) -> None:
    """Ctrl-C goes to all of `python train.py 2>&1 | tee log`."""
    (tmp_path / "train.py").write_text(SCRIPT)
    job = subprocess.Popen(
        f"{sys.executable} train.py . 2>&1 | tee log",
        shell=True,
        cwd=tmp_path,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 240
    while not (tmp_path / "began").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(job.pid, number)
    while not list(tmp_path.glob("run/checkpoint-*/manifest.json")):
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.05)
    job.wait()


def test_two_interrupts_in_a_row_save_once_and_end_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    job = subprocess.Popen(
        [sys.executable, "train.py", "."],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 240
    while not (tmp_path / "began").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    job.send_signal(signal.SIGINT)
    assert job.stderr is not None
    told = []
    for line in job.stderr:
        told.append(line)
        if "saved" in line:
            job.send_signal(signal.SIGINT)
    assert job.wait() == 130
    assert [line.split(":")[1].split()[0] for line in told] == ["asked", "saved"]
    assert records.read(tmp_path / "run")[-1].state == "stopped"
