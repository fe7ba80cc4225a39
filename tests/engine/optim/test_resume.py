"""A run killed between two steps continues with the same weights, by any optimizer or schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anytrain import Accelerator, set_seed
from anytrain.engine.optim import build, schedules

ADAM = {"learning_rate": 0.05, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *((name, "linear", {}) for name in build.names()),
    ("adamw_torch", "cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ("adafactor", "warmup_stable_decay", {"num_decay_steps": 3}),
    ("sgd", "constant", {}),
]


def started(
    name: str, schedule: str, options: dict[str, Any], asked: str = ""
) -> tuple[Any, Any, Any, Any]:
    set_seed(3)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    kind, arguments = build.optimizer_class(name, **ADAM, options=build.parse_options(asked))
    optimizer = kind(build.parameter_groups(model, 0.1), **arguments)
    moving = schedules.build(
        schedule, optimizer, num_warmup_steps=2, num_training_steps=9, options=options
    )
    return accelerator, *accelerator.prepare(model, optimizer, moving)


def train(run: tuple[Any, Any, Any, Any], steps: range) -> None:
    accelerator, model, optimizer, schedule = run
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        loss = model(torch.randn(4, 6, generator=draw)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("name", "schedule", "options"), CASES)
def test_a_resumed_run_ends_with_the_same_weights(
    name: str, schedule: str, options: dict[str, Any], tmp_path: Path
) -> None:
    whole = started(name, schedule, options)
    train(whole, range(9))
    first = started(name, schedule, options)
    train(first, range(4))
    first[0].save_state(str(tmp_path))
    second = started(name, schedule, options)
    second[0].load_state(str(tmp_path))
    train(second, range(4, 9))
    for own, other in zip(second[1].parameters(), whole[1].parameters(), strict=True):
        assert torch.equal(own, other)
    assert second[3].get_last_lr() == whole[3].get_last_lr()


def test_an_adafactor_with_its_own_rate_resumes_and_tells_it(tmp_path: Path) -> None:
    asked = "relative_step=true,scale_parameter=true,warmup_init=true"
    whole, first, second = (started("adafactor", "constant", {}, asked) for _ in range(3))
    train(whole, range(9))
    train(first, range(4))
    first[0].save_state(str(tmp_path))
    second[0].load_state(str(tmp_path))
    assert second[3].get_last_lr() == first[3].get_last_lr()
    train(second, range(4, 9))
    for own, other in zip(second[1].parameters(), whole[1].parameters(), strict=True):
        assert torch.equal(own, other)
    assert second[3].get_last_lr() == whole[3].get_last_lr() != first[3].get_last_lr()
