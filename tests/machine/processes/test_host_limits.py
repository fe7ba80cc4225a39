from __future__ import annotations

import tempfile

import pytest

from anytrain.core.errors import DiskFull, NothingFits, Notice
from anytrain.machine.processes import host_limits
from anytrain.machine.processes.host_limits import (
    Need,
    Room,
    check_memory,
    folder_for_tensors,
    free_memory,
)

GIB = 2**30


def group(root, path, **files):
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(str(text))


def said(root, line):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(line)


def test_version_2_of_control_groups_leaves_its_limit_less_what_cannot_be_given_up(tmp_path):
    said(tmp_path, "0::/job\n")
    stat = f"anon 5\ninactive_file {GIB // 4}\n"
    group(tmp_path, "job", memory__max=GIB, memory__current=GIB // 2, memory__stat=stat)
    found = free_memory(tmp_path)
    assert found.free_bytes == GIB - GIB // 4
    assert "limit of 1.0 GiB" in found.because


def test_version_1_counts_too_and_the_tightest_parent_decides(tmp_path):
    said(tmp_path, "4:cpu,memory:/outer/inner\n")
    limits = {"memory__limit_in_bytes": GIB // 2, "memory__usage_in_bytes": GIB // 4}
    group(tmp_path, "memory/outer", **limits, memory__stat="total_inactive_file 0\n")
    group(
        tmp_path,
        "memory/outer/inner",
        memory__limit_in_bytes=9223372036854771712,
        memory__usage_in_bytes=5,
    )
    assert free_memory(tmp_path).free_bytes == GIB // 4


def test_without_a_limit_the_host_decides(tmp_path):
    said(tmp_path, "0::/\n")
    group(tmp_path, "", memory__max="max", memory__current=5)
    assert free_memory(tmp_path).because == "the host has"


def test_a_launch_that_cannot_start_is_refused_with_the_numbers():
    with pytest.raises(NothingFits, match="8 processes") as caught:
        check_memory(Need(8, 2 * GIB, copies=8), Room(3 * GIB, "the host has"))
    assert "2.0 GiB: 3.1 GiB; the host has 3.0 GiB free" in caught.value.why


def test_a_launch_whose_training_may_not_fit_is_told_so():
    with pytest.warns(Notice, match="8 times more .* 20.3 GiB in all; the host has 8.0 GiB free"):
        check_memory(Need(8, 2 * GIB, copies=8), Room(8 * GIB, "the host has"))


def test_a_launch_that_fits_says_nothing():
    check_memory(Need(8, 2 * GIB, copies=0), Room(8 * GIB, "the host has"))


def test_tensors_go_to_the_disk_where_shared_memory_has_no_room(monkeypatch):
    assert folder_for_tensors(1000, Room(0, "the host has")) == tempfile.gettempdir()
    monkeypatch.setattr(host_limits, "_free_space", lambda folder: 10)
    with pytest.raises(DiskFull, match="hand over"):
        folder_for_tensors(1000, Room(GIB, "the host has"))
