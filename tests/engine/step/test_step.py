from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from anytrain.core.errors import NothingFits
from anytrain.engine.step.guard import Judge
from anytrain.engine.step.out_of_memory import Splitting
from anytrain.engine.step.step import Batch, Step, StepOutput, TorchOps


class Guard:
    """Takes down what is held back; `bad` steps are skipped."""

    def __init__(self) -> None:
        self.vetoes: list[float] = []
        self.skipped = torch.zeros(())

    def note_norm(self, held: torch.Tensor) -> None:
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
        self.more = {"tell": self.told.append, **more}
        self.ops = TorchOps(
            (self.optimizer,),
            (self.schedule,),
            lambda: torch.nn.utils.clip_grad_norm_(self.model.parameters(), 100.0),
        )

    def step(self) -> Step:
        return Step(self.model, self.micro, self.no_sync, self.ops, **self.more)

    def judge(self, *, holds: bool = True) -> Judge:
        self.more["judge"] = Judge(self.optimizer, lambda lost: lost, holds=holds)
        return self.more["judge"]

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


def batch(*micro: torch.Tensor, spare: bool = False) -> Batch:
    own = micro[:-1] if spare else micro
    return Batch(micro, torch.tensor(sum(len(m) for m in own)), 0, is_last_spare=spare)


def test_a_step_trains_and_returns_what_it_left_on_the_device() -> None:
    bench = Bench()
    bench.judge()
    before = bench.weights()
    output = bench.step()(Batch((ROWS,), None, 0))
    assert output.rate == pytest.approx(0.1)
    assert bench.schedule.get_last_lr() == [pytest.approx(0.05)]
    assert isinstance(output.loss, torch.Tensor)
    assert output.grad_norm is not None
    assert not torch.equal(before[0], bench.weights()[0])
    assert all(p.grad is None for p in bench.model.parameters())


def test_micro_batches_make_the_step_of_the_whole_batch() -> None:
    whole, cut = Bench(), Bench()
    first = whole.step()(batch(ROWS))
    second = cut.step()(batch(ROWS[:1], ROWS[1:3], ROWS[3:]))
    torch.testing.assert_close(first.loss, second.loss)
    torch.testing.assert_close(whole.weights(), cut.weights())


def test_gradients_are_shared_and_moments_told_at_the_right_places() -> None:
    bench = Bench()
    bench.step()(batch(ROWS[:2], ROWS[2:4], ROWS[4:]))
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
    first = with_it.step()(batch(ROWS[:4], ROWS[4:], spare=True))
    second = without.step()(batch(ROWS[:4]))
    assert torch.equal(first.loss, second.loss)
    assert torch.equal(with_it.weights()[0], without.weights()[0])


def test_updates_are_held_back_from_a_bad_step_on_until_it_is_looked_at() -> None:
    bench = Bench()
    judge, step, guard = bench.judge(), bench.step(), bench.optimizer.guard
    for bad in (0.0, 1.0, 0.0, 0.0):
        guard.skipped = torch.tensor(bad)
        step(batch(ROWS))
    # Of each step first the loss; the first step found no word yet, the second that all was well.
    inf = float("inf")
    assert guard.vetoes == [0.0, 0.0, 0.0, 0.0, inf, 0.0, inf]
    judge.release()
    step(batch(ROWS))
    assert guard.vetoes[-2:] == [0.0, 0.0]


def test_where_bad_steps_are_skipped_nothing_is_held_back() -> None:
    bench = Bench()
    bench.judge(holds=False)
    step, guard = bench.step(), bench.optimizer.guard
    guard.skipped = torch.ones(())
    assert [float(step(batch(ROWS)).bad) for _ in "ab"] == [1.0, 1.0]
    assert guard.vetoes == [0.0, 0.0]


def test_batches_of_a_users_loop_make_one_update() -> None:
    whole, apart = Bench(), Bench()
    whole.step()(batch(ROWS[:3], ROWS[3:]))

    def third(model: nn.Module, inputs: Any, items: torch.Tensor | None) -> torch.Tensor:
        loss = model(inputs).pow(2).sum() / len(ROWS)
        loss.backward()
        return loss.detach()

    apart.micro = third  # type: ignore[method-assign]
    step = apart.step()
    first = step(Batch((ROWS[:3],), ends=False, num_in_step=2))
    assert first == StepOutput(first.loss) and apart.told == ["no_sync"]
    step(Batch((ROWS[3:],), ends=True, num_in_step=2))
    torch.testing.assert_close(whole.weights(), apart.weights())


class Full(Exception):
    """No memory is left."""


class SmallBench(Bench):
    """A bench that holds no more than so many rows, and drops some of its inputs."""

    def __init__(self, most: int, **more: Any) -> None:
        super().__init__()
        self.most = most
        self.said: list[int] = []
        self.shared = 0
        self.drop = nn.Dropout(0.5)
        self.more["fitting"] = Splitting(
            lambda error: isinstance(error, Full),
            lambda micro: torch.tensor(sum(len(m) for m in micro)),
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

    def micro(self, model: nn.Module, inputs: Any, items: torch.Tensor | None) -> torch.Tensor:
        if len(inputs) > self.most:
            raise Full
        return super().micro(model, inputs, items)


def test_a_step_that_does_not_fit_is_run_in_parts_with_the_same_result() -> None:
    small, large = SmallBench(2), SmallBench(100)
    step = small.step()
    first = step(batch(ROWS))
    second = large.step()(batch(ROWS))
    assert small.said == [2, 4]
    assert large.said == []
    torch.testing.assert_close(first.loss, second.loss)
    torch.testing.assert_close(small.weights(), large.weights())
    assert small.shared == large.shared == 1
    step(batch(ROWS))
    assert small.said == [2, 4]  # what fits is remembered


def test_half_a_gradient_of_a_failed_attempt_is_thrown_away() -> None:
    small, large = SmallBench(2), SmallBench(100)
    given = (ROWS[:2], ROWS[2:])  # the first micro-batch fits, the second does not
    small.step()(batch(*given))
    large.step()(batch(*given))
    torch.testing.assert_close(small.weights(), large.weights())


def test_one_rank_that_is_full_makes_all_cut() -> None:
    others = iter([True, False])
    bench = SmallBench(100, agree=lambda full: full or next(others))
    bench.step()(batch(ROWS))
    assert bench.said == [2]


def test_a_row_that_does_not_fit_ends_the_run() -> None:
    bench = SmallBench(0)
    with pytest.raises(NothingFits, match="one row at a time"):
        bench.step()(batch(ROWS))


def test_any_other_failure_passes_through() -> None:
    bench = SmallBench(100)

    def broken(*args: Any) -> torch.Tensor:
        raise ValueError("no")

    bench.micro = broken  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no"):
        bench.step()(batch(ROWS))
