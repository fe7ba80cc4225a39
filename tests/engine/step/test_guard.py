"""A non-finite gradient changes nothing, whoever decides."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from anytrain.core.errors import Notice
from anytrain.engine.precision import LossScale
from anytrain.engine.prepared.optimizer import DeviceRate, PreparedOptimizer, PreparedScheduler
from anytrain.engine.prepared.walk import Accumulation, Cursor
from anytrain.engine.step.guard import DeviceGuard, Guard, HostGuard, ScaledGuard
from anytrain.machine.parallel.world import Solo

CPU = torch.device("cpu")
# The CPU's fused AdamW takes the same flags as the GPU's: the device's way is tested here too.
GUARDS: dict[str, Callable[[], Guard]] = {
    "host": lambda: HostGuard(CPU),
    "device": lambda: DeviceGuard(CPU),
}
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "one-cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=30),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 3),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [3],
    ),
}


@pytest.fixture(autouse=True)
def _quiet() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Notice)
        yield


def parts(guard: Guard, schedule: str = "lambda", **options: object) -> tuple:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True, **options)
    cursor = Cursor(Accumulation())
    wrapped = PreparedOptimizer(optimizer, cursor, guard, Solo())
    scheduler = PreparedScheduler(SCHEDULES[schedule](optimizer), [wrapped], cursor, positions=1)
    return model, wrapped, scheduler


def train(model: nn.Module, optimizer: PreparedOptimizer, scheduler: object, bad: set) -> list:
    rates = []
    for turn in range(12):
        factor = float("nan") if turn in bad else 1.0
        (model(torch.ones(3, 4) * (turn + 1) / 10).sum() * factor).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nothing_moves(guard: str, value: float) -> None:
    model, optimizer, scheduler = parts(GUARDS[guard]())
    train(model, optimizer, scheduler, set())
    weights = [p.detach().clone() for p in model.parameters()]
    state = copy.deepcopy(optimizer.state_dict()["state"])
    (model(torch.ones(1, 4)).sum() * value).backward()
    optimizer.step()
    assert optimizer.step_was_skipped
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    for key, kept in state.items():
        for name, before in kept.items():
            assert torch.equal(before, optimizer.state_dict()["state"][key][name])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_device_decides_as_the_host_does(schedule: str) -> None:
    results = []
    for guard in GUARDS.values():
        model, optimizer, scheduler = parts(guard(), schedule)
        rates = train(model, optimizer, scheduler, {3, 4, 7})
        last, place = scheduler.get_last_lr(), scheduler.state_dict()["last_epoch"]
        results.append((rates, model.weight.detach().clone(), last, place))
        assert optimizer.guard.num_skipped == 3
        assert place == 9
    (rates, weight, last, _), (rates2, weight2, last2, _) = results
    assert rates == pytest.approx(rates2, rel=1e-6)
    assert torch.allclose(weight, weight2, rtol=1e-6)
    assert last == last2


def test_a_restored_schedule_goes_on_from_where_it_was() -> None:
    model, optimizer, scheduler = parts(DeviceGuard(CPU))
    assert isinstance(scheduler._rate, DeviceRate)
    train(model, optimizer, scheduler, {1})
    saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict(), model.state_dict()))
    expected = train(model, optimizer, scheduler, {2})
    model, optimizer, scheduler = parts(DeviceGuard(CPU))
    optimizer.load_state_dict(saved[0])
    scheduler.load_state_dict(saved[1])
    model.load_state_dict(saved[2])
    assert isinstance(saved[0]["param_groups"][0]["lr"], float)
    assert train(model, optimizer, scheduler, {2}) == expected


def test_more_positions_than_the_table_first_held() -> None:
    model, optimizer, scheduler = parts(DeviceGuard(CPU))
    for _ in range(600):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1 / 601)


def test_a_norm_that_overflows_is_not_finite_either() -> None:
    for guard in GUARDS.values():
        model, optimizer, _ = parts(guard())
        before = model.weight.detach().clone()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.guard.note_norm(torch.tensor(float("inf")))
        optimizer.step()
        assert optimizer.step_was_skipped
        assert torch.equal(before, model.weight)
        optimizer.step()
        assert not optimizer.step_was_skipped, "a veto counts once"


def test_closures_are_undone() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
    guard = HostGuard(CPU)
    scale = 1.0

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(1, 2)) ** 2).sum() * scale
        loss.backward()
        return loss

    guard.update(optimizer, closure)
    assert not guard.was_skipped()
    before = model.weight.detach().clone()
    scale = float("nan")
    guard.update(optimizer, closure)
    assert guard.was_skipped()
    assert torch.equal(before, model.weight)


def test_sparse_and_missing_gradients_are_looked_at() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    idle = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([*table.parameters(), idle], lr=0.1)
    guard = HostGuard(CPU)
    guard.update(optimizer, None)
    assert not guard.was_skipped(), "no gradient at all is nothing bad"
    (table(torch.tensor([1])) * float("inf")).sum().backward()
    before = table.weight.detach().clone()
    guard.update(optimizer, None)
    assert guard.was_skipped()
    assert torch.equal(before, table.weight)


def test_the_first_skip_is_told_once() -> None:
    model, optimizer, scheduler = parts(HostGuard(CPU))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train(model, optimizer, scheduler, {1, 2, 3})
    assert sum("skipped" in str(w.message) for w in seen) == 1


@pytest.mark.parametrize("fused", [True, False])
def test_a_loss_scale_shrinks_on_overflow_and_grows_after(fused: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scale = LossScale(scaler)
    model, optimizer, scheduler = parts(ScaledGuard(scale, CPU, fused))
    seen = []
    for turn in range(6):
        factor = float("inf") if turn == 1 else 1.0
        before = model.weight.detach().clone()
        scale(model(torch.ones(1, 4)).sum() * factor).backward()
        optimizer.guard.unscale(optimizer.optimizer)
        if turn != 1:
            assert torch.equal(model.weight.grad, torch.ones(2, 4)), "gradients are true again"
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped == (turn == 1)
        assert torch.equal(before, model.weight) == (turn == 1)
        seen.append(float(scaler.get_scale()))
    assert seen == [2.0**10, 2.0**9, 2.0**9, 2.0**10, 2.0**10, 2.0**11]
    assert scheduler.state_dict()["last_epoch"] == 5


def test_a_closure_is_undone_on_the_device_too() -> None:
    model, optimizer, _ = parts(DeviceGuard(CPU))

    def closure() -> torch.Tensor:
        optimizer.optimizer.zero_grad()
        loss = model(torch.ones(1, 4)).sum() * float("nan")
        loss.backward()
        return loss

    before = model.weight.detach().clone()
    optimizer.step(closure)
    assert optimizer.step_was_skipped
    assert optimizer.guard.num_skipped == 1
    assert torch.equal(before, model.weight)


def test_clipping_by_value_does_not_hide_an_overflow() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scale = LossScale(scaler)
    for fused in (True, False):
        model, optimizer, _ = parts(ScaledGuard(scale, CPU, fused))
        before = model.weight.detach().clone()
        scale(model(torch.ones(1, 4)).sum() * float("inf")).backward()
        optimizer.guard.unscale(optimizer.optimizer)
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        model.weight.grad.nan_to_num_()
        model.bias.grad.nan_to_num_()
        optimizer.step()
        assert optimizer.step_was_skipped
        assert torch.equal(before, model.weight)


@pytest.mark.parametrize("kind", GUARDS)
@pytest.mark.parametrize("norm", [1.0, float("nan"), float("inf")])
def test_a_norm_of_all_gradients_decides(kind: str, norm: float) -> None:
    guard = GUARDS[kind]()
    model, optimizer, _ = parts(guard)
    model(torch.ones(1, 4)).sum().backward()
    before = model.weight.clone()
    guard.note_norm(torch.tensor(norm), covers_all=True)
    optimizer.step()
    assert guard.was_skipped() is (norm != 1.0)
    assert torch.equal(before, model.weight) is (norm != 1.0)


@pytest.mark.parametrize("kind", GUARDS)
@pytest.mark.parametrize("earlier", ["used", "forgotten"])
def test_a_norm_of_all_gradients_speaks_for_one_update(kind: str, earlier: str) -> None:
    guard = GUARDS[kind]()
    model, optimizer, _ = parts(guard)
    guard.note_norm(torch.tensor(1.0), covers_all=True)
    if earlier == "used":
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    else:
        guard.forget()
    model(torch.full((1, 4), torch.nan)).sum().backward()
    guard.note_norm(torch.tensor(1.0))  # of some of the gradients
    optimizer.step()
    assert guard.was_skipped()


def test_an_optimizer_clears_gradients_its_own_way_where_it_has_one() -> None:
    class Keeps(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            self.asked = set_to_none

    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    own = Keeps([weight], lr=0.1)
    PreparedOptimizer(own, Cursor(Accumulation()), HostGuard(CPU), Solo()).zero_grad()
    assert own.asked
    assert weight.grad is not None
    plain = torch.optim.SGD([weight], lr=0.1)
    PreparedOptimizer(plain, Cursor(Accumulation()), HostGuard(CPU), Solo()).zero_grad()
    assert weight.grad is None
