"""What is told of a run's time, from a record alone."""

from __future__ import annotations

from typing import Any

import pytest

from anytrain.core.records import Life, counted, together
from anytrain.insight.report.why import Bottleneck, explain, judge


def found(seconds: dict[str, float], plan: dict[str, str] | None = None, **more: Any) -> Bottleneck:
    finding = judge(life(seconds, plan, **more))
    assert finding is not None
    return finding


def life(seconds: dict[str, float], plan: dict[str, str] | None = None, **more: Any) -> Life:
    chosen = {
        "device": "cpu",
        "precision": "bf16",
        "step": "eager",
        "shapes": "any",
        **(plan or {}),
    }
    began = {
        "plan": {name: {"value": v, "because": f"why {v}"} for name, v in chosen.items()},
        "num_cores": 8,
        "samples_per_step": 32,
        "step": 10,
    }
    settings = {"settings": more.pop("settings", {})}
    return Life({**began, **settings}, {"seconds": seconds, "step": 20, **more})


@pytest.mark.parametrize(
    ("seconds", "name", "words"),
    [
        ({"start": 9, "data": 50, "step": 50}, "data", "dataloader_num_workers=4"),
        ({"transfer": 10, "step": 90}, "transfer", "pinned"),
        ({"evaluate": 50, "step": 50}, "evaluate", "batches"),
        ({"save": 50, "step": 50}, "save", "save_state(blocking=False)"),
        ({"record": 50, "step": 50}, "record", "longer run"),
        ({"other": 50, "step": 50}, "other", "callbacks"),
        ({"start": 80, "step": 20}, "start", "local folder"),
    ],
)
def test_what_dominates_is_named_with_a_remedy(
    seconds: dict[str, float], name: str, words: str
) -> None:
    finding = found(seconds)
    assert finding.name == name
    assert finding.share == pytest.approx(seconds[name] / sum(seconds.values()))
    assert words in finding.remedy
    assert not finding.is_step


def test_a_remedy_knows_what_was_set() -> None:
    slow = {"data": 50.0, "step": 50.0}
    assert "4 workers cannot keep up" in found(slow, workers=4).remedy
    saving = {"save": 50.0, "step": 50.0}
    assert "async_save" in found(saving, settings={"async_save": False}).remedy
    often = {"async_save": True, "save_strategy": "steps", "save_steps": 5}
    assert "every 5 steps" in found(saving, settings=often).remedy
    often = {"eval_strategy": "steps", "eval_steps": 10, "per_device_eval_batch_size": 8}
    remedy = found({"evaluate": 50.0, "step": 50.0}, settings=often).remedy
    assert "every 10 steps" in remedy
    assert "(now 8)" in remedy
    shapes = ["32x16", "32x24"]
    assert "2 shapes" in found({"record": 50.0, "step": 50.0}, shapes=shapes).remedy


def test_an_eager_step_on_cuda_says_why_it_is_not_recorded() -> None:
    finding = found({"step": 100.0}, {"device": "cuda:0", "step": "eager"})
    assert finding.is_step
    assert "why eager" in finding.remedy


def test_a_revision_is_the_newest_word() -> None:
    moved = life({"step": 100.0}, {"device": "cuda:0", "step": "cuda_graph"})
    assert judge(moved) is None
    moved.revisions.append(
        {"choice": "step", "value": "eager", "because": "loss.item() in train.py:7", "step": 3}
    )
    finding = judge(moved)
    assert finding is not None
    assert "train.py:7" in finding.remedy


def test_float32_on_a_cpu_and_batches_of_one_shape_can_be_faster() -> None:
    assert "bf16" in found({"step": 100.0}, {"precision": "no"}).remedy
    assert "length_buckets" in found({"step": 100.0}, shapes=["32x128"]).remedy


def test_a_step_that_gets_no_processor_says_so() -> None:
    starved = life({"step": 100.0}, {"precision": "no"}, time=1100.0, cpu_seconds=52.0)
    starved.began |= {"time": 1000.0, "cpu_seconds": 2.0}
    finding = judge(starved)
    assert finding is not None
    assert "0.5 of a core" in finding.remedy
    starved.last["cpu_seconds"] = 150.0
    fed = judge(starved)
    assert fed is not None
    assert "bf16" in fed.remedy


def test_nothing_is_said_where_nothing_stands_out() -> None:
    told = explain([life({"data": 2.0, "step": 98.0, "wait": 1.0}, {"shapes": "buckets"})])
    assert told["finding"] is None
    assert told["steps"] == 10
    assert told["samples_per_second"] == pytest.approx(320 / 101)
    assert sum(told["shares"].values()) == pytest.approx(1)


def test_a_moment_is_not_worth_a_word_whatever_its_share() -> None:
    assert judge(life({"start": 2.0, "other": 0.2, "step": 0.4}, {"precision": "no"})) is None
    assert judge(life({"start": 2.0, "other": 1.2, "step": 0.8})) is not None


def test_a_run_that_was_resumed_is_told_over_all_its_starts() -> None:
    clocks = {"time": 1100.0, "cpu_seconds": 30.0}
    first = life({"data": 30.0, "step": 10.0}, hidden=1.0, peak_bytes=5, shapes=["4x8"], **clocks)
    second = life({"step": 60.0}, hidden=2.0, peak_bytes=3, shapes=["4x8", "4x9"], **clocks)
    for each in (first, second):
        each.began |= {"time": 1000.0, "cpu_seconds": 10.0}
    told = explain([first, second])
    assert (told["starts"], told["steps"], told["step"]) == (2, 20, 20)
    assert told["shares"] == {"data": 0.3, "step": 0.7}
    assert (told["wall_seconds"], told["hidden_seconds"], told["peak_bytes"]) == (100, 3, 5)
    assert told["samples_per_second"] == 20 * 32 / 100
    assert told["shapes"] == ["4x8", "4x9"]
    assert told["finding"]["name"] == "data"
    one = together([first, second])
    assert (one.passed("time"), one.passed("cpu_seconds")) == (200, 40)


def test_a_run_from_step_0_is_another_than_those_before_it() -> None:
    old, fresh, resumed = life({"step": 1.0}), life({"step": 1.0}), life({"step": 1.0})
    fresh.began["step"] = 0
    assert counted([old, fresh, resumed]) == [fresh, resumed]
    assert counted([old, resumed]) == [old, resumed]


def test_shapes_that_came_late_are_the_steps_trouble_where_each_is_compiled() -> None:
    compiled = {"graphs": 9, "late_shapes": {"input_ids": 7, "labels": 1}}
    finding = found({"step": 90.0, "data": 1.0}, {"device": "xla:0"}, **compiled)
    assert finding.remedy.startswith("'input_ids' had 7 new shapes after the first batches")
    assert "9 graphs in all" in finding.remedy
    few = {"graphs": 3, "late_shapes": {}, "shapes": ["4x64"]}
    assert judge(life({"step": 90.0, "data": 1.0}, {"device": "xla:0"}, **few)) is None
    assert explain([life({"step": 90.0}, {"device": "xla:0"}, **few)])["graphs"] == 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"seconds": {"data": 50.0, "step": 50.0}, "workers": 1}, "1 worker cannot keep up"),
        ({"seconds": {"data": 50.0, "step": 50.0}, "cores": 1}, "With 1 core, a worker"),
        (
            {
                "seconds": {"evaluate": 50.0, "step": 50.0},
                "settings": {"eval_strategy": "steps", "eval_steps": 1},
            },
            "less often than every step (",
        ),
        (
            {
                "seconds": {"save": 50.0, "step": 50.0},
                "settings": {"async_save": True, "save_strategy": "steps", "save_steps": 1},
            },
            "with a save every step:",
        ),
    ],
)
def test_one_of_anything_is_told_in_the_singular(given: dict[str, Any], words: str) -> None:
    cores, seconds = given.pop("cores", None), given.pop("seconds")
    told = life(seconds, **given)
    told.began["num_cores"] = cores or 8
    finding = judge(told)
    assert finding is not None and words in finding.remedy
