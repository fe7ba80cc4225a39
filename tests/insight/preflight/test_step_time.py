"""An estimate of a step's time follows from rates, and says what it assumes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from anytrain.insight.preflight.step_time import RATES, Rates, estimate, measured, rates_of
from anytrain.insight.preflight.targets import CHIPS, parse_target
from anytrain.machine.backends.cpu import Cpu
from insight.preflight.steps import op, step

PLAIN = Rates(
    "a device",
    {"float32": 1e12, "tensor32": 4e12, "bfloat16": 8e12, "float16": 8e12},
    bytes_per_s=1e11,
    matmul_share=1.0,
    copy_share=1.0,
    kernel_s=1e-6,
    host_op_s=1e-5,
)


def seconds(*ops: object, **how: bool) -> float:
    return estimate(step(4, ops), PLAIN, is_recorded=True, **how).step_s  # type: ignore[arg-type]


def test_arithmetic_or_memory_takes_the_time_whichever_is_slower() -> None:
    assert seconds(op("mm", flops=10**12)) == pytest.approx(1.0)
    assert seconds(op("mul.Tensor", num_bytes=2 * 10**11)) == pytest.approx(2.0)


def test_no_kernel_is_shorter_than_the_shortest() -> None:
    assert seconds(op("add.Tensor", calls=1000, num_bytes=8)) == pytest.approx(1e-3)


def test_halves_compute_at_their_own_rate() -> None:
    assert seconds(op("mm", dtype="bfloat16", flops=10**12)) == pytest.approx(1 / 8)


def test_convolutions_round_to_tf32_and_products_only_on_wish() -> None:
    assert seconds(op("convolution", flops=10**12)) == pytest.approx(1 / 4)
    assert seconds(op("mm", flops=10**12), allows_tf32=True) == pytest.approx(1 / 4)


def test_a_view_costs_the_device_nothing() -> None:
    assert seconds(op("view", calls=100, num_bytes=10**12)) == 0


def test_a_look_up_reads_its_rows_and_not_the_table() -> None:
    looked_up = op("embedding", shape=(100, 100), num_bytes=10**12)
    assert seconds(looked_up) == pytest.approx(1e-6)


def test_op_by_op_a_fast_device_waits_for_the_host() -> None:
    trace = step(4, (op("add.Tensor", calls=100),))
    eager, recorded = (estimate(trace, PLAIN, is_recorded=r) for r in (False, True))
    assert eager.is_host_bound
    assert eager.step_s == pytest.approx(1e-3)
    assert recorded.step_s == pytest.approx(1e-4)
    assert eager.samples_per_s == pytest.approx(4000)


def test_host_and_device_take_turns_where_values_are_read() -> None:
    work = op("mm", flops=10**9)
    read = dataclasses.replace(op("_local_scalar_dense", calls=2), host_read="item")
    free, reading = (
        estimate(step(4, (op("add.Tensor", calls=100), work, *more)), PLAIN)
        for more in ((), (read,))
    )
    assert free.step_s == max(free.device_s, free.host_s)
    assert reading.step_s == reading.device_s + reading.host_s


def test_evaluation_and_construction_are_no_part_of_a_step() -> None:
    assert seconds(op("mm", "evaluate", flops=10**12), op("mm", "make", flops=10**12)) == 0


def test_an_estimate_says_that_it_is_one() -> None:
    told = estimate(step(4), PLAIN).assumption
    assert told.startswith("An estimate")
    assert "a device" in told


def test_every_rate_belongs_to_a_chip_that_can_be_a_target() -> None:
    known = {chip for chips in CHIPS.values() for chip in chips}
    assert set(RATES) <= known
    assert set(CHIPS["cuda"]) | set(CHIPS["tpu"]) <= set(RATES)


def test_a_target_by_memory_alone_is_taken_for_a_usual_chip() -> None:
    found = rates_of(parse_target("cuda:24GB"))
    assert found is not None
    assert found.because.startswith("taken for")
    assert rates_of(parse_target("cuda")) is None


def test_this_machines_own_device_is_measured() -> None:
    found = measured(Cpu(), torch.device("cpu"), seconds=0.05)
    assert 1e8 < found.flops["float32"] < 1e15
    assert 1e8 < found.bytes_per_s < 1e13
    assert "measured" in dataclasses.asdict(found)["because"]
