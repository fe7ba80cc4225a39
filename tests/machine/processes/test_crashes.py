from __future__ import annotations

import json
import os
import signal

import pytest

from anytrain.machine.processes import crashes, notes
from anytrain.machine.processes.crashes import Ending, MemoryMarks
from anytrain.machine.processes.notes import Note
from anytrain.machine.processes.pulse import Beat, Pulse

CALM = MemoryMarks(3, "this control group's", 4 * 2**30)
KILLED = MemoryMarks(4, "this control group's", 4 * 2**30)
BLIND = MemoryMarks(None, "this machine's", None)


def ending(rank=1, code=-9, note=None, step=12):
    beat = Beat(rank, 4711, "here", step, "backward", False, 0, 0.0)
    return Ending(rank, 4711, code, beat, note)


def note(kind, text=""):
    return Note(kind, text, 0.0)


def test_a_killed_rank_is_named_with_its_signal_and_step():
    error = crashes.explain([ending()], 2, CALM, CALM)
    assert error.what == "Rank 1 of 2 (pid 4711) was killed by SIGKILL at step 12 (backward)."
    assert "load_state" in error.fix


def test_memory_is_blamed_only_when_the_kernel_has_counted_a_kill():
    blamed = crashes.explain([ending()], 2, CALM, KILLED).why
    assert "out of memory" in blamed
    assert "from 3 to 4" in blamed
    assert "limit of 4.0" in blamed
    for before, after in ((CALM, CALM), (BLIND, BLIND)):
        assert not crashes.explain([ending()], 2, before, after).why.startswith("out of memory")


def test_an_oom_kill_elsewhere_is_not_blamed_for_another_signal():
    assert "memory" not in crashes.explain([ending(code=-15)], 2, CALM, KILLED).why


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-15, "was killed by SIGTERM"),
        (-11, "crashed with SIGSEGV"),
        (-6, "crashed with SIGABRT"),
        (3, "left with exit code 3"),
    ],
)
def test_every_kind_of_end_has_its_words(code, words):
    assert words in crashes.explain([ending(code=code)], 2, CALM, CALM).what


def test_the_scripts_own_error_is_repeated_in_one_line():
    own = ending(code=1, note=note("error", "ValueError: bad\nsecond line"))
    error = crashes.explain([own], 2, CALM, CALM)
    assert "failed with ValueError: bad at step 12" in error.what
    assert len(str(error).splitlines()) == 3


def test_an_error_whose_process_had_to_be_swept_away_is_still_its_own():
    own = ending(code=-9, note=note("error", "ValueError: bad"))
    assert "failed with ValueError" in crashes.explain([own], 2, CALM, CALM).what
    assert own.exit_code == 1


def test_ranks_that_failed_alike_are_named_together():
    same = [ending(rank=r, code=1, note=note("error", "ValueError: bad")) for r in (1, 0)]
    assert crashes.explain(same, 2, CALM, CALM).what.startswith("Ranks 0, 1 of 2 failed")


def test_a_lost_peer_is_a_consequence_and_not_the_cause():
    survivor = ending(rank=0, code=1, note=note("peer lost"))
    victim = ending(rank=1, code=-9)
    assert crashes.cause([survivor, victim]) is victim
    alone = crashes.explain([survivor], 4, CALM, CALM)
    assert "another machine" in alone.why


def test_a_stall_is_told_in_the_words_of_the_rank_that_saw_it():
    words = json.dumps(["Rank 1 is frozen.", "it is stopped.", "wake it."])
    seen = ending(rank=0, code=1, note=note("stall", words))
    error = crashes.explain([ending(rank=1, code=-9), seen], 2, CALM, CALM)
    assert str(error) == "Rank 1 is frozen.\n  why: it is stopped.\n  fix: wake it."


def test_a_single_process_is_the_script():
    lone = Ending(0, 4711, -9, None, None)
    assert crashes.explain([lone], 1, CALM, CALM).what == (
        "The script was killed by SIGKILL before it reached anytrain."
    )


def test_exit_codes_are_those_of_a_shell():
    assert ending(code=-signal.SIGKILL).exit_code == 137
    assert ending(code=-signal.SIGTERM).exit_code == 143
    assert ending(code=5).exit_code == 5


def test_a_beat_of_an_earlier_process_is_not_taken_for_the_dead_ones(tmp_path):
    Pulse(0, str(tmp_path)).mark(9, "forward")
    notes.leave(str(tmp_path), 0, "error", "KeyError: 'x'")
    own = crashes.ending(tmp_path, 0, os.getpid(), 1)
    assert own.beat.step == 9
    assert own.note.text == "KeyError: 'x'"
    assert crashes.ending(tmp_path, 0, 1, 1).beat is None


def test_this_systems_counters_can_be_read_or_are_said_to_be_absent():
    marks = crashes.memory_marks()
    assert marks.oom_kills is None or marks.oom_kills >= 0
    assert crashes.peak_child_bytes() >= 0


def test_only_the_first_rank_of_a_host_says_the_same_words(tmp_path):
    assert notes.first_to_say(str(tmp_path), "ValueError: x")
    assert not notes.first_to_say(str(tmp_path), "ValueError: x")
    assert notes.first_to_say(str(tmp_path), "ValueError: y")
