"""The room of speed may be taken away: everything trains, op by op."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import anytrain
from launching import run_command

JOB = """
import torch
from torch import nn
import anytrain.engine.assemble.steps as steps
from anytrain import Accelerator, Trainer, TrainingArguments


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x, labels):
        return {"loss": (self.layer(x) - labels).pow(2).mean()}


rows = [{"x": torch.tensor([n / 8]), "labels": torch.tensor([n / 4])} for n in range(8)]
trainer = Trainer(Line(), TrainingArguments("out", max_steps=4, report_to=[]), train_dataset=rows)
print("loss", trainer.train().training_loss)
accelerator = Accelerator()
model = nn.Linear(1, 1)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
step = accelerator.step(lambda model, batch: model(batch).pow(2).mean())
print("step", float(step(torch.ones(2, 1)).loss))
print("room", steps.fast_room())
"""


def test_without_its_folder_everything_trains_op_by_op(tmp_path: Path) -> None:
    here = Path(anytrain.__file__).parent
    left = shutil.ignore_patterns("fast", "__pycache__")
    shutil.copytree(here, tmp_path / "src" / "anytrain", ignore=left)
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, str(tmp_path / "job.py")]
    told = run_command(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "src")}).stdout
    found = [line.split() for line in told.splitlines()]
    said = {words[0]: words[1] for words in found if words and words[0] in ("loss", "step", "room")}
    assert said["room"] == "None"
    assert float(said["loss"]) > 0 and float(said["step"]) > 0
