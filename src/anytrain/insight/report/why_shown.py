"""Show where a run's time went: in a terminal, as text, or as a part of a notebook's page."""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING, Any

from anytrain.core.text import one_line, safe_console
from anytrain.insight.pages.page import Markup, joined, tag
from anytrain.insight.report.why import MEANING, NOTHING, over_starts

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN = 0.0005
_WIDTH = 100
_HEAD = ("time", "seconds", "share", "what")
_RIGHT = ("seconds", "share")


class Why:
    """Where a run's time went, and what to do about it."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told
        """All that is known, as plain values."""

    def print(self, console: Console) -> None:
        """Print it as `anytrain why` does."""
        from rich.table import Table
        from rich.text import Text

        told = self.told
        console.print(Text(one_line(heading(told)), style="bold"), soft_wrap=True)
        table = Table(*_HEAD)
        for column in table.columns:
            column.overflow = "fold"
            column.justify = "right" if column.header in _RIGHT else "left"
        for row in rows(told):
            table.add_row(*map(Text, row))
        console.print(table)
        for line in facts(told):
            console.print(Text(one_line(line)), soft_wrap=True)
        finding, remedy = verdict(told)
        console.print(Text(finding, style="bold" if remedy else ""))
        if remedy:
            console.print(Text(remedy), soft_wrap=True)

    def __repr__(self) -> str:
        file = io.StringIO()
        self.print(safe_console(file=file, width=_WIDTH, color_system=None, force_jupyter=False))
        return file.getvalue().rstrip()

    def _repr_html_(self) -> str:
        finding, remedy = verdict(self.told)
        return tag(
            "div",
            tag("p", tag("strong", one_line(heading(self.told)))),
            _table(self.told),
            tag("ul", (tag("li", one_line(line)) for line in facts(self.told))),
            tag("p", tag("strong", finding) if remedy else finding, " ", remedy),
        )


def _table(told: dict[str, Any]) -> Markup:
    def cells(kind: str, row: tuple[str, ...]) -> Markup:
        sides = ("right" if name in _RIGHT else "left" for name in _HEAD)
        return joined(
            tag(kind, cell, style=f"text-align:{side};padding:2px 12px 2px 0")
            for cell, side in zip(row, sides, strict=True)
        )

    body = (tag("tr", cells("td", row)) for row in rows(told))
    return tag("table", tag("thead", tag("tr", cells("th", _HEAD))), tag("tbody", body))


def rows(told: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each name that took time worth showing."""
    found = []
    for name, share in told["shares"].items():
        if share >= _SHOWN:
            row = (name, f"{told['seconds'][name]:.1f}", f"{share:.1%}", MEANING.get(name, ""))
            found.append(tuple(map(one_line, row)))
    return found


def verdict(told: dict[str, Any]) -> tuple[str, str]:
    """Return what takes too much, and what to do about it; that nothing does has no remedy."""
    finding = told["finding"]
    if finding is None:
        return NOTHING, ""
    return f"{finding['share']:.0%} of the time: {MEANING[finding['name']]}.", finding["remedy"]


def heading(told: dict[str, Any]) -> str:
    """Return how the run stands, in a line."""
    of = "" if told["max_steps"] is None else f" of {told['max_steps']}"
    times = over_starts(told["starts"])
    wall = f"{told['wall_seconds']:.1f} s"
    state = _heard(told) if told["state"] == "unknown" else told["state"]
    return f"{told['run']}: {state} at step {told['step']}{of} after {wall}{times}"


def _heard(told: dict[str, Any]) -> str:
    """Say where a run of another host is, and when it last wrote."""
    when = "" if told["heard"] is None else time.strftime(" %F %T", time.localtime(told["heard"]))
    return f"on {told['host']}, last heard of{when},"


def facts(told: dict[str, Any]) -> list[str]:
    """Return what else is known, a line each."""
    found = [f"{name}: {value} ({because})" for name, (value, because) in told["plan"].items()]
    if told["samples_per_second"]:
        found.append(f"samples/s between batches: {told['samples_per_second']:.1f}")
    if told["peak_bytes"]:
        found.append(f"peak memory: {told['peak_bytes'] / 2**30:.2f} GiB")
    if told["shapes"]:
        found.append(f"shapes: {len(told['shapes'])} ({', '.join(told['shapes'][:8])})")
    if told["hidden_seconds"] >= 0.05:
        found.append(
            f"{told['hidden_seconds']:.1f} s of waiting for data cost nothing: the device was busy"
        )
    learnt = (
        f"at step {each['step']}: {each['choice']} became {each['value']} ({each['because']})"
        for each in told["revisions"]
    )
    return [*found, *dict.fromkeys(learnt)]  # each start may learn the same
