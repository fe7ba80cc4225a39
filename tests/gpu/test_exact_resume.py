"""On CUDA a resumed run is the same to the bit in deterministic mode."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from anytrain import Accelerator, set_seed

pytestmark = pytest.mark.gpu


class Augmented(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index)) + torch.rand(8)


@pytest.fixture
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("blocking", [True, False])
def test_resumed_equals_uninterrupted(tmp_path: Path, precision: str, blocking: bool) -> None:
    def train(stop_after: int | None, resume: bool) -> list[torch.Tensor]:
        set_seed(0)
        accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=2)
        model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.2), nn.GELU(), nn.Linear(64, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n / 10))
        loader = DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=2)
        model, optimizer, scheduler, loader = accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        if resume:
            accelerator.load_state(tmp_path / "saved")
        done = 0
        while loader.iteration < 3:
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch / 40).pow(2).mean())
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                done += 1
                if done == stop_after:
                    accelerator.save_state(tmp_path / "saved", blocking=blocking)
                    accelerator.finish_saving()
                    return []
        return [p.detach().cpu() for p in model.parameters()]

    whole = train(None, resume=False)
    train(14, resume=False)
    resumed = train(None, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
