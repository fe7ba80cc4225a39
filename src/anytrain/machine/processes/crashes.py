"""Turn an exit code, the last beat and the memory counters into a true sentence.

Nothing is guessed: "out of memory" is said only where the kernel has counted a kill.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from anytrain.core.errors import PeerLost
from anytrain.machine.processes import notes
from anytrain.machine.processes.notes import Note
from anytrain.machine.processes.pulse import Beat, read_beat
from anytrain.machine.processes.watch import RESUME

_CONSEQUENCES = ("peer lost", "interrupt")
_NATIVE = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP")


@dataclass(frozen=True, slots=True)
class Ending:
    """How a rank's process ended: its exit code (a signal is negative), beat and note."""

    rank: int
    pid: int
    code: int
    beat: Beat | None
    note: Note | None

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


@dataclass(frozen=True, slots=True)
class MemoryMarks:
    """What the kernel has counted: kills for want of memory, and the limit they came from."""

    oom_kills: int | None
    source: str
    limit_bytes: int | None


def ending(beats: str | Path, rank: int, pid: int, code: int) -> Ending:
    """Collect what a rank left behind; a beat of an earlier process is not its own."""
    beat = read_beat(beats, rank)
    own = beat if beat is not None and beat.pid == pid else None
    return Ending(rank, pid, code, own, notes.read(beats, rank))


def cause(endings: Sequence[Ending]) -> Ending:
    """Return the ending that the others follow from: the first that is no consequence."""
    stalls = [e for e in endings if e.note is not None and e.note.kind == "stall"]
    own = [e for e in endings if e.note is None or e.note.kind not in _CONSEQUENCES]
    return next(iter([*stalls, *own, *endings]))


def explain(
    endings: Sequence[Ending], size: int, before: MemoryMarks, after: MemoryMarks
) -> PeerLost:
    """Return the message that says which rank ended the job, how, where and what to do."""
    first = cause(endings)
    note = first.note
    if note is not None and note.kind == "stall":
        what, why, fix = json.loads(note.text)
        return PeerLost(what, why=why, fix=fix)
    if note is not None and note.kind == "peer lost":
        return _lost_elsewhere(first)
    what = f"{_who(first, endings, size)} {_how(first)} {_where(first)}."
    return PeerLost(what, why=_why(first, before, after), fix=f"{_fix(first)}{RESUME}.")


def memory_marks() -> MemoryMarks:
    """Read the kernel's counters as they stand now; compare two readings."""
    for folder in _memory_groups():
        for name in ("memory.events", "memory.oom_control"):
            kills = _counter(folder / name, "oom_kill")
            if kills is not None:
                return MemoryMarks(kills, "this control group's", _limit(folder))
    return MemoryMarks(_counter(Path("/proc/vmstat"), "oom_kill"), "this machine's", None)


def peak_child_bytes() -> int:
    """Return the largest memory that a child which has ended had in use."""
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


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
    if end.note is not None and end.failed_by_itself:
        return f"failed with {_first_line(end.note.text)}"
    if end.code < 0:
        verb = "was killed by" if end.code in (-9, -15) else "crashed with"
        return f"{verb} {_signal_name(end.code)}"
    return f"left with exit code {end.code}"


def _where(end: Ending) -> str:
    return end.beat.where() if end.beat else "before it reached anytrain"


def _why(end: Ending, before: MemoryMarks, after: MemoryMarks) -> str:
    if end.failed_by_itself:
        return "the script raised it; its traceback is above."
    if end.code == -signal.SIGKILL:
        return _why_killed(before, after)
    if end.code < 0 and _signal_name(end.code) in _NATIVE:
        return "native code failed, in a library or an extension: Python raises errors instead."
    if end.code < 0:
        return "another process sent the signal; anytrain did not."
    return "the script ended itself; what it wrote above may say why."


def _why_killed(before: MemoryMarks, after: MemoryMarks) -> str:
    peak = f"the largest process had {peak_child_bytes() / 2**30:.1f} GiB"
    limit = "" if after.limit_bytes is None else f" of a limit of {after.limit_bytes / 2**30:.1f}"
    if before.oom_kills is None or after.oom_kills is None:
        return f"SIGKILL came from outside; no memory counter can be read here, and {peak}{limit}."
    if after.oom_kills > before.oom_kills:
        return (
            f"out of memory: {after.source} count of such kills rose from {before.oom_kills} "
            f"to {after.oom_kills}; {peak}{limit}."
        )
    return f"SIGKILL came from outside; {after.source} count of out-of-memory kills did not rise."


def _fix(end: Ending) -> str:
    if end.code >= 0 or end.failed_by_itself:
        return "mend that, then "
    if _signal_name(end.code) in _NATIVE:
        return "run with PYTHONFAULTHANDLER=1 to see the line, then "
    return "find out who sent it, then "


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


def _memory_groups() -> list[Path]:
    """Return this process's memory control group, as version 2 and as version 1 mount it."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    root = Path("/sys/fs/cgroup")
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = root if not controllers else root / "memory"
        if not controllers or "memory" in controllers.split(","):
            folders += [base / path.lstrip("/"), base]
    return folders


def _counter(path: Path, name: str) -> int | None:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        return None
    return None


def _limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            value = int((folder / name).read_text())
        except (OSError, ValueError):
            continue
        # Version 1 writes "no limit" as the largest multiple of a page.
        return value if value < 2**60 else None
    return None
