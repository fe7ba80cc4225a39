"""On a device that runs behind the host, a wait for data costs only what the device idles."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from anytrain.core import records
from anytrain.doors.trainer import Trainer
from anytrain.doors.training_args import TrainingArguments
from anytrain.insight.report.why import judge

pytestmark = pytest.mark.gpu


class Points(Dataset[Any]):
    """Points that take their time to load."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return {"x": torch.full((8,), index / 160), "labels": torch.tensor(index % 2)}


class Heavy(nn.Module):
    """A model whose step takes the device a while."""

    def __init__(self, size: int, times: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.times = times
        self.register_buffer("weight", torch.ones(size, size) / size)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.weight
        for _ in range(self.times):
            found = found @ self.weight
        logits = self.layer(x) + found[0, 0]
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def train(tmp_path: Path, model: nn.Module, seconds: float) -> records.Life:
    args = TrainingArguments(
        output_dir=str(tmp_path),
        report_to="none",
        per_device_train_batch_size=4,
        max_steps=40,
        logging_steps=40,
        save_strategy="no",
    )
    Trainer(model, args, train_dataset=Points(seconds)).train()
    (life,) = records.read(tmp_path)
    assert sum(life.seconds.values()) > 0
    return life


def test_a_device_has_run_dry_once_it_is_waited_for() -> None:
    from anytrain.machine.backends.cuda import Cuda

    backend, device = Cuda(), torch.device("cuda", 0)
    weight = torch.ones(4096, 4096, device=device)
    for _ in range(50):
        weight = weight @ weight
    assert not backend.is_idle(device)
    backend.synchronize(device)
    assert backend.is_idle(device)


def test_loading_that_hides_behind_the_device_is_no_wait(tmp_path: Path) -> None:
    life = train(tmp_path, Heavy(4096, 60), seconds=0.005)
    assert life.last["hidden"] > 0.05
    assert life.seconds["data"] < 0.5 * life.last["hidden"]
    finding = judge(life)
    assert finding is None or finding.name != "data"


def test_loading_that_lets_the_device_run_dry_is_found(tmp_path: Path) -> None:
    life = train(tmp_path, Heavy(64, 1), seconds=0.01)
    finding = judge(life)
    assert finding is not None
    assert finding.name == "data"
    assert life.seconds["data"] > 40 * 4 * 0.01 * 0.8
