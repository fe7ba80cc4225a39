"""What decides over a non-finite step on torch_xla, what it says of itself, and what is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import DataLoader

from anytrain import Accelerator
from anytrain.core.errors import AnytrainError
from xla_runs import counted, rows

STEPS = 16


def _model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))


def _loader(data: Any = None) -> Any:
    data = rows() if data is None else data
    return DataLoader([(row["x"], row["labels"]) for row in data], batch_size=8)


def _train(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, schedule: Any) -> Any:
    losses = []
    for _ in range(2):
        for x, labels in loader:
            loss = nn.functional.cross_entropy(model(x), labels)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return [float(loss) for loss in losses]


@pytest.mark.parametrize(
    ("schedule", "optimizer", "prepares", "width", "most"),
    [
        ("one cycle", AdamW, True, 60, 3),  # it moves the momentum, and asks if a step was skipped
        ("one cycle", AdamW, False, 61, 2),
        ("falling", AdamW, True, 62, 2),
        ("falling", AdamW, False, 63, 2),
        ("falling", SGD, True, 64, 2),
        ("falling", SGD, False, 65, 2),
    ],
)
def test_a_schedule_costs_no_graph_a_step(
    schedule: str, optimizer: Any, prepares: bool, width: int, most: int
) -> None:
    found = []
    for cpu in (False, True):
        accelerator, model = Accelerator(cpu=cpu), _model(width)
        made: Any = optimizer(model.parameters(), lr=1e-2)
        if schedule == "one cycle":
            rate: Any = OneCycleLR(made, 1e-2, total_steps=STEPS + 1)
        else:
            rate = LambdaLR(made, lambda step: 1 / (1 + step))
        model, made, loader = accelerator.prepare(model, made, _loader())  # type: ignore[assignment]
        if prepares:
            rate = accelerator.prepare(rate)
        before = counted()
        found.append(_train(accelerator, model, made, loader, rate))
        if not cpu:
            compiled = counted()[0] - before[0]
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    assert compiled <= most


@pytest.mark.parametrize("late", [False, True], ids=["before prepare", "after"])
def test_hooks_of_an_optimizer_see_no_update_that_is_taken_back(late: bool) -> None:
    data = rows()[:32]
    data[3]["x"] = torch.full((8,), torch.nan)
    accelerator, model = Accelerator(), _model(32)
    optimizer: Any = SGD(model.parameters(), lr=1.0)
    seen: list[torch.Tensor] = []

    def look(*_: Any) -> None:
        seen.append(model[0].weight.detach().sum())

    if not late:
        optimizer.register_step_post_hook(look)
    prepared: Any
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, _loader(data))
    if late:
        optimizer.register_step_post_hook(look)
    else:
        assert "SGD has step hooks" in accelerator.plan.guard.because
    for x, labels in loader:
        accelerator.backward(nn.functional.cross_entropy(prepared(x), labels))
        if late:
            optimizer.step()
        else:
            _skip(optimizer)
        optimizer.zero_grad()
    assert len(seen) == 3
    assert all(torch.isfinite(value.cpu()) for value in seen)


def _skip(optimizer: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the host tells of the skipped update
        optimizer.step()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda params: AdamW(params, foreach=True), "AdamW with foreach=True cannot be undone"),
        (lambda params: SGD(params, momentum=0.9, dampening=0.1), "SGD with dampening=0.1 cannot"),
        (lambda params: AdamW(params), "the device takes a non-finite step back"),
    ],
)
def test_the_plan_says_why_a_flag_is_read(make: Any, told: str) -> None:
    accelerator, model = Accelerator(), _model(8)
    accelerator.prepare(model, make(model.parameters()))
    assert told in accelerator.plan.guard.because


def test_one_optimizer_that_is_asked_about_leaves_the_next_alone() -> None:
    accelerator, model = Accelerator(), _model(8)
    adagrad: Any = torch.optim.Adagrad(model[0].parameters())
    adamw: Any = AdamW(model[2].parameters())
    _, adagrad, adamw = accelerator.prepare(model, adagrad, adamw)
    assert not adagrad.guard.decides_on_device
    assert adamw.guard.decides_on_device


def test_fp16_says_that_its_flag_is_read() -> None:
    accelerator, model = Accelerator(mixed_precision="fp16"), _model(8)
    accelerator.prepare(model, AdamW(model.parameters()))
    assert accelerator.plan.guard.value == "host"
    assert "fp16" in accelerator.plan.guard.because


def test_what_could_not_take_a_step_is_refused_when_it_is_prepared() -> None:
    accelerator, model = Accelerator(), _model(8)
    with pytest.raises(AnytrainError, match="(?s)fused=True.*leave fused out"):
        accelerator.prepare(model, AdamW(model.parameters(), fused=True))
    with pytest.raises(AnytrainError, match="sparse=False"):
        accelerator.prepare(nn.Embedding(4, 4, sparse=True))
    with pytest.raises(AnytrainError, match="compiles the whole step already"):
        Accelerator(dynamo_backend="inductor")
