"""The page of a search: its trials, the best first, and each parameter against the objective."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from anytrain.core.documents import real
from anytrain.core.records import Sweep, Trial
from anytrain.core.text import amount
from anytrain.insight.pages.charts import Dot, dots, number
from anytrain.insight.pages.markup import (
    Content,
    Markup,
    Section,
    beside,
    document,
    framed,
    joined,
    section,
    table,
    tag,
    text,
)

_NEAR = 0.2  # of the axis: marks that stand nearer write over each other
_WIDE_RANGE = 30.0
"""A range whose ends are so many times apart is shown by its orders of magnitude."""
_MOST_KINDS = 12
_LOOKS = {"complete": "good", "running": "note", "failed": "error", "killed": "error"}


def build(sweep: Sweep, links: Mapping[int, str], states: Mapping[int, str]) -> str:
    """Return the page of a search.

    `links` lead to the trials' own reports, by their numbers; `states` are those of their runs.
    """
    name = sweep.folder.resolve().name
    found = (_summary(sweep, states), _trials(sweep, links, states), _varied(sweep))
    goals = ", ".join(
        f"{goal} {each}" for each, goal in zip(_goals(sweep), sweep.directions, strict=True)
    )
    told = f"Search of {amount(len(sweep.trials), 'trial')} to {goals}"
    heading = joined(tag("h1", name), tag("p", told, class_="dim"))
    content, before = framed(found, heading, sweep.folder)
    return document(
        f"{name}: search",
        content,
        before=before,
        styles=(beside("report.css"), beside("diff.css"), beside("sweep.css")),
        scripts=(beside("sort.js"),),
    )


def _summary(sweep: Sweep, states: Mapping[int, str]) -> Section | None:
    tiles: list[tuple[str, str, str]] = []
    if (best := sweep.best) is not None:
        tiles.append(("best objective", number(best.objectives[0]), f"trial {best.number}"))
        tiles += [
            (name, _shown(value), "of the best trial") for name, value in best.parameters.items()
        ]
    counts: dict[str, int] = {}
    for trial in sweep.trials:
        state = _state(trial, states)
        counts[state] = counts.get(state, 0) + 1
    told = ", ".join(f"{count} {state}" for state, count in counts.items())
    tiles.append(("trials", f"{len(sweep.trials):,}", told))
    drawn = [
        tag("div", tag("dt", name), tag("dd", value, tag("small", more)))
        for name, value, more in tiles
    ]
    return section("summary", "Summary", [tag("dl", drawn, class_="tiles")])


def _trials(sweep: Sweep, links: Mapping[int, str], states: Mapping[int, str]) -> Section | None:
    names = _names(sweep)
    goals = _goals(sweep)
    rows: list[list[Content]] = []
    for trial in sweep.ranked():
        link = links.get(trial.number)
        name = text(trial.folder.name)
        first: Content = name if link is None else tag("a", name, href=link)
        values = [number(each) if math.isfinite(each) else "-" for each in trial.objectives]
        values += ["-"] * (len(goals) - len(values))
        told = [_shown(trial.parameters[n]) if n in trial.parameters else "-" for n in names]
        state = _state(trial, states)
        look = tag("span", state, class_=_LOOKS.get(state, "warning"))
        rows.append([first, *values[: len(goals)], *told, look])
    if not rows:
        return section("trials", "Trials", [tag("p", "No trial has begun yet.")])
    head = [tag("button", name, type="button") for name in ("trial", *goals, *names, "state")]
    best = "The best first" if len(goals) == 1 else f"The best by {goals[0]} first"
    caption = f"{best}; press a heading to sort. A trial leads to its own report."
    places = [n for n, name in enumerate(names, 1 + len(goals)) if _is_numeric(sweep, name)]
    shown = table(head, rows, numbers=[*range(1, 1 + len(goals)), *places])
    parts = (tag("p", caption, class_="dim"), tag("div", shown, class_="sortable"))
    return section("trials", "Trials", parts)


def _varied(sweep: Sweep) -> Section | None:
    counted = [trial for trial in sweep.trials if trial.is_complete]
    drawn, same = [], []
    for name in _names(sweep):
        having = [trial for trial in counted if name in trial.parameters]
        values = list(dict.fromkeys(_shown(trial.parameters[name]) for trial in having))
        if len(values) > 1:
            drawn += [_chart(sweep, having, name, place) for place in range(len(sweep.directions))]
        elif values:
            same.append(f"{name} {values[0]}")
    if not drawn and not same:
        return None
    parts: list[Content] = []
    if drawn:
        hint = "Each dot is a trial that came to its end; the best one is filled."
        parts += [tag("p", hint, class_="dim"), tag("div", drawn, class_="pairs dots")]
    if same:
        parts.append(tag("p", f"The same in every trial: {', '.join(same)}.", class_="dim"))
    return section("varied", "What varied", parts)


def _chart(sweep: Sweep, trials: Sequence[Trial], name: str, place: int) -> Markup:
    goal = _goals(sweep)[place]
    at, ticks = _places([trial.parameters[name] for trial in trials])
    found = [
        Dot(
            x,
            trial.objectives[place],
            f"{trial.folder.name}: {name} {_shown(trial.parameters[name])}, {goal} "
            f"{number(trial.objectives[place])}",
            is_marked=trial == sweep.best,
        )
        for x, trial in zip(at, trials, strict=True)
        if place < len(trial.objectives)
    ]
    title = f"{goal} by {name}"
    return tag("figure", tag("figcaption", title), dots(found, ticks, number, title=title))


def _places(values: Sequence[Any]) -> tuple[list[float], list[tuple[float, str]]]:
    """Return where on the axis each value stands, and the axis' marks."""
    numbers = [real(value) for value in values]
    known = [each for each in numbers if each is not None and math.isfinite(each)]
    if len(known) < len(values):
        kinds = sorted(dict.fromkeys(map(_shown, values)))
        marks = [(float(n), kind) for n, kind in enumerate(kinds[:_MOST_KINDS])]
        return [float(kinds.index(_shown(value))) for value in values], marks
    low, high = min(known), max(known)
    if low > 0 and high / low >= _WIDE_RANGE:
        middle = math.exp((math.log(low) + math.log(high)) / 2)
        told = [(math.log(each), f"{each:.2g}") for each in (low, middle, high)]
        return [math.log(each) for each in known], told
    different = sorted(set(known))
    near = any(b - a < _NEAR * (high - low) for a, b in pairwise(different))
    marked = [low, (low + high) / 2, high] if near or len(different) > 4 else different
    return known, [(each, number(each)) for each in marked]


def _names(sweep: Sweep) -> list[str]:
    return list(dict.fromkeys(name for trial in sweep.trials for name in trial.parameters))


def _is_numeric(sweep: Sweep, name: str) -> bool:
    values = [trial.parameters[name] for trial in sweep.trials if name in trial.parameters]
    return all(real(value) is not None for value in values)


def _goals(sweep: Sweep) -> list[str]:
    count = len(sweep.directions)
    return ["objective"] if count == 1 else [f"objective {n + 1}" for n in range(count)]


def _state(trial: Trial, states: Mapping[int, str]) -> str:
    """Return how a trial stands; one that has not said so may have been killed."""
    return states.get(trial.number, trial.state) if trial.state == "running" else trial.state


def _shown(value: Any) -> str:
    found = real(value)
    return text(value, 60) if found is None or not math.isfinite(found) else number(found)
