from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from anytrain.machine.processes import supervise

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('ready', flush=True); time.sleep(1000)"
)
PARENT = (
    "import subprocess, sys, time; "
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)']); "
    "print(child.pid, flush=True); time.sleep(1000)"
)
QUICK_PARENT = PARENT.removesuffix("; time.sleep(1000)")


@pytest.fixture
def start():
    started = []

    def begin(code):
        process = supervise.start([sys.executable, "-c", code], os.environ, piped=True)
        started.append(process)
        return process

    yield begin
    supervise.end(started, signal.SIGKILL, 0)


def test_a_polite_process_ends_at_the_first_signal(start):
    process = start("print('ready', flush=True); import time; time.sleep(1000)")
    process.stdout.readline()
    supervise.end([process], signal.SIGTERM, 10)
    assert process.returncode == -signal.SIGTERM


def test_a_stubborn_process_is_killed_after_the_grace(start):
    process = start(STUBBORN)
    process.stdout.readline()
    begun = time.monotonic()
    supervise.end([process], signal.SIGTERM, 0.5)
    assert process.returncode == -signal.SIGKILL
    assert time.monotonic() - begun < 240


def test_a_stopped_process_does_not_use_up_the_grace(start):
    process = start("print('ready', flush=True); import time; time.sleep(1000)")
    process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    supervise.end([process], signal.SIGTERM, 1000)
    assert process.returncode == -signal.SIGTERM
    assert time.monotonic() - begun < 240


def test_what_a_process_has_started_goes_with_it(start):
    process = start(PARENT)
    grandchild = int(process.stdout.readline())
    process.kill()
    process.wait()
    supervise.end([process], signal.SIGTERM, 1)
    deadline = time.monotonic() + 240
    while _is_alive(grandchild):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_ended_well_may_leave_something_running(start):
    process = start(QUICK_PARENT)
    grandchild = int(process.stdout.readline())
    process.wait()
    supervise.end([process], signal.SIGTERM, 1)
    assert psutil.Process(grandchild).status() != psutil.STATUS_ZOMBIE
    os.kill(grandchild, signal.SIGKILL)


def test_the_first_failure_is_found_among_the_living(start):
    living, failing = start("import time; time.sleep(1000)"), start("import sys; sys.exit(4)")
    assert supervise.first_failure([living, failing]) == 1
    assert supervise.first_failure([start("pass"), start("pass")]) is None


def test_signals_become_stopped_inside_the_block_alone():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(supervise.Stopped, match="SIGTERM"), supervise.hearing_signals(lambda: []):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert signal.getsignal(signal.SIGTERM) is before


LAUNCHER = """
import os, sys
from anytrain.machine.processes import supervise
supervise._ONE_WISH_S = float(sys.argv[2])
members = []
with supervise.hearing_signals(lambda: members):
    try:
        members.append(supervise.start([sys.executable, "-c", *sys.argv[1:]], os.environ))
        supervise.first_failure(members)
    except supervise.Stopped as stop:
        try:
            supervise.end(members, stop.signum, 1000)
        except supervise.Stopped:
            print("asked again", flush=True)
        print(members[0].returncode, bool(supervise.cut_short()), flush=True)
"""
# Both signals may have come before the first is looked at, or in the middle of a print.
SAVES_SLOWLY = """
import os, signal, sys, time
def save(number, frame):
    time.sleep(float(sys.argv[2]))
    os.write(1, b"saved\\n")
    sys.exit(3)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, save)
print("ready", flush=True)
time.sleep(1000)
"""


def _said_after(gap_s, second, one_wish_s, saves_for_s):
    """Ask a launcher to stop twice, so far apart; return what it and its child said."""
    times = [str(one_wish_s), str(saves_for_s)]
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, SAVES_SLOWLY, *times], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout.readline() == "ready\n"
    launcher.send_signal(signal.SIGTERM)
    time.sleep(gap_s)
    launcher.send_signal(second)
    return launcher.communicate(timeout=240)[0].splitlines()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("gap_s", [0.0, 0.1])
def test_two_signals_at_once_are_one_wish_and_the_save_goes_on(gap_s, second):
    assert _said_after(gap_s, second, 200, 1.0) == ["saved", "3 False"]


def test_a_later_signal_ends_the_wait_for_the_save():
    assert _said_after(0.8, signal.SIGTERM, 0.5, 1000) == ["asked again", "-9 True"]


def test_the_first_signal_is_heard_while_survivors_are_ended(start):
    process = start(STUBBORN)
    process.stdout.readline()
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))
    begun = time.monotonic()
    with pytest.raises(supervise.Stopped), supervise.hearing_signals(lambda: [process]):
        timer.start()
        supervise.end([process], signal.SIGTERM, 1000)
    assert time.monotonic() - begun < 240
    assert not supervise.cut_short()


def test_ctrl_z_suspends_the_children_too_and_waking_wakes_them():
    code = (
        "import os, sys, time\n"
        "from anytrain.machine.processes import supervise\n"
        "members = []\n"
        "with supervise.hearing_signals(lambda: members):\n"
        "    sleeper = [sys.executable, '-c', 'import time; time.sleep(1000)']\n"
        "    members.append(supervise.start(sleeper, os.environ))\n"
        "    print(members[0].pid, flush=True)\n"
        "    time.sleep(1000)\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    )
    child = psutil.Process(int(launcher.stdout.readline()))
    try:
        launcher.send_signal(signal.SIGTSTP)
        _wait_for(child, stopped=True)
        _wait_for(psutil.Process(launcher.pid), stopped=True)
        launcher.send_signal(signal.SIGCONT)
        _wait_for(child, stopped=False)
    finally:
        child.kill()
        launcher.kill()
        launcher.communicate()


def _wait_for(process, stopped):
    deadline = time.monotonic() + 240
    while (process.status() == psutil.STATUS_STOPPED) is not stopped:
        assert time.monotonic() < deadline
        time.sleep(0.02)
