"""Draw a run in a terminal: a bar that moves, log lines above it, a table at the end.

The cursor is never hidden and nothing is drawn from another thread. So a run that is killed
leaves a terminal in order, and a forked data worker inherits no lock that somebody holds.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from rich.console import Console as RichConsole, ConsoleOptions, RenderResult
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.table import Table
from rich.text import Text

from anytrain.core.errors import Notice
from anytrain.engine.recording.console import Course, Followed
from anytrain.engine.recording.shown import Entry, Summary, duration, fitting, lines

_NARROWEST_BAR = 8
_WIDEST_BAR = 60
_NARROWEST_TABLE = 50
_live: weakref.WeakSet[Terminal] = weakref.WeakSet()


class _Screen(RichConsole):
    def show_cursor(self, show: bool = True) -> bool:
        """Leave the cursor alone: nothing could show it again after a kill."""
        return False


class Terminal(Followed):
    """A bar at the bottom of the terminal, and what is logged above it."""

    def __init__(
        self, console: RichConsole | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(clock)
        self._given = console
        self._console: RichConsole | None = None
        self._live: Live | None = None
        self._broken = False

    def begin(self, course: Course) -> None:
        """Start showing a training."""
        self._open()
        super().begin(course)

    def evaluating(self, done: int, total: int | None) -> None:
        """Show a second bar; the only one where nothing is trained."""
        self._open()
        super().evaluating(done, total)

    def evaluated(self) -> None:
        """Take the evaluation's bar away."""
        super().evaluated()
        if self.pace is None:
            self.close()

    def draw(self) -> None:
        """Move the bars."""
        if self._live is not None:
            self._safely(self._live.refresh)

    def tell(self, entry: Entry) -> None:
        """Print the entry above the training's bar; without one, the caller has the figures."""
        console = self._console
        if console is None or self.pace is None:
            return
        wide = 0 if self.course.total is None else len(str(self.course.total))
        pairs = [("step", f"{entry.step:>{wide}}")]
        if entry.epoch is not None:
            pairs.append(("epoch", f"{entry.epoch:.2f}"))
        told = lines([*pairs, *entry.pairs()], console.width - 1)
        style = "bold" if entry.is_evaluation else ""
        self._safely(lambda: console.print(Text("\n".join(told), style=style)))

    def end(self, summary: Summary) -> None:
        """Take the bars away and print the summary as a table."""
        super().end(summary)
        console = self._console
        self.close()
        if console is not None:
            self._safely(lambda: console.print(_ending(summary, console.width)))

    def close(self) -> None:
        """Take the bars away, and give standard output back."""
        super().close()
        live, self._live, self._console = self._live, None, None
        _live.discard(self)
        if live is not None:
            self._safely(live.stop)

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        # One column stays free: some terminals start a new line when the last one is written.
        width = options.max_width - 1
        if self.pace is not None:
            total, left = self.course.total, self.left()
            times = f"{self.elapsed()}, {left} left" if left else self.elapsed()
            tails = _counts(self.step, total, times)
            yield _bar("training", self.step, total, tails, width, options.ascii_only)
            yield Text(fitting(self._facts(), width), style="dim")
        if self.evaluation is not None:
            done, total = self.evaluation.done, self.evaluation.total
            tails = _counts(done, total, duration(self.clock() - self.evaluation.began))
            yield _bar("evaluating", done, total, tails, width, options.ascii_only)

    def _facts(self) -> list[str]:
        latest = self.standing.latest
        first = [f"{name} {latest[name]}" for name in ("loss", "lr") if name in latest]
        memory = [f"{name} {amount}" for name, amount in self.standing.memory]
        return [part for part in (*first, self.speed(), *memory) if part]

    def _open(self) -> None:
        if self._live is not None or self._broken:
            return
        self._console = self._given or _Screen(highlight=False, force_jupyter=False)
        self._live = Live(self, console=self._console, auto_refresh=False, transient=True)
        _live.add(self)
        self._safely(self._live.start)

    def _safely(self, action: Callable[[], Any]) -> None:
        """Draw, and go on without drawing where the terminal has gone away."""
        try:
            action()
        except OSError as error:
            self._broken, self._live, self._console = True, None, None
            _give_output_back()
            warnings.warn(
                f"Progress is no longer shown: {error}. Training goes on.", Notice, stacklevel=2
            )


def _counts(done: int, total: int | None, times: str) -> list[str]:
    """Return what may stand to the right of a bar, the fullest first."""
    if total is None:
        return [f"{done}  {times}", str(done)]
    counts = f"{done:>{len(str(total))}}/{total}"
    share = f"{done / total:.0%}" if total else "100%"
    return [f"{counts}  {share:>4}  {times}", f"{counts}  {times}", counts]


def _bar(
    label: str, done: int, total: int | None, tails: list[str], width: int, is_ascii: bool
) -> Text:
    """Return a line: label, bar, figures. Narrow terminals lose figures, then the label."""
    most = width - _NARROWEST_BAR - 1
    tail = next((tail for tail in tails if len(tail) <= most), tails[-1])
    room = width - len(tail) - 1
    line = Text(no_wrap=True)
    if room - len(label) - 1 >= _NARROWEST_BAR:
        line.append(f"{label} ")
        room -= len(label) + 1
    if total and room > 2:
        room = min(room, _WIDEST_BAR)
        # Two characters, not two colours: some terminals have no colours.
        full, empty = ("#", "-") if is_ascii else ("━", "╌")
        filled = min(room, room * done // total)
        line.append(full * filled, style="green" if done >= total else "cyan")
        line.append(empty * (room - filled), style="dim")
        line.append(" ")
    line.append(tail)
    line.truncate(width)
    return line


def _ending(summary: Summary, width: int) -> Table | Text:
    """Return the summary as a table; as lines where a table would squeeze the values."""
    if width < _NARROWEST_TABLE:
        told = [summary.title, *(f"{name}: {value}" for name, value in summary.rows())]
        return Text("\n".join(told), overflow="fold")
    table = Table(title=summary.title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in summary.rows():
        table.add_row(Text(name), Text(value))
    return table


def _give_output_back() -> None:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, FileProxy):
            setattr(sys, name, stream.rich_proxied_file)


def _in_child() -> None:
    """Draw nothing in a forked process: the bar belongs to its parent."""
    if len(_live):
        _give_output_back()
        for terminal in list(_live):
            terminal._live = terminal._console = None
        _live.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
