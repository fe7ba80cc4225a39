"""Run a script in one process or in many, and say in a few lines how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from anytrain.core import environment
from anytrain.core.errors import BadInput
from anytrain.core.plan import Wish, Wishes
from anytrain.doors.launch.options import DEFAULT_PORT, LaunchOptions, check, check_port
from anytrain.machine.processes import (
    crashes,
    heartbeat,
    host_limits,
    notes,
    parent_death,
    supervise,
)
from anytrain.machine.processes.crashes import Ending
from anytrain.machine.processes.host_limits import MemoryMarks

if TYPE_CHECKING:
    from anytrain.doors.launch.target import LaunchTarget

# A single process must not take itself for a rank of some other launcher's job.
_OTHERS_PLACE = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_PROCID",
)


def launch(options: LaunchOptions, script: str, args: Sequence[str]) -> int:
    """Run the script as the options say; return the exit code of the job."""
    check(options)
    _check_script(script, bool(options.module))
    if options.main_process_port and not options.machine_rank:
        check_port(options.main_process_port, "--main_process_port")
    _set_before_torch(options)
    try:
        with supervise.hearing_signals(list):
            command, num_processes = _prepared(options, script, args)
    except supervise.Stopped as stop:
        _say(f"Stopped by {notes.asked_by(stop.signum)} before a process was started.")
        return 128 + stop.signum
    with supervise.launch_folder() as beats:
        os.environ["ANYTRAIN_BEATS"] = beats
        if num_processes * options.machines == 1:
            return _run_one(command, beats, options.max_restarts or 0)
        return _run_many(command, beats, num_processes, options)


def _prepared(options: LaunchOptions, script: str, args: Sequence[str]) -> tuple[list[str], int]:
    """Return what each process runs, and how many of them this machine is to have."""
    # From here on torch is loaded: everything that needs no device was refused before.
    from anytrain.doors.launch.target import choose_target, threads

    wishes = options.wishes().over(environment.read().wishes)
    asked = None if options.num_processes is None else options.num_processes // options.machines
    target = choose_target(wishes, asked)
    _export_options(options, wishes, target)
    if target.num_processes * options.machines > 1:
        import anytrain.machine.parallel.agent  # noqa: F401  it takes its time, too
    os.environ.update(threads(target.num_processes, options.num_cpu_threads_per_process))
    command = [sys.executable, "-u", *(["-m"] if options.module else []), script, *args]
    # Whatever the ranks are doing, importing torch or not ours at all, they end with this process.
    return parent_death.with_death_signal(command), target.num_processes


def _check_script(script: str, module: bool) -> None:
    if not module and not os.path.exists(script):
        raise BadInput(
            f"There is no script {script}.",
            why=f"no such file, seen from {os.getcwd()}.",
            fix="pass the path of a Python file, or --module with a module's name.",
        )
    if not module and os.path.isdir(script) and not os.path.exists(f"{script}/__main__.py"):
        raise BadInput(
            f"{script} is not a script.",
            why="it is a folder, and there is no __main__.py in it.",
            fix="pass the path of a Python file, or --module with a module's name.",
        )


def _set_before_torch(options: LaunchOptions) -> None:
    """Set what torch, here and in the children, reads when it is loaded."""
    ids = options.gpus()
    if ids is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(ids)
    if options.debug:
        os.environ["ANYTRAIN_DEBUG"] = "1"
    else:
        # The store's C++ warnings come with thirty lines of stack for each lost connection.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _export_options(options: LaunchOptions, wishes: Wishes, target: LaunchTarget) -> None:
    """Put the options and the vendor's variables where the children find them."""
    exported = options.wishes()
    if exported.device is not None:
        # "gpu" is a friendly name that only the launcher knows; a number in the name is kept.
        number = exported.device.value.partition(":")[2]
        name = f"{target.backend.name}:{number}" if number else target.backend.name
        exported = Wishes(device=Wish(name, exported.device.source)).over(exported)
    os.environ.update(environment.launch_variables(exported))
    os.environ.update(target.backend.launch_environment(target.num_processes, wishes))


def _run_one(command: list[str], beats: str, max_restarts: int) -> int:
    """Run a world of one: no process group, and the same last words."""
    before = host_limits.memory_marks()
    environ = {k: v for k, v in os.environ.items() if k not in _OTHERS_PLACE}
    members: list[supervise.Process] = []
    with supervise.hearing_signals(lambda: members):
        try:
            for left in range(max_restarts, -1, -1):
                notes.clear(beats, 0)
                members[:] = [supervise.start(command, environ)]
                if supervise.first_failure(members) is None:
                    return 0
                end = crashes.ending(beats, 0, members[0].pid, members[0].returncode)
                supervise.end(members, signal.SIGTERM, 0)
                if end.was_preempted:
                    return _say_stopped(beats, 1, end.code - 128)
                if left:
                    _say_restart([end], 1, before, left)
            return _say_crash([end], 1, before)
        except supervise.Stopped as stop:
            return _stop(members, beats, stop.signum)


def _stop(members: list[supervise.Process], beats: str, signum: int) -> int:
    # Asked twice, `end` kills everything before it passes the second request on.
    with contextlib.suppress(supervise.Stopped):
        asked = supervise.passed_on(signum)
        supervise.end(members, asked, supervise.GRACE_S, beats=beats)
    return _say_stopped(beats, 1, signum)


def _run_many(command: list[str], beats: str, num_processes: int, options: LaunchOptions) -> int:
    from anytrain.machine.parallel import agent

    if not options.debug:
        agent.quiet()
    before = host_limits.memory_marks()
    machines = options.machines
    size = num_processes * machines

    def on_restart(endings: list[Ending], left: int) -> None:
        _say_restart(endings, size, before, left + 1)

    port = options.main_process_port
    job = agent.ElasticJob(
        command=command,
        local_size=num_processes,
        beats=beats,
        num_machines=machines,
        machine_rank=options.machine_rank or 0,
        # Alone, a machine needs no address that others could reach.
        address=(options.main_process_ip if machines > 1 else None) or "127.0.0.1",
        port=port if port is not None else (0 if machines == 1 else DEFAULT_PORT),
        max_restarts=options.max_restarts or 0,
        on_restart=on_restart,
    )
    outcome = agent.run(job)
    if outcome.signum is not None:
        return _say_stopped(beats, size, outcome.signum)
    if not outcome.endings:
        return 0
    return _say_crash(outcome.endings, size, before, outcome.returned)


def _say_crash(
    endings: list[Ending], size: int, before: MemoryMarks, returned: Sequence[int] = ()
) -> int:
    error = crashes.explain(endings, size, before, host_limits.memory_marks(), returned)
    _say(str(error))
    return crashes.cause(endings).exit_code


def _say_restart(endings: list[Ending], size: int, before: MemoryMarks, left: int) -> None:
    error = crashes.explain(endings, size, before, host_limits.memory_marks())
    _say(f"{error.what} Starting again; {left - 1} more restart(s) after this one.")


def _say_stopped(beats: str, size: int, signum: int) -> int:
    last = [beat for rank in range(size) if (beat := heartbeat.read_beat(beats, rank)) is not None]
    how = f"Stopped by {notes.asked_by(signum)}"
    if supervise.cut_short() - {beat.pid for beat in last if _has_saved(beats, beat.rank)}:
        how += ", and killed before it had ended by itself: what was not saved is lost"
    _say(f"{how}.{_where(last, size) or ' No step was begun.'}")
    return 128 + signum


def _has_saved(beats: str, rank: int) -> bool:
    note = notes.read(beats, rank)
    return note is not None and note.kind == "preempted"


def _where(last: Sequence[heartbeat.Beat], size: int) -> str:
    """Say where the ranks were, those at one place together."""
    places: dict[str, list[int]] = {}
    for beat in last:
        places.setdefault(beat.where(), []).append(beat.rank)
    said = ""
    for place, ranks in list(places.items())[:4]:
        if len(ranks) == size:
            who = "All ranks were" if size > 1 else "The script was"
        else:
            verb = "was" if len(ranks) == 1 else "were"
            who = f"{heartbeat.name_ranks(ranks).capitalize()} {verb}"
        said += f" {who} {place}."
    return said


def _say(text: str) -> None:
    # A launcher whose terminal is gone ends with the signal's code all the same.
    parent_death.replace_lost_terminal()
    sys.stderr.write(f"anytrain: {text}\n")
    sys.stderr.flush()
