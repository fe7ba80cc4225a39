from __future__ import annotations

import json

import pytest

from anytrain.machine.processes.error_hooks import is_peer_lost
from launching import run_script


class DistBackendError(RuntimeError):
    """Stands in for torch's class of that name, which only its transport raises."""


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/a/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:9."),
        RuntimeError("[/a/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer."),
        DistBackendError("NCCL error: remote process exited or there was a network error"),
        DistBackendError("Broken pipe"),
        DistBackendError(
            "NCCL error in: NCCLUtils.hpp:268, remote process exited or there was a network error, "
            "NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error"
        ),
        DistBackendError(
            "NCCL error in: ProcessGroupNCCL.cpp:1275, internal error, NCCL version 2.14.3\n"
            "Last error:\nNet : Connection closed by remote peer user<50260>"
        ),
        DistBackendError("[1] is setting up NCCL communicator: store->get('0'): Broken pipe"),
    ],
)
def test_a_transports_complaint_means_a_lost_peer(error):
    assert is_peer_lost(error)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("Connection reset by peer"),
        RuntimeError("Connection reset by peer"),
        ValueError("NCCL connection closed by peer"),
        RuntimeError("[/a/gloo/x.cc] Invalid scalar type"),
        DistBackendError("NCCL error: invalid usage"),
        DistBackendError(
            "NCCL error: unhandled system error\nLast error:\n"
            "Error while creating shared memory segment /dev/shm/nccl-KWfVyt (size 5967872)"
        ),
    ],
)
def test_other_errors_are_the_scripts_own(error):
    assert not is_peer_lost(error)


def test_what_a_lost_peer_caused_is_a_lost_peer():
    try:
        try:
            raise RuntimeError("[gloo/transport] Connection closed by peer")
        except RuntimeError as lost:
            raise KeyError("metrics") from lost
    except KeyError as error:
        assert is_peer_lost(error)


SCRIPT = """
import sys, threading
from anytrain.machine.processes import error_hooks
from anytrain.machine.processes.heartbeat import Pulse
error_hooks.PATIENCE_S = 0.3
pulse = Pulse(1, sys.argv[2] if len(sys.argv) > 2 else None)
pulse.mark(8, "backward")
words = error_hooks.ErrorHooks(pulse, 2, lambda: None, False)
lost = RuntimeError("[/src/gloo/pair.cc:5] Connection closed by peer [::1]:9. Check the logs.")
if sys.argv[1] == "lost":
    raise lost
if sys.argv[1] == "thread":
    def fail():
        raise lost
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
if sys.argv[1] == "own":
    raise ValueError("my mistake")
if sys.argv[1] == "interrupt":
    raise KeyboardInterrupt
if sys.argv[1] == "crash":
    import os
    os.abort()
if sys.argv[1] == "restored":
    before = sys.excepthook
    words.restore()
    import faulthandler
    assert not faulthandler.is_enabled()
    assert sys.excepthook is sys.__excepthook__ and before is not sys.__excepthook__
"""


def test_without_our_launcher_a_lost_peer_is_told_in_three_lines():
    ran = run_script(SCRIPT, "lost", check=False)
    assert ran.returncode == 1
    assert len(ran.stderr.splitlines()) == 3
    assert "Rank 1 of 2 lost a peer at step 8 (backward)." in ran.stderr
    assert "said: Connection closed by peer [::1]:9." in ran.stderr


def test_under_our_launcher_a_lost_peer_is_left_to_it(tmp_path):
    ran = run_script(SCRIPT, "lost", tmp_path, check=False)
    assert (ran.returncode, ran.stderr) == (1, "")
    assert json.loads((tmp_path / "rank-1.note").read_text())["kind"] == "peer lost"


def test_a_threads_lost_peer_is_no_news():
    assert run_script(SCRIPT, "thread").stderr == ""


def test_the_scripts_own_error_is_shown_in_full_and_noted(tmp_path):
    ran = run_script(SCRIPT, "own", tmp_path, check=False)
    assert ran.returncode == 1
    assert ran.stderr.count("Traceback") == 1
    assert "ValueError: my mistake" in ran.stderr
    assert json.loads((tmp_path / "rank-1.note").read_text())["kind"] == "error"


def test_the_same_error_of_a_second_rank_is_not_shown_again(tmp_path):
    run_script(SCRIPT, "own", tmp_path, check=False)
    assert run_script(SCRIPT, "own", tmp_path, check=False).stderr == ""


def test_debug_shows_everything(tmp_path):
    script = SCRIPT.replace("lambda: None, False", "lambda: None, True")
    assert "Connection closed" in run_script(script, "lost", tmp_path, check=False).stderr


def test_an_interrupt_under_our_launcher_is_quiet(tmp_path):
    ran = run_script(SCRIPT, "interrupt", tmp_path, check=False)
    assert ran.returncode != 0
    assert ran.stderr == ""


def test_the_hooks_are_taken_away_again():
    run_script(SCRIPT, "restored")


def test_without_our_launcher_a_native_crash_shows_its_stack():
    ran = run_script(SCRIPT, "crash", check=False)
    assert ran.returncode == -6
    assert "Fatal Python error: Aborted" in ran.stderr
    assert "script.py" in ran.stderr
