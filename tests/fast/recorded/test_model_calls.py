"""Forward and backward recorded, with a recorder that runs its work again at each replay.

What only a real graph shows needs a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from anytrain.fast.purity.impurity import hooked
from anytrain.fast.recorded import recordings
from anytrain.fast.recorded.model_calls import CALLS, ModelShortening, RecordedModel, RecorderSlots
from anytrain.fast.recorded.payback import Payback, unlimited
from anytrain.fast.recorded.recordings import Outside, Recordings
from rerun_recorder import Again


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = torch.tanh(self.first(x))
        logits = self.last(hidden)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits, "hidden": hidden}


class Bench:
    """A model with its twin that runs op by op."""

    def __init__(self, model: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.model = model or Net()
        self.twin = copy.deepcopy(self.model)
        self.told: list[tuple[str, str]] = []
        self.recorders: list[Again] = []
        self.call = RecordedModel(
            self.model,
            self.model.forward,
            RecorderSlots(self._recorder),
            lambda recorder: Recordings(
                recorder,
                self.model,
                (),
                self._tell,
                None,
                Payback(unlimited),
                Outside(lambda: hooked(self.model)),
                CALLS,
            ),
            lambda: ModelShortening(None, ()),
            self._tell,
        )

    def _recorder(self) -> Again:
        self.recorders.append(Again(lambda: list(self.call.gradients._buffers.values())))
        return self.recorders[-1]

    def _tell(self, value: str, because: str) -> None:
        self.told.append((value, because))

    def both(self, work: Callable[[Callable[..., Any], nn.Module], Any], steps: int = 6) -> None:
        """Do the same with the recorded model and its twin; all that comes of it is the same."""
        draws = torch.Generator().manual_seed(1)
        for _ in range(steps):
            state = draws.get_state()
            found = []
            for call, model in ((self.call, self.model), (self.twin, self.twin)):
                draws.set_state(state)
                torch.manual_seed(3)
                found.append(work(call, model))
            after = [
                [None if p.grad is None else p.grad.clone() for p in model.parameters()]
                for model in (self.model, self.twin)
            ]
            torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
            for one, other in zip(*after, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0)
            for model in (self.model, self.twin):
                with torch.no_grad():
                    for p in model.parameters():
                        if p.grad is not None:
                            p.sub_(0.1 * p.grad)
                model.zero_grad()
            torch.rand(1, generator=draws)

    @property
    def num_replayed(self) -> int:
        return sum(recorder.num_replayed for recorder in self.recorders)


@pytest.fixture(autouse=True)
def _host_tensors_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "_is_elsewhere", lambda tensor: False)


def batch(rows: int = 5) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(rows, 4), "labels": torch.randint(3, (rows,))}


def test_a_models_own_loss() -> None:
    bench = Bench()

    def step(call: Any, model: Any) -> Any:
        loss = call(**batch())["loss"]
        loss.backward()
        return loss.detach()

    bench.both(step)
    assert bench.call.is_on and bench.num_replayed == 2 * 4
    assert bench.told == [
        (
            "cuda_graph",
            "a model's forward and backward is recorded once for each shape and replayed",
        )
    ]


def test_a_loss_of_the_users_from_several_outputs() -> None:
    bench = Bench()

    def step(call: Any, model: Any) -> Any:
        given = batch()
        out = call(given["x"])
        loss = (
            nn.functional.cross_entropy(out["logits"], given["labels"]) + out["hidden"].pow(2).sum()
        )
        loss.backward()
        return loss.detach(), out["logits"].detach()

    bench.both(step)
    assert bench.num_replayed == 8


def test_outputs_and_gradients_that_are_kept_keep_their_values() -> None:
    bench = Bench()
    kept: dict[int, list[Any]] = {0: [], 1: []}

    def step(call: Any, model: Any) -> Any:
        out = call(**batch())
        out["loss"].backward()
        own = kept[model is bench.twin]
        own += [out["loss"], out["logits"], *(p.grad for p in model.parameters())]
        return [tensor.detach().clone() for tensor in own]

    bench.both(step)
    assert bench.num_replayed == 8


def test_gradients_add_up_over_micro_batches() -> None:
    bench = Bench()

    def step(call: Any, model: Any) -> Any:
        for _ in range(3):
            call(**batch())["loss"].backward()

    bench.both(step)
    assert bench.num_replayed > 12


def test_gradients_that_are_zeroed_in_place_are_added_to() -> None:
    bench = Bench()

    def step(call: Any, model: Any) -> Any:
        model.zero_grad(set_to_none=False)
        call(**batch())["loss"].backward()

    bench.both(step)
    assert bench.num_replayed == 8


def test_two_forwards_before_one_backward() -> None:
    bench = Bench()

    def step(call: Any, model: Any) -> Any:
        one, other = call(batch()["x"])["hidden"], call(batch()["x"])["hidden"]
        loss = (one * other).sum()
        loss.backward()
        return loss.detach()

    bench.both(step)
    assert len(bench.recorders) == 2
    assert bench.num_replayed == 16


def test_outputs_of_which_nobody_asks_a_gradient_leave_their_slot() -> None:
    bench = Bench()

    def step(call: Any, model: Any) -> Any:
        call(batch()["x"])["hidden"].sum().item()
        call(**batch())["loss"].backward()

    bench.both(step, steps=8)
    assert len(bench.recorders) == 1


def test_an_input_gets_its_gradient() -> None:
    bench = Bench()

    def step(call: Any, model: Any) -> Any:
        source = torch.randn(5, 4, requires_grad=True)
        call(source * 2, labels=torch.zeros(5, dtype=torch.int64))["loss"].backward()
        return source.grad

    bench.both(step)
    assert bench.num_replayed == 8


def test_parameters_that_are_frozen_in_turn() -> None:
    bench = Bench()

    def step(call: Any, model: Any) -> Any:
        for wants in (True, False):
            for p in model.first.parameters():
                p.requires_grad_(wants)
            call(**batch())["loss"].backward()
        for p in model.first.parameters():
            p.requires_grad_(True)

    bench.both(step)
    assert bench.num_replayed == 16


def test_evaluation_and_calls_without_gradients_run_as_they_are() -> None:
    bench = Bench()

    def step(call: Any, model: Any) -> Any:
        call(**batch())["loss"].backward()
        model.eval()
        found = call(**batch())["loss"].detach()
        model.train()
        with torch.no_grad():
            return found, call(**batch())["loss"]

    bench.both(step)
    assert bench.call.is_on and bench.num_replayed == 8


def test_a_backward_for_the_second_time_is_computed_again() -> None:
    bench = Bench()
    steps = iter(range(100))

    def step(call: Any, model: Any) -> Any:
        loss = call(**batch())["loss"]
        twice = next(steps) >= 10
        loss.backward(retain_graph=twice)
        if twice:
            loss.backward()

    bench.both(step, steps=8)
    assert bench.call.is_on and bench.num_replayed > 8


def test_a_backward_of_another_output_is_computed_again() -> None:
    bench = Bench()
    steps = iter(range(100))

    def step(call: Any, model: Any) -> Any:
        out = call(**batch())
        name = "hidden" if next(steps) >= 10 else "loss"
        out[name].sum().backward()

    bench.both(step, steps=8)


@pytest.mark.parametrize("how", ["grad", "penalty"])
def test_gradients_asked_for_by_name_run_op_by_op_and_the_plan_says_so(how: str) -> None:
    bench = Bench()

    def step(call: Any, model: Any) -> Any:
        source = torch.randn(5, 4, requires_grad=True)
        out = call(source)["logits"].sum()
        if how == "grad":
            found = torch.autograd.grad(out, [*model.parameters()])
            return [g.detach() for g in found]
        (slope,) = torch.autograd.grad(out, source, create_graph=True)
        slope.norm().backward()
        return slope.detach()

    bench.both(step)
    assert not bench.call.is_on and bench.num_replayed == 0
    assert "gradient" in bench.told[-1][1]


def test_batches_of_several_shapes() -> None:
    bench = Bench()
    rows = [2, 3, 4, 2, 3, 4, 2, 3, 4, 2, 3, 4]
    steps = iter([n for n in rows for _ in (0, 1)])

    def step(call: Any, model: Any) -> Any:
        call(**batch(next(steps)))["loss"].backward()

    bench.both(step, steps=len(rows))
    assert bench.call.is_on and bench.num_replayed > 12


def test_a_hook_that_comes_later_stops_the_replays() -> None:
    bench = Bench()
    seen: list[int] = []
    steps = iter(range(100))

    def step(call: Any, model: Any) -> Any:
        if next(steps) in (10, 11):
            model.first.register_forward_hook(lambda *_: seen.append(1))
        call(**batch())["loss"].backward()

    bench.both(step, steps=8)
    assert len(seen) == 2 * 3
