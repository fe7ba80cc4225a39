"""Numbers drawn on the host that decide nothing do not keep a step from being recorded."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from anytrain.fast.recorded import recordings
from anytrain.fast.recorded.host_draws import noted
from anytrain.fast.recorded.recordings import Recordings
from fast.recorded.test_recordings import Again, Bench

CERTAIN: list[Callable[[Any], Any]] = [
    lambda u: u < 0.0,
    lambda u: u < 1,
    lambda u: u <= -0.1,
    lambda u: u <= 1.0,
    lambda u: u > -1,
    lambda u: u > 1.0,
    lambda u: u >= 0,
    lambda u: u >= 1.0,
]
UNCERTAIN: list[Callable[[Any], Any]] = [
    lambda u: u < 0.1,
    lambda u: u <= 0.0,
    lambda u: u > 0.0,
    lambda u: u < float("nan"),
    lambda u: u < torch.zeros(()),
    lambda u: u + 1,
    lambda u: u.item(),
    lambda u: u.tolist(),
    lambda u: u.numpy(),
    lambda u: u.clone(),
    lambda u: torch.stack([u, u]),
    lambda u: torch.maximum(input=torch.ones(3), other=u),
    lambda u: torch.zeros(3).__setitem__(0, u),
    lambda u: torch.full((2,), u),
    lambda u: torch.zeros(2).new_full((2,), u),
    lambda u: torch.zeros(2).new_tensor(u),
    lambda u: torch.tensor(u),
    lambda u: torch.arange(0, u, 0.5),
    lambda u: torch.add(torch.ones(2), torch.ones(2), alpha=u),
    lambda u: torch.nn.functional.leaky_relu(torch.ones(2), u),
    copy.deepcopy,
    pickle.dumps,
    bool,
    float,
    str,
]


@pytest.mark.parametrize("compare", CERTAIN)
def test_a_comparison_that_all_numbers_pass_or_fail_decides_nothing(
    compare: Callable[[Any], Any],
) -> None:
    before = torch.get_rng_state()
    with noted() as chances:
        found = {bool(compare(torch.rand([]))) for _ in range(20)}
    assert len(found) == 1
    assert (chances.number, chances.decide) == (20, False)
    assert chances.explain(before, torch.get_rng_state())


@pytest.mark.parametrize("use", UNCERTAIN)
def test_whatever_else_is_done_with_a_number_may_matter(use: Callable[[Any], Any]) -> None:
    before = torch.get_rng_state()
    with noted() as chances:
        use(torch.rand([]))
    assert chances.decide
    assert not chances.explain(before, torch.get_rng_state())


def test_a_number_that_somebody_keeps_may_matter() -> None:
    before = torch.get_rng_state()
    with noted() as chances:
        kept = torch.rand([])
    assert not chances.explain(before, torch.get_rng_state())
    assert 0 <= float(kept) < 1


def test_numbers_that_leave_the_generator_where_it_was_are_not_drawn_again() -> None:
    before = torch.get_rng_state()
    with noted() as chances, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        float(torch.rand(1))
    assert chances.explain(before, torch.get_rng_state())
    chances.draw()
    assert torch.equal(before, torch.get_rng_state())


def test_another_thread_gets_plain_numbers() -> None:
    found: list[type] = []
    with noted() as chances:
        thread = threading.Thread(target=lambda: found.append(type(torch.rand([]))))
        thread.start()
        thread.join()
    assert found == [torch.Tensor]
    assert chances.number == 0


def test_a_device_that_is_set_inside_holds_afterwards() -> None:
    with noted(), torch.device("meta"):
        torch.rand(3)
    with torch.device("meta"):
        assert torch.rand(3).device.type == "meta"


def test_compiled_code_runs_as_before_and_is_not_explained() -> None:
    compiled = torch.compile(lambda x: x + torch.rand(1), backend="eager", fullgraph=True)
    before = torch.get_rng_state()
    with noted() as chances:
        assert compiled(torch.ones(2)).shape == (2,)
    assert not chances.explain(before, torch.get_rng_state())


def test_other_draws_are_not_explained() -> None:
    before = torch.get_rng_state()
    with noted() as chances:
        torch.rand([]) < 0.0  # noqa: B015
        torch.rand(3)
    assert not chances.explain(before, torch.get_rng_state())
    assert type(torch.rand([])) is torch.Tensor


class LayerDrop(nn.Linear):
    """A layer that is left out at times, as transformers' are."""

    rate = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :1] if torch.rand([]) < self.rate else super().forward(x)


class Quietly(Again):
    """Replay without touching the host's generator, as a graph does."""

    def record(self, work: Any, draws: Any) -> Any:
        work()  # a recording runs Python once
        again, output = super().record(work, draws)

        def replay() -> None:
            with torch.random.fork_rng(devices=[]):
                again()

        return replay, output


def bench(rate: float) -> Bench:
    made = Bench(LayerDrop(2, 1))
    made.model.rate = rate
    made.recorder = Quietly()
    made.recordings = Recordings(
        made.recorder, made.model, (made.optimizer,), lambda value, because: None
    )
    return made


def drawn_after(step: Callable[[torch.Tensor], Any], rows: list[torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(7)
    for row in rows:
        step(row)
    return torch.rand(4)


@pytest.fixture(autouse=True)
def _host_tensors_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "_is_elsewhere", lambda tensor: False)


def test_a_model_with_layerdrop_of_rate_0_is_recorded_and_draws_as_op_by_op() -> None:
    made, rows = bench(0.0), list(torch.rand(6, 4, 2))

    def step(row: torch.Tensor) -> None:
        found = made.recordings.find(made, {"x": row}, "step")
        if found is None:
            with made.recordings.observed(made):
                made.compute({"x": row})
        else:
            found[0](found[1])

    drawn = drawn_after(step, rows)
    assert made.recordings.stopped is None
    assert (made.recorder.num_recorded, made.recorder.num_replayed) == (1, 4)
    assert torch.equal(drawn, drawn_after(lambda row: made.compute({"x": row}), rows))


def test_a_model_with_layerdrop_stays_op_by_op() -> None:
    made = bench(0.5)
    for row in torch.rand(4, 4, 2):
        assert made.recordings.find(made, {"x": row}, "step") is None
        with made.recordings.observed(made):
            made.compute({"x": row})
    assert "LayerDrop" in str(made.recordings.stopped)
