"""Charts that can be zoomed and read with mouse, keyboard and screen reader, drawn by uPlot.

A page holds the charts' data as JSON and two scripts: uPlot, taken from the installed package
`uplot` when the page is made, and curves.js. In the page `anytrain.update(told)` takes what
`told(charts)` returns and draws it in place: a chart of a known name gets its new data and keeps
its zoom, a new one is put after the one told before it, in the element with the class "charts".
uPlot's objects are in `anytrain.plots` by the charts' names.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from anytrain.core.errors import BadInput
from anytrain.insight.pages.page import Content, Markup, beside, document, embedded, encodable, tag

MOST_POINTS = 2000
DATA = "anytrain-charts"
Point = tuple[float, float | None]


@dataclass(frozen=True, slots=True)
class Series:
    """A line: points in the order of their x; one without a value is a gap."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over one x axis, under a name that is the chart's own in its page.

    With `kind` "dots" or "bars" there is one series, drawn as such.
    """

    name: str
    title: str
    series: Sequence[Series]
    across: str = "step"
    unit: str = ""
    """How values are written: "bytes", "seconds", or as numbers."""
    marks: Sequence[tuple[float, str]] = ()
    """Places on the x axis with a word for each, such as a new start."""
    broad: bool = False
    """Whether it takes the whole width."""
    kind: Literal["line", "dots", "bars"] = "line"
    summary: str = field(init=False)
    """What it shows in words: first, last, lowest and highest of each line."""

    def __post_init__(self) -> None:
        alone = len(self.series) == 1
        words = " ".join(_in_words(series, self, alone=alone) for series in self.series)
        object.__setattr__(self, "summary", words)


def page(
    title: str,
    *content: Content,
    charts: Sequence[Chart],
    before: Content = (),
    styles: Sequence[str] = (),
    scripts: Sequence[str] = (),
    connects: bool = False,
) -> str:
    """Return a page in which the figures of these charts come to life.

    `content` holds the figures where they should stand; see `document` for the rest.
    """
    script, look = library()
    return document(
        title,
        *content,
        embedded(told(charts), DATA),
        before=before,
        styles=(look, beside("curves.css"), *styles),
        scripts=(script, beside("curves.js"), *scripts),
        connects=connects,
    )


def figures(charts: Iterable[Chart]) -> Markup:
    """Return the charts' figures in a grid."""
    return tag("div", map(figure, charts), class_="charts")


def figure(chart: Chart) -> Markup:
    """Return the place of one chart: its title and what it shows in words."""
    return tag(
        "figure",
        tag("figcaption", chart.title),
        tag("p", chart.summary, class_="dim"),
        class_="chart broad" if chart.broad else "chart",
        data_chart=chart.name,
    )


def told(charts: Iterable[Chart]) -> dict[str, Any]:
    """Return the charts as plain values, for `anytrain.update` in the page."""
    return {"charts": [_told(chart) for chart in charts]}


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Return at most that many points, with the lowest and the highest of each stretch.

    >>> thin([(0, 1.0), (1, 9.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 0.0), (6, 1.0)], most=4)
    [(0, 1.0), (1, 9.0), (5, 0.0), (6, 1.0)]
    """
    if len(points) <= most:
        return list(points)
    inner = points[1:-1]
    stretches = max((most - 2) // 2, 1)
    kept = [points[0]]
    for n in range(stretches):
        stretch = inner[n * len(inner) // stretches : (n + 1) * len(inner) // stretches]
        kept += _extremes(stretch)
    return [*kept, points[-1]]


def library() -> tuple[str, str]:
    """Return uPlot's script and style from the installed package."""
    # Found, not imported: the package would load IPython.
    spec = importlib.util.find_spec("uplot")
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    for place in places:
        script = Path(place) / "static" / "uPlot.iife.js"
        look = Path(place) / "static" / "uPlot.min.css"
        if script.is_file() and look.is_file():
            return script.read_text(encoding="utf-8"), look.read_text(encoding="utf-8")
    raise BadInput(
        "Cannot draw the charts of this page.",
        why="uPlot, which draws them, comes from the package uplot-python, which is not installed.",
        fix="pip install 'anytrain[report]'",
    )


def number(value: float, unit: str = "") -> str:
    """Return a value as a person writes it.

    >>> number(0.00002), number(1234567), number(3 * 2**30, "bytes"), number(75, "seconds")
    ('2e-05', '1,234,567', '3.00 GiB', '1 min 15 s')
    """
    if unit == "bytes":
        return _bytes(value)
    if unit == "seconds" and abs(value) < 1e9:
        return _seconds(value)
    if abs(value) < 1e9 and value == int(value):
        return f"{int(value):,}"
    return f"{value:,.1f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def _bytes(value: float) -> str:
    for name, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= scale:
            return f"{value / scale:.2f} {name}"
    return f"{value:.0f} B"


def _seconds(value: float) -> str:
    if value < 60:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def _extremes(stretch: Sequence[Point]) -> list[Point]:
    """Return its lowest and highest point in their order; a gap where there is nothing else."""
    values = [y for _, y in stretch if y is not None]
    if not values:
        return list(stretch[:1])
    known = stretch if len(values) == len(stretch) else [p for p in stretch if p[1] is not None]
    low, high = values.index(min(values)), values.index(max(values))
    # A line of equal values keeps a point of each stretch.
    return [known[place] for place in sorted({low, high})]


def _told(chart: Chart) -> dict[str, Any]:
    return {
        "name": encodable(chart.name),  # as the figure in the page has it
        "title": encodable(chart.title),
        "summary": encodable(chart.summary),
        "across": chart.across,
        "unit": chart.unit,
        "broad": chart.broad,
        "kind": chart.kind,
        "marks": [{"x": x, "text": text} for x, text in chart.marks],
        "series": [_lines(series) for series in chart.series],
    }


def _lines(series: Series) -> dict[str, Any]:
    kept = thin([point if _is_known(point) else (point[0], None) for point in series.points])
    return {
        "name": encodable(series.name),
        "x": [x for x, _ in kept],
        "y": [y for _, y in kept],
        "of": len(series.points),
    }


def _is_known(point: Point) -> bool:
    return point[1] is not None and math.isfinite(point[1])


def _in_words(series: Series, chart: Chart, *, alone: bool) -> str:
    unit, across = chart.unit, chart.across
    known = [y for _, y in series.points if y is not None and math.isfinite(y)]
    places = [x for x, y in series.points if y is not None and math.isfinite(y)]
    lost = len(series.points) - len(known)
    before = "" if alone else f"{series.name}: "
    missing = f" Not finite: {lost} of {len(series.points)}." if lost else ""
    if not known:
        return f"{before}no finite value."
    if len(known) == 1:
        return f"{before}{number(known[0], unit)} at {across} {number(places[0])}.{missing}"
    low, high = min(known), max(known)
    if low == high:
        return f"{before}{number(low, unit)} throughout.{missing}"
    way = f"from {number(known[0], unit)} to {number(known[-1], unit)}"
    return (
        f"{before}{way if chart.kind == 'line' else f'{len(known)} {chart.kind}'}; "
        f"lowest {number(low, unit)} at {across} {number(places[known.index(low)])}, "
        f"highest {number(high, unit)} at {across} {number(places[known.index(high)])}.{missing}"
    )
