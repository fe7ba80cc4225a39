"""Call a function in several processes, and bring back what it returns or what went wrong.

By default they are fresh: function and arguments travel by value, so those of a notebook or of
the script that is running work, and nothing of this process's state is inherited, no device
least of all. A fork is made only where it is asked for. Nothing is left behind: no process, no
folder, no file, whether the call ends well, is interrupted, or this process is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from string import Template
from typing import IO, Any, TextIO

from anytrain.core import environment
from anytrain.core.errors import BadType, PeerLost
from anytrain.core.notices import give_notice
from anytrain.machine.processes import (
    child,
    crashes,
    exceptions,
    heartbeat,
    host_limits,
    notebook_cell,
    notes,
    parent_death,
    pickling,
    stack_dumps,
    supervise,
)

_INTERRUPT_GRACE_S = 2.0
"""How long children may take to leave an interrupted call, unless they save their work."""
_CAUSE_S = 0.5
"""How long the rank that died first may take to show, where a consequence came first."""
_OUTPUT_S = 2.0
"""How long output may take to arrive that children have left behind."""
_HOME = str(Path(__file__).parents[3])
"""Where anytrain is, also when it was found beside a working folder that has changed since."""
# Until the call begins, an interrupt ends a child without a word. The notebook may have found
# anytrain on a path of its own.
_BOOT = """
import json, signal, sys
if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.path.extend(path for path in json.loads(sys.argv.pop(1)) if path not in sys.path)
from anytrain.machine.processes.child import main
main(*sys.argv[1:])
"""


@dataclass(frozen=True, slots=True)
class SpawnOptions:
    """The processes that one machine brings to a job, and where all of them meet."""

    num_processes: int
    size: int
    first_rank: int = 0
    address: str = "127.0.0.1"
    port: int = 29500
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables for the children, on top of this process's own."""
    prefix: str | None = None
    """What each output line begins with; ${rank}, ${local_rank} and ${role_name} are filled in."""
    interval_s: float = 0.1
    max_restarts: int = 0
    forks: bool = False
    timeout_s: float | None = None
    brings_all: bool = False
    """Whether every rank's value comes back, as a list, instead of rank 0's."""
    trains_on_host: bool = True
    """Whether each process will write to the tensors it is handed, in the host's memory."""

    def variables(self, local_rank: int, folder: str) -> dict[str, str]:
        """Return what one child's environment says beyond this process's own."""
        return {
            **self.environ,
            "RANK": str(self.first_rank + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.num_processes),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "ANYTRAIN_BEATS": folder,
        }

    def brings(self, local_rank: int) -> bool:
        """Whether this child's value comes back."""
        return self.brings_all or self.first_rank + local_rank == 0


def call(function: Callable[..., Any], args: Sequence[Any], options: SpawnOptions) -> Any:
    """Call the function in each process of the options; return rank 0's value, if it is here.

    The error of the rank that failed first is raised here, with its type and its traceback.
    A Ctrl-C ends the children before it goes on.
    """
    with ExitStack() as stack:
        parcel = None
        if not options.forks:
            parcel = stack.enter_context(_stored(pack(function, args), options))
        for attempt in range(options.max_restarts + 1):
            with supervise.launch_folder() as folder:
                failure = _Attempt(folder, options, (function, tuple(args)), parcel).run()
                if failure is None:
                    return _values(folder, options)
                if attempt == options.max_restarts:
                    raise failure
                _say_restart(failure, attempt + 1, options.max_restarts)
    raise AssertionError("the last attempt returns or raises")


def pack(function: Callable[..., Any], args: Sequence[Any]) -> pickling.Parcel:
    """Return the call as a parcel, or say what in it cannot travel."""
    try:
        parcel = pickling.pack((function, tuple(args)))
    except Exception as error:
        name = getattr(function, "__name__", repr(function))
        culprit = pickling.culprit(function, tuple(args)) or "it or something it refers to"
        raise BadType(
            f"Cannot hand {name} over to other processes.",
            why=f"{culprit} cannot be pickled: {notes.text(error)}",
            fix=_way_out(culprit),
        ) from error
    parcel.surroundings = pickling.surroundings()
    if parcel.devices:
        give_notice(
            f"Tensors on {', '.join(sorted(parcel.devices))} are handed over through the host's "
            "memory: each process gets them on the CPU, and `prepare` moves them to its device.",
            stacklevel=4,
        )
    return parcel


def _way_out(culprit: str) -> str:
    if "`get_ipython" in culprit:
        return (
            "a line with `!` or `%` needs the notebook's own process: use subprocess.run() in its "
            'place, or pass start_method="fork".'
        )
    return (
        "create that object inside the function, or pass what it is made from; "
        'start_method="fork" takes it along.'
    )


@contextmanager
def _stored(parcel: pickling.Parcel, options: SpawnOptions) -> Iterator[IO[bytes]]:
    """Give an open file that holds the parcel and that no folder lists."""
    free = host_limits.free_memory()
    copies = options.num_processes if options.trains_on_host else 0
    host_limits.check_memory(
        host_limits.Need(options.num_processes, parcel.num_bytes, copies), free
    )
    with pickling.nameless_file(host_limits.folder_for_tensors(parcel.num_bytes, free)) as file:
        parcel.write(file)
        del parcel  # the file holds it all
        yield file


class _Attempt:
    """One start of all processes, to its end."""

    def __init__(
        self, folder: str, options: SpawnOptions, call: child.Call, parcel: IO[bytes] | None
    ) -> None:
        self._folder, self._options, self._call, self._parcel = folder, options, call, parcel
        self._members: list[supervise.Process] = []
        self._failed: dict[int, crashes.Ending] = {}
        """By rank: how those ended that failed, as soon as it was seen."""
        self._ended_at: float | None = None
        """When the launcher began to end the others."""
        self._piped = options.prefix is not None or not _is_terminal_output(sys.stdout)

    def run(self) -> BaseException | None:
        """Start them, wait, and return the error that ended it."""
        before = host_limits.memory_marks()
        is_well = True
        copies: list[notebook_cell.PipeReader] = []
        with parent_death.liveness_pipe() as ends, _pages() as pages:
            try:
                for local_rank in range(self._options.num_processes):
                    self._members.append(self._start(local_rank, ends, pages))
                if self._piped:
                    copies = _show_output(self._members, self._options)
                is_well = self._wait()
            except BaseException:
                self._interrupt()
                raise
            finally:
                # A grandchild may hold the pipes open: what it still says is not waited for.
                deadline = time.monotonic() + _OUTPUT_S
                for copy in copies:
                    copy.end(deadline)
        failure = None if is_well else self._failure(before)
        supervise.forget_looks(member.pid for member in self._members)
        return failure

    def _start(self, local_rank: int, ends: tuple[int, int], pages: int | None) -> Any:
        options, folder = self._options, self._folder
        variables = options.variables(local_rank, folder)
        shared = [] if pages is None else [pages]
        if pages is not None:
            variables[notebook_cell.PIPE] = str(pages)
        if self._parcel is None:
            return self._fork(local_rank, variables, ends)
        files = [self._parcel.fileno(), ends[0]]
        paths = [each for each in (*sys.path, _HOME) if isinstance(each, str)]
        words = [json.dumps(paths), folder, *files, int(options.brings(local_rank))]
        command = [sys.executable, *_flags(), "-c", _BOOT, *map(str, words)]
        environ = {**os.environ, **variables}
        return supervise.start(command, environ, self._piped, files + shared, listens=False)

    def _fork(self, local_rank: int, variables: dict[str, str], ends: tuple[int, int]) -> Any:
        rank, brings = self._options.first_rank + local_rank, self._options.brings(local_rank)

        def work() -> int:
            parent_death.close_liveness_pipes()
            parent_death.exit_with_parent(ends[0], self._folder)
            return child.perform(lambda: self._call, self._folder, rank, brings)

        return supervise.start_fork(work, variables, self._piped)

    def _wait(self) -> bool:
        """Wait for all; where one fails, end the others. Return whether all went well."""
        options = self._options
        try:
            failed = supervise.first_failure(self._members, options.interval_s, options.timeout_s)
        except TimeoutError:
            raise self._out_of_time() from None
        if failed is None:
            return True
        deadline = time.monotonic() + _CAUSE_S
        while crashes.is_consequence(crashes.cause(self._endings())):
            codes = [supervise.poll(member) for member in self._members]
            if None not in codes or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        self._ended_at = time.time()
        notes.set_flag(self._folder, notes.PEER_DIED)
        supervise.end(self._members, signal.SIGTERM, supervise.SURVIVOR_GRACE_S)
        return False

    def _interrupt(self) -> None:
        """End the children at once, but for a checkpoint that they are about to save."""
        folder = self._folder
        notes.set_flag(folder, notes.INTERRUPTED)
        begun = {pid for _, pid in stack_dumps.known_processes(folder)}
        # One that has not come as far as our code would show Python's own end of an interrupt.
        supervise.end([m for m in self._members if m.pid not in begun], signal.SIGKILL, 0)
        is_deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # so are its children, then
        signum, grace_s = signal.SIGTERM if is_deaf else signal.SIGINT, _INTERRUPT_GRACE_S
        is_saving = partial(notes.has_flag, folder, notes.SAVING)
        supervise.end(self._members, signum, grace_s, is_saving)

    def _out_of_time(self) -> PeerLost:
        """Say where each rank was when the time was over."""
        doing = "\n".join(
            _doing(self._folder, self._options.first_rank + local_rank, member)
            for local_rank, member in enumerate(self._members)
        )
        return PeerLost(
            f"The launch was ended after {self._options.timeout_s:g} s.",
            why=f"timeout={self._options.timeout_s:g} was given and it was not done.\n{doing}",
            fix="give it more time, or look at these lines for what it waited for.",
        )

    def _failure(self, before: host_limits.MemoryMarks) -> BaseException:
        options, endings = self._options, self._endings()
        first = crashes.cause(endings)
        found = child.read_result(self._folder, first.rank)
        pickled = None if found is None else found.error
        returned = [
            options.first_rank + i for i, m in enumerate(self._members) if m.returncode == 0
        ]
        is_lost = first.note is not None and first.note.kind == "peer lost"
        if pickled and is_lost and (returned or options.size > options.num_processes):
            seen = [
                stack_dumps.Frame(file, line, name.rpartition(".")[2])
                for file, name, _, line in reversed(pickled[0].frames)
            ]
            first = replace(first, evidence=replace(first.evidence, stack=tuple(seen)))
            endings, pickled = [first], None
        if not pickled:
            after = host_limits.memory_marks()
            return crashes.explain(endings, options.size, before, after, returned)
        error = exceptions.unpickle_error(pickled)
        error.add_note(f"It was raised by rank {first.rank} of {options.size}.")
        if remark := crashes.remark(first, before, host_limits.memory_marks()):
            error.add_note(remark)
        return error

    def _endings(self) -> list[crashes.Ending]:
        """Return how those ended that did not end well, and which of them were ended here."""
        since = self._ended_at
        for rank, member in enumerate(self._members, self._options.first_rank):
            if member.returncode and rank not in self._failed:
                end = crashes.ending(self._folder, rank, member.pid, member.returncode)
                # Its own words count if they are older than that.
                was_ended = since is not None and (end.note is None or end.note.written > since)
                self._failed[rank] = replace(end, was_ended=was_ended)
        return list(self._failed.values())


def _flags() -> list[str]:
    """Return this interpreter's own options; the folder it runs in hides no package."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags if {"-I", "-P"} & set(flags) else [*flags, "-P"]


def _say_restart(failure: BaseException, attempt: int, more: int) -> None:
    give_notice(
        f"Attempt {attempt} of {more + 1} failed and is made again: {notes.words(failure)}",
        stacklevel=4,
    )


def _doing(folder: str, rank: int, member: supervise.Process) -> str:
    """Say where a rank is now."""
    if member.poll() is not None:
        return f"    rank {rank} had ended."
    beat, seen = heartbeat.read_beat(folder, rank), stack_dumps.last_seen(folder, rank, member.pid)
    where = "before its first step with anytrain" if beat is None else beat.where()
    own = () if seen is None else tuple(takewhile(_is_of_the_call, seen.stack))
    stack = f", in\n{stack_dumps.describe(own, indent=' ' * 6)}" if own else ""
    return f"    rank {rank} was {where}{stack}"


def _is_of_the_call(frame: stack_dumps.Frame) -> bool:
    return frame.file != child.__file__


def _values(folder: str, options: SpawnOptions) -> Any:
    ranks = range(options.first_rank, options.first_rank + options.num_processes)
    try:
        found = [child.read_result(folder, rank) for rank in ranks]
    except Exception as error:
        raise BadType(
            "Cannot bring back what the function returned.",
            why=f"it is made of something that this process does not have: {notes.words(error)}",
            fix="import that here first, or return plain values and tensors.",
        ) from error
    silent = [local for local, each in enumerate(found) if each is None and options.brings(local)]
    _say_left([options.first_rank + local for local in silent])
    values = [None if each is None else each.value for each in found]
    return values if options.brings_all else values[0]


def _say_left(ranks: list[int]) -> None:
    """Say which ranks have left no value, though they ended well."""
    if ranks:
        who = ", ".join(f"rank {rank}" for rank in ranks)
        give_notice(
            f"The function did not return in {who}: its process was ended with exit code 0 (by "
            "sys.exit or os._exit), so there is no value of it.",
            stacklevel=5,
        )


def _is_terminal_output(stream: TextIO) -> bool:
    """Whether children that write to file 1 write where this process's prints go."""
    try:
        return stream.fileno() == 1 and not environment.in_notebook()
    except (OSError, ValueError, AttributeError):
        return False


@contextmanager
def _pages() -> Iterator[int | None]:
    """Give the end of a pipe whose pages this process's cell shows; None outside a notebook."""
    if not environment.in_notebook():
        yield None
        return
    ours, theirs = os.pipe()
    copy = notebook_cell.show_cell_outputs(os.fdopen(ours, "rb"))
    try:
        yield theirs
    finally:
        os.close(theirs)
        copy.end(time.monotonic() + _OUTPUT_S)


def _show_output(
    members: Sequence[supervise.Process], options: SpawnOptions
) -> list[notebook_cell.PipeReader]:
    """Copy the children's output to this process's, as a notebook needs."""
    copies = []
    for local_rank, member in enumerate(members):
        words = {"rank": options.first_rank + local_rank, "local_rank": local_rank}
        prefix = Template(options.prefix or "").safe_substitute(words, role_name="default")
        for pipe, stream in ((member.stdout, sys.stdout), (member.stderr, sys.stderr)):
            if pipe is not None:
                copies.append(notebook_cell.copy_text(pipe, stream, prefix))
    return copies
