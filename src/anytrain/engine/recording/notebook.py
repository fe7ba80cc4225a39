"""Show a run in a notebook: one output, updated in place, with a bar and a table of entries."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from anytrain.core.text import Sheet, amount
from anytrain.engine.recording.console import BoundedCurve, Course, Display
from anytrain.engine.recording.formatting import LogEntry, Summary, duration, number
from anytrain.engine.recording.small_charts import Points, charts

_MOST_ROWS = 200
_MOST_CHARTS = 6
_CELL = 'style="text-align:left;padding:2px 12px 2px 0"'

Show = Callable[[Mapping[str, str]], Any]
"""Puts one rendering, by MIME type, on the page; returns a thing that can `update` it."""


def _display(rendering: Mapping[str, str]) -> Any:
    from IPython.display import display

    return display(dict(rendering), raw=True, display_id=True)


class NotebookBar(Display):
    """A bar, curves, and a table: Step, Training Loss, Validation Loss, one column a metric."""

    # Each update is a message to the browser with the whole table in it.
    interval_s = 0.25

    def __init__(self, show: Show = _display, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._show = show
        self._page: Any = None
        self._columns: list[str] = []
        self._rows: list[dict[str, str]] = []
        self._num_left_out = 0
        self._training_loss = ""
        self._summary: Summary | None = None
        self._evaluated: dict[str, BoundedCurve] = {}
        """The figures of evaluations so far, by what their columns are called."""
        self._charts = ""

    def begin(self, course: Course) -> None:
        self._forget()
        self._columns = ["Step", "Training Loss", *["Validation Loss"] * course.evaluates]
        super().begin(course)

    def evaluating(self, done: int, total: int | None) -> None:
        """Show a second bar; outside a training it starts an output of its own."""
        if self.pace is None and self.evaluation is None:
            self._forget()
        super().evaluating(done, total)

    def tell(self, entry: LogEntry) -> None:
        """Add a row, or fill the row of this step."""
        if entry.is_evaluation:
            loss = {"Training Loss": self._training_loss} if self.pace is not None else {}
            self._add(entry.step, {**loss, **_columns_of(entry)})
            for name, value in entry.values.items():
                self._evaluated.setdefault(_title(name), BoundedCurve()).add(entry.step, value)
        elif "loss" in entry.values:
            self._training_loss = number(entry.values["loss"])
            if not self.course.evaluates:
                self._add(entry.step, {"Training Loss": self._training_loss})
        self._charts = charts(self._curves())
        self.draw()

    def end(self, summary: Summary) -> None:
        """Replace the bar by the summary; the table stays."""
        super().end(summary)
        self._summary = summary
        self.draw()

    def draw(self) -> None:
        rendering = {"text/html": self._html(), "text/plain": self._text()}
        if self._page is None:
            self._page = self._show(rendering)
        else:
            self._page.update(rendering, raw=True)

    def _forget(self) -> None:
        self._page = self._summary = None
        self._columns, self._rows, self._num_left_out = ["Step"], [], 0
        self._training_loss = self._charts = ""
        self._evaluated = {}

    def _curves(self) -> dict[str, dict[str, Points]]:
        """Return the curves by chart: all losses in one, each other figure in its own."""
        losses: dict[str, Points] = {"training": self.standing.losses.points()}
        found: dict[str, dict[str, Points]] = {"Loss": losses}
        for title, trail in self._evaluated.items():
            if title.endswith("Loss"):
                losses[title.removesuffix(" Loss").lower() or "validation"] = trail.points()
            elif len(found) < _MOST_CHARTS:
                found[title] = {"validation": trail.points()}
        return found

    def _add(self, step: int, values: dict[str, str]) -> None:
        self._columns.extend(name for name in values if name not in self._columns)
        if self._rows and self._rows[-1]["Step"] == str(step):
            self._rows[-1].update(values)
            return
        self._rows.append({"Step": str(step), **values})
        if len(self._rows) > _MOST_ROWS:
            del self._rows[0]
            self._num_left_out += 1

    def _bars(self) -> list[tuple[str, int, int | None, str]]:
        bars = []
        if self.pace is not None:
            parts = (self.times(), self.speed(), *self.memory())
            tail = "  ".join(part for part in parts if part)
            bars.append(("training", self.step, self.course.total, tail))
        if self.evaluation is not None:
            spent = duration(self.clock() - self.evaluation.began)
            bars.append(("evaluating", self.evaluation.done, self.evaluation.total, spent))
        return bars

    def _html(self) -> str:
        parts = []
        for label, done, total, tail in self._bars():
            scale = "" if total is None else f' max="{total}"'
            of = "" if total is None else f"/{total}"
            parts.append(
                f'<div>{label} <progress value="{done}"{scale} style="width:300px;'
                f'vertical-align:middle"></progress> {done}{of}  {tail}</div>'
            )
        if self._charts:
            parts.append(self._charts)
        if self._rows:
            parts.append(_html_table(self._columns, self._rows))
        if left_out := self._num_left_out:
            verb = "is" if left_out == 1 else "are"
            parts.append(f"<div>{amount(left_out, 'earlier entry')} {verb} not shown.</div>")
        if self._summary is not None:
            parts.append(Sheet(self._summary.title, self._summary.rows())._repr_html_())
        return "\n".join(parts)

    def _text(self) -> str:
        """Return the same for a viewer that shows no HTML."""
        told = []
        for label, done, total, tail in self._bars():
            of = "" if total is None else f"/{total}"
            told.append(f"{label} {done}{of}  {tail}")
        if self._rows:
            told.append("  ".join(self._columns))
            told.extend("  ".join(row.get(c, "-") for c in self._columns) for row in self._rows)
        if self._summary is not None:
            told.append(self._summary.title)
            told.extend(f"{name}: {value}" for name, value in self._summary.rows())
        return "\n".join(told)


def _columns_of(entry: LogEntry) -> dict[str, str]:
    """Name an evaluation's figures as people know them from notebooks.

    >>> _columns_of(LogEntry(5, None, {"eval_loss": 0.5, "eval_f1_macro": 0.9}))
    {'Validation Loss': '0.5', 'F1 Macro': '0.9'}
    """
    return {_title(name): number(value) for name, value in entry.values.items()}


def _title(name: str) -> str:
    words = name.split("_")[1:] or [name]
    title = " ".join(word.capitalize() for word in words)
    return "Validation Loss" if title == "Loss" else title


def _html_table(columns: list[str], rows: list[dict[str, str]]) -> str:
    head = "".join(f"<th {_CELL}>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>"
        + "".join(f"<td {_CELL}>{escape(row.get(name, '-'))}</td>" for name in columns)
        + "</tr>\n"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"
