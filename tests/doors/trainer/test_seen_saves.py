"""What callbacks see, and may do, when they are told of a save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
