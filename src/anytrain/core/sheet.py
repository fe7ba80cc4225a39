"""A thing as a person is told of it: a title, and what is known by name; as text and as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from anytrain.core.text import one_line

_CELL = 'style="text-align:left;vertical-align:top;padding:2px 12px 2px 0"'


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
