from __future__ import annotations

from typing import Any

import pytest
import torch

from anytrain.engine.recording.meter import Meter
from anytrain.machine.parallel.world import Solo

CPU = torch.device("cpu")


def value(number: float) -> torch.Tensor:
    return torch.tensor(number)


def filled(*losses: float, bad: tuple[int, ...] = (), is_read: bool = False) -> Meter:
    meter = Meter(CPU)
    for number, loss in enumerate(losses):
        verdict = number in bad if is_read else value(float(number in bad))
        meter.add(value(loss), value(loss * 10), 0.1 * number, verdict)
    return meter


def test_a_reading_is_the_mean_loss_and_the_last_norm_and_rate() -> None:
    reading = filled(1.0, 2.0, 6.0).read(Solo())
    assert reading is not None
    assert (reading.num_steps, reading.loss) == (3, 3.0)
    assert (reading.grad_norm, reading.learning_rate) == (60.0, pytest.approx(0.2))
    assert (reading.num_bad, reading.first_bad) == (0, -1)


def test_a_reading_begins_anew() -> None:
    meter = filled(5.0)
    meter.read(Solo())
    assert meter.read(Solo()) is None
    meter.add(value(2.0), None, 0.5, value(0.0))
    reading = meter.read(Solo())
    assert reading is not None
    assert (reading.loss, reading.grad_norm) == (2.0, None)


def test_bad_steps_are_counted_and_have_no_part_in_the_mean() -> None:
    meter = filled(1.0, float("nan"), float("inf"), 3.0, bad=(1, 2))
    assert (meter.num_bad(), meter.first_bad()) == (2, 1)
    reading = meter.read(Solo())
    assert reading is not None
    assert (reading.num_bad, reading.first_bad, reading.loss) == (2, 1, 2.0)


@pytest.mark.parametrize("bad", [(), (0,), (1, 2), (3,), (0, 1, 2, 3)])
def test_a_verdict_that_is_read_already_gives_the_same_reading(bad: tuple[int, ...]) -> None:
    losses = (1.0, 2.5, 4.0, 0.3)
    read, unread = (filled(*losses, bad=bad, is_read=is_read) for is_read in (True, False))
    assert read.first_bad() == unread.first_bad()
    assert repr(read.read(Solo())) == repr(unread.read(Solo()))


@pytest.mark.parametrize("is_read", [True, False])
def test_answered_bad_steps_are_forgotten_and_the_next_one_is_found(is_read: bool) -> None:
    meter = filled(1.0, 2.0, 3.0, 3.0, bad=(2, 3), is_read=is_read)
    meter.forget_bad()
    assert (meter.num_steps, meter.num_bad(), meter.first_bad()) == (2, 0, -1)
    meter.add(value(1.0), None, 0.1, False if is_read else value(0.0))
    meter.add(value(1.0), None, 0.1, True if is_read else value(1.0))
    assert (meter.num_bad(), meter.first_bad()) == (1, 3)


def test_what_was_saved_does_not_change_with_later_steps() -> None:
    meter = filled(1.0, 2.0)
    saved = meter.state_dict(Solo())
    meter.add(value(5.0), None, 0.1, False)
    assert saved["losses"].tolist() == [3.0]


def test_a_saved_meter_goes_on_adding() -> None:
    whole, first = filled(1.0, 2.0, 4.0, bad=(1,)), filled(1.0, 2.0, bad=(1,))
    second = Meter(CPU)
    second.load_state_dict(first.state_dict(Solo()), Solo())
    second.add(value(4.0), value(40.0), 0.2, value(0.0))
    assert second.read(Solo()) == whole.read(Solo())


class Rank(Solo):
    """One of two ranks, that knows what the other would give."""

    size = 2

    def __init__(self, rank: int, others: float) -> None:
        super().__init__()
        self.rank = rank
        self.others = torch.tensor([others])

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        """Return both ranks' values in order."""
        both = [value.reshape(1), self.others]
        return torch.cat(both if self.rank == 0 else both[::-1])


def test_every_rank_goes_on_from_its_own_losses() -> None:
    state = filled(1.0, 2.0).state_dict(Rank(0, others=30.0))
    for rank, expected in ((0, 3.0), (1, 30.0)):
        meter = Meter(CPU)
        meter.load_state_dict(state, Rank(rank, others=0.0))
        assert meter.state_dict(Solo())["losses"].tolist() == [expected]


def test_ranks_of_another_number_share_the_losses() -> None:
    state: dict[str, Any] = filled(1.0, 2.0).state_dict(Rank(0, others=5.0))
    meter = Meter(CPU)
    meter.load_state_dict(state, Solo())
    reading = meter.read(Solo())
    assert reading is not None
    assert reading.loss == 2.0  # (3 + 5) / 2 ranks / 2 steps
