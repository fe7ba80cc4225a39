"""Charts as plain SVG: nothing to load, sharp at every size, coloured by the page's style."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from anytrain.insight.pages.page import Markup, tag

_WIDTH, _HEIGHT = 720.0, 260.0
_NARROW, _LOW = 360.0, 220.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 8.0, 22.0, 24.0
_TICKS = 4


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
