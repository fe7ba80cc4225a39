"""A step on torch_xla is one graph, compiled twice, with the CPU's losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from anytrain import Accelerator
from anytrain.core.errors import Notice
from xla_runs import counted, rows, train

STEPS, EVAL_BATCHES = 16, 8


@pytest.mark.parametrize(("name", "width"), [("adamw_torch", 33), ("sgd", 34)])
def test_training_compiles_twice_and_evaluation_once_with_one_run_a_step(
    tmp_path: Path, name: str, width: int
) -> None:
    ours = train(tmp_path / "xla", optim=name, width=width)
    assert ours.plan.guard.value == "select"
    assert ours.compilations == 2 + 1
    assert ours.executions == STEPS + EVAL_BATCHES
    cpu = train(tmp_path / "cpu", optim=name, width=width, use_cpu=True)
    assert cpu.compilations == cpu.executions == 0
    assert ours.losses == pytest.approx(cpu.losses, abs=1e-5)
    assert ours.eval_losses == pytest.approx(cpu.eval_losses, abs=1e-5)
    for key, value in cpu.weights.items():
        torch.testing.assert_close(ours.weights[key], value, atol=1e-4, rtol=1e-3)


def test_accumulated_steps_are_one_graph_too(tmp_path: Path) -> None:
    told: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "eval_strategy": "no",
        "width": 35,
    }
    ours = train(tmp_path / "xla", **told)
    assert ours.compilations == 2
    assert ours.executions == STEPS // 2
    cpu = train(tmp_path / "cpu", use_cpu=True, **told)
    assert ours.losses == pytest.approx(cpu.losses, abs=1e-5)


def test_an_optimizer_that_counts_on_the_host_costs_a_second_graph(tmp_path: Path) -> None:
    ours = train(tmp_path / "xla", optim="adagrad", eval_strategy="no")
    assert ours.plan.guard.value == "host"
    assert "Adagrad" in ours.plan.guard.because
    assert ours.executions == 2 * STEPS
    cpu = train(tmp_path / "cpu", optim="adagrad", eval_strategy="no", use_cpu=True)
    assert ours.losses == pytest.approx(cpu.losses, abs=1e-5)


def test_a_step_of_a_nan_changes_nothing_without_being_read(tmp_path: Path) -> None:
    data = rows()
    data[-1]["x"] = torch.full((8,), torch.nan)
    told: dict[str, Any] = {"on_nonfinite": "skip", "eval_strategy": "no", "data": data}
    ours = train(tmp_path / "xla", **told)
    with pytest.warns(Notice, match="skipped"):
        cpu = train(tmp_path / "cpu", use_cpu=True, **told)
    assert ours.executions == STEPS
    assert all(torch.isfinite(value).all() for value in ours.weights.values())
    for key, value in cpu.weights.items():
        torch.testing.assert_close(ours.weights[key], value, atol=1e-4, rtol=1e-3)


def test_tied_weights_stay_tied_on_the_device(tmp_path: Path) -> None:
    ours: Any = train(tmp_path, max_steps=2, eval_strategy="no").model
    assert ours.first.weight is ours.other.weight
    assert len(list(ours.parameters())) == 5


def _loop(accelerator: Accelerator, width: int) -> tuple[list[float], int]:
    """Train and evaluate as in the TPU guide; return the epochs' last losses and the hits."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    data = [(row["x"], row["labels"]) for row in rows()]
    loaders: Any = DataLoader(data, batch_size=8), DataLoader(data[:32], batch_size=8)
    model, optimizer, schedule, *loaders = accelerator.prepare(model, optimizer, schedule, *loaders)
    losses, hits = [], 0
    for _ in range(2):
        model.train()
        for x, labels in loaders[0]:
            loss = nn.functional.cross_entropy(model(x), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        model.eval()
        for x, labels in loaders[1]:
            with torch.no_grad():
                predictions = model(x).argmax(dim=-1)
            both = accelerator.gather_for_metrics((predictions, labels))
            hits += int((both[0].cpu() == both[1].cpu()).sum())
    assert schedule.get_last_lr() == [pytest.approx(1e-3)]
    return losses, hits


@pytest.mark.parametrize(("precision", "width"), [("no", 36), ("bf16", 37)])
def test_the_guides_own_loop_costs_the_same_few_graphs(precision: str, width: int) -> None:
    accelerator = Accelerator(mixed_precision=precision)
    before = counted()
    losses, hits = _loop(accelerator, width)
    after = counted()
    assert after[0] - before[0] == 2 + 1
    assert after[1] - before[1] == STEPS + EVAL_BATCHES
    expected = _loop(Accelerator(cpu=True), width)
    assert losses == pytest.approx(expected[0], abs=1e-5 if precision == "no" else 2e-2)
    assert abs(hits - expected[1]) <= (0 if precision == "no" else 4)
    if precision == "bf16":
        assert "not XLA_USE_BF16" in accelerator.plan.precision.because
