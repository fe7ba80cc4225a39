"""What is known of a rank that has not come."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from anytrain.core.environment import RankPlace
from anytrain.machine.parallel import rendezvous
from launching import free_port


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    # A port of its own: whoever else on this machine is to meet at that port counts as this job.
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    env = {**os.environ, "RANK": "1"}
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=env)
    yield process
    process.kill()
    process.communicate()


def test_a_rank_is_followed_from_its_start_to_its_end(rank: subprocess.Popen[bytes]) -> None:
    seen = rendezvous.PeerProcesses(RankPlace(0, 0, 3, 3), None)
    seen.look()
    assert seen.state(1) == "has started, and is on its way"
    assert seen.pid(1) == f" (pid {rank.pid})"
    assert not seen.pid(2)
    assert seen.state(2).startswith("cannot be seen from here")
    os.kill(rank.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, rank.pid, os.WSTOPPED | os.WNOWAIT)
    assert seen.state(1) == rendezvous.STOPPED
    rank.kill()
    os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
    seen.look()
    assert seen.state(1) == rendezvous.ENDED


def test_a_rank_that_a_launcher_started_and_nobody_sees_has_ended(tmp_path: Path) -> None:
    here = RankPlace(0, 0, 2000, 1000)
    assert rendezvous.PeerProcesses(here, str(tmp_path)).state(1) == rendezvous.ENDED
    assert rendezvous.PeerProcesses(here, str(tmp_path)).state(1000).startswith("cannot be seen")
    assert rendezvous.PeerProcesses(here, None).state(1).startswith("cannot be seen")


def test_the_lowest_that_is_alive_speaks(rank: subprocess.Popen[bytes]) -> None:
    for own, speaks in ((0, True), (2, False)):
        seen = rendezvous.PeerProcesses(RankPlace(own, own, 3, 3), None)
        seen.look()
        assert seen.is_lowest_here() is speaks
