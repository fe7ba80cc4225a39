"""A preflight's report for the terminal, and as a page with source lines and a memory curve."""

from __future__ import annotations

import io
import linecache
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from anytrain.core.text import safe_console
from anytrain.insight.pages.charts import area
from anytrain.insight.pages.markup import Markup, document, joined, table, tag
from anytrain.insight.preflight.findings import SEVERITIES, Finding
from anytrain.insight.preflight.report import Outlook, Report
from anytrain.insight.preflight.trace import SourcePlace
from anytrain.insight.preflight.units import plain, seconds, size

if TYPE_CHECKING:
    from anytrain.insight.preflight.memory import Forecast

STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_WIDTH = 100
_MODULES = 5
_FEW = 0.01
NO_BATCH = "batch of unknown size (no prepared loader)"
"""Printed where no prepared loader gave a batch size."""
_AROUND = 3
_MODULES_ON_PAGE = 12
_MOMENTS = 600


def text(report: Report, width: int = _WIDTH) -> str:
    """Return the report as plain text."""
    console = safe_console(file=io.StringIO(), width=width, markup=False)
    show(report, console)
    written: str = console.file.getvalue()  # type: ignore[attr-defined]  # our own StringIO
    return written.rstrip()


def show(report: Report, console: Console) -> None:
    """Print the report, target by target."""
    for number, outlook in enumerate(report.outlooks):
        if number:
            console.print()
        console.print(Group(*_outlook(outlook)))


def _outlook(outlook: Outlook) -> Iterator[RenderableType]:
    good = outlook.runs and outlook.has_room is not False
    style = "bold green" if good else "bold red"
    head = Text.assemble((outlook.target.name, "bold"), ": ", (outlook.verdict, style))
    head.append(f"  (torch {outlook.target.torch_version})", "dim")
    yield head
    for finding in outlook.findings:
        yield Padding(_finding(finding), (0, 0, 0, 2))
    if not outlook.findings:
        yield Padding(Text("Nothing to say about its operations."), (0, 0, 0, 2))
    for part in (_memory(outlook), _largest(outlook)):
        if part is not None:
            yield Padding(part, (0, 0, 0, 2))
    for line in time_lines(outlook):
        yield Padding(Text(line), (0, 0, 0, 2))
    if outlook.compiled is not None:
        yield Padding(Text(str(outlook.compiled)), (0, 0, 0, 2))
    for note in outlook.notes:
        yield Padding(Text(f"Not seen: {note}", "dim"), (0, 0, 0, 2))


def _finding(finding: Finding) -> RenderableType:
    head = Text.assemble((finding.severity, STYLES[finding.severity]), f"  {finding.what}")
    if not finding.certain:
        head.append("  (may be)", "dim")
    if finding.per_step > 1:
        head.append(f"  {finding.per_step} times a step", "dim")
    lines: list[RenderableType] = [head]
    if finding.place is not None and (finding.place.file or finding.place.module):
        lines.append(_indented(Text(f"at {shorter(finding.place)}", "bold")))
        if finding.place.text:
            lines.append(_indented(Text(finding.place.text, "italic"), 6))
    lines.append(_indented(Text(f"why: {finding.why}")))
    lines.append(_indented(Text(f"fix: {finding.fix}")))
    return Group(*lines)


def _indented(part: RenderableType, by: int = 4) -> RenderableType:
    return Padding(part, (0, 0, 0, by))


def shorter(place: SourcePlace) -> str:
    """Return a place with its file as seen from here, where it is below this folder."""
    try:
        file = str(Path(place.file).relative_to(Path.cwd()))
    except ValueError:
        file = place.file
    return str(SourcePlace(place.module, file, place.line))


def _memory(outlook: Outlook) -> RenderableType | None:
    found = outlook.memory
    if found is None:
        return None
    table = Table("memory", "size", "how", "why", title=None)
    table.columns[1].justify = "right"
    for row in memory_rows(found):
        table.add_row(*row)
    rows: list[RenderableType] = [Text(f"Memory: {memory_line(outlook)}"), table]
    modules = large_modules(found)
    if modules:
        listed = ", ".join(f"{name} {size(n)}" for name, n in modules[:_MODULES])
        rows.append(Text(f"Activations: {listed}"))
    return Group(*rows)


def memory_rows(found: Forecast) -> list[tuple[str, str, str, str]]:
    """Return a row for each part, the largest first, and margins last."""
    ordered = sorted(found.parts, key=lambda each: (each.how == "margin", -each.num_bytes))
    return [(part.name, size(part.num_bytes), part.how, part.why) for part in ordered]


def large_modules(found: Forecast) -> list[tuple[str, int]]:
    """Return the modules whose activations the peak holds, the largest first; none if they are few.

    Where a batch is small, the peak is in the optimizer's update, when they are gone.
    """
    if sum(found.activations_by_module.values()) < _FEW * found.peak_bytes:
        return []
    return list(by_module(found.activations_by_module).items())


def memory_line(outlook: Outlook) -> str:
    """Return what the step needs and what it may use, in one line."""
    found = outlook.memory
    if found is None:
        return ""
    batch = f"batch of {found.batch_size}" if found.batch_size else NO_BATCH
    shape = f" as long as the longest sample ({found.length})"
    if not found.length:  # others may be longer
        shape = ", of the shape of the run's first one"
    told = (
        f"peak {size(found.peak_bytes)} with a {batch}{shape}; "
        f"{size(found.needed_bytes)} taken from the device"
    )
    if found.limit is None:
        return f"{told}. Say how much it has ({outlook.target.kind}:16GB) to know if it fits."
    thumb = ", a rule of thumb" if found.limit.is_rule_of_thumb else ""
    usable = f"{size(found.limit.usable_bytes)} of {size(found.limit.whole_bytes)}"
    return f"{told}, of {usable} usable ({found.limit.because}{thumb})."


def by_module(activations: dict[str, int], depth: int = 3) -> dict[str, int]:
    """Return activations added up by the first parts of the modules' paths, the largest first.

    >>> by_module({"bert.encoder.layer.0.output": 2, "bert.encoder.layer.1": 3, "": 1})
    {'bert.encoder.layer': 5, 'the model itself': 1}
    """
    found: dict[str, int] = {}
    for name, num_bytes in activations.items():
        short = ".".join(name.split(".")[:depth]) or "the model itself"
        found[short] = found.get(short, 0) + num_bytes
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def largest_rows(outlook: Outlook) -> list[tuple[str, str, str, str]]:
    """Return a row for each setting: words, largest batch, how the batch is kept, memory."""
    from anytrain.insight.preflight.batch_search import MOST

    rows = []
    for fit in outlook.fits:
        keeps = f"{fit.micro_batch} x {fit.accumulation}" if fit.micro_batch else "-"
        largest = "none fits"
        if fit.largest:
            largest = f"{fit.largest:,}"
        if fit.largest >= fit.most:
            largest += " or more" if fit.most == MOST else " (all of the data)"
        rows.append((str(fit.setting), largest, keeps, size(fit.forecast.needed_bytes)))
    return rows


def _largest(outlook: Outlook) -> RenderableType | None:
    rows = largest_rows(outlook)
    if outlook.memory is not None and not outlook.job.batch_size:
        return Text(f"Largest batch: not looked for, with a {NO_BATCH}.")
    if not rows:
        return None
    effective = outlook.job.batch_size * outlook.job.accumulation
    table = Table("setting", "largest batch", f"to keep {effective:,}", "memory then")
    for row in rows:
        table.add_row(*row)
    return table


def time_lines(outlook: Outlook) -> list[str]:
    """Return the estimates of a step's time, each with what it assumes."""
    lines = []
    for found in (outlook.time, outlook.recorded_time):
        if found is not None:
            bound = ", the device waits for the host" if found.is_host_bound else ""
            rate = f" ({plain(found.samples_per_s)} samples/s{bound})"
            if not outlook.job.batch_size:
                rate = bound
            which = " with the longest samples" if outlook.job.length else ""
            told = f"Step: about {seconds(found.step_s)}{which}{rate}."
            lines.append(f"{told} {found.assumption}")
    return lines


# -- the page -------------------------------------------------------------------------------------


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
        yield tag("section", _section(outlook), id=f"t{number}")


def _verdict(outlook: Outlook) -> Markup:
    good = outlook.runs and outlook.has_room is not False
    return tag("strong", outlook.verdict, class_="good" if good else "bad")


def _section(outlook: Outlook) -> Iterator[str]:
    yield tag("h2", f"{outlook.target.name}: ", _verdict(outlook))
    told = f"torch {outlook.target.torch_version}, {outlook.job.num_parameters:,} parameters, "
    precision = "float32" if outlook.job.precision == "no" else outlook.job.precision
    size_of = f"batch of {outlook.job.batch_size:,}" if outlook.job.batch_size else NO_BATCH
    told += f"{size_of}, {precision}"
    yield tag("p", told, class_="dim")
    for finding in outlook.findings:
        yield _finding_box(finding)
    if not outlook.findings:
        yield tag("p", "Nothing to say about its operations.")
    if outlook.memory is not None:
        yield from _memory_section(outlook)
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


def _finding_box(finding: Finding) -> Markup:
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


def _memory_section(outlook: Outlook) -> Iterator[str]:
    found = outlook.memory
    assert found is not None
    yield tag("h3", "Memory")
    yield tag("p", memory_line(outlook))
    if len(outlook.timeline) > 1:
        yield _timeline(outlook)
    yield table(("part", "size", "how", "why"), memory_rows(found))
    modules = large_modules(found)[:_MODULES_ON_PAGE]
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
