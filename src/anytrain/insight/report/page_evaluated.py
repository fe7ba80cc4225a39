"""What the last evaluation found: right and wrong by class, residuals, and the worst examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anytrain.core.records import Run
from anytrain.insight.pages.curves import number
from anytrain.insight.pages.page import Content, Markup, joined, table, tag
from anytrain.insight.report.page_section import Section, section
from anytrain.insight.report.page_values import finite, listed, mapping, mappings, text, whole

_WARMTHS = 9


def evaluations(run: Run) -> Section | None:
    """Return what was evaluated last, for each set."""
    several = len(run.evaluations) > 1
    content: list[Content] = []
    for split, found in run.evaluations.items():
        if several:
            content.append(tag("h3", split))
        content.append(joined(*_evaluation(found)))
    return section("evaluation", "Evaluation", content)


def _evaluation(found: dict[str, Any]) -> Iterator[Content]:
    samples, step = whole(found.get("num_samples")), whole(found.get("step"))
    on = "" if samples is None else f" on {samples:,} samples"
    at = "" if step is None else f" at step {step:,}"
    yield tag("p", f"The last evaluation{on}{at}.")
    if note := found.get("note"):
        yield tag("p", text(note), class_="dim")
    if found.get("kind") == "classification":
        yield from _classes(found)
        yield _wrong(found, ("label", "predicted", "confidence"), _CONFIDENT)
    if found.get("kind") == "regression":
        yield from _residuals(found)
        yield _wrong(found, ("label", "predicted", "error"), "The largest errors")


def _classes(found: dict[str, Any]) -> Iterator[Markup]:
    names = [text(name, 60) for name in listed(found.get("classes"))]
    counts = [[finite(n) or 0.0 for n in listed(row)] for row in listed(found.get("confusion"))]
    if names and counts and len(names) <= len(counts):
        yield _confusion(names, counts)
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
        yield table(head, rows, caption="How well each class is told", numbers=range(1, 5))


def _confusion(names: list[str], counts: list[list[float]]) -> Markup:
    rows = []
    for name, row in zip(names, counts, strict=False):
        total = sum(row) or 1.0
        cells = [tag("td", number(n), class_=f"number warm{_warmth(n / total)}") for n in row]
        rows.append(tag("tr", tag("th", name, scope="row"), cells))
    corner = tag("th", "true \\ predicted", scope="col")
    top = tag("tr", corner, (tag("th", each, scope="col", class_="number") for each in names))
    caption = tag("caption", "Confusion: a row for each true class, a column for each predicted")
    inner = tag("table", caption, tag("thead", top), tag("tbody", rows), class_="confusion")
    return tag("div", inner, class_="wide")


def _warmth(share: float) -> int:
    return round(min(max(share, 0.0), 1.0) * _WARMTHS)


def _residuals(found: dict[str, Any]) -> Iterator[Markup]:
    told = mapping(found.get("residuals"))
    edges = [finite(edge) for edge in listed(told.get("edges"))]
    counts = [finite(count) or 0.0 for count in listed(told.get("counts"))]
    if not counts or len(edges) != len(counts) + 1:
        return
    most = max(counts) or 1.0
    rows = []
    for n, count in enumerate(counts):
        low, high = edges[n], edges[n + 1]
        if low is None or high is None:
            continue
        share = tag("rect", x="0", y="0", height="10", width=f"{100 * count / most:.1f}",
                    class_="part1")  # fmt: skip
        bar = tag("svg", share, viewBox="0 0 100 10", preserveAspectRatio="none",
                  class_="count", aria_hidden="true")  # fmt: skip
        rows.append((f"{number(low)} to {number(high)}", number(count), bar))
    caption = "Residuals: predicted less true"
    yield table(("from, to", "samples", ""), rows, caption=caption, numbers=(1,))


def _wrong(found: dict[str, Any], columns: tuple[str, ...], caption: str) -> Markup:
    names = [text(name, 60) for name in listed(found.get("classes"))]
    rows = [
        (
            text(each.get("index", "")),
            _inputs(each.get("inputs")),
            *(_cell(each.get(column), column, names) for column in columns),
        )
        for each in mappings(found.get("worst"))
    ]
    if not rows:
        return Markup("")
    numbers = (0, 4) if names else (0, 2, 3, 4)
    return table(("sample", "input", *columns), rows, caption=caption, numbers=numbers)


def _inputs(inputs: Any) -> Content:
    given = mapping(inputs)
    return joined(
        *(
            tag("p", tag("span", f"{name}: ", class_="dim"), text(value, 600))
            for name, value in given.items()
        )
    )


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


_CONFIDENT = "Wrong with the most confidence"
