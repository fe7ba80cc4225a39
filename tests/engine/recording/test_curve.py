from __future__ import annotations

import math

import pytest

from anytrain.engine.recording.small_charts import curve

RISING = [(0.0, 0.5), (1.0, 0.6), (2.0, 0.83), (3.0, 0.95)]


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_no_line_is_wider_than_asked(width: int) -> None:
    drawn = curve(RISING, title="accuracy", x_label="epoch", width=width)
    assert max(map(len, drawn.splitlines())) <= width


def test_a_rising_curve_is_highest_at_its_end_and_names_its_extremes() -> None:
    top, *_, bottom, _axis, scale = curve(RISING, x_label="epoch", width=40).splitlines()
    assert top.split()[0] == "0.95" and top.endswith("█")
    assert bottom.split()[0] == "0.5"
    assert scale.split() == ["0", "epoch", "3"]


def test_ascii_is_used_where_the_encoding_has_no_blocks() -> None:
    assert curve(RISING, title="accuracy", encoding="ascii").isascii()
    assert not curve(RISING, title="accuracy", encoding="UTF-8").isascii()


def test_points_that_are_not_finite_are_left_out() -> None:
    holed = [*RISING, (1.5, math.nan), (2.5, math.inf)]
    assert curve(holed) == curve(RISING)


def test_no_points_one_point_and_a_flat_curve_are_drawn_without_complaint() -> None:
    assert curve([], title="loss") == "loss: no points to draw"
    assert "█" in curve([(3, 1.0)])
    assert "1 ┤" in curve([(0, 1.0), (9, 1.0)])


def test_many_points_in_one_column_are_averaged() -> None:
    crowd = [(float(i), float(i % 2)) for i in range(10_000)]
    rows = curve(crowd, width=30, height=4).splitlines()
    assert len(rows) == 6
