"""What a profile's events say of the device."""

from __future__ import annotations

import pytest
import torch

from anytrain.machine.backends import probe
from anytrain.recipes.bench.child import FirstStep, StepClock, matmul_rate, summarise


def event(cat: str, name: str, ts: float, dur: float = 1.0) -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}


def test_work_on_two_streams_is_counted_once_and_gaps_are_idle() -> None:
    events = [
        event("kernel", "gemm", 0, 40),
        event("gpu_memcpy", "Memcpy HtoD", 20, 40),
        event("kernel", "gemm", 80, 20),
        {"ph": "M", "name": "process_name"},
    ]
    told = summarise(events, 2)
    assert told["busy_s"] == pytest.approx(40e-6)
    assert told["profiled_step_s"] == pytest.approx(50e-6)
    assert told["profiled_idle"] == pytest.approx(0.2)
    assert told["kernels"] == 1.5


def test_waits_of_the_host_are_counted_but_not_the_profilers_own_last_one() -> None:
    events = [
        event("kernel", "gemm", 0, 10),
        event("cuda_runtime", "cudaLaunchKernel", 0),
        event("cuda_runtime", "cudaMemcpyAsync", 2),
        event("cuda_runtime", "cudaStreamSynchronize", 3),
        event("cuda_runtime", "cudaEventRecord", 4),
        event("cuda_driver", "cuLaunchKernelEx", 5),
        event("cuda_runtime", "cudaDeviceSynchronize", 9),
    ]
    assert summarise(events, 1)["host_waits"] == 1


def test_a_profile_without_device_work_says_nothing() -> None:
    assert summarise([event("cuda_runtime", "cudaLaunchKernel", 0)], 1) == {}


def test_the_clock_takes_the_steps_in_the_middle() -> None:
    backend = probe.get("cpu")
    clock = StepClock((2, 3, 1), backend, torch.device("cpu"))
    first = FirstStep(0.0, backend, torch.device("cpu"))
    for _ in range(6):
        assert clock.done < 5 or clock.step_s > 0
        clock()
        first()
    assert clock.done == 6
    assert clock.step_s > 0
    assert clock.profiled == {}, "there is no device to look at"
    assert first.after_s is not None


def test_the_rate_of_a_product_is_a_rate() -> None:
    assert matmul_rate(probe.get("cpu"), torch.device("cpu")) > 1e8
