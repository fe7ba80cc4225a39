"""Text made safe to print, and the sheet that an object shows of itself.

A name that others wrote may hold what a terminal obeys: codes that recolour it, rename its window
or move its cursor, signs that turn the writing round, line breaks that begin a line of somebody
else's. They are shown as Python writes them, such as \\x1b, and are obeyed by nobody.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderHook, RenderResult
    from rich.segment import Segment

_OBEYED = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control codes, less the line break and the tab
    "\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069"  # the direction of writing; no width
    "\u2028\u2029\ufeff\ud800-\udfff"  # further line breaks; halves of characters
    "\U000e0000-\U000e007f"  # letters that nobody sees
)
_ANYWHERE = re.compile(f"[{_OBEYED}]")
_IN_A_LINE = re.compile(f"[\t\n{_OBEYED}]")
_CELL = 'style="text-align:left;vertical-align:top;padding:2px 12px 2px 0"'


def printable(text: str) -> str:
    r"""Return the text with all that a terminal would obey shown; lines and tabs stay.

    >>> print(printable("red\x1b[31m\nnext"))
    red\x1b[31m
    next
    """
    return _ANYWHERE.sub(_escaped, text)


def one_line(text: object, most: int | None = None) -> str:
    r"""Return a name, or another text that belongs on one line, safe to print.

    >>> print(one_line("loss\nfix: run this"))
    loss\nfix: run this
    """
    found = _IN_A_LINE.sub(_escaped, str(text))
    return found if most is None or len(found) <= most else f"{found[: most - 3]}..."


def amount(count: int, noun: str) -> str:
    """Return a count with its noun, in the singular or the plural.

    >>> amount(1, "shape"), amount(0, "shape"), amount(12_000, "batch"), amount(2, "entry")
    ('1 shape', '0 shapes', '12,000 batches', '2 entries')
    """
    if count != 1:
        noun = f"{noun[:-1]}ies" if noun.endswith("ry") else noun
        noun += "" if noun.endswith("ies") else "es" if noun.endswith(("s", "x", "ch")) else "s"
    return f"{count:,} {noun}"


def size(num_bytes: float) -> str:
    """Return a number of bytes in words.

    >>> size(96), size(1_340_000_000), size(24 * 10**9)
    ('96 B', '1.34 GB', '24 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def safe_console(**options: Any) -> Console:
    """Return a console of rich's that prints names as they are: nothing in them is obeyed."""
    from rich.console import Console

    made = Console(**{"highlight": False, "emoji": False, **options})
    made.push_render_hook(cast("RenderHook", _Hook()))
    return made


class _Hook:
    """Puts what a console is about to print through `printable`."""

    def process_renderables(self, renderables: list[Any]) -> list[Any]:
        """Return the same things, to be printed safely."""
        return [_Shown(each) for each in renderables]


class _Shown:
    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return self._segments(console, options)

    def _segments(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        from rich.segment import Segment

        for segment in console.render(self._thing, options):
            is_text = segment.control is None and _ANYWHERE.search(segment.text)
            yield Segment(printable(segment.text), segment.style) if is_text else segment


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape", "surrogatepass").decode("ascii")


class Sheet:
    """A title, and rows of which the first cell is a name.

    >>> Sheet("Plan", [("device", "cpu", "one core"), ("step", "eager", "default")])
    Plan
      device  cpu    one core
      step    eager  default
    """

    def __init__(self, title: str, rows: Iterable[Sequence[object]]) -> None:
        self.title = one_line(title)
        self.rows = [[one_line(cell) for cell in row] for row in rows]

    def __repr__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        told = (
            "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in self.rows
        )
        return "\n".join([self.title, *(f"  {line}" for line in told)])

    def _repr_html_(self) -> str:
        body = "".join(
            f"<tr><th {_CELL}>{escape(row[0])}</th>"
            + "".join(f"<td {_CELL}>{escape(cell)}</td>" for cell in row[1:])
            + "</tr>\n"
            for row in self.rows
        )
        return f"<b>{escape(self.title)}</b><table><tbody>{body}</tbody></table>"


def in_no_checkpoint(since: str) -> str:
    """Return in words that a run's end was not saved.

    >>> in_no_checkpoint("checkpoint-4")
    'what was learnt since checkpoint-4 is in no checkpoint'
    """
    return f"what was learnt since {since} is in no checkpoint"
