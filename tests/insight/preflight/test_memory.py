"""A forecast adds up, names its margins, and knows each target's limit."""

from __future__ import annotations

import dataclasses

import pytest

from anytrain.insight.preflight.memory import (
    Forecast,
    capped,
    fits_within,
    forecast,
    limit_of,
    steps_of,
    workspaces,
)
from anytrain.insight.preflight.targets import parse_target
from insight.preflight.steps import MIB, PRODUCTS, SAMPLE, STATE, WEIGHTS, op, step

GIB = 2**30


def part(told: Forecast, name: str) -> int:
    return sum(p.num_bytes for p in told.parts if p.name == name)


@pytest.mark.parametrize("target", ["cuda:h200", "cuda:24GB", "mps:16GB", "cpu:16GB", "tpu:v5e"])
def test_all_parts_but_the_margins_add_up_to_the_peak(target: str) -> None:
    told = forecast(step(4), parse_target(target))
    counted = sum(p.num_bytes for p in told.parts if p.how != "margin")
    assert told.peak_bytes == counted
    assert told.peak_bytes >= 2 * WEIGHTS + STATE + 4 * SAMPLE
    assert told.needed_bytes >= told.peak_bytes
    assert told.fits


def test_on_a_cpu_the_peak_is_what_the_tensors_hold() -> None:
    trace = step(4)
    assert forecast(trace, parse_target("cpu:16GB")).peak_bytes == trace.held.peak_bytes


def test_a_hopper_gpu_keeps_larger_workspaces_for_products() -> None:
    assert workspaces(PRODUCTS, parse_target("cuda:h200")) == (32 * MIB, 32 * MIB)
    assert workspaces(PRODUCTS, parse_target("cuda:rtx4090")) == (8320 * 1024, 8320 * 1024)


def test_a_step_without_products_has_no_workspace() -> None:
    ops = (op("add.Tensor"), op("mm", "make"))
    assert workspaces(ops, parse_target("cuda:h200")) == ()


def test_two_batches_are_on_their_way_to_a_gpu() -> None:
    trace = step(8, accumulation=4)
    assert part(forecast(trace, parse_target("cuda:h200")), "batches ahead") == 2 * 8 * 1024 // 4


def test_several_processes_hold_their_gradients_all_the_time() -> None:
    trace = step(4, world_size=2, num_parameters=100, num_trainable=50)
    held = {**trace.held.by_owner, "gradients": 0}
    held_early = dataclasses.replace(trace.held, by_owner=held)
    told = forecast(dataclasses.replace(trace, held=held_early), parse_target("cuda:h200"))
    assert part(told, "gradient buckets") == WEIGHTS // 2
    assert part(forecast(step(4), parse_target("cuda:h200")), "gradient buckets") == 0


def test_a_recorded_step_needs_workspaces_and_inputs_of_its_own() -> None:
    target = parse_target("cuda:h200")
    eager, recorded = (forecast(step(4), target, is_recorded=r) for r in (False, True))
    assert recorded.peak_bytes - eager.peak_bytes == 64 * MIB + 4 * 1024
    assert (eager.records, recorded.records) == (None, True)


def test_a_step_that_only_fits_op_by_op_is_not_recorded() -> None:
    trace, target = step(4), parse_target("cuda:h200")
    limit = capped(430 * MIB)
    told = forecast(trace, target, limit, is_recorded=True)
    assert (told.fits, told.records) == (True, False)


def test_a_guess_about_cudnn_is_a_margin_and_decides_nothing() -> None:
    plain = step(4)
    begin, end = plain.held.step
    events = (*plain.held.events[:5], (-9, 90 * MIB), (-9, 0), *plain.held.events[5:])
    held = dataclasses.replace(plain.held, events=events, step=(begin, end + 2))
    trace, target = dataclasses.replace(plain, held=held), parse_target("cuda:h200")
    told, without = forecast(trace, target), forecast(plain, target)
    assert told.peak_bytes == without.peak_bytes
    assert "cuDNN" in {p.name for p in told.parts if p.how == "margin"}


def test_what_dies_within_a_step_comes_again_in_the_next() -> None:
    events = steps_of(step(1), num_more=2)
    assert sum(size for _, size in events) == (
        WEIGHTS + STATE + 1024 + 3 * (SAMPLE + WEIGHTS)  # three steps of activations and gradients
    )
    assert len({which for which, size in events if size}) == 3 + 3 * 2


@pytest.mark.parametrize("batch_size", [1, 4, 30])
@pytest.mark.parametrize("target", ["cuda:h200", "mps:16GB"])
def test_the_quick_answer_is_the_forecasts(batch_size: int, target: str) -> None:
    trace, limit = step(batch_size), capped(600 * MIB)
    told = forecast(trace, parse_target(target), limit)
    assert fits_within(trace, parse_target(target), limit) == told.fits


@pytest.mark.parametrize(
    ("target", "usable_gib"),
    [("mps:8GB", 3.5), ("mps:16GB", 32 / 3), ("mps:36GB", 27.0), ("mps:64GB", 48.0)],
)
def test_a_mac_may_use_its_working_set_or_what_the_system_leaves(
    target: str, usable_gib: float
) -> None:
    limit = limit_of(parse_target(target))
    assert limit is not None
    assert limit.usable_bytes / GIB == pytest.approx(usable_gib)
    assert limit.is_rule_of_thumb


def test_what_metal_rounds_is_counted_where_the_memory_is_fullest() -> None:
    told = forecast(step(1), parse_target("mps:16GB"))
    assert part(told, "page rounding") == 15 * 1024  # of the batch alone, which is 1 KiB


def test_a_target_without_a_size_is_not_judged() -> None:
    told = forecast(step(4), parse_target("cuda"))
    assert (told.limit, told.fits) == (None, None)
    assert told.peak_bytes


def test_what_is_too_large_does_not_fit() -> None:
    told = forecast(step(40), parse_target("cuda:1GB"))
    assert told.fits is False
    assert told.limit is not None
    assert told.needed_bytes > told.limit.usable_bytes
