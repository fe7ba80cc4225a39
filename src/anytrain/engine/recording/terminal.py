"""Draw a run in a terminal: bars that move, log lines above them, a table at the end.

The cursor rests where the bars begin and is never hidden, and nothing is drawn from another
thread. So what a signal handler or a data worker writes goes over the bars and is never erased,
and a run that is killed leaves a terminal in order.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, TextIO, cast

from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from anytrain.core.text import safe_console
from anytrain.engine.recording.console import Course, Display, put, tell_broken
from anytrain.engine.recording.formatting import LogEntry, Summary, duration, fitting, lines
from anytrain.engine.recording.small_charts import sparkline

_NARROWEST_BAR = 8
_WIDEST_BAR = 60
_NARROWEST_TABLE = 50
_WIDEST_SPARK = 24
_CLEAR = "\r\x1b[J"
_END_LINE = "\x1b[K\n"
_open: weakref.WeakSet[Terminal] = weakref.WeakSet()


class Terminal(Display):
    """Bars at the bottom of the terminal, and what is logged or printed above them."""

    def __init__(
        self,
        stream: TextIO | None = None,
        width: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(clock)
        self._given = stream, width
        self._console: RichConsole | None = None
        self._aside: list[RedirectedStream] = []
        self._lock = threading.RLock()
        self.is_broken = False
        """Whether what it writes to has gone away."""

    def begin(self, course: Course) -> None:
        self._start()
        super().begin(course)

    def evaluating(self, done: int, total: int | None) -> None:
        """Show a second bar; the only one where nothing is trained."""
        self._start()
        super().evaluating(done, total)

    def evaluated(self) -> None:
        """Take the evaluation's bar away."""
        super().evaluated()
        if self.pace is None:
            self.close()

    def draw(self) -> None:
        """Draw the bars where the cursor is, and put it back there."""
        console = self._console
        if console is None:
            return
        try:
            bars = self.bars(console.width - 1, not console.encoding.startswith("utf"))
            shown = _styled(console, *bars).rstrip("\n")
        except Exception as error:  # noqa: BLE001 - any print draws the bars anew, and would raise
            self._give_up(error)
            return
        back = f"\x1b[{len(bars) - 1}A\r" if len(bars) > 1 else "\r"
        self._write(console.file, _CLEAR + (shown + back if bars else ""))

    def tell(self, entry: LogEntry) -> None:
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
        self._print(console, Text("\n".join(told), style=style))

    def say(self, text: str) -> None:
        console = self._console
        if console is not None:
            self._print(console, Text(text, style="dim"))

    def end(self, summary: Summary) -> None:
        """Take the bars away and print the summary as a table."""
        super().end(summary)
        console = self._console
        if console is not None:
            self._print(console, _ending(summary, console.width))
        self.close()

    def close(self) -> None:
        """Take the bars away, and give standard output back."""
        super().close()
        console, self._console = self._console, None
        self.let_go()
        if console is not None:
            self._write(console.file, _CLEAR)

    def above(self, stream: IO[str], text: str) -> None:
        """Write whole lines where the bars are, and the bars below them."""
        with self._lock:
            if self._console is not None:
                self._write(self._console.file, _CLEAR)
            self._write(stream, text)
            self.draw()

    def bars(self, width: int, is_ascii: bool) -> list[Text]:
        shown = []
        if self.pace is not None:
            total = self.course.total
            tails = _counts(self.step, total, self.times())
            shown.append(_bar("training", self.step, total, tails, width, is_ascii))
            shown.append(Text(fitting(self._figures(is_ascii), width), style="dim"))
            shown.extend(self._below(width))
        if self.evaluation is not None:
            done, total = self.evaluation.done, self.evaluation.total
            tails = _counts(done, total, duration(self.clock() - self.evaluation.began))
            shown.append(_bar("evaluating", done, total, tails, width, is_ascii))
        return shown

    def let_go(self) -> None:
        for proxy in self._aside:
            proxy.step_aside()
        self._aside = []
        _open.discard(self)

    def _figures(self, is_ascii: bool) -> list[str]:
        latest, loss = self.standing.latest, self.standing.loss
        first = [f"{name} {latest[name]}" for name in (loss, "lr") if name in latest]
        drawn = sparkline(self.standing.losses.points(), _WIDEST_SPARK, is_ascii=is_ascii)
        if drawn and loss in latest:
            first[0] += f" {drawn}"
        return [part for part in (*first, self.speed(), *self.memory()) if part]

    def _below(self, width: int) -> list[Text]:
        spent, remark = self.spent(), self.standing.remark
        told = [Text(fitting([self.course.spent_in, *spent], width), style="dim")] if spent else []
        if remark:
            told.append(Text(remark[:width], style="yellow"))
        return told

    def _start(self) -> None:
        if self._console is not None or self.is_broken:
            return
        stream, width = self._given
        self._console = safe_console(
            file=stream or sys.stdout,
            width=width,
            force_jupyter=False,
            force_terminal=True,
        )
        if stream is None:
            self._aside = [RedirectedStream(self, "stdout"), RedirectedStream(self, "stderr")]
        _open.add(self)

    def _print(self, console: RichConsole, thing: Text | Table) -> None:
        try:
            text = _styled(console, thing)
        except (OSError, ValueError) as error:  # it touches its file, which may be closed
            self._give_up(error)
            return
        self.above(console.file, text)

    def _write(self, stream: IO[str], text: str) -> None:
        """Write, and go on without drawing where the terminal has gone away."""
        try:
            with self._lock:
                put(stream, text)
        except (OSError, ValueError) as error:  # nobody looks any more, or the file was closed
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.is_broken, self._console = True, None
        self.let_go()
        tell_broken(error)


class RedirectedStream:
    """Stands in for standard output or error: whole lines go above the bars."""

    def __init__(self, terminal: Terminal, name: str) -> None:
        self._terminal: Terminal | None = terminal
        self._name = name
        self._stream: TextIO = getattr(sys, name)
        self._part = ""
        self._pid = os.getpid()
        setattr(sys, name, cast(TextIO, self))

    def write(self, text: str) -> int:
        """Write the lines that are whole; keep the rest until its end comes."""
        if self._terminal is None:  # a logger may hold this long after the bars are gone
            return self._stream.write(text)
        if self._pid != os.getpid():  # forked: it knows nothing of the bars but that they exist
            self._stream.write(text.replace("\n", _END_LINE))
            return len(text)
        # What a carriage return would overwrite is never seen.
        whole, newline, self._part = (self._part + text).rpartition("\n")
        self._part = self._part.rpartition("\r")[2] if "\r" in self._part else self._part
        if newline:
            self._terminal.above(self._stream, whole + newline)
        return len(text)

    def writelines(self, many: Any) -> None:
        for text in many:
            self.write(text)

    def flush(self) -> None:
        """Leave a line that is not whole until it is: the next drawing would erase it."""
        self._stream.flush()

    def step_aside(self) -> None:
        """Write the rest, and put the real stream back, unless somebody put another."""
        self._terminal, part, self._part = None, self._part, ""
        if getattr(sys, self._name) is self:
            setattr(sys, self._name, self._stream)
        if part and self._pid == os.getpid():
            with suppress(OSError, ValueError):  # it may be why this steps aside
                put(self._stream, f"{part}\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _styled(console: RichConsole, *things: Any) -> str:
    """Return what the console would write."""
    with console.capture() as captured:
        for thing in things:
            console.print(thing)
    return captured.get()


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


def _in_child() -> None:
    """Draw nothing in a forked process: the bars are its parent's."""
    for terminal in list(_open):
        terminal._console = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
