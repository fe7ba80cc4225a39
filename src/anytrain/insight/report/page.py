"""The report of a run: one HTML page that needs nothing else, made from the run's record alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from anytrain.core.documents import finite, mapping, whole
from anytrain.core.records import Life, RunRecord
from anytrain.core.text import in_no_checkpoint
from anytrain.insight.pages.charts import Chart, Point, chart_grid, chart_page, number
from anytrain.insight.pages.markup import (
    Content,
    Markup,
    Section,
    beside,
    framed,
    joined,
    moment,
    section,
    table,
    tag,
    text,
)
from anytrain.insight.report import page_evaluation, page_sections
from anytrain.insight.report.page_curves import (
    Figures,
    charts_of,
    figures,
    is_clocked,
    starts,
)
from anytrain.insight.report.starts import changes, not_used, own_count, position
from anytrain.insight.report.why import training_seconds

_LOOKS = {"finished": "good", "running": "note", "failed": "error", "killed": "error"}
_NAMED = 4


def page(run: RunRecord, defaults: Mapping[str, Any] | None = None) -> str:
    """Return the report of a run; `defaults` are what its arguments would be if nobody chose."""
    known = figures(run)
    charts = charts_of(run, known)
    sections = (
        summary(run, known),
        _curves(charts),
        page_evaluation.evaluations(run),
        page_sections.time_ledger(run),
        page_sections.shapes(run),
        page_sections.checkpoints(run),
        page_sections.warnings(run),
        every_figure(known),
        page_sections.plan(run),
        page_sections.arguments(run, defaults or {}),
        page_sections.surroundings(run),
        page_sections.reproduce(run),
    )
    content, before = framed(sections, heading(run), run.folder)
    return chart_page(
        f"{run.name}: report",
        content,
        charts=[*charts, *page_evaluation.charts_of(run)],
        before=before,
        styles=(beside("report.css"),),
    )


def _curves(charts: list[Chart]) -> Section | None:
    if not charts:
        return section(
            "curves", "Curves", [tag("p", "No figure has been logged more than once yet.")]
        )
    hint = (
        "Drag over a chart to zoom, double-click to see all. "
        "With the keyboard: arrow keys, + and -, 0 for all."
    )
    return section("curves", "Curves", [tag("p", hint, class_="dim hint"), chart_grid(charts)])


# -- the summary: how the run stands, and its figures ---------------------------------------------


def summary(run: RunRecord, known: Figures) -> Section | None:
    """Return how the run stands, and what matters most about it."""
    tiles = [
        tag("div", tag("dt", name), tag("dd", value, tag("small", more) if more else ""))
        for name, value, more in _tiles(run, known)
    ]
    return section(
        "summary",
        "Summary",
        (tag("p", how_it_stands(run)), tag("dl", tiles, class_="tiles")),
    )


def badge(run: RunRecord) -> Markup:
    """Return the run's state, in a word."""
    words, looks = run.state, _LOOKS.get(run.state, "warning")
    if run.state == "finished" and run.unsaved is not None:
        words, looks = "finished, end not saved", "warning"
    return tag("span", words, class_=f"badge {looks}")


def how_it_stands(run: RunRecord) -> str:
    """Return how the run ended, or up to where it is known, in a sentence or two."""
    told = _last_words(run)
    if (num_starts := len(run.counted_lives)) > 1:
        told += (
            f" It was started {'twice' if num_starts == 2 else f'{num_starts} times'}{_where(run)}."
        )
    names = list(dict.fromkeys(each.name for each in changes(run)))
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        told += f" The starts differ in {', '.join(names[:_NAMED])}{more} (see Arguments)."
    if unused := [name for name, _, _ in not_used(run.start)]:
        told += f" Its checkpoint's {', '.join(unused)} counted, not what was given."
    return told


def _where(run: RunRecord) -> str:
    """Return where it was started again: a curve has no mark before its first point."""
    again = [step for step, _ in starts(run)]
    logged = [step for entry in run.metrics if (step := finite(entry.get("step"))) is not None]
    if logged and again and min(logged) <= min(again) and max(again) <= max(logged):
        return "; the curves mark where"
    known = ", ".join(map(number, again[-5:]))
    return f", again after step {known}" if known else ""


def every_figure(known: Figures) -> Section | None:
    """Return all that was logged, a line each."""
    rows = []
    for name, points in [*known.curves.items(), *known.ends.items(), *known.apart.items()]:
        values = _finite(points)
        ends = (values[0], values[-1], min(values), max(values)) if values else ()
        rows.append((name, f"{len(points):,}", *(map(number, ends) if ends else "––––")))
    if not rows:
        return None
    head = ("name", "values", "first", "last", "lowest", "highest")
    caption = "Everything that was logged; the charts above show the figures of the model."
    return section(
        "figures",
        "All figures",
        [table(head, rows, caption=caption, numbers=range(1, 6))],
    )


def _last_words(run: RunRecord) -> str:
    heard = run.life.heard
    upto = f"step {number(position(run))}"
    when = f" ({moment(heard)})" if heard is not None else ""
    if run.state == "finished":
        unsaved = run.unsaved
        but = "" if unsaved is None else f", but {in_no_checkpoint(text(unsaved[0]))}"
        return f"The run finished at {upto}{when}{but}."
    if run.state == "running":
        return f"The run is still going; this is how it stood at {upto}{when}."
    if run.state == "killed":
        return (
            f"The run was killed. It is known up to {upto}{when}; what happened after that is not "
            "known."
        )
    if run.state == "failed":
        told = f"The error was: {text(run.life.error)}" if run.life.error else ""
        return f"The run failed after {upto}{when}. {told}".rstrip()
    if run.state == "stopped":
        return f"The run was stopped after {upto}{when}, by a signal or a key."
    if run.state == "ended":
        ended = f"The process ended after {upto}{when}"
        return f"{ended} without saying whether the training was complete."
    host = text(run.life.began.get("host", "another host")) if run.lives else ""
    where = f" It ran on {host}, and only that host knows whether it still does." if host else ""
    return f"How the run ended is not known; it was last heard of at {upto}{when}.{where}"


def _tiles(run: RunRecord, known: Figures) -> Iterator[tuple[str, Content, str]]:
    if run.lives:
        yield from _progress(run)
    yield from _losses(known)
    for name, points in known.curves.items():
        is_figure = name.startswith(("eval_", "eval/")) and not is_clocked(name)
        if is_figure and (values := _finite(points)):
            yield name, number(values[-1]), _range(values)
    for name, points in known.apart.items():
        if not is_clocked(name.partition(" ")[0]) and (values := _finite(points)):
            yield name, number(values[-1]), "no point of the curve"
    yield from _best(run)
    if run.lives:
        yield from _machine(run.total)


def _losses(known: Figures) -> Iterator[tuple[str, Content, str]]:
    if values := _finite(known.curves.get("loss") or known.curves.get("train_loss") or []):
        first = f"first {number(values[0])}" if len(values) > 1 else ""
        yield "last loss", number(values[-1]), first
    elif values := _finite(known.ends.get("train_loss", [])):
        yield "training loss", number(values[-1]), "mean of the run"


def _progress(run: RunRecord) -> Iterator[tuple[str, Content, str]]:
    life = run.life
    most, epoch = whole(life.began.get("max_steps")), finite(life.last.get("epoch"))
    of = f" of {most:,}" if most else ""
    logged = own_count(run)
    more = [f"epoch {epoch:.4g}"] if epoch is not None else []
    more += [f"last logged at step {number(logged)}"] if logged is not None else []
    yield "steps", f"{number(position(run))}{of}", ", ".join(more)
    seconds, num_starts = run.total.seconds, len(run.counted_lives)
    if spent := sum(seconds.values()):
        start = number(seconds.get("start", 0.0), "seconds")
        told = f"{num_starts} starts, {start} before their first batches"
        yield "time", number(spent, "seconds"), told if num_starts > 1 else f"start {start}"


def _machine(life: Life) -> Iterator[tuple[str, Content, str]]:
    precision = life.choice("precision")[0]
    world = whole(life.began.get("world_size")) or 1
    yield "device", text(life.began.get("device", "?")), f"{world} processes" if world > 1 else ""
    if precision:
        yield "precision", "float32" if precision == "no" else precision, ""
    samples = finite(life.began.get("samples_per_step"))
    training = training_seconds(life)
    if samples and training > 0:
        rate = life.num_steps * samples / training
        yield "throughput", f"{number(round(rate, 1))} samples/s", "between batches"
    peak = finite(life.last.get("peak_bytes"))
    if peak:
        yield "highest memory", number(peak, "bytes"), ""


def _best(run: RunRecord) -> Iterator[tuple[str, Content, str]]:
    best = [event for event in run.events if event.get("kind") == "best"]
    if best and (value := finite(best[-1].get("value"))) is not None:
        step = whole(best[-1].get("step"))
        at = "" if step is None else f"at step {step:,}"
        yield f"best {text(best[-1].get('metric'), 40)}", number(value), at


def _range(values: list[float]) -> str:
    low, high = min(values), max(values)
    return "" if low == high else f"{number(low)} to {number(high)}"


def _finite(points: list[Point]) -> list[float]:
    return [y for _, y in points if y is not None and math.isfinite(y)]


def heading(run: RunRecord) -> Markup:
    """Return the report's title, with where the run is from."""
    start, life = run.start, run.life.began
    began = moment(start.get("time", life.get("time")))
    host = text(start.get("host", life.get("host", "")))
    model = text(mapping(start.get("model")).get("name") or "")
    said = [f"started {began}" if began else "", f"on {host}" if host else "", model]
    return joined(
        tag("h1", run.name, " ", badge(run)),
        tag("p", " · ".join(filter(None, said)), class_="dim"),
    )
