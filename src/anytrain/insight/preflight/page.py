"""A preflight's report as a page: findings beside their source lines, and memory over a step."""

from __future__ import annotations

import linecache
import shlex
from collections.abc import Iterator

from anytrain.insight.pages.charts import area
from anytrain.insight.pages.markup import Markup, document, joined, table, tag
from anytrain.insight.preflight.findings import SEVERITIES, Finding, SourcePlace
from anytrain.insight.preflight.printed import (
    NO_BATCH,
    large_modules,
    largest_rows,
    memory_line,
    shorter,
    time_lines,
)
from anytrain.insight.preflight.report import Outlook, Report
from anytrain.insight.preflight.words import size

_AROUND = 3
_MODULES = 12
_MOMENTS = 600


def page(report: Report) -> str:
    """Return the report as one HTML page that needs nothing else."""
    return document("anytrain preflight", *_content(report))


def fragment(report: Report) -> str:
    """Return the report as a part of another page, such as a notebook."""
    # A page of its own inside the other one: neither's style reaches the other.
    return tag("iframe", srcdoc=page(report), style="width:100%;height:40rem;border:0", sandbox="")


def _content(report: Report) -> Iterator[str]:
    yield tag("h1", "anytrain preflight")
    if report.command:
        yield tag("p", tag("code", shlex.join(report.command)))
    rows = [
        (
            tag("a", o.target.name, href=f"#t{n}"),
            _verdict(o),
            *(str(o.count(severity)) for severity in SEVERITIES),
        )
        for n, o in enumerate(report.outlooks)
    ]
    yield table(("target", "verdict", *(f"{s}s" for s in SEVERITIES)), rows)
    for number, outlook in enumerate(report.outlooks):
        yield tag("section", _outlook(outlook), id=f"t{number}")


def _verdict(outlook: Outlook) -> Markup:
    good = outlook.runs and outlook.has_room is not False
    return tag("strong", outlook.verdict, class_="good" if good else "bad")


def _outlook(outlook: Outlook) -> Iterator[str]:
    yield tag("h2", f"{outlook.target.name}: ", _verdict(outlook))
    told = f"torch {outlook.target.torch_version}, {outlook.job.num_parameters:,} parameters, "
    precision = "float32" if outlook.job.precision == "no" else outlook.job.precision
    size_of = f"batch of {outlook.job.batch_size:,}" if outlook.job.batch_size else NO_BATCH
    told += f"{size_of}, {precision}"
    yield tag("p", told, class_="dim")
    for finding in outlook.findings:
        yield _finding(finding)
    if not outlook.findings:
        yield tag("p", "Nothing to say about its operations.")
    if outlook.memory is not None:
        yield from _memory(outlook)
    if outlook.fits:
        yield tag("h3", "Largest batch")
        effective = outlook.job.batch_size * outlook.job.accumulation
        yield table(
            ("setting", "largest batch", f"to keep {effective:,}", "memory then"),
            largest_rows(outlook),
        )
    if outlook.time is not None:
        yield tag("h3", "Time (an estimate)")
        yield from (tag("p", line) for line in time_lines(outlook))
    if outlook.compiled is not None:
        yield tag("h3", "Compiled for the chip")
        yield tag("pre", str(outlook.compiled))
    if outlook.notes:
        yield tag("h3", "Not seen")
        yield tag("ul", (tag("li", note) for note in outlook.notes))


def _finding(finding: Finding) -> Markup:
    often = f", {finding.per_step} times a step" if finding.per_step > 1 else ""
    doubt = "" if finding.certain else ", may be"
    badge = tag("span", f"{finding.severity}", class_=f"badge {finding.severity}")
    kind = tag("span", f" {finding.kind}{often}{doubt}", class_="dim")
    return tag(
        "div",
        joined(badge, kind),
        tag("p", tag("strong", finding.what)),
        _source(finding.place),
        tag("p", f"Why: {finding.why}"),
        tag("p", f"Fix: {finding.fix}"),
        class_=f"finding {finding.severity}",
    )


def _source(place: SourcePlace | None) -> Markup:
    """Return the place and the lines around it, as far as the file can be read here."""
    if place is None or not (place.file or place.module):
        return Markup("")
    lines = linecache.getlines(place.file) if place.file else []
    shown = []
    first = max(place.line - _AROUND, 1)
    for number in range(first, min(place.line + _AROUND, len(lines)) + 1):
        text = f"{number:>5}  {lines[number - 1].rstrip()}"
        shown.append(tag("span", text, class_="here" if number == place.line else "line"))
    if not shown and place.text:
        shown.append(tag("span", f"{place.line:>5}  {place.text}", class_="here"))
    where = tag("p", tag("code", shorter(place)))
    return joined(where, tag("pre", shown)) if shown else where


def _memory(outlook: Outlook) -> Iterator[str]:
    found = outlook.memory
    assert found is not None
    yield tag("h3", "Memory")
    yield tag("p", memory_line(outlook))
    if len(outlook.timeline) > 1:
        yield _timeline(outlook)
    ordered = sorted(found.parts, key=lambda each: (each.how == "margin", -each.num_bytes))
    yield table(
        ("part", "size", "how", "why"),
        [(part.name, size(part.num_bytes), part.how, part.why) for part in ordered],
    )
    modules = large_modules(found)[:_MODULES]
    if modules:
        yield tag("h3", "Activations by module")
        yield table(("module", "size"), [(name, size(n)) for name, n in modules])


def _timeline(outlook: Outlook) -> Markup:
    moments = outlook.timeline
    # Of each stretch its highest moment: a peak that lasts one operation is still a peak.
    each = -(-len(moments) // _MOMENTS)
    kept = [
        max(moments[start : start + each], key=lambda moment: moment.total_bytes)
        for start in range(0, len(moments), each)
    ]
    limit = None if outlook.memory is None else outlook.memory.limit
    return area(
        [float(moment.total_bytes) for moment in kept],
        lambda value: size(int(value)),
        title=f"Memory over one training step on {outlook.target.name}",
        parts=[moment.phase for moment in kept],
        limit=None if limit is None else (float(limit.usable_bytes), "usable"),
    )
