"""`anytrain watch`: follow a run from another terminal, or in a browser. Loads no torch."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from anytrain.cli.options import RUN, newest_run, say
from anytrain.core.errors import BadInput
from anytrain.core.records import no_record

if TYPE_CHECKING:
    from anytrain.insight.report.watch import Clock, View, Wait

ONCE = typer.Option(False, "--once", help="Print how the run stands now, and exit.")
WAIT = typer.Option(
    60.0, "--wait", min=0, help="Seconds to wait for a run that died to be started again."
)
WEB = typer.Option(False, "--web", help="Show it as a page on this machine, 127.0.0.1.")
PORT = typer.Option(None, "--port", min=0, max=65535, help="The page's port; a free one otherwise.")
OPEN = typer.Option(False, "--open", help="Open the page in a browser.")
_WIDTH = 100


def watch(
    run: Path | None = RUN,
    once: bool = ONCE,
    wait: float = WAIT,
    web: bool = WEB,
    port: int | None = PORT,
    opens: bool = OPEN,
) -> None:
    """Follow a run by what it writes down: progress, loss, speed, time left, memory.

    The run is not touched: q or Ctrl-C leaves it alone. Before there is a record, it is waited
    for; of a search, the newest trial is taken, and with --once the newest of a folder of runs.
    The exit status is 0 when the run ends well, goes on or you leave, and 1 when it failed, was
    killed, or its end is in no checkpoint.
    """
    _check_options(once, web, opens or port is not None)
    from anytrain.insight.report.run_folders import newest_below, newest_trial

    run = newest_run("watch") if run is None else newest_trial(run, say, "watch")
    if run.is_file():  # no run will ever be written there
        raise no_record(run, "")
    if once:
        _print_once(newest_below(run, say))
        return
    try:
        with _ends_in_order():
            if web:
                _serve(run, port, opens)
            else:
                _follow(run, wait)
    except KeyboardInterrupt:  # the usual way to leave
        typer.echo()


def _check_options(once: bool, web: bool, is_about_the_page: bool) -> None:
    if once and web:
        raise BadInput(
            "Cannot use --once with --web.",
            why="--once prints how the run stands and exits; a page is served until you stop it.",
            fix="leave one of them out; `anytrain report RUN` writes a page that stays as it is.",
        )
    if is_about_the_page and not web:
        raise BadInput(
            "Cannot use --port or --open without --web.",
            why="they are about the page, and none is served.",
            fix="add --web, or leave them out.",
        )


@contextmanager
def _ends_in_order() -> Iterator[None]:
    """Let a request to end, or a terminal that goes away, leave the keyboard as it was."""
    # What is ignored stays so: `nohup` means it.
    found = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    ours = [number for number in found if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in ours:
            signal.signal(number, _leave)
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # as a shell tells it


def _print_once(folder: Path) -> None:
    from rich.console import Console

    from anytrain.core.records import open_run
    from anytrain.engine.recording.console import put
    from anytrain.insight.report.watch import is_well, present

    console, run = Console(), open_run(folder)
    width = console.width if sys.stdout.isatty() else _WIDTH
    for line in present(run, width, not console.encoding.startswith("utf")):
        put(sys.stdout, f"{line}\n")
    if not is_well(run):
        raise typer.Exit(1)


def _follow(folder: Path, linger_s: float) -> None:
    from anytrain.insight.report.watch import follow

    with _keys() as wait:
        ended_well = follow(folder, _view, wait, _say, linger_s)
    _let_go()
    if not ended_well:
        raise typer.Exit(1)


def _view(clock: Clock) -> View:
    from anytrain.engine.recording.console import PlainDisplay, is_terminal
    from anytrain.engine.recording.terminal import Terminal

    return Terminal(clock=clock) if is_terminal(sys.stdout) else PlainDisplay(clock=clock)


def _say(text: str) -> None:
    typer.echo(text)


def _let_go() -> None:
    """Give up what was not read, where whoever read this has left: `anytrain watch RUN | head`."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _keys() -> Iterator[Wait]:
    """Give a way to wait that a pressed q cuts short; Ctrl-C leaves too, and without a complaint.

    Keys are not echoed meanwhile. Where input is no terminal, or another job's, only Ctrl-C or a
    signal leaves.
    """
    if sys.platform == "win32" or sys.stdin is None or not sys.stdin.isatty():
        yield _sleep
        return
    if not _has_keyboard():
        yield _sleep
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield _until_q
    finally:
        if _has_keyboard():
            with suppress(termios.error):  # the terminal has gone away
                termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _has_keyboard() -> bool:
    """Whether this is the job in front: the shell stops any other that touches the keyboard."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:  # not the terminal that this process is controlled by: nobody stops it
        return True


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _until_q(seconds: float) -> bool:
    if not _has_keyboard():  # stopped, and sent to the background
        return _sleep(seconds)
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and os.read(sys.stdin.fileno(), 64).lower().startswith(b"q")


def _serve(folder: Path, port: int | None, opens: bool) -> None:
    from anytrain.insight.report.web import serve

    with _keys() as wait:
        serve(folder, wait=wait, say=_say, port=port, opens=opens)
