"""`anytrain watch`: follow a run from another terminal, or in a browser. Loads no torch."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from anytrain.insight.report.watch import Clock, View, Wait

RUN = typer.Argument(help="A run's output_dir; an Accelerator's project_dir.")
ONCE = typer.Option(False, "--once", help="Print how the run stands now, and leave.")
WAIT = typer.Option(
    60.0, "--wait", min=0, help="Seconds to wait for a run that died to be started again."
)
WEB = typer.Option(False, "--web", help="Show it as a page on this machine, 127.0.0.1.")
PORT = typer.Option(None, "--port", min=0, max=65535, help="The page's port; a free one otherwise.")
OPEN = typer.Option(False, "--open", help="Open the page in a browser.")
_WIDTH = 100


def watch(
    run: Path = RUN,
    once: bool = ONCE,
    wait: float = WAIT,
    web: bool = WEB,
    port: int | None = PORT,
    opens: bool = OPEN,
) -> None:
    """Follow a run by what it writes down: progress, loss, speed, time left, memory.

    The run is not touched: q or Ctrl-C leaves it alone. Before there is a record, it is waited
    for. The exit status is 0 when the run ends well or you leave, and 1 when it failed or was
    killed.
    """
    if once:
        _print_once(run)
        return
    try:
        if web:
            _serve(run, port, opens)
        else:
            _follow(run, wait)
    except KeyboardInterrupt:  # the usual way to leave
        typer.echo()


def _print_once(folder: Path) -> None:
    from rich.console import Console

    from anytrain.core.records import open_run
    from anytrain.insight.report.watch import present

    console = Console(highlight=False)
    width = console.width if sys.stdout.isatty() else _WIDTH
    for line in present(open_run(folder), width, not console.encoding.startswith("utf")):
        console.print(line, markup=False, soft_wrap=True)


def _follow(folder: Path, linger_s: float) -> None:
    from anytrain.insight.report.watch import follow

    with _keys() as wait:
        ended_well = follow(folder, _view, wait, _say, linger_s)
    _let_go()
    if not ended_well:
        raise typer.Exit(1)


def _view(clock: Clock) -> View:
    from anytrain.engine.recording.console import Plain, is_terminal
    from anytrain.engine.recording.terminal import Terminal

    return Terminal(clock=clock) if is_terminal(sys.stdout) else Plain(clock=clock)


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

    Keys are not echoed meanwhile. Where input is no terminal, only Ctrl-C leaves.
    """
    if not sys.stdin.isatty() or sys.platform == "win32":
        yield _sleep
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield _until_q
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _until_q(seconds: float) -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and os.read(sys.stdin.fileno(), 64).lower().startswith(b"q")


def _serve(folder: Path, port: int | None, opens: bool) -> None:
    from anytrain.insight.report.web import serve

    with _keys() as wait:
        serve(folder, wait=wait, say=_say, port=port, opens=opens)
