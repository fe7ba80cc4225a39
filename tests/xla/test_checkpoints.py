"""Runs on torch_xla are saved from the host, resume to the bit there, and elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anytrain import Accelerator
from anytrain.machine.backends import probe
from xla_runs import train

TOLD: dict[str, Any] = {
    "max_steps": 10,
    "save_strategy": "steps",
    "save_steps": 4,
    "eval_strategy": "no",
    "logging_steps": 2,
}


def test_a_resumed_run_ends_in_the_same_bits_dropout_and_all(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", dropout=0.3, **TOLD)
    rest = train(tmp_path / "rest", dropout=0.3, resume=tmp_path / "whole" / "checkpoint-4", **TOLD)
    assert rest.losses[-2:] == whole.losses[-2:]
    assert all(torch.equal(rest.weights[name], value) for name, value in whole.weights.items())


def test_a_run_goes_on_from_xla_to_the_cpu_and_back(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", **TOLD)
    from_xla = tmp_path / "whole" / "checkpoint-4"
    cpu = train(tmp_path / "cpu", use_cpu=True, resume=from_xla, **TOLD)
    back = train(tmp_path / "back", resume=tmp_path / "cpu" / "checkpoint-8", **TOLD)
    assert cpu.losses == pytest.approx(whole.losses, abs=1e-5)
    assert back.losses == pytest.approx(whole.losses, abs=1e-5)


def test_how_often_a_run_is_cut_does_not_change_what_it_draws() -> None:
    backend = probe.get("xla")
    device = backend.device(0)

    def draw(*, cut: bool) -> list[float]:
        backend.restore_rng(device, torch.zeros(8, dtype=torch.uint8))
        first = torch.rand(4, device=device)
        if cut:
            backend.end_step()
            backend.synchronize(device)
        return [*first.cpu().tolist(), *torch.rand(4, device=device).cpu().tolist()]

    assert draw(cut=False) == draw(cut=True)


def test_objects_of_equal_shapes_are_saved_apart(tmp_path: Path) -> None:
    accelerator = Accelerator()
    device = accelerator.device
    state = {"a": torch.zeros(3).to(device), "b": torch.ones(3).to(device)}
    accelerator.save(state, tmp_path / "both.safetensors", safe_serialization=True)
    from safetensors.torch import load_file

    found = load_file(tmp_path / "both.safetensors")
    assert found["a"].tolist() == [0.0] * 3
    assert found["b"].tolist() == [1.0] * 3


def test_an_accelerators_state_comes_back_on_the_device(tmp_path: Path) -> None:
    accelerator = Accelerator()
    model: Any = nn.Linear(4, 2)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    x = torch.ones(2, 4).to(accelerator.device)

    def step() -> None:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    step()
    accelerator.save_state(tmp_path / "saved")
    step()
    expected = model.weight.detach().cpu()
    accelerator.load_state(tmp_path / "saved")
    step()
    assert torch.equal(model.weight.detach().cpu(), expected)
