from __future__ import annotations

import socket

import pytest

from anytrain.core.errors import BadInput, Unsupported
from anytrain.doors.launch.options import LaunchOptions, check, check_port


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_processes": 0}, "--num_processes 0"),
        ({"num_processes": -2}, "--num_processes -2"),
        ({"num_machines": 0}, "--num_machines 0"),
        ({"machine_rank": -1}, "--machine_rank -1"),
        ({"machine_rank": 2}, "--machine_rank 2"),
        ({"max_restarts": -1}, "--max_restarts -1"),
        ({"stall_timeout": -1.0}, "--stall_timeout -1.0"),
        ({"gradient_accumulation_steps": 0}, "--gradient_accumulation_steps 0"),
        ({"num_cpu_threads_per_process": 0}, "--num_cpu_threads_per_process 0"),
        ({"main_process_port": 70000}, "70000"),
        ({"mixed_precision": "fp12"}, "fp12"),
        ({"cpu": True, "multi_gpu": True}, "--cpu and --multi_gpu"),
        ({"gpu_ids": "0,,1"}, "0,,1"),
        ({"gpu_ids": "zero"}, "zero"),
        ({"gpu_ids": "1,1"}, "1,1"),
        ({"num_machines": 2}, "2 machines"),
        ({"num_machines": 2, "main_process_ip": "a", "main_process_port": 0}, "2 machines"),
        ({"num_machines": 2, "main_process_ip": "a", "num_processes": 3}, "3 processes"),
    ],
)
def test_what_cannot_work_is_refused_by_name(options, words):
    with pytest.raises(BadInput) as caught:
        check(LaunchOptions(**options))
    assert words in caught.value.what


def test_fp8_is_known_and_refused():
    with pytest.raises(Unsupported):
        check(LaunchOptions(mixed_precision="fp8"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_processes": 4, "mixed_precision": "bf16", "gpu_ids": "0, 2"},
        {"gpu_ids": "all", "multi_gpu": True},
        {"num_machines": 2, "main_process_ip": "a", "num_processes": 4, "machine_rank": 1},
        {"stall_timeout": 0.0, "max_restarts": 0, "main_process_port": 0},
    ],
)
def test_what_can_work_passes(options):
    check(LaunchOptions(**options))


def test_higher_options_win_where_they_speak():
    high, low = LaunchOptions(num_processes=2), LaunchOptions(num_processes=8, gpu_ids="1")
    assert high.over(low).given() == {"num_processes": 2, "gpu_ids": "1"}


def test_options_become_wishes_of_the_children():
    wishes = LaunchOptions(cpu=True, mixed_precision="bf16", stall_timeout=5.0).wishes()
    assert (wishes.device.value, wishes.precision.value, wishes.stall_s.value) == (
        "cpu",
        "bf16",
        "5.0",
    )
    assert wishes.accumulation is None


def test_gpu_ids_are_a_list_or_everything():
    assert LaunchOptions(gpu_ids="0, 3").gpus() == ["0", "3"]
    assert LaunchOptions(gpu_ids="all").gpus() is None


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_port_that_somebody_listens_on_is_refused(family):
    with socket.socket(family) as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=f"Cannot use port {port}"):
            check_port(port, "--main_process_port")
    check_port(port, "--main_process_port")
