"""The charts of a page: zoomable ones drawn by uPlot, and plain SVG that needs no script.

Those of uPlot can be read with mouse, keyboard and screen reader. A page holds their data as JSON
and two scripts: uPlot, taken from the installed package `uplot` when the page is made, and
curves.js. In the page `anytrain.update(told)` takes what `chart_data(charts)` returns and draws it
in place: a chart of a known name gets its new data and keeps its zoom, a new one is put after the
one told before it, in the element with the class "charts". uPlot's objects are in `anytrain.plots`
by the charts' names.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from anytrain.core.errors import BadInput
from anytrain.insight.pages.markup import (
    Content,
    Markup,
    beside,
    document,
    embedded,
    encodable,
    tag,
)

MOST_POINTS = 2000
DATA = "anytrain-charts"
Point = tuple[float, float | None]
_WIDTH, _HEIGHT = 720.0, 260.0
_NARROW, _LOW = 360.0, 220.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 8.0, 22.0, 24.0
_TICKS = 4


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


def chart_page(
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
        embedded(chart_data(charts), DATA),
        before=before,
        styles=(look, beside("curves.css"), *styles),
        scripts=(script, beside("curves.js"), *scripts),
        connects=connects,
    )


def chart_grid(charts: Iterable[Chart]) -> Markup:
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


def chart_data(charts: Iterable[Chart]) -> dict[str, Any]:
    """Return the charts as plain values, for `anytrain.update` in the page."""
    return {"charts": [_plain(chart) for chart in charts]}


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


def _plain(chart: Chart) -> dict[str, Any]:
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
    points = [(x, y if y is not None and math.isfinite(y) else None) for x, y in series.points]
    kept = thin(points)
    return {
        "name": encodable(series.name),
        "x": [x for x, _ in kept],
        "y": [y for _, y in kept],
        "of": len(series.points),
    }


def _in_words(series: Series, chart: Chart, *, alone: bool) -> str:
    unit, across = chart.unit, chart.across
    finite = [(x, y) for x, y in series.points if y is not None and math.isfinite(y)]
    places, known = [x for x, _ in finite], [y for _, y in finite]
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


# -- plain SVG, coloured by the style of the page -------------------------------------------------


def area(
    values: Sequence[float],
    label: Callable[[float], str],
    *,
    title: str,
    parts: Sequence[str] = (),
    limit: tuple[float, str] | None = None,
) -> Markup:
    """Return a filled line over evenly spaced values, with grid, highest value and limit.

    `parts` names the stretch that each value belongs to; neighbours of one name are marked off.
    The limit is drawn where it is not far above the values.
    """
    top = max([*values, 1.0]) * 1.08
    if limit is not None and limit[0] <= 2 * top:
        top = max(top, limit[0] * 1.05)
    x = _scale(0, max(len(values) - 1, 1), _LEFT, _WIDTH - _RIGHT)
    y = _scale(0, top, _HEIGHT - _BOTTOM, _TOP)
    drawn = [
        tag("title", title),
        *_grid(top, y, label),
        *_stretches(parts, x),
        _filled(values, x, y),
        *_highest(values, x, y, label),
    ]
    if limit is not None and limit[0] <= top:
        drawn += _limit(limit, y)
    return tag(
        "svg",
        drawn,
        viewBox=f"0 0 {_WIDTH:.0f} {_HEIGHT:.0f}",
        role="img",
        aria_label=title,
    )


@dataclass(frozen=True, slots=True)
class Dot:
    """A point of `dots`."""

    x: float
    y: float
    words: str
    is_marked: bool = False


def dots(
    points: Sequence[Dot],
    ticks: Sequence[tuple[float, str]],
    label: Callable[[float], str],
    *,
    title: str,
) -> Markup:
    """Return points over an axis with these marks; the marked one is filled and drawn last."""
    xs, ys = [*(dot.x for dot in points), *(at for at, _ in ticks)], [dot.y for dot in points]
    x = _scale(*_apart(xs), _LEFT + 10, _NARROW - 14)
    low, high = _apart(ys)
    y = _scale(low, high, _LOW - _BOTTOM - 10, _TOP)
    drawn = [tag("title", title)]
    for tick in range(_TICKS + 1):
        value = low + (high - low) * tick / _TICKS
        at = f"{y(value):.1f}"
        drawn += [
            tag("line", x1=f"{_LEFT}", x2=f"{_NARROW}", y1=at, y2=at, stroke="var(--line)"),
            tag("text", label(value), x=f"{_LEFT - 6}", y=f"{y(value) + 4:.1f}", text_anchor="end"),
        ]
    for place, words in ticks:
        is_last = place == max(xs) and len(ticks) > 1
        at = f"{_NARROW if is_last else x(place):.1f}"
        side = "end" if is_last else "middle"
        drawn.append(tag("text", words, x=at, y=f"{_LOW - 6}", text_anchor=side))
    for dot in sorted(points, key=lambda dot: dot.is_marked):
        drawn.append(
            tag("circle", tag("title", dot.words), cx=f"{x(dot.x):.1f}", cy=f"{y(dot.y):.1f}",
                r="6" if dot.is_marked else "4.5", stroke="var(--accent)", stroke_width="1.5",
                fill="var(--accent)", fill_opacity="1" if dot.is_marked else "0.15")
        )  # fmt: skip
    box = f"0 0 {_NARROW:.0f} {_LOW:.0f}"
    return tag("svg", drawn, viewBox=box, role="img", aria_label=title)


def _apart(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest value, or what lies around the only one."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low < high:
        return low, high
    return low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _grid(top: float, y: Callable[[float], float], label: Callable[[float], str]) -> list[Markup]:
    found = []
    for tick in range(_TICKS + 1):
        value = top * tick / _TICKS
        at = f"{y(value):.1f}"
        found.append(
            tag("line", x1=f"{_LEFT}", x2=f"{_WIDTH - _RIGHT}", y1=at, y2=at, stroke="var(--line)")
        )
        words = tag("text", label(value), x=f"{_LEFT - 6}", y=at, text_anchor="end")
        found.append(words)
    return found


def _stretches(parts: Sequence[str], x: Callable[[float], float]) -> list[Markup]:
    found, start = [], 0
    for name, run in groupby(parts):
        length = sum(1 for _ in run)
        left = f"{x(start):.1f}"
        found.append(
            tag("line", x1=left, x2=left, y1=f"{_TOP}", y2=f"{_HEIGHT - _BOTTOM}",
                stroke="var(--dim)", stroke_dasharray="2 3")
        )  # fmt: skip
        if x(start + length) - x(start) > 7 * len(name):
            middle = f"{(x(start) + x(start + length)) / 2:.1f}"
            found.append(tag("text", name, x=middle, y=f"{_HEIGHT - 6}", text_anchor="middle"))
        start += length
    return found


def _filled(
    values: Sequence[float], x: Callable[[float], float], y: Callable[[float], float]
) -> Markup:
    points = " ".join(f"{x(n):.1f},{y(value):.1f}" for n, value in enumerate(values))
    base = f"{y(0):.1f}"
    ends = f"{x(0):.1f},{base} {points} {x(max(len(values) - 1, 0)):.1f},{base}"
    return tag("polygon", points=ends, fill="var(--accent)", fill_opacity="0.3",
               stroke="var(--accent)", stroke_width="1")  # fmt: skip


def _highest(
    values: Sequence[float],
    x: Callable[[float], float],
    y: Callable[[float], float],
    label: Callable[[float], str],
) -> list[Markup]:
    if not values:
        return []
    at = max(range(len(values)), key=values.__getitem__)
    left, up = x(at), y(values[at])
    side = "end" if left > _WIDTH / 2 else "start"
    words = f"peak {label(values[at])}"
    return [
        tag("circle", cx=f"{left:.1f}", cy=f"{up:.1f}", r="3", fill="var(--error)"),
        tag("text", words, x=f"{left:.1f}", y=f"{up - 6:.1f}", text_anchor=side),
    ]


def _limit(limit: tuple[float, str], y: Callable[[float], float]) -> list[Markup]:
    at = f"{y(limit[0]):.1f}"
    return [
        tag("line", x1=f"{_LEFT}", x2=f"{_WIDTH - _RIGHT}", y1=at, y2=at,
            stroke="var(--error)", stroke_dasharray="6 3"),
        tag("text", limit[1], x=f"{_LEFT + 4}", y=f"{y(limit[0]) - 4:.1f}"),
    ]  # fmt: skip
