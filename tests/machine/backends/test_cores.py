"""A process computes with the threads that its part of the machine can run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from anytrain.machine.backends import cpu


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process run on the eight threads of four cores, and torch know all eight."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def _siblings(root: Path) -> Path:
    folder = "sys/devices/system/cpu"
    names = {
        f"{folder}/cpu{n}/topology/thread_siblings_list": f"{n % 4},{n % 4 + 4}" for n in range(8)
    }
    return _tree(root, names)


@pytest.mark.usefixtures("eight")
def test_a_core_counts_once_however_many_threads_it_has(tmp_path: Path) -> None:
    assert cpu.usable_cores(tmp_path).value == "8"
    found = cpu.usable_cores(_siblings(tmp_path))
    assert (found.value, found.because) == ("4", "8 threads share 4 cores")


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"sys/fs/cgroup/cpu.max": "250000 100000"}, "2"),
        ({"sys/fs/cgroup/cpu.max": "50000 100000"}, "1"),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, "8"),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000"}, "3"),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"}, "8"),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "400000 100000"}, "4"),
    ],
)
def test_a_containers_share_of_the_cores_is_the_bound(
    tmp_path: Path, files: dict[str, str], expected: str
) -> None:
    found = cpu.usable_cores(_tree(tmp_path, files))
    assert found.value == expected
    assert ("control group" in found.because) == (expected != "8")


@pytest.mark.usefixtures("eight")
def test_ranks_of_a_host_share_its_cores(tmp_path: Path) -> None:
    assert cpu.threads(1, tmp_path).value == "8"
    assert cpu.threads(3, tmp_path).value == "2"
    assert "for 3 processes" in cpu.threads(3, tmp_path).because
    assert cpu.threads(16, tmp_path).value == "1"


@pytest.mark.usefixtures("eight")
def test_each_rank_has_its_part_of_what_the_host_or_the_container_has(tmp_path: Path) -> None:
    assert [cpu.cores_each(ranks, _siblings(tmp_path)) for ranks in (1, 3, 16)] == [8, 2, 1]
    _tree(tmp_path, {"sys/fs/cgroup/cpu.max": "250000 100000"})
    assert [cpu.cores_each(ranks, tmp_path) for ranks in (1, 2, 3)] == [2, 1, 1]


@pytest.mark.usefixtures("eight")
def test_what_the_user_has_set_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert cpu.threads(4, tmp_path).value == "5"
    assert cpu.threads(4, tmp_path).because == "set in this process"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert cpu.threads(4, tmp_path).because == "OMP_NUM_THREADS=5"
