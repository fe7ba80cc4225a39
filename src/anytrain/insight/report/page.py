"""The report of a run: one HTML page that needs nothing else, made from the run's record alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from anytrain._version import __version__
from anytrain.core.records import RunRecord
from anytrain.insight.pages import curves
from anytrain.insight.pages.curves import Chart
from anytrain.insight.pages.page import Markup, beside, tag
from anytrain.insight.report import page_evaluated, page_facts, page_summary, page_time
from anytrain.insight.report.page_curves import Figures, charts_of, figures
from anytrain.insight.report.page_section import Section, section


def page(run: RunRecord, defaults: Mapping[str, Any] | None = None) -> str:
    """Return the report of a run; `defaults` are what its arguments would be if nobody chose."""
    known = figures(run)
    charts = charts_of(run, known)
    sections = list(_sections(run, known, charts, defaults or {}))
    links = [tag("li", tag("a", each.title, href=f"#{each.name}")) for each in sections]
    before = (
        tag("a", "Skip to the report", href="#main", class_="skip"),
        tag(
            "header", page_summary.heading(run), tag("nav", tag("ul", links), aria_label="Contents")
        ),
    )
    made = f"Made by anytrain {__version__} from the record in {run.folder}."
    return curves.page(
        f"{run.name}: report",
        *(Markup(str(each)) for each in sections),
        tag("footer", tag("p", made, class_="dim")),
        charts=[*charts, *page_evaluated.charts_of(run)],
        before=before,
        styles=(beside("report.css"),),
    )


def _sections(
    run: RunRecord, known: Figures, charts: list[Chart], defaults: Mapping[str, Any]
) -> Iterator[Section]:
    found = (
        page_summary.summary(run, known),
        _curves(charts),
        page_evaluated.evaluations(run),
        page_time.time_ledger(run),
        page_time.shapes(run),
        page_time.checkpoints(run),
        page_time.warnings(run),
        page_summary.every_figure(known),
        page_time.plan(run),
        page_facts.arguments(run, defaults),
        page_facts.surroundings(run),
        page_facts.reproduce(run),
    )
    yield from (each for each in found if each is not None)


def _curves(charts: list[Chart]) -> Section | None:
    if not charts:
        return section(
            "curves", "Curves", [tag("p", "No figure has been logged more than once yet.")]
        )
    hint = (
        "Drag over a chart to zoom, double-click to see all. "
        "With the keyboard: arrow keys, + and -, 0 for all."
    )
    return section("curves", "Curves", [tag("p", hint, class_="dim hint"), curves.figures(charts)])
