"""What callbacks see, and may do, when they are told of a save."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anytrain.core.errors import Notice
from anytrain.doors.callbacks import TrainerCallback
from anytrain.doors.trainer import Trainer
from anytrain.doors.training_args import TrainingArguments
from anytrain.engine.checkpoint import saving


class Point(nn.Module):
    """One number, drawn to the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(()))

    def forward(self, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.at - labels) ** 2).mean(), "at": self.at.expand(len(labels))}


class Adds(TrainerCallback):
    """Put a file of its own into each checkpoint, as scripts do with adapters."""

    def on_save(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        assert (folder / "model.safetensors").is_file()
        (folder / "own").mkdir()
        (folder / "own" / "note.txt").write_text("mine")


def trainer(folder: Path) -> Trainer:
    return Trainer(
        Point(),
        TrainingArguments(output_dir=str(folder), max_steps=4, save_steps=2, report_to="none"),
        train_dataset=[{"labels": float(i)} for i in range(32)],
        callbacks=[Adds],
    )


def test_a_save_is_whole_when_a_callback_is_told_of_it(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    assert (tmp_path / "checkpoint-4" / "own" / "note.txt").read_text() == "mine"


def test_a_checkpoint_with_files_of_a_callbacks_own_is_resumed_from(tmp_path: Path) -> None:
    whole = trainer(tmp_path)
    whole.train()
    again = trainer(tmp_path)
    again.remove_callback(Adds)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(again.model.at, whole.model.at)  # type: ignore[arg-type]


class Projector(Trainer):
    """Write a part of the model by itself, beside what is written anyway."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        torch.save({"at": self.model.at}, Path(str(output_dir)) / "projector.bin")


class After(Trainer):
    """Go on with a checkpoint's folder once it is saved."""

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:  # type: ignore[override]
        super()._save_checkpoint(model, trial)
        folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        assert (folder / "model.safetensors").is_file()
        (folder / "after.txt").write_text("mine")


def test_what_a_subclass_writes_with_the_model_is_in_checkpoints_too(tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), max_steps=4, save_steps=2)
    data = [{"labels": float(i)} for i in range(32)]
    whole = Projector(Point(), arguments, train_dataset=data)
    whole.train()
    kept = torch.load(tmp_path / "checkpoint-2" / "projector.bin")
    assert kept["at"] != whole.model.at
    again = Projector(Point(), arguments, train_dataset=data)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(again.model.at, whole.model.at)  # type: ignore[arg-type]
    again.save_model(str(tmp_path / "last"))
    assert (tmp_path / "last" / "projector.bin").is_file()


def note(trainer: Any) -> None:
    folder = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"
    (folder / "own").mkdir(parents=True)
    (folder / "own" / "note.txt").write_text("mine")


class Before(Trainer):
    """Put a file into a checkpoint's folder before anytrain writes there."""

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:  # type: ignore[override]
        note(self)
        super()._save_checkpoint(model, trial)


class Early(TrainerCallback):
    """Do the same at the end of the step that is saved."""

    trainer: Trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        if state.global_step % 2 == 0:
            note(self.trainer)


@pytest.mark.parametrize("who", ["subclass", "callback"])
def test_what_was_put_into_a_checkpoints_folder_before_is_in_the_checkpoint(
    tmp_path: Path, who: str
) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), max_steps=4, save_steps=2)
    data = [{"labels": float(i)} for i in range(32)]
    early = Early()
    kind, callbacks = (Before, None) if who == "subclass" else (Trainer, [early])
    early.trainer = whole = kind(Point(), arguments, train_dataset=data, callbacks=callbacks)
    whole.train()
    assert (tmp_path / "checkpoint-2" / "own" / "note.txt").read_text() == "mine"
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")]
    again = Trainer(Point(), arguments, train_dataset=data)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(again.model.at, whole.model.at)  # type: ignore[arg-type]


def test_what_is_put_on_a_trainer_to_save_with_is_called_for_checkpoints_too(
    tmp_path: Path,
) -> None:
    made = trainer(tmp_path)
    own, called = made.save_model, []

    def save_model(output_dir: str, _internal_call: bool = False) -> None:
        called.append(_internal_call)
        own(output_dir, _internal_call)
        (Path(output_dir) / "note.txt").write_text("mine")

    made.save_model = save_model  # type: ignore[method-assign]  # as scripts do
    made.train()
    assert called == [True, True]
    assert (tmp_path / "checkpoint-4" / "note.txt").read_text() == "mine"


def test_a_subclass_goes_on_with_a_whole_checkpoint(tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), max_steps=4, save_steps=2)
    After(Point(), arguments, train_dataset=[{"labels": float(i)} for i in range(32)]).train()
    assert (tmp_path / "checkpoint-2" / "after.txt").is_file()
    assert (tmp_path / "checkpoint-4" / "after.txt").is_file()


class Looks(TrainerCallback):
    """Hold the first save's commit up for a step, and note what is said to be the best."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trainer: Trainer | None = None
        self.may_commit = threading.Event()
        self.named: dict[int, str | None] = {}
        commit = saving._commit

        def held_up(*given: Any) -> Any:
            assert self.may_commit.wait(240)
            return commit(*given)

        monkeypatch.setattr(saving, "_commit", held_up)

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self.named[state.global_step] = state.best_model_checkpoint
        if state.global_step == 2:
            self.may_commit.set()
            assert self.trainer is not None
            self.trainer._between.writer._wait()


def test_a_best_checkpoint_is_named_once_it_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, looks = iter([0.9, 0.5, 0.4, 0.3]), Looks(monkeypatch)
    told = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="best",
        metric_for_best_model="score",
        report_to="none",
    )
    data = [{"labels": float(i)} for i in range(32)]
    looks.trainer = Trainer(
        Point(),
        told,
        train_dataset=data,
        eval_dataset=data,
        compute_metrics=lambda prediction: {"score": next(scores)},
        callbacks=[looks],
    )
    looks.trainer.train()
    best = str(tmp_path / "checkpoint-1")
    assert looks.named == {1: None, 2: None, 3: best, 4: best}
    saved = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())
    assert saved["best_model_checkpoint"] == best


class Notes(TrainerCallback):
    """Note each save that is told."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def on_save(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self.told.append(state.global_step)


@pytest.mark.parametrize("behind", [True, False], ids=["behind the loop", "waited for"])
def test_no_callback_is_told_of_a_save_that_failed(tmp_path: Path, behind: bool) -> None:
    (tmp_path / "checkpoint-2").write_text("in the way")
    notes, made = Notes(), trainer(tmp_path)
    made.args.async_save = behind
    made.remove_callback(Adds)
    made.add_callback(notes)
    with pytest.warns(Notice, match="checkpoint-2"):
        made.train()
    assert notes.told == [4]
    assert made.state.global_step == 4


def test_a_save_that_is_waited_for_is_committed_before_the_next_step(tmp_path: Path) -> None:
    there: dict[int, bool] = {}

    class Begins(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            there[state.global_step] = (tmp_path / "checkpoint-2" / "manifest.json").is_file()

    made = trainer(tmp_path)
    made.args.async_save = False
    made.remove_callback(Adds)
    made.add_callback(Begins)
    made.train()
    assert there == {0: False, 1: False, 2: True, 3: True}
