"""`prepare` leaves a model as much itself as it can."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn

from anytrain import Accelerator, AutocastKwargs


def test_in_one_process_and_full_precision_a_model_is_itself() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    assert accelerator.prepare(model) is model
    assert "forward" not in model.__dict__


def test_mixed_precision_can_be_taken_off_again() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(nn.Linear(2, 2))
    assert model(torch.ones(1, 2)).dtype == torch.float32
    assert "forward" in model.__dict__
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert plain is model
    assert "forward" not in model.__dict__
    assert torch.equal(plain(torch.ones(1, 2)), nn.Linear.forward(plain, torch.ones(1, 2)))


def test_a_forward_that_the_user_had_replaced_comes_back() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = nn.Linear(2, 2)
    own = model.forward = lambda x: x + 1
    accelerator.prepare(model)
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert model.forward is own


def test_preparing_twice_is_preparing_once() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = accelerator.prepare(model, optimizer)
    second = accelerator.prepare(*first)
    assert first[0] is second[0]
    assert first[1] is second[1]
    assert len(accelerator._models) == 1
    assert len(accelerator._optimizers) == 1


def test_any_order_and_any_nesting() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    loader = torch.utils.data.DataLoader(torch.ones(4, 2))
    out = accelerator.prepare(scheduler, {"o": optimizer, "rest": [loader, (model, "word")]}, 3)
    assert out[0].scheduler is scheduler
    assert out[0].optimizers == [out[1]["o"]]
    assert out[1]["rest"][1] == (model, "word")
    assert out[2] == 3


def test_autocast_can_be_turned_off_inside() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = nn.Linear(2, 2)
    with accelerator.autocast():
        assert model(torch.ones(1, 2)).dtype == torch.bfloat16
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert model(torch.ones(1, 2)).dtype == torch.float32


def test_a_compiled_model_is_unwrapped_or_kept() -> None:
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    model = nn.Linear(2, 2)
    prepared = accelerator.prepare(model)
    assert accelerator.plan.step.value == "compiled"
    assert prepared(torch.ones(1, 2)).shape == (1, 2)
    assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is model
    assert hasattr(accelerator.unwrap_model(prepared), "_orig_mod")
    assert accelerator.get_state_dict(prepared).keys() == {"weight", "bias"}


def test_two_models_with_two_optimizers_train_apart() -> None:
    accelerator = Accelerator(cpu=True)
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    first = torch.optim.SGD(one.parameters(), lr=0.1)
    second = torch.optim.SGD(two.parameters(), lr=0.1)
    one, two, first, second = accelerator.prepare(one, two, first, second)
    before = two.weight.detach().clone()
    accelerator.backward(one(torch.ones(1, 2)).sum())
    first.step()
    assert torch.equal(before, two.weight)


def test_float64_stays_on_a_device_that_has_it() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.ones(2, dtype=torch.float64)))
    assert next(iter(loader)).dtype == torch.float64


@pytest.mark.parametrize("steps", [1, 3])
def test_gradients_are_averaged_over_the_batches_of_an_update(steps: int) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.weight.item()
    for value in range(steps):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), float(value + 1))).sum())
            optimizer.step()
            optimizer.zero_grad()
    assert before - model.weight.item() == pytest.approx(sum(range(1, steps + 1)) / steps, rel=1e-5)


def test_a_deep_copy_computes_with_its_own_weights() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(nn.Linear(2, 2))
    average = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.zero_()
    assert not average(torch.ones(1, 2)).any()
    assert model(torch.ones(1, 2)).any()
    assert average(torch.ones(1, 2)).dtype == torch.float32


def test_the_signature_of_forward_stays_to_be_read() -> None:
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(nn.Linear(2, 2))
    assert list(inspect.signature(model.forward).parameters) == ["input"]
