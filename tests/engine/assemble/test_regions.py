"""A run looks after its compiled blocks at its log points, by the time that its steps take."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from anytrain.core.plan import Wish, Wishes
from anytrain.engine.assemble.regions import Regions, build_regions
from anytrain.engine.assemble.run import Run, RunOptions
from anytrain.engine.assemble.session import Session, session


class Tier:
    """What is told how long steps take, and says when blocks have changed."""

    because = "4 x Block run compiled"

    def __init__(self) -> None:
        self.told: list[tuple[int, float]] = []
        self.answers = [False, True]

    def tend(self, steps_left: int, step_s: float, *, has_room: bool) -> bool:
        """Keep what was told."""
        assert has_room
        self.told.append((steps_left, step_s))
        return self.answers.pop(0)


def on_cpu() -> Session:
    return session(Wishes(device=Wish("cpu", "test")))


def test_a_change_is_a_revision_and_time_is_told_by_the_step() -> None:
    run, tier = on_cpu(), Tier()
    regions = Regions(run, tier, step=None)  # type: ignore[arg-type]
    regions.tend(10)
    assert tier.told == []  # no step has been made

    def steps(number: int) -> None:
        for _ in range(number):
            with run.ledger.span("step"):
                time.sleep(0.01)
        with run.ledger.span("evaluate"):
            time.sleep(0.5)

    steps(2)
    regions.tend(8)
    steps(3)
    regions.tend(5)
    assert [left for left, _ in tier.told] == [8, 5]
    assert all(0.01 <= step_s < 0.15 for _, step_s in tier.told)
    last: Any = run.revisions[-1]
    assert (last.choice, last.because) == ("step", tier.because)
    assert last.value == run.plan.step.value
    assert len(run.revisions) == 1


def test_the_cpu_compiles_nothing_by_itself() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    assert build_regions(Run(on_cpu(), RunOptions()), model, step=None) is None  # type: ignore[arg-type]
    assert not model[0]._forward_pre_hooks
    assert not torch.are_deterministic_algorithms_enabled()
