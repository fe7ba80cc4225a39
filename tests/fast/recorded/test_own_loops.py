"""Loops that users write themselves, with the calls of their models recorded.

So the rules run without a GPU; what only a real graph shows needs one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from anytrain import Accelerator, set_seed
from anytrain.engine.assemble import run as preparing
from anytrain.fast import room
from anytrain.fast.recorded import recordings
from equivalence import twins
from rerun_recorder import Again


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Again]:
    made: list[Again] = []

    def kept() -> list[torch.Tensor]:
        return [b for model in runs for b in model.gradients._buffers.values()]

    def record(run: Any, model: nn.Module) -> None:
        room.record_calls(run, model)
        runs.extend(run.recorded_models[-1:])

    runs: list[Any] = []
    monkeypatch.setattr(recordings, "_is_elsewhere", lambda tensor: False)
    monkeypatch.setattr(room, "CudaGraphs", lambda device: made.append(Again(kept)) or made[-1])
    monkeypatch.setattr(room, "is_compiled", lambda module: True)  # there are no kernels here
    monkeypatch.setattr(preparing, "record_calls", record)
    return made


def batches(number: int = 12, rows: int = 4) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 30, (number, rows, 10), generator=draw)
    return [{"input_ids": each, "labels": each[:, 0] % 2} for each in ids]


def loop(**options: Any) -> tuple[list[float], list[torch.Tensor], Any]:
    """Train a BERT by the loop of the guides; return the losses, the weights and the plan."""
    set_seed(0)
    clips, precision = options.pop("clips", False), options.pop("precision", "no")
    accelerator = Accelerator(cpu=True, mixed_precision=precision, **options)
    model = twins.bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    losses, right = [], []
    for _ in range(2):
        model.train()
        for batch in batches():
            with accelerator.accumulate(model):
                outputs = model(**batch)
                accelerator.backward(outputs.loss)
                if clips and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(outputs.loss)
            right.append((outputs.logits.argmax(-1) == batch["labels"]).float().mean())
        model.eval()
        with torch.no_grad():
            losses.append(model(**batches()[0]).loss)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    plan = accelerator.plan.step
    accelerator.end_training()
    return [float(value) for value in (*losses, *right)], weights, plan


@pytest.mark.parametrize(
    "options",
    [{}, {"clips": True}, {"gradient_accumulation_steps": 3}, {"precision": "bf16"}],
    ids=["plain", "clipped", "accumulated", "bf16"],
)
def test_the_guides_loop_learns_the_same(
    options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    plain, weights, plan = loop(**options)
    assert plan.value == "eager"
    recorders = request.getfixturevalue("recorders")
    losses, others, plan = loop(**options)
    assert plan.value == "cuda_graph", plan.because
    assert len(recorders) == 1 and recorders[0].num_replayed > 30
    assert losses == plain
    for one, other in zip(weights, others, strict=True):
        assert torch.equal(one, other)


def gan() -> tuple[list[float], Any]:
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    make = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
    judge = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    first, second = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (make, judge))
    make, judge, first, second = accelerator.prepare(make, judge, first, second)
    score, losses = nn.functional.binary_cross_entropy_with_logits, []
    for _ in range(12):
        real, noise = torch.randn(6, 8), torch.randn(6, 4)
        fake = make(noise)
        loss = score(judge(real), torch.ones(6, 1)) + score(judge(fake.detach()), torch.zeros(6, 1))
        accelerator.backward(loss)
        second.step()
        second.zero_grad()
        fooled = score(judge(fake), torch.ones(6, 1))
        accelerator.backward(fooled)
        first.step()
        first.zero_grad()
        second.zero_grad()
        losses += [loss.item(), fooled.item()]
    plan = accelerator.plan.step
    accelerator.end_training()
    return losses, plan


def test_two_models_that_train_against_each_other(request: pytest.FixtureRequest) -> None:
    plain, _ = gan()
    recorders = request.getfixturevalue("recorders")
    losses, plan = gan()
    assert losses == plain
    assert plan.value == "cuda_graph", plan.because
    assert sum(recorder.num_replayed for recorder in recorders) > 40


def test_a_step_that_is_one_function_is_recorded_as_a_whole_or_not_at_all(
    recorders: list[Again],
) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.forward
    accelerator.end_training()
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model
    assert before is not model.forward and "forward" not in vars(model)
