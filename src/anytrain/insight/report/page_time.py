"""Where the run's time went, what its batches looked like, what it saved and said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from anytrain.core.documents import finite, listed, mapping, whole
from anytrain.core.records import Life, RunRecord
from anytrain.core.text import amount
from anytrain.insight.pages.charts import number
from anytrain.insight.pages.markup import Markup, Section, joined, moment, section, table, tag, text
from anytrain.insight.report.why import MEANING, NOTHING, judge, ledger, over_starts, shares


def time_ledger(run: RunRecord) -> Section | None:
    """Return where the time went, and one thing to do about it."""
    life = run.total
    whole_time = sum(life.seconds.values())
    if whole_time <= 0:
        return None
    shown = ledger(life.seconds, shares(life))
    rows = [
        (joined(_colour(n), f" {name}"), number(seconds, "seconds"), f"{share:.1%}", meaning)
        for n, (name, seconds, share, meaning) in enumerate(shown)
    ]
    caption = f"{number(whole_time, 'seconds')} in all{over_starts(len(run.counted_lives))}"
    told = table(("time", "seconds", "share", "what"), rows, caption=caption, numbers=(1, 2))
    bar = _bar({name: share for name, _, share, _ in shown})
    return section("time", "Where the time went", (bar, told, _verdict(life)))


def shapes(run: RunRecord) -> Section | None:
    """Return the shapes of the batches, and how much of them was padding."""
    last = run.total.last
    content: list[Markup] = []
    found = [text(each, 60) for each in listed(last.get("shapes"))]
    if found:
        more = f" and {len(found) - 24} more" if len(found) > 24 else ""
        named = ", ".join(found[:24])
        content.append(tag("p", f"Batches came in {amount(len(found), 'shape')}: {named}{more}."))
    waste = finite(last.get("padding_share"))
    if waste is not None:
        content.append(tag("p", f"{waste:.1%} of what was computed was padding."))
    late = mapping(last.get("late_shapes"))
    graphs = whole(last.get("graphs"))
    if graphs:
        were = "was" if graphs == 1 else "were"
        content.append(tag("p", f"{amount(graphs, 'graph')} {were} compiled."))
    if late:
        rows = [(name, text(times)) for name, times in late.items()]
        caption = "New shapes after the first batches"
        content.append(table(("input", "times"), rows, caption=caption, numbers=(1,)))
    return section("shapes", "Shapes and padding", content)


def checkpoints(run: RunRecord) -> Section | None:
    """Return what was saved, and what is still there."""
    rows: dict[str, tuple[Markup | str, ...]] = {}
    states: dict[str, str] = {}
    for event in run.events:
        # Folders move, names do not.
        kind, name = event.get("kind"), PurePath(text(event.get("path"))).name
        if kind == "checkpoint":
            rows.pop(name, None)  # a later start has saved it again
            rows[name], states[name] = _saved(event, run), "kept"
        elif kind == "removed":
            states[name] = "removed"
        elif kind == "best":
            states = {each: "kept" if was == "best" else was for each, was in states.items()}
            states[name] = "best"
    if not rows:
        return None
    head = ("checkpoint", "step", "size", "took", "when", "state")
    told = [(*row, states[name]) for name, row in rows.items()]
    return section(
        "checkpoints",
        "Checkpoints",
        [table(head, told, caption="In the order they were saved", numbers=(1, 2, 3))],
    )


def _saved(event: dict[str, Any], run: RunRecord) -> tuple[Markup | str, ...]:
    size, spent = finite(event.get("bytes")), finite(event.get("seconds"))
    return (
        tag("code", text(_inside(text(event.get("path"), 4096), run))),
        text(event.get("step", "")),
        "" if size is None else number(size, "bytes"),
        "" if spent is None else number(spent, "seconds"),
        moment(event.get("time")),
    )


def _inside(path: str, run: RunRecord) -> str:
    """Return a path as seen from the run's folder, where it lies in it or did when it ran."""
    start = run.start
    output = PurePath(text(mapping(start.get("arguments")).get("output_dir") or run.folder, 4096))
    folders = (run.folder, run.folder.absolute(), run.folder.resolve(), output)
    for folder in (*folders, text(start.get("cwd", ""), 4096) / output):
        if folder.name and PurePath(path).is_relative_to(folder) and PurePath(path) != folder:
            return str(PurePath(path).relative_to(folder))
    return path


def warnings(run: RunRecord) -> Section | None:
    """Return what the run was warned of."""
    notices = [event for event in run.events if event.get("kind") == "notice"]
    found = [tag("div", _notice(event), class_="finding warning") for event in notices]
    return section("warnings", "Warnings", found)


def plan(run: RunRecord) -> Section | None:
    """Return what was decided, why, and what changed on the way."""
    chosen = mapping(run.start.get("plan")) or mapping(run.life.began.get("plan"))
    rows = []
    for name, choice in chosen.items():
        value, because = run.life.choice(name)
        told = mapping(choice)
        value = value or text(told.get("value", ""))
        rows.append((name, tag("code", value), because or text(told.get("because", ""))))
    content = []
    if rows:
        caption = "What was decided when the run began, as it stood at the end"
        content.append(table(("choice", "value", "because"), rows, caption=caption))
    # Each start learns anew; what it says again is told once.
    revisions = dict.fromkeys(
        (text(each.get("choice")), text(each.get("step", "")), tag("code", text(each.get("value"))),
         text(each.get("because")))
        for life in run.lives for each in life.revisions
    )  # fmt: skip
    if revisions:
        head = ("choice", "at step", "became", "because")
        caption = "What was learnt on the way"
        content.append(table(head, revisions, caption=caption, numbers=(1,)))
    return section("plan", "Plan", content)


def _verdict(life: Life) -> Markup:
    try:
        finding = judge(life)
    except (ArithmeticError, LookupError, TypeError, ValueError):  # the record is damaged
        return Markup("")
    if finding is None:
        return tag("p", NOTHING)
    said = f"{finding.share:.0%} of the time: {MEANING[finding.name]}. "
    return tag("p", tag("strong", said), finding.remedy)


def _colour(place: int) -> Markup:
    mark = tag("rect", width="12", height="12", rx="2", class_=f"part{place % 8 + 1}")
    return tag("svg", mark, viewBox="0 0 12 12", class_="mark", aria_hidden="true")


def _bar(shares: dict[str, float]) -> Markup:
    """Return the shares as one bar; the table beside it says the same in words."""
    at, parts = 0.0, []
    for n, (name, share) in enumerate(shares.items()):
        part = tag("title", f"{name}: {share:.1%}")
        parts.append(
            tag("rect", part, x=f"{at:.2f}", width=f"{100 * share:.2f}", y="0", height="6",
                class_=f"part{n % 8 + 1}")
        )  # fmt: skip
        at += 100 * share
    named = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    return tag(
        "svg", parts, viewBox="0 0 100 6", preserveAspectRatio="none", class_="bar", role="img",
        aria_label=f"Shares of the time: {named}",
    )  # fmt: skip


def _notice(event: dict[str, Any]) -> Iterator[Markup]:
    step, count = whole(event.get("step")), whole(event.get("count")) or 1
    category = text(event.get("category") or "notice", 80)
    where = "" if step is None else f" at step {step:,}"
    often = f", {count} times" if count > 1 else ""
    yield tag("span", category, class_="badge warning")
    yield tag("span", f"{where}{often}", class_="dim")
    yield tag("p", text(event.get("text"), 2000))
