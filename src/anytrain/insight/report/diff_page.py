"""The page of a comparison: the runs' curves over each other, and what differs, in one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anytrain.core.errors import BadInput
from anytrain.insight.pages import curves
from anytrain.insight.pages.page import Markup, beside, table, tag
from anytrain.insight.report import diff_text
from anytrain.insight.report.diff_curves import Curve

Histories = Sequence[Mapping[str, Curve]]


def write(path: Path, found: Mapping[str, Any], histories: Histories) -> None:
    """Write the page of a comparison; `histories` are the runs' curves, in the same order."""
    text = build(found, histories)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(
            f"Cannot write {path}.",
            why=f"{type(error).__name__}: {error}",
            fix="pass another place with -o, in a folder that is there and may be written to.",
        ) from error


def build(found: Mapping[str, Any], histories: Histories) -> str:
    """Return the page of a comparison."""
    charts = _charts(found, histories)
    title = "Differences between " + " and ".join(_called(run) for run in found["runs"][:2])
    if len(found["runs"]) > 2:
        title = f"Differences between {len(found['runs'])} runs"
    sections: list[Markup | None] = [_head(found, title), _chosen(found), _parting(found, charts)]
    if len(found["runs"]) == 2:
        sections += [_figures(found), _times(found)]
    return curves.page(
        title,
        *(section for section in sections if section is not None),
        before=tag("a", "Skip to the differences", href="#main", class_="skip"),
        charts=charts,
        styles=(beside("diff.css"),),
        scripts=(beside("sort.js"),),
    )


def _called(run: Mapping[str, Any]) -> str:
    return f"{run['label']} {run['name']}"


def _charts(found: Mapping[str, Any], histories: Histories) -> list[curves.Chart]:
    """Return a chart for each figure that some run logged twice, all runs in it."""
    marks = {curve["name"]: _marks(curve["pairs"]) for curve in found["curves"]}
    names = dict.fromkeys(name for history in histories for name in history)
    charts = []
    for name in sorted(names, key=lambda name: (name != "loss", not name.startswith("eval"))):
        series = [
            curves.Series(_called(run), sorted(history[name].items()))
            for run, history in zip(found["runs"], histories, strict=True)
            if name in history
        ]
        if max(len(each.points) for each in series) > 1:
            told = marks.get(name, [])
            charts.append(curves.Chart(name, name, series, marks=told, broad=name == "loss"))
    return charts


def _marks(pairs: Sequence[Mapping[str, Any]]) -> list[tuple[float, str]]:
    """Return where runs part from the first, those of one step together."""
    at: dict[int, list[str]] = {}
    for pair in pairs:
        if pair.get("parts_at") is not None:
            at.setdefault(pair["parts_at"], []).append(pair["run"])
    alone = len(pairs) == 1  # the words of several would lie over each other
    return [(step, "part here" if alone else ", ".join(who)) for step, who in sorted(at.items())]


def _head(found: Mapping[str, Any], title: str) -> Markup:
    runs = tag("ul", (tag("li", diff_text.heading(run)) for run in found["runs"]))
    same = [tag("p", diff_text.same(found), class_="good")] if found["is_same"] else []
    notes = [tag("p", note, class_="finding warning") for note in found["notes"]]
    return tag("header", tag("h1", title), runs, *same, *notes)


def _chosen(found: Mapping[str, Any]) -> Markup:
    if len(found["runs"]) > 2:
        return _runs(found)
    labels = [run["label"] for run in found["runs"]]
    parts = []
    for each in found["differences"]:
        rows = [(row["name"], *diff_text.with_reasons(row)) for row in each["rows"]]
        if rows:
            parts.append(table(("name", *labels), rows, caption=each["group"].capitalize()))
    if not parts:
        parts.append(tag("p", diff_text.NOTHING_CHOSEN))
    count = tag("p", diff_text.counted(found), class_="dim")
    return _section("What differs", *parts, count, class_="told")


def _runs(found: Mapping[str, Any]) -> Markup:
    columns = diff_text.run_columns(found)
    head = [tag("button", name, type="button") for name, _ in columns]
    rows = [[texts[n] for _, texts in columns] for n in range(len(found["runs"]))]
    shown = table(head, rows, caption="Each run and what differs; press a heading to sort.")
    count = tag("p", diff_text.counted(found), class_="dim")
    return _section("Runs", tag("div", shown, class_="sortable"), count)


def _parting(found: Mapping[str, Any], charts: Sequence[curves.Chart]) -> Markup:
    others = [f"A and {run['label']}" for run in found["runs"][1:]]
    rows = [
        (curve["name"], *(pair["said"] for pair in curve["pairs"])) for curve in found["curves"]
    ]
    told = [table(("figure", *others), rows)] if rows else [tag("p", diff_text.NO_CURVE)]
    rule = tag("details", tag("summary", "How this is judged"), tag("p", found["rule"]))
    return _section("Where the curves part", *told, rule, curves.figures(charts))


def _figures(found: Mapping[str, Any]) -> Markup | None:
    head, rows = diff_text.figure_rows(found)
    return _section("Figures", table(head, rows, numbers=range(1, 6))) if rows else None


def _times(found: Mapping[str, Any]) -> Markup | None:
    head, rows = diff_text.times_compared(found)
    if not rows:
        return None
    caption = "All starts of a run together."
    return _section("Times", table(head, rows, caption=caption, numbers=range(1, 4)))


def _section(title: str, *content: Markup, **attributes: str) -> Markup:
    return tag("section", tag("h2", title), *content, **attributes)
