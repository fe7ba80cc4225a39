"""The folder of a launch goes with its launcher, or with the next one."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from anytrain.machine.processes import supervise


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def killed_in_the_middle() -> None:
    """Hold a folder in a process that is killed."""
    pid = os.fork()
    if pid == 0:
        with supervise.launch_folder():
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def test_a_folder_is_there_while_it_is_held(tmp_path: Path) -> None:
    with supervise.launch_folder() as held:
        assert Path(held).parent == tmp_path
    assert not list(tmp_path.iterdir())


def test_what_a_killed_launcher_left_is_removed_by_the_next(tmp_path: Path) -> None:
    killed_in_the_middle()
    assert len(list(tmp_path.iterdir())) == 1
    with supervise.launch_folder() as held:
        assert list(tmp_path.iterdir()) == [Path(held)]


def test_what_another_holds_or_made_stays(tmp_path: Path) -> None:
    foreign = tmp_path / "anytrain-mine"
    foreign.mkdir()
    with supervise.launch_folder() as one, supervise.launch_folder() as other:
        assert {str(path) for path in tmp_path.iterdir()} == {one, other, str(foreign)}
