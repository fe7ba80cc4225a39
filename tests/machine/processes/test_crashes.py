from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

import pytest

from anytrain.machine.processes import crashes, host_limits, notes
from anytrain.machine.processes.crashes import Ending
from anytrain.machine.processes.heartbeat import Beat, Pulse
from anytrain.machine.processes.host_limits import MemoryMarks, Space
from anytrain.machine.processes.notes import Note
from anytrain.machine.processes.supervise import Evidence

CALM = MemoryMarks(3, "this control group's", 4 * 2**30, 39 * 2**30 // 10)
KILLED = MemoryMarks(4, "this control group's", 4 * 2**30, 39 * 2**30 // 10)
BLIND = MemoryMarks(None, "this machine's", None)


def ending(rank=1, code=-9, note=None, step=12, evidence=Evidence()):  # noqa: B008  frozen
    beat = Beat(rank, 4711, "here", step, "backward", False, 0, 0.0)
    return Ending(rank, 4711, code, beat, note, evidence)


def note(kind, text=""):
    return Note(kind, text, 0.0)


def test_a_killed_rank_is_named_with_its_signal_and_step():
    error = crashes.explain([ending()], 2, CALM, CALM)
    assert error.what == "Rank 1 of 2 (pid 4711) was killed by SIGKILL at step 12 (backward)."
    assert "load_state" in error.fix


def test_memory_is_blamed_only_when_the_kernel_has_counted_a_kill():
    blamed = crashes.explain([ending()], 2, CALM, KILLED)
    assert blamed.why.startswith("it ran out of host memory: 3.9 of 4.0 GiB were in use;")
    assert "from 3 to 4" in blamed.why
    for before, after in ((CALM, CALM), (BLIND, BLIND), (BLIND, KILLED)):
        assert "ran out" not in crashes.explain([ending()], 2, before, after).why


def test_a_kill_counted_by_the_whole_machine_is_only_likely_to_be_this_one():
    calm, killed = (MemoryMarks(n, "this machine's", None, is_own_group=False) for n in (3, 4))
    assert "it most likely ran out" in crashes.explain([ending()], 2, calm, killed).why


def test_every_ranks_memory_is_told_and_one_model_advised_where_several_had_some():
    each = Evidence(peak_bytes=2**31, peers=((0, 2**30), (1, 2**31)))
    several = crashes.explain([ending(evidence=each)], 2, CALM, KILLED)
    assert (
        "the largest process of each rank was seen with up to (0: 1.0 GiB, 1: 2.0 GiB)"
        in several.why
    )
    assert "make the model once outside and pass it in" in several.fix
    alone = Evidence(peak_bytes=2**31, peers=((0, 2**31),))
    lone = crashes.explain([ending(rank=0, evidence=alone)], 1, CALM, KILLED)
    assert "its largest process was seen with up to 2.0 GiB" in lone.why
    assert "outside" not in lone.fix


def test_a_kill_beside_full_memory_that_nobody_counted_is_told_as_that():
    full = Evidence(peak_bytes=4 * 2**30, peers=((1, 4 * 2**30),))
    why = crashes.explain([ending(evidence=full)], 2, CALM, CALM).why
    assert "did not rise" in why
    assert "a scheduler or a memory guard may have sent it" in why


@pytest.mark.parametrize(
    ("peak", "after", "words"),
    [
        (
            2**30,
            "CALM",
            "Memory was not short: its largest process was seen with up to 1.0 of 4.0 GiB",
        ),
        (
            4 * 2**30,
            "CALM",
            "Memory was short: its largest process was seen with up to 4.0 of 4.0 GiB",
        ),
        (2**30, "KILLED", "While the job ran, this control group's count"),
    ],
)
def test_a_native_crash_says_whether_memory_was_short(peak, after, words):
    seen = Evidence(peak_bytes=peak, peers=((1, peak),))
    marks = {"CALM": CALM, "KILLED": KILLED}[after]
    assert words in crashes.explain([ending(code=-11, evidence=seen)], 2, CALM, marks).why


def test_a_bus_error_blames_shared_memory_only_where_that_was_full():
    full = Evidence(shared=Space(64 * 2**20, 0))
    error = crashes.explain([ending(code=-7, evidence=full)], 2, CALM, CALM)
    assert error.why == "shared memory ran out: /dev/shm of 64 MiB was full."
    assert "--shm-size" in error.fix
    empty = Evidence(shared=Space(64 * 2**20, 63 * 2**20))
    other = crashes.explain([ending(code=-7, evidence=empty)], 2, CALM, CALM)
    assert "cut short" in other.why
    assert "had 63 MiB of 64 MiB free" in other.why
    assert "shm" not in other.fix


@pytest.mark.parametrize(
    "words", ["(pid 7) is killed by signal: Killed.", "(pid(s) 7) exited unexpectedly"]
)
def test_a_loading_worker_that_was_killed_is_explained_by_the_counter_alone(words):
    text = f"RuntimeError: DataLoader worker {words}"
    own = ending(code=1, note=note("error", text))
    blamed = crashes.explain([own], 2, CALM, KILLED).why
    assert "A loading worker ran out of host memory" in blamed
    assert "memory" not in crashes.explain([own], 2, CALM, CALM).why


def test_a_loading_workers_bus_error_is_told_with_the_room_of_shared_memory():
    text = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible"
    full = Evidence(shared=Space(64 * 2**20, 0))
    own = ending(code=1, note=note("error", text), evidence=full)
    assert "shared memory ran out" in crashes.explain([own], 2, CALM, CALM).why


def test_shared_memory_that_was_refused_is_told_with_its_size():
    text = (
        "RuntimeError: Caught RuntimeError in DataLoader worker process 0.\nRuntimeError: "
        "unable to allocate shared memory(shm) for file </t>: No space left on device (28)"
    )
    small = Evidence(shared=Space(64 * 2**20, 64 * 2**20))
    own = ending(code=1, note=note("error", text), evidence=small)
    error = crashes.explain([own], 2, CALM, CALM)
    assert "Shared memory ran out, as the error says: /dev/shm has 64 MiB." in error.why
    disk = ending(code=1, note=note("error", "OSError: No space left on device"), evidence=small)
    assert crashes.remark(disk, CALM, CALM) is None


def test_refused_memory_is_told_with_the_limit_that_refused_it():
    limited = Evidence(address_limit_bytes=3 * 2**30, peak_bytes=2**30)
    own = ending(code=1, note=note("error", "MemoryError: "), evidence=limited)
    error = crashes.explain([own], 2, CALM, CALM)
    assert "its address space may be 3.0 GiB (ulimit -v)" in error.why
    assert "3.0 GiB" in crashes.remark(own, CALM, CALM)
    other = ending(code=1, note=note("error", "KeyError: 'x'"), evidence=limited)
    assert crashes.remark(other, CALM, CALM) is None


def test_a_gpus_allocator_is_quoted_in_the_launchers_summary():
    text = (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total "
        "capacity of 15.77 GiB of which 512.00 MiB is free. Of the allocated memory 14.01 GiB is "
        "allocated by PyTorch, and 600.00 MiB is reserved by PyTorch but unallocated."
    )
    error = crashes.explain([ending(code=1, note=note("error", text))], 2, CALM, CALM)
    assert "GPU 1 has no memory left: 2.00 GiB more were asked for" in error.why
    assert "tensors hold 14.01 GiB" in error.why
    assert error.fix.startswith("try a smaller batch")


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
    own = ending(code=1, note=note("error", "OutOfRange: Cannot compute step 3: it is 7 (0 to 1)."))
    assert "it is 7 (0 to 1) at step 12" in crashes.explain([own], 2, CALM, CALM).what


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


def test_the_first_in_time_is_the_cause_and_never_one_that_the_launcher_ended():
    late = replace(ending(rank=0, code=1, note=note("error", "RuntimeError: later")), at=2.0)
    early = replace(ending(rank=1, code=1, note=note("error", "ValueError: first")), at=1.0)
    assert crashes.cause([late, early]) is early
    swept = replace(ending(rank=0, code=-15), was_ended=True)
    lost = replace(ending(rank=1, code=1, note=note("peer lost")), at=3.0)
    assert crashes.cause([swept, lost]) is lost


def test_a_rank_left_alone_by_ranks_that_are_done_is_told_so():
    lost = ending(rank=1, code=1, note=note("peer lost"))
    error = crashes.explain([lost], 3, CALM, CALM, returned=[0, 2])
    assert (
        error.what
        == "Rank 1 of 3 waited at step 12 (backward) for ranks 0, 2, which had already ended."
    )


@pytest.mark.parametrize(
    ("signum", "words"),
    [
        (signal.SIGALRM, "a timer (signal.alarm, setitimer) rang"),
        (signal.SIGVTALRM, "a timer (setitimer) rang"),
        (signal.SIGXCPU, "a limit on processor time (ulimit -t)"),
        (signal.SIGUSR1, "it was sent the signal, not by anytrain."),
        (signal.SIGSEGV, "unless somebody sent the signal (kill -SEGV)"),
        (signal.SIGKILL, "something sent it SIGKILL, not anytrain"),
    ],
)
def test_a_signal_is_blamed_on_no_more_than_is_known(signum, words):
    error = crashes.explain([ending(code=-signum)], 2, CALM, CALM)
    assert words in error.why
    assert "another process" not in error.why


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
    marks = host_limits.memory_marks()
    assert marks.oom_kills is None or marks.oom_kills >= 0


def test_only_the_first_rank_of_a_host_says_the_same_words(tmp_path):
    assert notes.first_to_say(str(tmp_path), "ValueError: x")
    assert not notes.first_to_say(str(tmp_path), "ValueError: x")
    assert notes.first_to_say(str(tmp_path), "ValueError: y")
