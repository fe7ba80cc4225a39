"""Turn an exit code, the last beat, the stack and the memory counters into a true sentence.

Nothing is guessed: "out of memory" is said only where the kernel has counted a kill or has
refused memory, and what is only likely is said to be so.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from anytrain.core.errors import PeerLost
from anytrain.machine.processes import host_limits, notes, stack_dumps, supervise
from anytrain.machine.processes.heartbeat import Beat, read_beat
from anytrain.machine.processes.host_limits import MemoryMarks
from anytrain.machine.processes.notes import Note
from anytrain.machine.processes.stalls import RESUME
from anytrain.machine.processes.supervise import Evidence

_CONSEQUENCES = ("peer lost", "interrupt")
_NATIVE = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP")
_SHORT_OF_MEMORY = 0.9
"""The part of the limit that the ranks must have had in use for memory to have been short."""
_REFUSED = ("can't allocate memory", "Cannot allocate memory", "std::bad_alloc")
_SHARED_WORDS = ("shared memory", "/dev/shm")
_SHARED_TENSORS = ("gather", "reduce", "broadcast")
"""What a rank is doing where its tensors meet the others'."""
_AMOUNT = r"([\d.]+ (?:[KMGT]?i?B|bytes))"
_ALLOCATOR_WORDS = {
    "asked": rf"Tried to allocate {_AMOUNT}",
    "device": r"GPU (\d+) has a total capacity",
    "total": rf"total capacity of {_AMOUNT}",
    "free": rf"of which {_AMOUNT} is free",
    "held": rf"Of the allocated memory {_AMOUNT}",
    "pools": rf"with {_AMOUNT} allocated in private pools",
    "unused": rf"and {_AMOUNT} is reserved by PyTorch but unallocated",
}
_LESS_DEVICE_MEMORY = (
    'Try a smaller batch with more gradient accumulation steps, or mixed_precision="bf16"'
)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a rank's process ended: its exit code (a signal is negative), beat, note, evidence."""

    rank: int
    pid: int
    code: int
    beat: Beat | None
    note: Note | None
    evidence: Evidence = Evidence()
    noticed: float = 0.0
    """Wall-clock time at which its launcher saw it."""
    at: float = 0.0
    """When it ended, as near as is known."""
    was_ended: bool = False
    """Whether its launcher ended it, because another rank had failed."""

    @property
    def exit_code(self) -> int:
        """The exit code for a launcher that dies of this: 128 + signal, as shells do."""
        if self.failed_by_itself:
            return max(self.code, 1)
        return 128 - self.code if self.code < 0 else self.code

    @property
    def was_preempted(self) -> bool:
        """Whether it saved its work and left because a signal asked for it."""
        return self.note is not None and self.note.kind == "preempted"

    @property
    def failed_by_itself(self) -> bool:
        """Whether an error of the script's own ended it, whatever swept the process away."""
        return self.note is not None and self.note.kind == "error"

    @property
    def words(self) -> str:
        """The error that it told of, "" where it told of none."""
        return self.note.text if self.note is not None and self.failed_by_itself else ""


def ending(beats: str | Path, rank: int, pid: int, code: int) -> Ending:
    """Collect what a rank left behind; a beat of an earlier process is not its own."""
    beat = read_beat(beats, rank)
    own = beat if beat is not None and beat.pid == pid else None
    found = supervise.collect_evidence(beats, rank, pid, code)
    note, noticed = notes.read(beats, rank), time.time()
    at = noticed
    if note is not None:
        at = note.written
    elif code < 0:
        # Errors of others may follow from it, so it counts from when it was last seen alive.
        at = supervise.alive_at(pid) or noticed
    return Ending(rank, pid, code, own, note, found, noticed, at)


def cause(endings: Sequence[Ending]) -> Ending:
    """Return the ending that the others follow from: the first that is no consequence."""
    stalls = [e for e in endings if e.note is not None and e.note.kind == "stall"]
    in_time = sorted((e for e in endings if not e.was_ended), key=lambda e: e.at)
    own = [e for e in in_time if not is_consequence(e)]
    return next(iter([*stalls, *own, *in_time, *endings]))


def is_consequence(end: Ending) -> bool:
    """Whether it says itself that it follows from something else."""
    return end.note is not None and end.note.kind in _CONSEQUENCES


def explain(
    endings: Sequence[Ending],
    size: int,
    before: MemoryMarks,
    after: MemoryMarks,
    returned: Sequence[int] = (),
) -> PeerLost:
    """Return the message that says which rank ended the job, how, where and what to do.

    `returned` are the ranks of this machine that were done.
    """
    first = cause(endings)
    note = first.note
    if note is not None and note.kind == "stall":
        what, why, fix = json.loads(note.text)
        return PeerLost(what, why=why, fix=fix)
    if note is not None and note.kind == "peer lost":
        return _left_alone(first, size, returned) if returned else _lost_elsewhere(first)
    what = f"{_who(first, endings, size)} {_how(first)} {_where(first)}."
    why, fix = _Verdict(first, before, after).words()
    return PeerLost(what, why=f"{why}{_stack(first)}", fix=f"{fix}{RESUME}.")


def remark(end: Ending, before: MemoryMarks, after: MemoryMarks) -> str | None:
    """Return what the evidence adds to an error that the script raised itself, if anything."""
    found = _Verdict(end, before, after).addition()
    return None if found is None else f"{found[0]}\n  fix: {found[1].removesuffix('; then ')}."


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What follows from one rank's end and two readings of the kernel's counters."""

    end: Ending
    before: MemoryMarks
    after: MemoryMarks

    def words(self) -> tuple[str, str]:
        """Return why it ended, and what to do before starting again."""
        if self.end.failed_by_itself:
            return self._raised()
        if self.end.code >= 0:
            return (
                "the script ended itself; what it wrote above may say why.",
                "correct that, then ",
            )
        if self.end.code == -signal.SIGKILL:
            return self._killed()
        if self.end.code == -signal.SIGBUS:
            return self._bus_error()
        if _signal_name(self.end.code) in _NATIVE:
            return self._native()
        if of_its_own := _TIMERS.get(_signal_name(self.end.code)):
            return f"{of_its_own}; anytrain did not send it.", "see what set it, then "
        return "it was sent the signal, not by anytrain.", "find out who sent it, then "

    def addition(self) -> tuple[str, str] | None:
        """Return what the evidence adds to an error of the script's own, and what to do."""
        text = self.end.words
        if device := explain_device_memory(text):
            lines = device.splitlines()
            return "\n    ".join(lines[:-1]), f"{lines[-1][0].lower()}{lines[-1][1:]}; then "
        if "DataLoader worker (pid" in text:
            return self._worker_died(text)
        if text.startswith("MemoryError") or any(words in text for words in _REFUSED):
            return self._refused(), "ask for less at once, or raise the limit; then "
        if any(words in text for words in _SHARED_WORDS) and "No space left" in text:
            return self._shared_refused(), _MORE_SHARED
        return None

    def _raised(self) -> tuple[str, str]:
        told = "the script raised it; its traceback is above."
        added, fix = self.addition() or ("", "correct that, then ")
        return f"{told}\n    {added}" if added else told, fix

    def _worker_died(self, text: str) -> tuple[str, str] | None:
        if "Bus error" in text:
            # Workers hand their batches over in shared memory, and give it back when they die.
            return self._bus_error()[0], _MORE_SHARED
        # Which of the two words torch finds depends on who notices first.
        if self._new_kills and ("Killed" in text or "exited unexpectedly" in text):
            return f"A loading worker {self._out_of_memory()}", self._less_memory()
        return None

    def _killed(self) -> tuple[str, str]:
        if self._new_kills:
            return f"it {self._out_of_memory()}", self._less_memory()
        if self.before.oom_kills is None or self.after.oom_kills is None:
            counted = "no count of out-of-memory kills can be read here"
        else:
            counted = f"{self.after.source} count of out-of-memory kills did not rise"
        why = f"something sent it SIGKILL, not anytrain; {counted}{self._had(', and ')}."
        if self._share >= _SHORT_OF_MEMORY:
            why += " That is nearly all: a scheduler or a memory guard may have sent it."
        return why, "find out who sent it, then "

    def _unlike(self) -> tuple[str, str] | None:
        """Say what gloo ends a process for, where the process was about that."""
        doing = "" if self.end.beat is None else self.end.beat.doing
        if self.end.code != -signal.SIGABRT or doing not in _SHARED_TENSORS:
            return None
        why = f"in {doing} the ranks' tensors must be alike in shape and dtype; where they differ, "
        why += "gloo ends the process, and its own line above says so."
        return why, "make them alike first (accelerator.pad_across_processes), then "

    def _native(self) -> tuple[str, str]:
        if (unlike := self._unlike()) is not None:
            return unlike
        why = "native code failed, in a library or an extension (Python raises errors instead), "
        sent = _signal_name(self.end.code).removeprefix("SIG")
        why += f"unless somebody sent the signal (kill -{sent})."
        if self._new_kills:
            why += f" While the job ran, {self._counted()}."
        elif self._share >= _SHORT_OF_MEMORY:
            why += f" Memory was short{self._had(': ')}."
        elif self.end.evidence.peak_bytes is not None:
            why += f" Memory was not short{self._had(': ')}."
        if self.end.evidence.stack:
            return why, "see what that line hands to native code, then "
        return why, "run with PYTHONFAULTHANDLER=1 to see the line, then "

    def _bus_error(self) -> tuple[str, str]:
        if self._shared_is_full:
            return self._shared_words(), _MORE_SHARED
        return f"{_BUS} {self._shared_words()}".rstrip(), "look at the files that it maps, then "

    @property
    def _new_kills(self) -> int:
        if self.before.oom_kills is None or self.after.oom_kills is None:
            return 0
        return max(0, self.after.oom_kills - self.before.oom_kills)

    @property
    def _limit(self) -> int | None:
        return self.after.limit_bytes

    @property
    def _share(self) -> float:
        """How much of the memory the ranks had in use together at most, as far as was seen."""
        used = sum(peak for _, peak in self.end.evidence.peers)
        return used / (self._limit or host_limits.machine_bytes())

    def _out_of_memory(self) -> str:
        """Say what is known of a kill for want of memory, "ran out ..." or less than that."""
        likely = "" if self.after.is_own_group else "most likely "
        used = ""
        if self._limit is not None and self.after.peak_bytes is not None:
            used = f": {_of(self.after.peak_bytes, self._limit)} were in use"
        elif self._limit is not None:
            used = f": the limit is {_size(self._limit)}"
        each = self._each()
        return f"{likely}ran out of host memory{used}; {self._counted()}{each and f'; {each}'}."

    def _less_memory(self) -> str:
        several = len(self.end.evidence.peers) > 1
        return f"{_LESS_MEMORY}{_ONE_MODEL if several else ''}; then "

    def _counted(self) -> str:
        before, after = self.before.oom_kills, self.after.oom_kills
        return f"{self.after.source} count of out-of-memory kills rose from {before} to {after}"

    def _each(self) -> str:
        """Say how much each rank of this host had."""
        peers = self.end.evidence.peers
        if len(peers) > 1:
            shown = ", ".join(f"{rank}: {_size(peak)}" for rank, peak in peers[:16])
            return f"the largest process of each rank was seen with up to ({shown})"
        peak = self.end.evidence.peak_bytes
        return "" if peak is None else f"its largest process was seen with up to {_size(peak)}"

    def _had(self, link: str) -> str:
        if self.end.evidence.peak_bytes is None:
            return ""
        home = "" if self._limit is not None else " that this machine has"
        total = self._limit or host_limits.machine_bytes()
        seen = _of(self.end.evidence.peak_bytes, total)
        return f"{link}its largest process was seen with up to {seen}{home}"

    def _refused(self) -> str:
        limit = self.end.evidence.address_limit_bytes
        if limit is not None:
            return (
                "The system refused it more memory: its address space may be "
                f"{_size(limit)} (ulimit -v){self._had(', and ')}."
            )
        return f"The system refused it more memory{self._had('; ')}."

    @property
    def _shared_is_full(self) -> bool:
        shared = self.end.evidence.shared
        return shared is not None and shared.is_full

    def _shared_refused(self) -> str:
        shared = self.end.evidence.shared
        size = (
            ""
            if shared is None
            else f": {host_limits.SHARED_MEMORY} has {_size(shared.total_bytes)}"
        )
        return f"Shared memory ran out, as the error says{size}."

    def _shared_words(self) -> str:
        shared = self.end.evidence.shared
        if shared is None:
            return ""
        if shared.is_full:
            total = _size(shared.total_bytes)
            return f"shared memory ran out: {host_limits.SHARED_MEMORY} of {total} was full."
        free = _of(shared.free_bytes, shared.total_bytes)
        return f"{host_limits.SHARED_MEMORY} had {free} free at the least, where it was looked at."


_TIMERS = {
    "SIGALRM": "a timer (signal.alarm, setitimer) rang and nothing handled it, or it was sent",
    "SIGVTALRM": "a timer (setitimer) rang and nothing handled it, or it was sent",
    "SIGPROF": "a profiler's timer rang and nothing handled it, or it was sent",
    "SIGXCPU": "it reached a limit on processor time (ulimit -t), or the signal was sent",
    "SIGXFSZ": "it reached a limit on the size of files (ulimit -f), or the signal was sent",
}
_BUS = (
    "the system could not provide a page of mapped memory, as when a mapped file is cut short "
    "or its disk is full."
)
_LESS_MEMORY = "start fewer processes or loading workers, or give it more memory"
_ONE_MODEL = (
    "; where every process makes the model, make the model once outside and pass it in "
    "(notebook_launcher shares it)"
)
_MORE_SHARED = (
    "give the container more shared memory (docker run --shm-size=8g, or --ipc=host), or use "
    "fewer loading workers (num_workers=0 needs none); then "
)


def _who(first: Ending, endings: Sequence[Ending], size: int) -> str:
    if size == 1:
        return "The script"
    alike = sorted({e.rank for e in endings if _same_error(e, first)})
    if len(alike) > 1:
        return f"Ranks {', '.join(map(str, alike))} of {size}"
    return f"Rank {first.rank} of {size} (pid {first.pid})"


def _same_error(one: Ending, other: Ending) -> bool:
    if one.note is None or other.note is None or not one.failed_by_itself:
        return False
    return (one.note.kind, one.note.text) == (other.note.kind, other.note.text)


def _how(end: Ending) -> str:
    if end.failed_by_itself:
        said = _first_line(end.words)  # one sentence with where it was
        return f"failed with {said if said.endswith('...') else said.removesuffix('.')}"
    if end.code < 0:
        verb = "crashed with" if _signal_name(end.code) in _NATIVE else "was killed by"
        return f"{verb} {_signal_name(end.code)}"
    if end.note is not None and end.note.kind == "exit" and f"({end.code})" not in end.note.text:
        return f"left by {_first_line(end.note.text)}"
    return f"left with exit code {end.code}"


def _where(end: Ending) -> str:
    frame = stack_dumps.own_frame(end.evidence.stack)
    line = f", in {frame}" if frame is not None else ""
    if end.beat is not None:
        return f"{end.beat.where()}{line}"
    # What it left shows that it has loaded anytrain; it has made no Accelerator or Trainer yet.
    loaded = end.evidence.seen or end.evidence.stack
    reached = "before the first step" if loaded else "before it reached anytrain"
    return f"{reached}{line}"


def _stack(end: Ending) -> str:
    """Return the lines that show what it was doing."""
    if end.evidence.stack:
        return f"\n    Its Python stack, innermost first:\n{_lines(end.evidence.stack)}"
    seen = end.evidence.seen
    if end.code != -signal.SIGKILL or end.failed_by_itself or seen is None or not seen.stack:
        return ""
    ago = max(0.0, end.noticed - seen.at)
    return f"\n    {ago:.1f} s before that was noticed, it was in:\n{_lines(seen.stack)}"


def _lines(stack: Sequence[stack_dumps.Frame]) -> str:
    return stack_dumps.describe(stack, indent="      ")


def _left_alone(end: Ending, size: int, returned: Sequence[int]) -> PeerLost:
    """Say that a rank waited for others that were done already."""
    several = len(returned) > 1
    done = f"rank{'s' if several else ''} {', '.join(map(str, returned))}"
    stack = end.evidence.stack
    own = next((n for n, frame in enumerate(stack) if not frame.is_library), 0)
    called = f"in {stack[own - 1].function}" if own else _where(end)
    return PeerLost(
        f"Rank {end.rank} of {size} waited {called} for {done}, which had already ended.",
        why="every rank must make the same collective calls, as often and in the same order."
        f"{_stack(end)}",
        fix="let every rank make that call, or none: look for a return, an exit, a break or a "
        "condition on the rank before it.",
    )


def _lost_elsewhere(end: Ending) -> PeerLost:
    return PeerLost(
        f"Rank {end.rank} lost a peer {_where(end)}.",
        why="a rank on another machine died first; its launcher names it.",
        fix=f"read the other machines' output, then {RESUME}.",
    )


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _first_line(text: str) -> str:
    line = text.splitlines()[0] if text else "an error"
    return line if len(line) <= 200 else line[:197] + "..."


def _size(num_bytes: int) -> str:
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**30:.1f} GiB"


def _of(part: int, whole: int) -> str:
    """Return a part of a whole in words.

    >>> _of(2**30, 3 * 2**30), _of(9 * 2**20, 3 * 2**30)
    ('1.0 of 3.0 GiB', '9 MiB of 3.0 GiB')
    """
    if whole < 2**30 or part < 2**30 / 10:
        return f"{_size(part)} of {_size(whole)}"
    return f"{part / 2**30:.1f} of {whole / 2**30:.1f} GiB"


def explain_device_memory(text: str) -> str | None:
    """Return the lines, what to do last, or None where the text is not an allocator's complaint.

    >>> print(explain_device_memory(
    ...     "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity "
    ...     "of 15.77 GiB of which 512.00 MiB is free. Of the allocated memory 14.01 GiB is "
    ...     "allocated by PyTorch, and 600.00 MiB is reserved by PyTorch but unallocated."))
    GPU 1 has no memory left: 2.00 GiB more were asked for, 512.00 MiB of 15.77 GiB are free.
    PyTorch's tensors hold 14.01 GiB; 600.00 MiB more are reserved and unused.
    Try a smaller batch with more gradient accumulation steps, or mixed_precision="bf16"
    """
    if "out of memory" not in text or "Tried to allocate" not in text:
        return None
    found = {name: re.search(words, text) for name, words in _ALLOCATOR_WORDS.items()}
    got = {name: match[1] for name, match in found.items() if match is not None}
    device = f"GPU {got['device']}" if "device" in got else "The device"
    first = f"{device} has no memory left: {got.get('asked', 'some')} more were asked for"
    if "free" in got and "total" in got:
        first += f", {got['free']} of {got['total']} are free"
    lines = [f"{first}."]
    if "held" in got and "unused" in got:
        recorded = f", {got['pools']} of it for recorded steps" if "pools" in got else ""
        lines.append(
            f"PyTorch's tensors hold {got['held']}{recorded}; {got['unused']} more are reserved "
            "and unused."
        )
    return "\n".join([*lines, _LESS_DEVICE_MEMORY])
