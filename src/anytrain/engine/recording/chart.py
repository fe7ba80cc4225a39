"""Draw small charts as SVG, for a notebook: nothing to load, readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from anytrain.engine.recording.formatting import number

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 340.0, 150.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 8.0, 8.0, 20.0
_COLOURS = ("#3b82f6", "#e8710a", "#16a34a", "#a855f7", "#db2777", "#0891b2")
_TEXT = 'fill="currentColor" font-size="11" font-family="sans-serif"'


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
        """Return the lowest and highest value, and the first and last step."""
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
        """Return a line through the points, which ends in a dot."""
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
    return (value - low) / (high - low)
