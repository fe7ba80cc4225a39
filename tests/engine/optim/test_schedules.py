"""Every schedule has the rates that transformers gives it, and a checkpoint can hold it."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest
import torch
import transformers
from transformers.trainer_utils import SchedulerType

from anytrain.core.errors import BadInput, Notice
from anytrain.engine.checkpoint.encode import decode, encode
from anytrain.engine.optim import schedules
from anytrain.engine.optim.adafactor import Adafactor, AdafactorSchedule

LENGTH = 20
CASES: list[tuple[str, dict[str, Any]]] = [
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.3}),
    ("cosine_with_restarts", {}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", {}),
    ("polynomial", {"lr_end": 1e-4, "power": 2.5}),
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 3}),
    ("cosine_with_min_lr", {"min_lr": 1e-3}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.2, "num_cycles": 0.8}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}),
    ("cosine_warmup_with_min_lr", {"min_lr": 2e-3, "warmup_lr_rate": 0.3, "num_cycles": 1.5}),
    ("warmup_stable_decay", {"num_decay_steps": 6}),
    ("warmup_stable_decay", {"num_decay_steps": 6, "decay_type": "linear", "min_lr_ratio": 0.1}),
    (
        "warmup_stable_decay",
        {"num_decay_steps": 6, "decay_type": "1-sqrt", "warmup_type": "cosine"},
    ),
    ("warmup_stable_decay", {"num_decay_steps": 18, "warmup_type": "1-sqrt", "num_cycles": 0.7}),
]


def optimizer(rate: float = 0.01) -> torch.optim.Optimizer:
    groups = [{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)], "lr": rate / 3}]
    return torch.optim.SGD(groups, lr=rate)


def walk(scheduler: Any, steps: int) -> list[list[float]]:
    rates = [scheduler.get_last_lr()]
    for _ in range(steps):
        scheduler.optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr())
    return rates


def ours(name: str, warmup: int, options: dict[str, Any], length: int | None = LENGTH) -> Any:
    return schedules.build(
        name, optimizer(), num_warmup_steps=warmup, num_training_steps=length, options=options
    )


def test_every_name_of_transformers_is_here() -> None:
    assert set(schedules.names()) == {kind.value for kind in SchedulerType}


@pytest.mark.parametrize("warmup", [0, 1, 5, 19, 25, -3])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_schedule_has_the_rates_of_transformers(
    name: str, options: dict[str, Any], warmup: int
) -> None:
    if name == "inverse_sqrt" and warmup < 0 and not options:
        return  # transformers divides by zero here; refused below
    theirs = transformers.get_scheduler(
        name, optimizer(), warmup, LENGTH, scheduler_specific_kwargs=options
    )
    # Five steps too many: a loop may go on past the end.
    expected, got = walk(theirs, LENGTH + 5), walk(ours(name, warmup, options), LENGTH + 5)
    assert got == [pytest.approx(rates, rel=1e-14, abs=1e-17) for rates in expected]


@pytest.mark.parametrize(("name", "options"), [case for case in CASES if case[0] != "constant"])
def test_a_schedule_holds_its_options_under_the_names_of_transformers(
    name: str, options: dict[str, Any]
) -> None:
    made = ours(name, 4, options)
    theirs = transformers.get_scheduler(
        name, optimizer(), 4, LENGTH, scheduler_specific_kwargs=options
    )
    assert made.lr_lambdas[0].args == theirs.lr_lambdas[0].args
    assert made.lr_lambdas[0].keywords == theirs.lr_lambdas[0].keywords


def test_stages_can_be_given_one_by_one() -> None:
    options = {"num_decay_steps": 5, "num_stable_steps": 7}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns whenever both are known
        theirs = transformers.get_scheduler(
            "warmup_stable_decay", optimizer(), 8, 20, scheduler_specific_kwargs=options
        )
    assert walk(ours("warmup_stable_decay", 8, options), 25) == walk(theirs, 25)
    assert walk(ours("warmup_stable_decay", 8, options, length=None), 25) == walk(
        ours("warmup_stable_decay", 8, options), 25
    )


def test_stages_that_do_not_fill_training_are_told() -> None:
    with pytest.warns(Notice, match="4 warm-up, 7 stable and 5 decay updates make 16"):
        ours("warmup_stable_decay", 4, {"num_decay_steps": 5, "num_stable_steps": 7})


def test_a_polynomial_ends_where_all_of_training_was_warm_up() -> None:
    rates = walk(ours("polynomial", LENGTH, {"lr_end": 1e-4}), LENGTH)
    assert rates[-1][0] == pytest.approx(1e-4)  # transformers divides by zero at this step


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_checkpoint_continues_a_schedule(name: str, options: dict[str, Any]) -> None:
    whole = walk(ours(name, 4, options), LENGTH)
    first = ours(name, 4, options)
    walk(first, 7)
    held = encode(first.state_dict(), "schedule")
    second = ours(name, 4, options)
    second.load_state_dict(decode(held.document, held.tensors))
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert walk(second, LENGTH - 7) == whole[7:]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_shape_of_a_schedule_can_be_pickled(name: str, options: dict[str, Any]) -> None:
    factor = ours(name, 4, options).lr_lambdas[0]
    again = pickle.loads(pickle.dumps(factor))
    assert [again(step) for step in range(9)] == [factor(step) for step in range(9)]


def test_a_resumed_run_follows_the_length_it_asks_for() -> None:
    first = ours("linear", 0, {}, length=10)
    walk(first, 5)
    longer = ours("linear", 0, {}, length=20)
    longer.load_state_dict(first.state_dict())
    assert walk(longer, 1)[-1][0] == pytest.approx(0.01 * 14 / 20)


@pytest.mark.parametrize("name", ["reduce_lr_on_plateau", "greedy"])
def test_a_schedule_by_metric_moves_like_that_of_transformers(name: str) -> None:
    options = {"patience": 1, "min_lr": 1e-4, "factor": 0.5}
    theirs = transformers.get_scheduler(name, optimizer(), scheduler_specific_kwargs=options)
    mine = ours(name, 0, options)
    for metric in (3.0, 2.0, 1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 0.1):
        theirs.step(metric)
        mine.step(metric)
        rates = [group["lr"] for group in mine.optimizer.param_groups]
        assert rates == [group["lr"] for group in theirs.optimizer.param_groups]
    assert len(set(rates)) == 2
    encode(mine.state_dict(), "schedule")


def test_only_two_schedules_follow_a_metric() -> None:
    assert schedules.follows_metric(ours("reduce_lr_on_plateau", 0, {}))
    assert schedules.follows_metric(ours("greedy", 0, {"min_lr": 1e-5}))
    assert not schedules.follows_metric(ours("linear", 0, {}))
    theirs = transformers.get_scheduler("greedy", optimizer())
    assert schedules.follows_metric(theirs)


def test_warm_up_below_one_is_a_share_of_training() -> None:
    for asked in (0, 0.0, 0.03, 0.5, 1, 1.0, 7, 12.9):
        args = transformers.TrainingArguments(output_dir="unused", warmup_steps=asked)
        assert schedules.warmup_steps(asked, 101) == args.get_warmup_steps(101)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("cosine", {"num_cycle": 1}, "its options are num_cycles"),
        ("linear", {"num_cycles": 1}, "it has no options"),
        ("constant", {"power": 1}, "it has no options"),
        ("cosine", {"num_cycles": "many"}, "num_cycles='many'"),
        ("cosine", {"num_cycles": True}, "num_cycles=True"),
        ("polynomial", {"lr_end": 0.5}, "must be smaller than the learning rate"),
        ("inverse_sqrt", {"timescale": 0}, "timescale"),
        ("cosine_with_min_lr", {}, "neither was given"),
        ("cosine_with_min_lr", {"min_lr": 0.1, "min_lr_rate": 0.1}, "both were given"),
        ("warmup_stable_decay", {}, "'num_decay_steps'"),
        ("warmup_stable_decay", {"num_decay_steps": 3, "decay_type": "exp"}, "'1-sqrt'"),
        ("reduce_lr_on_plateau", {"factor": 2.0}, "Factor should be < 1.0"),
        ("reduce_lr_on_plateau", {"min_lr": "low"}, "min_lr='low'"),
        ("reduce_lr_on_plateau", {"min_lr": [0.1]}, "cannot take its options"),
        ("greedy", {"mode": "up"}, "mode='up'"),
        ("coseno", {}, "did you mean lr_scheduler_type='cosine'"),
        ("zigzag", {}, "the schedules are linear"),
    ],
)
def test_a_wrong_option_is_refused_with_those_there_are(
    name: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadInput, match=says):
        ours(name, 2, options)


def test_a_negative_warm_up_is_no_time_scale() -> None:
    with pytest.raises(BadInput, match="timescale"):
        ours("inverse_sqrt", -3, {})


def test_a_falling_schedule_needs_an_end() -> None:
    with pytest.raises(BadInput, match="set max_steps"):
        ours("cosine", 2, {}, length=None)
    assert ours("constant", 0, {}, length=None).get_last_lr()[0] == 0.01


def test_an_option_may_come_as_text() -> None:
    assert walk(ours("cosine", 2, {"num_cycles": "1.5"}), 9) == walk(
        ours("cosine", 2, {"num_cycles": 1.5}), 9
    )


def test_an_optimizer_that_makes_its_own_rate_is_left_alone_or_refused() -> None:
    own = Adafactor([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(BadInput, match="lr_scheduler_type='constant'"):
        schedules.build("linear", own, num_warmup_steps=0, num_training_steps=9)
    reading = schedules.build("constant", own, num_warmup_steps=0, num_training_steps=9)
    assert isinstance(reading, AdafactorSchedule)
