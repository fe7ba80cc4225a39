"""Sections of a report: where the time went, what the run was made of, how to make it again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from anytrain.core.documents import finite, listed, mapping, whole
from anytrain.core.records import Life, RunRecord
from anytrain.core.text import amount
from anytrain.insight.pages.charts import number
from anytrain.insight.pages.markup import (
    Markup,
    Section,
    facts,
    joined,
    moment,
    section,
    table,
    tag,
    text,
)
from anytrain.insight.report import starts
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


# -- what the run was made of, and how to make it again -------------------------------------------


def arguments(run: RunRecord, defaults: Mapping[str, Any]) -> Section | None:
    """Return the run's arguments: those that are not the default first."""
    given = starts.arguments(run.start)
    if not given:
        settings = mapping(run.life.began.get("settings"))
        known = [facts(settings, "As far as they were recorded"), _changes(run)]
        return section("arguments", "Arguments", known)
    changed = {k: v for k, v in given.items() if not _is_default(k, v, defaults)}
    rest = {k: v for k, v in given.items() if k not in changed}
    content = [facts(changed, "Other than the default" if defaults else "As they were given")]
    content += [_not_used(run), _changes(run)]
    if rest:
        told = tag("summary", f"{amount(len(rest), 'argument')} at the default")
        content.append(tag("details", told, facts(rest, "At the default")))
    return section("arguments", "Arguments", content)


def _not_used(run: RunRecord) -> Markup:
    """Return what was given and not used: a checkpoint that a run goes on from settles some."""
    rows = [
        (name, tag("code", text(given)), tag("code", text(used)))
        for name, given, used in starts.not_used(run.start)
    ]
    caption = "Given, and not used: the checkpoint that the run went on from has settled these"
    return table(("name", "given", "used"), rows, caption=caption) if rows else Markup("")


def _changes(run: RunRecord) -> Markup:
    rows = [
        (
            each.name,
            f"start {each.start}",
            "–" if each.step is None else number(each.step),
            tag("code", text(each.before)),
            tag("code", text(each.after)),
        )
        for each in starts.changes(run)
    ]
    head = ("name", "changed with", "after step", "before", "from there on")
    return table(head, rows, caption="In what the starts differ") if rows else Markup("")


def surroundings(run: RunRecord) -> Section | None:
    """Return versions, hardware, code and data."""
    start, began = run.start, run.life.began
    versions = mapping(start.get("versions")) or mapping(began.get("versions"))
    told: dict[str, Any] = {key: start[key] for key in ("python", "platform") if key in start}
    hardware = {
        key: _sized(value) if key.endswith("_bytes") else value
        for key, value in mapping(start.get("hardware")).items()
    }
    model = mapping(start.get("model"))
    content: list[Markup] = [facts({**told, **versions}, "Versions"), facts(hardware, "Hardware")]
    content.append(facts(mapping(start.get("git")), "Code (git)"))
    for split, data in _data(start):
        content.append(facts(data, f"Data: {split}"))
    counts = {k: v if (n := finite(v)) is None else number(n) for k, v in model.items()}
    content.append(facts(counts, "Model"))
    content = [each for each in content if each]
    told_of = [tag("div", content, class_="pairs")] if content else []
    return section("surroundings", "Versions, hardware, code and data", told_of)


def reproduce(run: RunRecord) -> Section | None:
    """Return what to type to make the run again."""
    return section("reproduce", "How to reproduce", _steps(run))


def _steps(run: RunRecord) -> Iterator[Markup]:
    start = run.start
    command = [text(part, 10_000) for part in listed(start.get("command"))]
    if not command:
        return
    lines = []
    git, versions = mapping(start.get("git")), mapping(start.get("versions"))
    if cwd := start.get("cwd"):
        lines.append(f"cd {shlex.quote(text(cwd, 1000))}")
    if commit := git.get("commit"):
        lines.append(f"git checkout {shlex.quote(text(commit))}")
    if versions:
        # Behind the plus is a build's own name, which indices of packages do not know.
        public = {name: text(version).partition("+")[0] for name, version in versions.items()}
        pins = [shlex.quote(f"{name}=={version}") for name, version in public.items()]
        lines.append(f"pip install {' '.join(pins)}")
    lines.append(shlex.join(_launched(start, command)))
    yield tag("pre", "\n".join(lines))
    yield from (tag("p", each) for each in _remarks(run, git))


def _launched(start: dict[str, Any], command: list[str]) -> list[str]:
    """Return the command that starts all processes of a run, of which each knows only its own."""
    num_processes = whole(mapping(start.get("hardware")).get("num_processes")) or 1
    if num_processes < 2 or "launch" in command:
        return command
    after = command[1:]
    while after and after[0] in ("-u", "-B", "-O", "-I", "-s", "-E"):  # Python's own
        after = after[1:]
    if not after or (after[0].startswith("-") and after[0] != "-m"):
        return command
    module = ["--module"] if after[0] == "-m" else []
    return ["anytrain", "launch", "--num_processes", str(num_processes), *module] + (
        after[1:] if module else after
    )


def _remarks(run: RunRecord, git: dict[str, Any]) -> Iterator[str]:
    start = run.start
    if starts.changes(run):
        yield "The starts of the run differ (see Arguments): one command alone does not repeat it."
    if git.get("is_dirty"):
        yield "The code had changes that were not committed, so the commit alone is not what ran."
    for name, version in mapping(start.get("versions")).items():
        if "+" in text(version):
            yield f"The build of {name} was {text(version)}."
    yield from _seeds(run)
    for split, data in _data(start):
        if known := data.get("fingerprint"):
            named = f"The fingerprint of the {split} data, a hash of some of its samples,"
            yield f"{named} was {text(known, 100)}."


def _seeds(run: RunRecord) -> Iterator[str]:
    seed = whole(starts.arguments(run.start).get("seed"))
    changed = [each for each in starts.changes(run) if each.name == "seed"]
    if changed:
        told = [f"The seed was {text(changed[0].before)} first"]
        for each in changed:
            at = "" if each.step is None else f" from step {number(each.step)} on"
            told.append(f"then {text(each.after)}{at}")
        yield f"{', '.join(told)}."
    elif seed is not None:
        yield f"The seed was {seed}; the order of the samples and all random draws follow from it."


def _is_default(name: str, value: Any, defaults: Mapping[str, Any]) -> bool:
    """Whether nobody chose it; what is left to us by default may have become "no" or empty."""
    if name not in defaults:
        return False
    default = defaults[name]
    is_nothing = value is False or value in (None, "", [], {})
    return bool(default == value) or (default in (None, "") and is_nothing)


def _data(start: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    found = {split: mapping(data) for split, data in mapping(start.get("data")).items()}
    return sorted(found.items(), key=lambda each: (each[0] != "train", each[0]))


def _sized(value: Any) -> str | None:
    """Return a size; None where there is nothing of it, such as memory of a CPU's own."""
    found = finite(value)
    return number(found, "bytes") if found else None
