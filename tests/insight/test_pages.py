"""Pages that need nothing else."""

from __future__ import annotations

import subprocess
import sys

from anytrain.insight.pages.charts import area
from anytrain.insight.pages.markup import Markup, document, joined, table, tag


def test_pages_load_no_torch() -> None:
    code = "import sys, anytrain.insight.pages.charts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_text_is_escaped_once() -> None:
    inner = tag("b", "<&>")
    assert inner == "<b>&lt;&amp;&gt;</b>"
    assert tag("p", inner, "<", title='"') == '<p title="&quot;"><b>&lt;&amp;&gt;</b>&lt;</p>'
    assert joined(["a", Markup("<i>")], "<") == "a<i>&lt;"


def test_a_page_has_a_title_and_its_style() -> None:
    page = document("a < b", tag("p", "text"))
    assert "<title>a &lt; b</title>" in page
    assert page.startswith("<!doctype html>")
    assert "default-src 'none'" in page
    assert table(("x",), [("1",)]) in document("t", table(("x",), [("1",)]))


def test_a_chart_marks_its_peak_its_parts_and_a_limit_in_reach() -> None:
    parts = ["forward"] * 20 + ["backward"] * 20
    values = [float(n) for n in range(20)] + [float(20 - n) for n in range(20)]
    drawn = area(values, lambda v: f"{v:.0f} B", title="Memory", parts=parts, limit=(25.0, "full"))
    assert "peak 20 B" in drawn
    assert ">forward<" in drawn
    assert ">backward<" in drawn
    assert ">full<" in drawn
    assert ">full<" not in area(values, str, title="t", limit=(1e9, "full"))


def test_a_chart_of_nothing_is_drawn_too() -> None:
    assert area([], str, title="t").startswith("<svg")
    assert area([0.0], str, title="t").startswith("<svg")
