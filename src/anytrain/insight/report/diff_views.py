"""What differs between runs, as it is shown: in a terminal, plainly in a pipe, or as a page."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from itertools import combinations
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytrain.core.errors import BadInput
from anytrain.core.text import amount, one_line, safe_console
from anytrain.insight.pages.charts import Chart, Series, chart_grid, chart_page
from anytrain.insight.pages.markup import Markup, beside, table, tag
from anytrain.insight.report.diff import Curve

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_SAME = "The runs are the same in everything that was recorded"
NOTHING_CHOSEN = "No recorded choice, version or place differs."
NO_CURVE = "There is no curve to compare: A logged no figure more than once."
_CHARACTERS = 60
_IN_A_PIPE = 100  # columns: nothing is cut there, and what is longer goes on in the next line
_UNBOUNDED = 100_000
Histories = Sequence[Mapping[str, Curve]]
_UNITS = {"peak bytes": ("peak memory, GiB", 2.0**30)}

# -- in words -------------------------------------------------------------------------------------


def heading(run: Mapping[str, Any]) -> str:
    """Return who a run is and how it stands, in a line."""
    of = "" if run["max_steps"] is None else f" of {run['max_steps']}"
    where = "" if run["step"] is None else f" at step {run['step']}{of}"
    starts = "" if run["starts"] <= 1 else f", {run['starts']} starts"
    return f"{run['label']}  {run['folder']}: {run['state']}{where}{starts}"


def same(found: Mapping[str, Any]) -> str:
    """Return in words that nothing differs; where a run lies and how long it took is no matter."""
    places = any(each["rows"] for each in found["differences"])
    return f"{_SAME}, but for where they ran and how fast." if places else f"{_SAME}."


def counted(found: Mapping[str, Any]) -> str:
    """Return how much is the same, by group."""
    told = []
    for each in found["differences"]:
        group, count = each["group"], each["same"]
        if count:
            is_several = group.endswith("s")
            told.append(amount(count, group[:-1]) if is_several else f"{count:,} of the {group}")
    return f"The same: {', '.join(told)}." if told else "Nothing that was recorded is the same."


def value_text(value: object) -> str:
    """Return a value as people read it.

    >>> value_text(0.30000000000000004), value_text(None), value_text(["a", "b c"])
    ('0.3', '-', "a 'b c'")
    """
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        words = [value_text(each) for each in value]
        return " ".join(repr(word) if " " in word or not word else word for word in words)
    return one_line(value)


def value_texts(values: Sequence[object]) -> list[str]:
    """Return values as people read them, with all their digits where they would look the same.

    >>> value_texts([0.1, 0.2]), value_texts([0.1234567, 0.12345674]), value_texts([1, "1"])
    (['0.1', '0.2'], ['0.1234567', '0.12345674'], ['1', "'1'"])
    """
    return _told_apart(values, [value_text(value) for value in values])


def figure_texts(values: Sequence[float | None]) -> list[str]:
    """Return figures, with all their digits where they would look the same."""
    return _told_apart(values, [figure_text(value) for value in values])


def _told_apart(values: Sequence[object], texts: list[str]) -> list[str]:
    pairs = combinations(zip(values, texts, strict=True), 2)
    if any(text == other and value != its for (value, text), (its, other) in pairs):
        return ["-" if value is None else repr(value) for value in values]
    return texts


def figure_text(value: float | None, is_difference: bool = False) -> str:
    """Return a figure, or how much it is above or below another."""
    if value is None:
        return "-"
    if is_difference and value == 0:
        return "0"
    return f"{value:+.4g}" if is_difference and math.isfinite(value) else f"{value:.6g}"


def time_rows(found: Mapping[str, Any]) -> list[tuple[str, list[float | None]]]:
    """Return the times, throughput and memory by name, in units that people read."""
    rows = []
    for row in found["times"]:
        name, unit = _UNITS.get(row["name"], (row["name"], 1.0))
        rows.append((name, [None if v is None else v / unit for v in row["values"]]))
    return rows


def time_text(value: float | None) -> str:
    """Return a time or a rate, as exact as it can be trusted.

    >>> time_text(0.0011917), time_text(3356.474)
    ('0.00119', '3,356')
    """
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def ratio_text(value: float | None, other: float | None) -> str:
    """Return how many times as much the second is."""
    return "-" if not value or other is None else f"x {other / value:.2f}"


def run_columns(found: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Return what a table with one row a run shows: a name and a text for each run."""
    runs = found["runs"]
    columns = [
        ("run", [f"{run['label']} {run['name']}" for run in runs]),
        ("state", [run["state"] for run in runs]),
        ("step", [value_text(run["step"]) for run in runs]),
    ]
    for each in found["differences"]:
        if each["group"] != "place":
            columns += [(row["name"], value_texts(row["values"])) for row in each["rows"]]
    for figure in found["figures"]:
        columns.append((f"{figure['name']}, last", figure_texts(figure["last"])))
        if figure["better"] and figure["best"] != figure["last"]:
            columns.append((f"{figure['name']}, best", figure_texts(figure["best"])))
    columns += [
        (name, [time_text(value) for value in values])
        for name, values in time_rows(found)
        if not name.startswith("seconds: ")
    ]
    return columns


def with_reasons(row: Mapping[str, Any]) -> list[str]:
    """Return each run's value of what differs, with the reason for it where there is one."""
    texts = value_texts(row["values"])
    reasons: Sequence[Any] = row.get("because") or [None] * len(texts)
    return [f"{t} ({why})" if why else t for t, why in zip(texts, reasons, strict=True)]


def figure_rows(found: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and rows of two runs' last and best figures."""
    one, other = (run["label"] for run in found["runs"])
    head = (f"{one} last", f"{other} last", f"{other} - {one}", f"{one} best", f"{other} best")
    rows = []
    for figure in found["figures"]:
        cells = figure_texts(figure["last"])
        cells.append(figure_text(figure["difference"][1], is_difference=True))
        rows.append((figure["name"], *cells, *figure_texts(figure["best"])))
    return ("figure", *head), rows


def curve_rows(found: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and rows of where each curve parts from that of the first run."""
    head = ("figure", *(f"A and {run['label']}" for run in found["runs"][1:]))
    return head, [(each["name"], *(p["said"] for p in each["pairs"])) for each in found["curves"]]


def times_compared(found: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and rows of two runs' times, throughput and memory."""
    one, other = (run["label"] for run in found["runs"])
    rows = [
        (name, *map(time_text, values), ratio_text(*values)) for name, values in time_rows(found)
    ]
    return ("what", one, other, f"{other} / {one}"), rows


def fitted(texts: Sequence[str], most: int = _CHARACTERS) -> list[str]:
    """Cut what is said of one thing to so many characters; what differs is never cut away.

    >>> fitted(["/" + "a" * 20 + "/1", "/" + "a" * 20 + "/2"], most=12)
    ['/aaaa..aaa/1', '/aaaa..aaa/2']
    >>> fitted(["a" * 20 + "1" + "b" * 20, "a" * 20 + "2" + "b" * 20], most=12)
    ['..aaa1bbbb..', '..aaa2bbbb..']
    """
    kinds = len(set(texts))
    apart = len(commonprefix(list(texts)))
    begin = max(apart - (most - 4) // 3 - 1, 0)
    for short in (
        [_middle_out(text, most) for text in texts],
        [_window(text, begin, most) for text in texts],
    ):
        if len(set(short)) == kinds:
            return short
    return list(texts)


def _middle_out(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2 - 1
    return f"{text[:half]}..{text[-half:]}"


def _window(text: str, begin: int, most: int) -> str:
    if len(text) <= most:
        return text
    end = begin + most - 4
    return f"{'..' if begin else ''}{text[begin:end]}{'..' if end < len(text) else ''}"


# -- in a terminal --------------------------------------------------------------------------------


def show(found: Mapping[str, Any]) -> None:
    """Print the comparison: two runs side by side, more as a table with a row each."""
    console = safe_console(markup=False)
    if not console.is_terminal:
        console = safe_console(markup=False, width=_IN_A_PIPE)
    for run in found["runs"]:
        _say(console, heading(run), "bold")
    if found["is_same"]:
        _say(console, same(found), "green")
    if len(found["runs"]) > 2:
        _print_runs(console, found)
    else:
        _print_differences(console, found)
    for note in found["notes"]:
        _say(console, f"Note: {note}", "yellow")
    _print_curves(console, found)
    if len(found["runs"]) == 2:
        _print_numbers(console, "Figures", *figure_rows(found))
        _print_numbers(console, "Times", *times_compared(found))


def _text(text: str, style: str = "") -> Text:
    """Return text that neither moves the cursor nor colours the terminal, whatever a run wrote."""
    from rich.text import Text

    return Text(one_line(text), style=style)


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(_text(text, style), overflow="fold")


def _print(
    console: Console,
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    numbers: int | None = None,
) -> None:
    """Print a table; rows that are too wide for it follow, a line for each of their values.

    The columns from `numbers` on are aligned to the right.
    """
    short = list(rows)
    table = _table(title, head, short, numbers)
    while short and _width(console, table) > console.width:
        short.remove(max(short, key=lambda row: sum(map(len, row))))
        table = _table(title, head, short, numbers)
    console.print(table if short else _text(title, "italic"))
    names = head.index("A") if "A" in head else 1
    long = [row for row in rows if row not in short]
    for row in long:
        _say(console, "  " + "  ".join(filter(None, row[:names])), "bold")
        for name, cell in zip(head[names:], row[names:], strict=True):
            _fold(console, f"    {name}: ", cell)
    if long:
        console.print()


def _table(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], numbers: int | None
) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for n, name in enumerate(head):
        right = numbers is not None and n >= numbers
        table.add_column(one_line(name), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_text, row))
    return table


def _width(console: Console, table: Table) -> int:
    from rich.measure import Measurement

    return Measurement.get(console, console.options.update(max_width=_UNBOUNDED), table).maximum


def _fold(console: Console, before: str, text: str) -> None:
    """Print a value behind its name; what does not fit goes on below it, and nothing is cut."""
    room = max(console.width - len(before), 20)
    lines = textwrap.wrap(one_line(text), room, drop_whitespace=False) or [""]
    for n, line in enumerate(lines):
        console.print(_text(f"{before if n == 0 else ' ' * len(before)}{line}"), soft_wrap=True)


def _cut(console: Console, texts: Sequence[str]) -> list[str]:
    """Cut what is said of one thing where it is shown in a terminal, and not in a pipe."""
    told = [one_line(text) for text in texts]
    return fitted(told) if console.is_terminal else told


def _print_differences(console: Console, found: Mapping[str, Any]) -> None:
    rows = [
        (each["group"], row["name"], *_cut(console, with_reasons(row)))
        for each in found["differences"]
        for row in each["rows"]
    ]
    if rows:
        head = ("", "name", *(run["label"] for run in found["runs"]))
        _print(console, "What differs", head, rows)
    elif not found["is_same"]:
        _say(console, NOTHING_CHOSEN)
    _say(console, counted(found))


def _print_runs(console: Console, found: Mapping[str, Any]) -> None:
    """Print a row a run; a column a run where that is too wide."""
    columns = [(name, _cut(console, texts)) for name, texts in run_columns(found)]
    width = sum(max(len(name), *map(len, texts)) + 3 for name, texts in columns)
    if width <= console.width:
        rows = [[texts[n] for _, texts in columns] for n in range(len(found["runs"]))]
        _print(console, "Runs", [name for name, _ in columns], rows)
    else:
        (_, names), *rest = columns
        _print(console, "Runs", ("", *names), [(name, *texts) for name, texts in rest])
    _say(console, counted(found))


def _print_curves(console: Console, found: Mapping[str, Any]) -> None:
    if not found["curves"]:
        _say(console, NO_CURVE)
        return
    _print(console, "Where the curves part", *curve_rows(found))
    _say(console, found["rule"], "dim")


def _print_numbers(
    console: Console, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    if rows:
        _print(console, title, head, rows, numbers=1)


# -- as a page ------------------------------------------------------------------------------------


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
    return chart_page(
        title,
        *(section for section in sections if section is not None),
        before=tag("a", "Skip to the differences", href="#main", class_="skip"),
        charts=charts,
        styles=(beside("diff.css"),),
        scripts=(beside("sort.js"),),
    )


def _called(run: Mapping[str, Any]) -> str:
    return f"{run['label']} {run['name']}"


def _charts(found: Mapping[str, Any], histories: Histories) -> list[Chart]:
    marks = {curve["name"]: _marks(curve["pairs"]) for curve in found["curves"]}
    names = dict.fromkeys(name for history in histories for name in history)
    charts = []
    for name in sorted(names, key=lambda name: (name != "loss", not name.startswith("eval"))):
        series = [
            Series(_called(run), sorted(history[name].items()))
            for run, history in zip(found["runs"], histories, strict=True)
            if name in history
        ]
        if max(len(each.points) for each in series) > 1:
            told = marks.get(name, [])
            charts.append(Chart(name, name, series, marks=told, broad=name == "loss"))
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
    runs = tag("ul", (tag("li", heading(run)) for run in found["runs"]))
    good = [tag("p", same(found), class_="good")] if found["is_same"] else []
    notes = [tag("p", note, class_="finding warning") for note in found["notes"]]
    return tag("header", tag("h1", title), runs, *good, *notes)


def _chosen(found: Mapping[str, Any]) -> Markup:
    if len(found["runs"]) > 2:
        return _runs(found)
    labels = [run["label"] for run in found["runs"]]
    parts = []
    for each in found["differences"]:
        rows = [(row["name"], *with_reasons(row)) for row in each["rows"]]
        if rows:
            parts.append(table(("name", *labels), rows, caption=each["group"].capitalize()))
    if not parts:
        parts.append(tag("p", NOTHING_CHOSEN))
    count = tag("p", counted(found), class_="dim")
    return _section("What differs", *parts, count, class_="told")


def _runs(found: Mapping[str, Any]) -> Markup:
    columns = run_columns(found)
    head = [tag("button", name, type="button") for name, _ in columns]
    rows = [[texts[n] for _, texts in columns] for n in range(len(found["runs"]))]
    shown = table(head, rows, caption="Each run and what differs; press a heading to sort.")
    count = tag("p", counted(found), class_="dim")
    return _section("Runs", tag("div", shown, class_="sortable"), count)


def _parting(found: Mapping[str, Any], charts: Sequence[Chart]) -> Markup:
    told = table(*curve_rows(found)) if found["curves"] else tag("p", NO_CURVE)
    rule = tag("details", tag("summary", "How this is judged"), tag("p", found["rule"]))
    return _section("Where the curves part", told, rule, chart_grid(charts))


def _figures(found: Mapping[str, Any]) -> Markup | None:
    head, rows = figure_rows(found)
    return _section("Figures", table(head, rows, numbers=range(1, 6))) if rows else None


def _times(found: Mapping[str, Any]) -> Markup | None:
    head, rows = times_compared(found)
    if not rows:
        return None
    caption = "All starts of a run together."
    return _section("Times", table(head, rows, caption=caption, numbers=range(1, 4)))


def _section(title: str, *content: Markup, **attributes: str) -> Markup:
    return tag("section", tag("h2", title), *content, **attributes)
