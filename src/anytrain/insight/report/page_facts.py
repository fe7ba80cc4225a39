"""What the run was made of, and how to make it again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from anytrain.core.documents import finite, listed, mapping, whole
from anytrain.core.records import RunRecord
from anytrain.core.text import amount
from anytrain.insight.pages.charts import number
from anytrain.insight.pages.markup import Markup, Section, facts, section, table, tag, text
from anytrain.insight.report import starts


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
