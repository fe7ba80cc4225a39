from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from anytrain.core.errors import NothingFits
from anytrain.engine.data.feed import StepBatch
from anytrain.engine.step.update import Latch, SplittingUpdate, Update


class Guard:
    """Takes down what is held back."""

    def __init__(self) -> None:
        self.vetoes: list[float] = []

    def veto(self, held: torch.Tensor) -> None:
        self.vetoes.append(float(held))


class Descent(torch.optim.SGD):
    """Plain descent with a guard, as a prepared optimizer has."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.guard = Guard()


class Bench:
    """A model, and what a step is made of."""

    def __init__(self, **more: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        self.optimizer = Descent(self.model)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (n + 1))
        self.told: list[str] = []
        self.bad = 0.0
        self.seen: list[float] = []
        self.parts: dict[str, Any] = {
            "model": self.model,
            "micro": self.micro,
            "no_sync": self.no_sync,
            "clip": lambda: torch.nn.utils.clip_grad_norm_(self.model.parameters(), 100.0),
            "optimizer": self.optimizer,
            "schedulers": (self.schedule,),
            "judge": self,
            "tell": self.told.append,
            **more,
        }

    def look(self, loss: torch.Tensor) -> None:
        self.seen.append(float(loss))

    def verdict(self) -> torch.Tensor:
        return torch.tensor(self.bad)

    def micro(self, model: nn.Module, inputs: Any, items: torch.Tensor | None) -> torch.Tensor:
        loss = model(inputs).pow(2).sum() / (len(inputs) if items is None else items)
        loss.backward()
        return loss.detach()

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        self.told.append("no_sync")
        yield

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


ROWS = torch.arange(12.0).reshape(6, 2) / 10


def batch(*micro: torch.Tensor, spare: bool = False) -> StepBatch:
    own = micro[:-1] if spare else micro
    return StepBatch(micro, torch.tensor(sum(len(m) for m in own)), 0, is_last_spare=spare)


def test_a_step_trains_and_returns_what_it_left_on_the_device() -> None:
    bench = Bench()
    before = bench.weights()
    output = Update(**bench.parts)(StepBatch((ROWS,), None, 0))
    assert output.rate == pytest.approx(0.1)
    assert bench.schedule.get_last_lr() == [pytest.approx(0.05)]
    assert isinstance(output.loss, torch.Tensor)
    assert output.grad_norm is not None
    assert not torch.equal(before[0], bench.weights()[0])
    assert all(p.grad is None for p in bench.model.parameters())


def test_micro_batches_make_the_step_of_the_whole_batch() -> None:
    whole, cut = Bench(), Bench()
    first = Update(**whole.parts)(batch(ROWS))
    second = Update(**cut.parts)(batch(ROWS[:1], ROWS[1:3], ROWS[3:]))
    torch.testing.assert_close(first.loss, second.loss)
    torch.testing.assert_close(whole.weights(), cut.weights())


def test_gradients_are_shared_and_moments_told_at_the_right_places() -> None:
    bench = Bench()
    Update(**bench.parts)(batch(ROWS[:2], ROWS[2:4], ROWS[4:]))
    assert bench.told == [
        "no_sync",
        "substep_end",
        "no_sync",
        "substep_end",
        "pre_optimizer_step",
        "optimizer_step",
    ]


def test_a_spare_micro_batch_changes_nothing() -> None:
    with_it, without = Bench(), Bench()
    first = Update(**with_it.parts)(batch(ROWS[:4], ROWS[4:], spare=True))
    second = Update(**without.parts)(batch(ROWS[:4]))
    assert torch.equal(first.loss, second.loss)
    assert torch.equal(with_it.weights()[0], without.weights()[0])


def test_updates_are_held_back_from_a_bad_step_on_until_it_is_looked_at() -> None:
    bench = Bench()
    update = Update(**bench.parts)
    update(batch(ROWS))
    bench.bad = 1.0
    update(batch(ROWS))
    bench.bad = 0.0
    update(batch(ROWS))
    update(batch(ROWS))
    # The first step found no word yet, the second one that all was well.
    assert bench.optimizer.guard.vetoes == [0.0, float("inf"), float("inf")]
    assert update.latch is not None
    update.latch.open()
    update(batch(ROWS))
    assert bench.optimizer.guard.vetoes[-1] == 0.0


def test_without_a_latch_nothing_is_held_back() -> None:
    bench = Bench(latch=None)
    bench.bad = 1.0
    update = Update(**bench.parts)
    update(batch(ROWS))
    update(batch(ROWS))
    assert bench.optimizer.guard.vetoes == []


def test_a_latch_stays_closed() -> None:
    latch = Latch()
    for bad in (0.0, 1.0, 0.0):
        latch.close(torch.tensor(bad))
    assert float(latch.held) == float("inf")  # type: ignore[arg-type]  # it was closed


class Full(Exception):
    """No memory is left."""


class SmallBench(Bench):
    """A bench that holds no more than so many rows, and drops some of its inputs."""

    def __init__(self, most: int, **more: Any) -> None:
        self.most = most
        self.said: list[int] = []
        self.shared = 0
        self.drop = nn.Dropout(0.5)
        super().__init__(
            is_out_of_memory=lambda error: isinstance(error, Full),
            count=lambda micro: torch.tensor(sum(len(m) for m in micro)),
            keep_rng=self.keep_rng,
            split=self.said.append,
            share_gradients=self.share,
            **more,
        )

    def share(self) -> None:
        self.shared += 1

    def keep_rng(self) -> Any:
        state = torch.get_rng_state()
        return lambda: torch.set_rng_state(state)

    def look(self, loss: torch.Tensor) -> None:
        self.seen.append(float(loss))

    def verdict(self) -> torch.Tensor:
        return torch.tensor(self.bad)

    def micro(self, model: nn.Module, inputs: Any, items: torch.Tensor | None) -> torch.Tensor:
        if len(inputs) > self.most:
            raise Full
        return super().micro(model, inputs, items)


def test_a_step_that_does_not_fit_is_run_in_parts_with_the_same_result() -> None:
    small, large = SmallBench(2), SmallBench(100)
    update = SplittingUpdate(**small.parts)
    first = update(batch(ROWS))
    second = SplittingUpdate(**large.parts)(batch(ROWS))
    assert small.said == [2, 4]
    assert large.said == []
    torch.testing.assert_close(first.loss, second.loss)
    torch.testing.assert_close(small.weights(), large.weights())
    assert small.shared == large.shared == 1
    update(batch(ROWS))
    assert small.said == [2, 4]  # what fits is remembered


def test_half_a_gradient_of_a_failed_attempt_is_thrown_away() -> None:
    small, large = SmallBench(2), SmallBench(100)
    given = (ROWS[:2], ROWS[2:])  # the first micro-batch fits, the second does not
    SplittingUpdate(**small.parts)(batch(*given))
    SplittingUpdate(**large.parts)(batch(*given))
    torch.testing.assert_close(small.weights(), large.weights())


def test_one_rank_that_is_full_makes_all_cut() -> None:
    others = iter([True, False])
    bench = SmallBench(100, agree=lambda full: full or next(others))
    SplittingUpdate(**bench.parts)(batch(ROWS))
    assert bench.said == [2]


def test_a_row_that_does_not_fit_ends_the_run() -> None:
    bench = SmallBench(0)
    with pytest.raises(NothingFits, match="one row at a time"):
        SplittingUpdate(**bench.parts)(batch(ROWS))


def test_any_other_failure_passes_through() -> None:
    bench = Bench()

    def broken(*args: Any) -> torch.Tensor:
        raise ValueError("no")

    bench.parts |= {"micro": broken, "count": lambda micro: torch.tensor(6)}
    with pytest.raises(ValueError, match="no"):
        SplittingUpdate(**bench.parts)(batch(ROWS))
