from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from anytrain.machine.processes import parent_death

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps such a mark")
SAY = "import os, sys; print(os.getpid(), sys.argv[1:], sys.flags.no_site)"
UNTIE = (
    "from anytrain.machine.processes import parent_death\n"
    "was = parent_death.clear_death_signal()\n"
    "now = parent_death.clear_death_signal()\n"
    "parent_death.set_death_signal(was)\n"
    "print(was, now, parent_death.clear_death_signal())\n"
)


def test_a_tied_command_is_the_same_process_with_the_same_words():
    words = ["$HOME", "a b", "-S", ""]
    command = parent_death.with_death_signal([sys.executable, "-c", SAY, *words])
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.communicate(timeout=240)[0] == f"{child.pid} {words} 0\n"


def test_a_command_whose_parent_is_gone_does_not_begin():
    command = parent_death.with_death_signal([sys.executable, "-c", SAY])
    command[command.index(str(os.getpid()))] = "1"
    assert subprocess.run(command, capture_output=True, timeout=240).stdout == b""


def test_a_tie_is_taken_away_and_set_again():
    command = parent_death.with_death_signal([sys.executable, "-c", UNTIE])
    said = subprocess.run(command, capture_output=True, text=True, timeout=240).stdout
    assert said == f"{int(signal.SIGTERM)} 0 {int(signal.SIGTERM)}\n"
