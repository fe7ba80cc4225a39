"""Draw a curve with characters, for a terminal or a log file."""

from __future__ import annotations

import math
from collections.abc import Sequence

from anytrain.engine.recording.formatting import mean, number

_BLOCKS = " ▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = " .:-=+*#"
_NARROWEST = 8

Points = Sequence[tuple[float, float]]


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
    levels = [_level(y, low, high, height) for y in _sampled(finite, room)]
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


def _share(y: float, low: float, high: float) -> float:
    """Return how far y is on the way from low to high, which may be further apart than a float."""
    if math.isinf(high - low):
        y, low, high = y / 4, low / 4, high / 4
    return min(max((y - low) / (high - low), 0.0), 1.0)


def _level(y: float, low: float, high: float, height: int) -> float:
    """Return how high the column stands, in rows; the lowest still shows."""
    return height / 2 if high == low else _share(y, low, high) * height


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
