"""What the last evaluation found: right and wrong by class, residuals, and the worst examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anytrain.core.documents import finite, listed, mapping, mappings, whole
from anytrain.core.records import RunRecord
from anytrain.insight.pages.charts import Chart, Series, chart_grid, number
from anytrain.insight.pages.markup import (
    Content,
    Markup,
    Section,
    joined,
    section,
    table,
    tag,
    text,
)

_WARMTHS = 9
_SHOWN = 8


def evaluations(run: RunRecord) -> Section | None:
    """Return what was evaluated last, for each set."""
    several = len(run.evaluations) > 1
    content: list[Content] = []
    for split, found in ordered(run):
        if several:
            content.append(tag("h3", split))
        content.append(joined(*_evaluation(split, found)))
    return section("evaluation", "Evaluation", content)


def charts_of(run: RunRecord) -> list[Chart]:
    """Return the charts of all evaluations."""
    return [chart for split, found in ordered(run) for chart in residual_charts(split, found)]


def ordered(run: RunRecord) -> list[tuple[str, dict[str, Any]]]:
    """Return the evaluations, the plain one first."""
    return sorted(run.evaluations.items(), key=lambda each: (each[0] != "eval", each[0]))


def _evaluation(split: str, found: dict[str, Any]) -> Iterator[Content]:
    samples, step = whole(found.get("num_samples")), whole(found.get("step"))
    on = "" if samples is None else f" on {samples:,} samples"
    at = "" if step is None else f" at step {step:,}"
    if step is None and "step" in found:
        at = ", by a process that had not trained"
    if of := found.get("of"):
        at = f", of {text(of, 100)}" + ("" if step is None else f", after step {step:,}")
    yield tag("p", f"The last evaluation{on}{at}.")
    if note := found.get("note"):
        yield tag("p", text(note), class_="dim")
    if found.get("kind") == "classification":
        yield from _classes(found)
        columns = ("label", "predicted", "confidence")
        yield _wrong(found, columns, "Wrong with the most confidence")
    if found.get("kind") == "regression":
        yield chart_grid(residual_charts(split, found))
        yield _wrong(found, ("label", "predicted", "error"), "The largest errors")


def _classes(found: dict[str, Any]) -> Iterator[Markup]:
    names = [text(name, 60) for name in listed(found.get("classes"))]
    counts = [[finite(n) or 0.0 for n in listed(row)] for row in listed(found.get("confusion"))]
    tables = []
    if names and counts:
        tables.append(_confusion(names, counts))
    rows = [
        (
            name,
            *(_share(each.get(key)) for key in ("precision", "recall", "f1")),
            text(each.get("support", "")),
        )
        for name, each in zip(names, mappings(found.get("per_class")), strict=False)
    ]
    if rows:
        head = ("class", "precision", "recall", "F1", "samples")
        tables.append(table(head, rows, caption="Each class", numbers=range(1, 5)))
    yield tag("div", tables, class_="pairs")


def _confusion(names: list[str], counts: list[list[float]]) -> Markup:
    rows = []
    for name, row in zip(names, counts, strict=False):
        total = sum(row) or 1.0
        shares = [min(max(n / total, 0.0), 1.0) for n in row]
        cells = [
            tag("td", number(n), class_=f"number warm{round(share * _WARMTHS)}")
            for n, share in zip(row, shares, strict=True)
        ]
        rows.append(tag("tr", tag("th", name, scope="row"), cells))
    corner = tag("th", "true \\ predicted", scope="col")
    top = tag("tr", corner, (tag("th", each, scope="col", class_="number") for each in names))
    caption = tag("caption", "Confusion (rows: true, columns: predicted)")
    inner = tag("table", caption, tag("thead", top), tag("tbody", rows), class_="confusion")
    return tag("div", inner, class_="wide")


def residual_charts(split: str, found: dict[str, Any]) -> list[Chart]:
    """Return how far values were off, as charts; none for another kind of evaluation."""
    told = mapping(found.get("residuals"))
    edges = [finite(edge) for edge in listed(told.get("edges"))]
    counts = [finite(count) for count in listed(told.get("counts"))]
    bars = [
        ((low + high) / 2, count)
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
        if low is not None and high is not None
    ]
    dots = sorted(
        (true, said)
        for point in map(listed, listed(found.get("points")))
        if len(point) == 2
        and (true := finite(point[0])) is not None
        and (said := finite(point[1])) is not None
    )
    charts = []
    if bars:
        title = "Residuals: predicted less true"
        series = [Series("samples", bars)]
        charts.append(Chart(f"residuals {split}", title, series, across="residual", kind="bars"))
    if dots:
        title = "Predicted by true value"
        series = [Series("predicted", dots)]
        charts.append(Chart(f"points {split}", title, series, across="true", kind="dots"))
    return charts


def _wrong(found: dict[str, Any], columns: tuple[str, ...], caption: str) -> Markup:
    names = [text(name, 60) for name in listed(found.get("classes"))]
    worst = mappings(found.get("worst"))
    # Where each token has a class, one of the sample's is meant.
    of_tokens = any("token" in each for each in worst)
    rows = [
        (
            text(each.get("index", "")),
            _inputs(each),
            *((_token(each),) if of_tokens else ()),
            *(_cell(each.get(column), column, names) for column in columns),
        )
        for each in worst
    ]
    if not rows:
        return Markup("")
    head = ("sample", "input", *(("token",) if of_tokens else ()), *columns)
    numbers = range(len(head) - (1 if names else 3), len(head))
    shown = table(head, rows[:_SHOWN], caption=caption, numbers=numbers)
    if len(rows) <= _SHOWN:
        return shown
    more = table(head, rows[_SHOWN:], caption=f"{caption}, continued", numbers=numbers)
    return joined(shown, tag("details", tag("summary", f"{len(rows) - _SHOWN} more"), more))


def _inputs(sample: dict[str, Any]) -> Content:
    return joined(
        *(
            tag("p", tag("span", f"{name}: ", class_="dim"), text(value, 600))
            for name, value in mapping(sample.get("inputs")).items()
            if name != "token" or "token" not in sample  # that has a column of its own
        )
    )


def _token(sample: dict[str, Any]) -> str:
    """Return which token of a sample is meant, by its place and, where it is known, the word."""
    if "token" not in sample:
        return ""
    word = mapping(sample.get("inputs")).get("token")
    place = text(sample["token"], 20)
    return place if word is None else f"{place}: {text(word, 60)}"


def _cell(value: Any, column: str, names: list[str]) -> str:
    figure = finite(value)
    if column == "confidence":
        return _share(value)
    if figure is not None and names and figure == int(figure) and 0 <= figure < len(names):
        return names[int(figure)]
    return text(value) if figure is None else number(figure)


def _share(value: Any) -> str:
    found = finite(value)
    return "–" if found is None else f"{found:.1%}"
