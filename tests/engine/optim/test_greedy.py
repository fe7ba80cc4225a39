"""The greedy schedule moves as that of transformers, whatever its options."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers.optimization import GreedyLR

from anytrain.core.errors import BadInput, BadType, Notice
from anytrain.engine.checkpoint.encode import decode, encode
from anytrain.engine.optim.greedy import Greedy

CASES: list[dict[str, Any]] = [
    {"patience": 2},
    {"patience": 0, "factor": 0.5, "min_lr": 0.02},
    {"patience": 1, "cooldown": 2, "warmup": 3},
    {"patience": 0, "mode": "max", "threshold_mode": "rel", "threshold": 1e-2},
    {"patience": 0, "threshold_mode": "rel", "threshold": 1e-2},
    {"patience": 1, "mode": "max", "max_lr": [0.15, 0.2]},
    {"patience": 0, "smooth": True, "window_size": 4, "min_lr": [0.05, 0.08]},
    {"patience": 0, "reset_start": 2, "factor": 0.3, "min_lr": 0.05, "cooldown": 1},
    {"patience": 0, "reset_start": 3, "factor": 0.3, "min_lr": 0.05, "smooth": True},
]


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)]}], lr=0.1)


def metrics(count: int) -> list[float]:
    draw = random.Random(3)
    falling = [1.0 / (1 + i) for i in range(count // 2)]
    return falling + [draw.uniform(0.0, 2.0) for _ in range(count - len(falling))]


@pytest.mark.parametrize("options", CASES)
def test_it_moves_as_that_of_transformers(options: dict[str, Any]) -> None:
    theirs, mine = GreedyLR(optimizer(), **options), Greedy(optimizer(), **options)
    for metric in metrics(80):
        theirs.step(metric)
        mine.step(torch.tensor(metric, dtype=torch.float64))
        assert mine.get_last_lr() == theirs.get_last_lr()
        assert mine.best == theirs.best
    assert mine.last_epoch == theirs.last_epoch


@pytest.mark.parametrize("options", CASES)
def test_a_checkpoint_continues_it(options: dict[str, Any]) -> None:
    whole, first, second = (Greedy(optimizer(), **options) for _ in range(3))
    given = metrics(80)
    expected = []
    for metric in given:
        whole.step(metric)
        expected.append(whole.get_last_lr())
    for metric in given[:47]:
        first.step(metric)
    held = encode(first.state_dict(), "schedule")
    second.load_state_dict(decode(held.document, held.tensors))
    assert [group["lr"] for group in second.optimizer.param_groups] == first.get_last_lr()
    for metric, rates in zip(given[47:], expected[47:], strict=True):
        second.step(metric)
        assert second.get_last_lr() == rates


def test_it_says_each_move_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    schedule = Greedy(optimizer(), patience=0, verbose=True, reset_start=1, factor=0.001)
    for metric in (1.0, 2.0, 3.0):
        schedule.step(metric)
    said = capsys.readouterr().out
    assert "group 1 rises to 1.0000e+00" in said
    assert "group 0 falls to 1.0000e-03" in said
    assert "starts again" in said


def test_a_rate_that_cannot_fall_is_told() -> None:
    low = torch.optim.SGD([torch.zeros(1)], lr=5e-5)
    with pytest.warns(Notice, match="it can only rise"):
        Greedy(low)


def test_a_rate_kept_as_a_tensor_is_moved_in_place() -> None:
    sgd = torch.optim.SGD([torch.zeros(1)], lr=torch.tensor(0.1))
    rate = sgd.param_groups[0]["lr"]
    Greedy(sgd, patience=0).step(1.0)
    assert sgd.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.1 / 0.95)


@pytest.mark.parametrize(
    "options", [{"factor": 1.0}, {"factor": 0.0}, {"mode": "up"}, {"min_lr": [0.1]}]
)
def test_a_wrong_option_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        Greedy(optimizer(), **options)


def test_it_wants_an_optimizer() -> None:
    with pytest.raises(BadType, match="learning rate"):
        Greedy(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
