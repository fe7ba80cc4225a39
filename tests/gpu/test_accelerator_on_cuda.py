"""What only a real GPU shows: who decides, who waits, and what travels."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from anytrain import Accelerator, set_seed

pytestmark = pytest.mark.gpu


def parts(lr: float = 1e-2, **options: object) -> tuple:
    set_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
    data = TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
    return model, optimizer, DataLoader(data, batch_size=8, pin_memory=True), scheduler


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_the_device_is_taken_without_being_named() -> None:
    accelerator = Accelerator()
    assert accelerator.device.type == "cuda"
    assert accelerator.plan.guard.value == "device"


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_step_never_waits_for_the_device(precision: str) -> None:
    accelerator = Accelerator(mixed_precision=precision)
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())
    batches = list(loader)
    for turn in range(3):
        if turn == 1:
            torch.cuda.set_sync_debug_mode("error")
        try:
            for batch in batches:
                accelerator.backward(loss_of(model, batch))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    scheduler.get_last_lr()  # brings the host's scheduler to where the device is
    assert scheduler.scheduler.last_epoch == 24 - accelerator.num_skipped_steps


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["fused", "plain"])
def test_a_bad_gradient_changes_nothing(precision: str, kind: str) -> None:
    accelerator = Accelerator(mixed_precision=precision)
    given = parts() if kind == "fused" else parts(foreach=False)
    model, optimizer, loader, scheduler = accelerator.prepare(*given)
    batches = list(loader)
    for batch in batches[:4]:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    skipped = accelerator.num_skipped_steps
    weights = [p.detach().clone() for p in model.parameters()]
    state = copy.deepcopy(optimizer.state_dict()["state"])
    rate = scheduler.get_last_lr()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerator.backward(loss_of(model, batches[4]) * float("nan"))
        optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    assert accelerator.optimizer_step_was_skipped
    assert accelerator.num_skipped_steps == skipped + 1
    assert scheduler.get_last_lr() == rate
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    after = optimizer.state_dict()["state"]
    for key, values in state.items():
        assert all(torch.equal(value, after[key][name]) for name, value in values.items())
    accelerator.backward(loss_of(model, batches[5]))
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped


def test_the_rate_on_the_device_is_the_schedule_s() -> None:
    accelerator = Accelerator()
    model, optimizer, loader, scheduler = accelerator.prepare(*parts(lr=1.0))
    rates = []
    for position, batch in enumerate(loader):
        factor = float("nan") if position in (2, 3) else 1.0
        accelerator.backward(loss_of(model, batch) * factor)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(round(float(optimizer.param_groups[0]["lr"]), 6))
    positions = [1, 2, 2, 2, 3, 4, 5, 6]
    assert rates == [round(1 / (n + 1), 6) for n in positions]
    assert scheduler.get_last_lr() == [1 / 7]


def train(accelerator: Accelerator, prepared: tuple, num_steps: int) -> None:
    model, optimizer, loader, scheduler = prepared
    for _, batch in zip(range(num_steps), loader, strict=False):
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def test_a_checkpoint_goes_from_cpu_to_cuda_and_back(tmp_path: Path) -> None:
    first = Accelerator(cpu=True)
    prepared = first.prepare(*parts())
    train(first, prepared, 3)
    first.save_state(tmp_path / "cpu")
    second = Accelerator()
    on_gpu = second.prepare(*parts())
    second.load_state(tmp_path / "cpu")
    for a, b in zip(prepared[0].parameters(), on_gpu[0].parameters(), strict=True):
        assert torch.equal(a.detach(), b.detach().cpu())
    assert on_gpu[3].get_last_lr() == prepared[3].get_last_lr()
    train(second, on_gpu, 2)
    second.save_state(tmp_path / "cuda")
    third = Accelerator(cpu=True)
    back = third.prepare(*parts())
    third.load_state(tmp_path / "cuda")
    assert back[1].param_groups[0]["fused"] is None
    assert isinstance(back[1].param_groups[0]["lr"], float)
    train(third, back, 2)


def test_fp16_finds_a_scale_and_learns() -> None:
    accelerator = Accelerator(mixed_precision="fp16")
    model, optimizer, loader, _ = accelerator.prepare(*parts())
    losses = []
    for _ in range(10):
        for batch in loader:
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert sum(losses[-8:]) < sum(losses[:8])
    assert accelerator.scaler is not None


def test_sgd_and_a_custom_optimizer_are_guarded_too() -> None:
    class Plain(torch.optim.Optimizer):
        def __init__(self, params: object) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad, alpha=group["lr"])

    for make in (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), Plain):
        accelerator = Accelerator()
        model = nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, make(model.parameters()))
        before = model.weight.detach().clone()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            accelerator.backward(
                model(torch.ones(2, 4, device=accelerator.device)).sum() * float("inf")
            )
            optimizer.step()
        assert torch.equal(before, model.weight)
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(2, 4, device=accelerator.device)).sum())
        optimizer.step()
        assert not torch.equal(before, model.weight)


def test_an_index_in_the_device_s_name_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYTRAIN_DEVICE", "cuda:0")
    assert str(Accelerator().device) == "cuda:0"
