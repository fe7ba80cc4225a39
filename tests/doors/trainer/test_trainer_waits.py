"""Between two log points nothing of anytrain reads a value from the device.

On a CPU nothing waits, so what is watched is who asks: each of these reads would wait on a GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from anytrain.doors.callbacks import TrainerCallback
from equivalence import twins

READS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy")
HOUSE = "/src/anytrain/"
# On a CPU the guard reads its flag, and clipping the norm; it waits for nothing.
# Labels in host memory are looked at there. A sampler's order is drawn on the host.
ALLOWED = (
    "engine/step/guard.py",
    "engine/step/guard.py",
    "engine/objective.py _has_counted",
    "engine/data/",
)


class Steps(TrainerCallback):
    """Know whether the run is between two log points."""

    def __init__(self) -> None:
        self.step = 0
        self.is_inside = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self.step, self.is_inside = state.global_step + 1, True

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self.is_inside = not control.should_log and state.global_step % state.logging_steps != 0


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Take down who reads a tensor between two log points."""
    steps, found = Steps(), []

    def watched(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *args: Any, **more: Any) -> Any:
            caller = sys._getframe(1).f_code
            at_home = HOUSE in caller.co_filename.replace("\\", "/")
            here = f"{caller.co_filename} {caller.co_name}"
            if steps.is_inside and at_home and not any(place in here for place in ALLOWED):
                place = caller.co_filename.split(HOUSE)[1]
                found.append(f"step {steps.step}: {name} in {place}, {caller.co_name}")
            return original(self, *args, **more)

        return read

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, watched(name))
    return steps, found


@pytest.mark.parametrize(
    "wish",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"max_grad_norm": 0},
        {"on_nonfinite": "skip"},
        {"include_num_input_tokens_seen": "non_padding"},
        {"label_smoothing_factor": 0.1},
        {"logging_nan_inf_filter": True},
        {"lr_scheduler_type": "cosine", "warmup_steps": 3, "weight_decay": 0.1},
        {"auto_find_batch_size": True},
    ],
    ids=lambda wish: ", ".join(wish) or "plain",
)
def test_nothing_is_read_between_two_log_points(
    tmp_path: Path, reads: Any, wish: dict[str, Any]
) -> None:
    steps, found = reads
    ran = twins.train(
        twins.OURS,
        tmp_path,
        model=twins.bert,
        train_dataset=twins.sentences(40),
        logging_steps=5,
        callbacks=[steps],
        **wish,
    )
    assert ran.output.global_step >= 10
    assert found == []


@pytest.mark.parametrize("model", [twins.regression, twins.bert])
def test_no_number_is_copied_to_the_device_between_two_log_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    steps, found = Steps(), []

    def watched(name: str) -> Any:
        original = getattr(torch, name)

        def make(value: Any, *args: Any, **more: Any) -> Any:
            place = sys._getframe(1).f_code.co_filename.replace("\\", "/")
            if steps.is_inside and HOUSE in place and more.get("device") is not None:
                found.append(f"{name} in {place}, of a {type(value).__name__}")
            return original(value, *args, **more)

        return make

    for name in ("tensor", "as_tensor"):  # each copies from memory that is not pinned, and waits
        monkeypatch.setattr(torch, name, watched(name))
    twins.train(
        twins.OURS,
        tmp_path,
        model=model,
        train_dataset=twins.points(40) if model is twins.regression else twins.sentences(40),
        logging_steps=5,
        gradient_accumulation_steps=2,
        include_num_input_tokens_seen="all",
        callbacks=[steps],
    )
    assert steps.step >= 10
    assert found == []


def test_the_watch_sees_a_read(tmp_path: Path, reads: Any) -> None:
    steps, found = reads
    trainer = twins.build(
        twins.OURS,
        tmp_path,
        model=twins.bert(),
        train_dataset=twins.sentences(16),
        logging_steps=5,
        callbacks=[steps],
    )
    told = trainer.training_step

    def reading(*args: Any, **more: Any) -> torch.Tensor:
        loss: torch.Tensor = told(*args, **more)
        trainer._meter.num_bad()
        return loss

    trainer.training_step = reading
    trainer.train()
    assert any("item in engine/recording/meter.py, num_bad" in line for line in found)
