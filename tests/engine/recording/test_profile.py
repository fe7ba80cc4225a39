from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from anytrain.core.errors import BadInput, Notice
from anytrain.engine.recording.profile import ProfileOptions, build, profile


def work() -> None:
    torch.randn(8, 8) @ torch.randn(8, 8)


def operators(path: Path) -> list[str]:
    return [e["name"] for e in json.loads(path.read_text())["traceEvents"] if "name" in e]


def test_the_block_is_profiled_and_its_trace_written(tmp_path: Path) -> None:
    options = ProfileOptions(activities=["cpu"], output_trace_dir=tmp_path / "new" / "folder")
    with profile(options, rank=3) as profiler:
        work()
    assert "aten::matmul" in operators(tmp_path / "new" / "folder" / "profile_3.json")
    assert "aten::matmul" in {e.key for e in profiler.key_averages()}


def test_without_a_folder_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with profile(ProfileOptions(), rank=0) as profiler:
        work()
    assert list(tmp_path.iterdir()) == []
    assert isinstance(profiler, torch.profiler.profile)


def test_the_options_reach_torch() -> None:
    options = ProfileOptions(
        record_shapes=True, profile_memory=True, with_stack=True, with_flops=True, with_modules=True
    )
    profiler = build(options, rank=0)
    flags = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")
    assert all(getattr(profiler, flag) for flag in flags)


def test_a_schedule_records_its_active_steps_and_the_trace_outlives_idle_ones(
    tmp_path: Path,
) -> None:
    seen: list[Any] = []
    options = ProfileOptions(
        schedule_option={"wait": 1, "warmup": 1, "active": 1, "repeat": 2, "skip_first": 1},
        on_trace_ready=seen.append,
        output_trace_dir=tmp_path,
    )
    with profile(options, rank=0) as profiler:
        for _ in range(9):
            work()
            profiler.step()
    assert len(seen) == 2
    assert "aten::matmul" in operators(tmp_path / "profile_0.json")


def test_a_block_too_short_for_its_schedule_is_told(tmp_path: Path) -> None:
    options = ProfileOptions(
        schedule_option={"wait": 5, "warmup": 1, "active": 1}, output_trace_dir=tmp_path
    )
    with (
        pytest.warns(Notice, match="recorded nothing, so there is no profile_0.json"),
        profile(options, rank=0) as profiler,
    ):
        for _ in range(2):
            work()
            profiler.step()
    assert list(tmp_path.iterdir()) == []


def test_a_callback_that_exports_the_trace_itself_is_no_crash(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    options = ProfileOptions(
        on_trace_ready=lambda p: p.export_chrome_trace(str(own)), output_trace_dir=tmp_path
    )
    with (
        pytest.warns(Notice, match="profile_0.json is not written"),
        profile(options, rank=0),
    ):
        work()
    assert "aten::matmul" in operators(own)


def test_a_block_that_raises_still_leaves_its_trace(tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        profile(ProfileOptions(output_trace_dir=tmp_path), rank=0),
    ):
        work()
        raise ZeroDivisionError
    assert "aten::matmul" in operators(tmp_path / "profile_0.json")


def test_an_unknown_activity_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadInput, match="(?s)'gpu'.*'cpu', 'cuda', 'xpu', 'mtia', 'hpu'"):
        build(ProfileOptions(activities=["cpu", "gpu"]), rank=0)


def test_an_activity_that_this_machine_cannot_measure_is_refused() -> None:
    if torch.profiler.ProfilerActivity.XPU in torch.profiler.supported_activities():
        pytest.skip("this machine can measure xpu")
    with pytest.raises(BadInput, match="(?s)Cannot profile 'xpu' here.*measures .*cpu"):
        build(ProfileOptions(activities=["xpu"]), rank=0)


def test_an_activity_may_be_an_enum_member() -> None:
    class Activity(Enum):
        CPU = "cpu"

    profiler = build(ProfileOptions(activities=[Activity.CPU]), rank=0)  # type: ignore[list-item]  # HF's habit
    assert profiler.activities == {torch.profiler.ProfilerActivity.CPU}


@pytest.mark.gpu
def test_kernels_of_a_gpu_are_in_the_trace(tmp_path: Path) -> None:
    options = ProfileOptions(activities=["cpu", "cuda"], output_trace_dir=tmp_path)
    with profile(options, rank=0):
        torch.randn(64, 64, device="cuda").mm(torch.randn(64, 64, device="cuda")).sum().item()
    events = json.loads((tmp_path / "profile_0.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"wait": 1, "warmup": 1}, "missing: active"),
        ({"wait": 1, "warmup": 1, "active": 1, "pause": 2}, "unknown: pause"),
        ({"wait": -1, "warmup": 1, "active": 1}, "wait must be a whole number"),
        ({"wait": 1, "warmup": 1, "active": 0}, "active must be a whole number"),
    ],
)
def test_a_schedule_that_cannot_work_is_refused(option: dict[str, int], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        build(ProfileOptions(schedule_option=option), rank=0)


def test_a_folder_that_cannot_be_made_is_known_before_the_block_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        build(ProfileOptions(output_trace_dir=tmp_path / "file" / "below"), rank=0)
