from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from anytrain.core.errors import BadInput
from anytrain.machine.backends.cpu import Cpu, memory_limit, num_cores


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_a_control_group_the_limit_is_the_hosts_memory(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) == psutil.virtual_memory().total


def test_the_smallest_limit_up_the_tree_of_cgroup_v2_counts(tmp_path: Path) -> None:
    root = _tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/jobs/one\n",
            "sys/fs/cgroup/jobs/memory.max": "1000000\n",
            "sys/fs/cgroup/jobs/one/memory.max": "max\n",
        },
    )
    assert memory_limit(root) == 1_000_000


def test_a_container_sees_its_limit_at_the_mount(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/../../other\n", "sys/fs/cgroup/memory.max": "2000000\n"}
    assert memory_limit(_tree(tmp_path, files)) == 2_000_000


def test_cgroup_v1_counts_and_its_no_limit_number_does_not(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/job/memory.limit_in_bytes"
    root = _tree(
        tmp_path,
        {"proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n", group: "3000000\n"},
    )
    assert memory_limit(root) == 3_000_000
    (root / group).write_text("9223372036854771712\n")
    assert memory_limit(root) == psutil.virtual_memory().total


def test_more_processes_than_cores_may_be_launched() -> None:
    assert num_cores() + 1 in Cpu().process_counts()


def test_a_second_cpu_is_refused() -> None:
    with pytest.raises(BadInput, match="cpu:1"):
        Cpu(1).device(0)


def test_out_of_host_memory_is_explained_in_three_lines() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    text = Cpu().explain(caught.value)
    assert text is not None
    assert len(text.splitlines()) == 3
    assert "GiB that it may use" in text
