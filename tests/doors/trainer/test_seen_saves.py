"""What callbacks see, and may do, when they are told of a save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anytrain.doors.callbacks import TrainerCallback
from anytrain.doors.trainer import Trainer
from anytrain.doors.training_args import TrainingArguments


class Point(nn.Module):
    """One number, drawn to the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(()))

    def forward(self, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.at - labels) ** 2).mean()}


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
