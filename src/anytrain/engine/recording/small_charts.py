"""Draw small charts of a run: with characters for a terminal or a log file, as SVG for a notebook.

The SVG loads nothing, and can be read on light and dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from anytrain.engine.recording.formatting import mean, number

Points = Sequence[tuple[float, float]]

_BLOCKS = " ▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = " .:-=+*#"
_NARROWEST = 8
_WIDTH, _HEIGHT = 340.0, 150.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 8.0, 8.0, 20.0
_COLOURS = ("#3b82f6", "#e8710a", "#16a34a", "#a855f7", "#db2777", "#0891b2")
_TEXT = 'fill="currentColor" font-size="11" font-family="sans-serif"'


def curve(
    points: Points,
    *,
    title: str = "",
    x_label: str = "",
    width: int = 72,
    height: int = 8,
    encoding: str = "utf-8",
) -> str:
    """Return the curve through (x, y) as text, no line wider than `width`.

    Points that are not finite are left out. An encoding that lacks block characters gets ASCII.

    >>> print(curve([(0, 0.5), (1, 0.7), (2, 0.9)], title="accuracy", width=18, height=2))
    accuracy
    0.9 ┤       ▁▃▄▅▇█
    0.5 ┤▁▁▃▄▅▇███████
        └─────────────
         0           2
    """
    finite = sorted((x, y) for x, y in points if math.isfinite(x) and math.isfinite(y))
    if not finite:
        return f"{title}: no points to draw" if title else "no points to draw"
    is_ascii = not encoding.lower().replace("-", "").startswith("utf")
    low, high = min(y for _, y in finite), max(y for _, y in finite)
    labels = _labels(low, high, height)
    margin = max(len(label) for label in labels)
    room = max(width - margin - 2, _NARROWEST)
    levels = [_share(y, low, high) * height for y in _sampled(finite, room)]
    tick, corner, floor = ("|", "+", "-") if is_ascii else ("┤", "└", "─")
    told = [title] if title else []
    for row, label in zip(range(height - 1, -1, -1), labels, strict=True):
        told.append(f"{label:>{margin}} {tick}{_row(levels, row, is_ascii)}".rstrip())
    told.append(f"{'':>{margin}} {corner}{floor * room}")
    told.append(f"{'':>{margin}}  {_scale(finite[0][0], finite[-1][0], x_label, room)}".rstrip())
    return "\n".join(told)


def sparkline(points: Points, width: int, *, is_ascii: bool = False) -> str:
    """Return the curve through (x, y) as one line, no wider than `width`; nothing without two.

    >>> sparkline([(0, 0.9), (1, 0.6), (2, 0.4), (3, 0.3), (4, 0.2)], width=20)
    '█▅▃▂▁'
    """
    finite = sorted((x, y) for x, y in points if math.isfinite(x) and math.isfinite(y))
    if len(finite) < 2 or width < 2:
        return ""
    low, high = min(y for _, y in finite), max(y for _, y in finite)
    marks = (_ASCII_BLOCKS if is_ascii else _BLOCKS)[1:]
    most = len(marks) - 1
    return "".join(
        marks[most // 2 if high == low else round(_share(y, low, high) * most)]
        for y in _sampled(finite, min(width, len(finite)))
    )


def _labels(low: float, high: float, height: int) -> list[str]:
    """Return a label for each row, top first: the extremes, and the middle where there is room."""
    labels = [""] * height
    middle = height // 2
    if high == low:
        labels[middle] = number(float(low))
        return labels
    labels[0], labels[-1] = number(float(high)), number(float(low))
    if height >= 5:
        # What the row's upper edge stands for.
        labels[middle] = number(_between(low, high, (height - middle) / height))
    return labels


def _sampled(points: Points, columns: int) -> list[float]:
    """Return one y a column: the mean of the points in it, or a straight line between others."""
    first, last = points[0][0], points[-1][0]
    if last == first:
        return [mean([y for _, y in points])] * columns
    held: list[list[float]] = [[] for _ in range(columns)]
    for x, y in points:
        held[round((x - first) / (last - first) * (columns - 1))].append(y)
    known = {column: mean(ys) for column, ys in enumerate(held) if ys}
    places = sorted(known)
    heights: list[float] = []
    for begin, end in zip(places, places[1:], strict=False):
        for column in range(begin, end):
            share = (column - begin) / (end - begin)
            heights.append(_between(known[begin], known[end], share))
    return [*heights, known[places[-1]]]


def _between(low: float, high: float, share: float) -> float:
    return (1 - share) * low + share * high


def _row(levels: list[float], row: int, is_ascii: bool) -> str:
    marks = _ASCII_BLOCKS if is_ascii else _BLOCKS
    most = len(marks) - 1
    least = 1 if row == 0 else 0
    return "".join(
        marks[min(most, max(least, round((level - row) * most)))]
        if level > row or row == 0
        else " "
        for level in levels
    )


def _scale(first: float, last: float, label: str, room: int) -> str:
    """Return the line under the axis: where it begins, what it counts, where it ends."""
    begin, end = number(first), number(last)
    middle = f"  {label}  " if label else " "
    if len(begin) + len(middle) + len(end) > room:
        middle = " "
    return f"{begin}{middle:^{max(room - len(begin) - len(end), 1)}}{end}"


def charts(found: Mapping[str, Mapping[str, Points]]) -> str:
    """Return a chart for each title that has a line worth drawing; "" where none has."""
    drawn = [each for title, lines in found.items() if (each := chart(title, lines))]
    if not drawn:
        return ""
    row = "display:flex;flex-wrap:wrap;gap:4px 24px;margin:8px 0"
    return f'<div style="{row}">{"".join(drawn)}</div>'


def chart(title: str, lines: Mapping[str, Points]) -> str:
    """Return lines by name over the steps, with the newest value of each; "" without a curve."""
    finite = {
        name: kept
        for name, points in lines.items()
        if (kept := [(x, y) for x, y in points if math.isfinite(y)])
    }
    if not any(len(points) > 1 for points in finite.values()):
        return ""
    # What is of no training has the colour that it has beside one.
    colours = dict(zip(finite, _COLOURS["training" not in lines :], strict=False))
    every = [point for points in finite.values() for point in points]
    area = _Area([x for x, _ in every], [y for _, y in every])
    drawn = [*area.frame(), *(area.line(finite[name], colours[name]) for name in colours)]
    legend = "".join(
        f'<span style="white-space:nowrap;margin-left:10px"><span style="color:{colour}">&#9632;'
        f"</span> {escape(name)} {number(finite[name][-1][1])}</span>"
        for name, colour in colours.items()
    )
    return (
        '<figure style="margin:0;max-width:100%">'
        f'<figcaption style="font-size:12px"><b>{escape(title)}</b>{legend}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" width="{_WIDTH:.0f}" role="img" '
        f'style="max-width:100%;height:auto" aria-label="{escape(title, quote=True)} by step">'
        f"{''.join(drawn)}</svg></figure>"
    )


class _Area:
    """The place where lines are drawn, and the values at its edges."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self._xs, self._ys = (min(xs), max(xs)), (min(ys), max(ys))

    def _place(self, x: float, y: float) -> tuple[float, float]:
        right = _LEFT + _share(x, *self._xs) * (_WIDTH - _LEFT - _RIGHT)
        return right, _HEIGHT - _BOTTOM - _share(y, *self._ys) * (_HEIGHT - _TOP - _BOTTOM)

    def frame(self) -> list[str]:
        floor, labels = _HEIGHT - _BOTTOM, []
        for at, value in ((floor, self._ys[0]), (_TOP, self._ys[1])):
            labels += [
                f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at}" y2="{at}" '
                'stroke="currentColor" stroke-opacity="0.25"/>',
                f'<text x="{_LEFT - 6}" y="{at + 4}" text-anchor="end" {_TEXT}>'
                f"{number(float(value))}</text>",
            ]
        for at, anchor, step in (
            (_LEFT, "start", f"step {number(self._xs[0])}"),
            (_WIDTH - _RIGHT, "end", number(self._xs[1])),
        ):
            labels.append(
                f'<text x="{at}" y="{_HEIGHT - 4}" text-anchor="{anchor}" {_TEXT}>{step}</text>'
            )
        return labels

    def line(self, points: Points, colour: str) -> str:
        places = [self._place(x, y) for x, y in points]
        told = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        return (
            f'<polyline points="{told}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
            f'<circle cx="{places[-1][0]:.1f}" cy="{places[-1][1]:.1f}" r="2.5" fill="{colour}"/>'
        )


def _share(value: float, low: float, high: float) -> float:
    """Return how far a value is on the way from low to high; these may be far apart, or one."""
    if high == low:
        return 0.5
    if math.isinf(high - low):
        value, low, high = value / 4, low / 4, high / 4
    return min(max((value - low) / (high - low), 0.0), 1.0)
