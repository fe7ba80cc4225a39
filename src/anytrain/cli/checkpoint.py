"""`anytrain checkpoint`: what checkpoints there are, what is in them, and whether they are whole.

Loads no torch: looking at a checkpoint takes no longer than reading it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich import box
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from anytrain.cli import options
from anytrain.core import records
from anytrain.core.text import amount, one_line, safe_console, size
from anytrain.engine.checkpoint import locks, safetensors_format
from anytrain.engine.checkpoint.catalog import (
    Entry,
    Problem,
    Retention,
    entries,
    prunable,
    unlisted,
    verify,
    wrong_size,
)
from anytrain.engine.checkpoint.files import Damaged
from anytrain.engine.checkpoint.manifest import MANIFEST, Manifest, read

app = typer.Typer(
    help="List, show, verify and prune checkpoints.", add_completion=False, no_args_is_help=True
)

_FOLDER = typer.Argument(
    None, help="A checkpoint, a run, or a folder that holds some. Default: the newest run below."
)
_FIX = "pass a checkpoint, a run's folder, or a folder that holds some."
_HEAD = ("step", "saved", "size", "ranks", "metrics", "state")
_WIDEST = 100_000  # columns
_JSON = typer.Option(False, "--json", help="Print JSON instead of a table.")


@app.command("list")
def list_(path: Path | None = _FOLDER, as_json: bool = _JSON) -> None:
    """List the checkpoints of a folder, newest first.

    Those one level below it are listed, too.
    """
    found = _found(_chosen(path, "list"))
    if as_json:
        _print_json([_summary(entry) for entry in found])
        return
    _print_rows(("checkpoint", *_HEAD), [_row(entry) for entry in found])


@app.command()
def show(path: Path | None = _FOLDER, as_json: bool = _JSON) -> None:
    """Show what one checkpoint holds.

    Of a folder of several, it is the newest.
    """
    entry = _found(_chosen(path, "show"))[0]
    if entry.manifest is None:
        _fail(f"Cannot show {entry.path}.", f"{entry.problem}", "show another one.", code=1)
    if as_json:
        _print_json(_details(entry.path, entry.manifest))
        return
    _show(entry.path, entry.manifest)


@app.command("verify")
def verify_(path: Path | None = _FOLDER, as_json: bool = _JSON) -> None:
    """Read every byte and compare it with the manifest.

    The exit status is 1 where something is wrong.
    """
    found = {str(entry.path): verify(entry.path) for entry in _found(_chosen(path, "verify"))}
    if as_json:
        _print_json({name: [asdict(p) for p in problems] for name, problems in found.items()})
    else:
        rows = [row for name, problems in found.items() for row in _verdicts(name, problems)]
        _print_rows(("checkpoint", "state", "file", "what is wrong"), rows)
    if any(found.values()):
        raise typer.Exit(1)


@app.command()
def prune(
    path: Path = typer.Argument(help="The folder that holds the checkpoints."),
    keep_last: int = typer.Option(..., min=1, help="How many of the newest to keep."),
    metric: str | None = typer.Option(None, help="Keep the best by this metric too."),
    greater_is_better: bool = typer.Option(
        False, help="Whether a greater value of the metric is better."
    ),
    keep_every: int | None = typer.Option(
        None, min=1, help="Keep every checkpoint whose step is a multiple of this too."
    ),
    yes: bool = typer.Option(False, "--yes", "-y", help="Remove without asking."),
    dry_run: bool = typer.Option(False, help="Only say what would be removed."),
) -> None:
    """Remove old checkpoints of a folder.

    The newest whole one always stays, and so does a damaged one.
    """
    rule = Retention(keep_last, metric, greater_is_better, keep_every=keep_every)
    if not any(entry.path.parent == path for entry in _found(path)):
        _refuse_to_prune(path)
    going = prunable(path, rule)
    console = safe_console()
    if not dry_run:
        left = locks.clear_abandoned(path)
        if left:
            console.print(f"Cleared what {amount(len(left), 'killed save')} left.")
    if not going:
        console.print("Nothing to remove.")
        return
    _print_rows(("to be removed", *_HEAD), [_row(entry) for entry in going])
    if dry_run or not (yes or typer.confirm(f"Remove {amount(len(going), 'checkpoint')}?")):
        return
    for entry in going:
        locks.remove(path, entry.name)
    console.print(f"Removed {amount(len(going), 'checkpoint')}.")


def _found(path: Path) -> list[Entry]:
    """Return the checkpoint at a path, or those in it; leave with a message if there is none."""
    if not path.is_dir():
        there = "it is a file" if path.is_file() else "nothing of that name is there"
        _fail(f"There is no folder {path}.", f"{there}.", _FIX)
    if (path / MANIFEST).exists():
        try:
            return [Entry(path.name, path, read(path))]
        except Damaged as damage:
            return [Entry(path.name, path, None, Problem(damage.file, damage.why))]
    found = all_in(path)
    if not found:
        _fail(
            f"There is no checkpoint in {path}.",
            f"no folder in it, nor one level below, has a {MANIFEST}.",
            _FIX,
        )
    return found


def all_in(path: Path) -> list[Entry]:
    """Return the checkpoints in a folder, newest first, and then those one level below it."""
    inner = {folder: entries(folder) for folder in _folders(path)}
    # A run that has saved its model beside its checkpoints is no checkpoint without a manifest.
    own = [e for e in entries(path) if e.manifest or not (inner.get(e.path) or _is_run(e.path))]
    held = {entry.path for entry in own}
    below = [
        replace(entry, name=f"{folder.name}/{entry.name}")
        for folder, found in inner.items()
        if folder not in held
        for entry in found
    ]
    return own + sorted(below, key=lambda e: -e.manifest.created_ns if e.manifest else 0)


def _folders(path: Path) -> list[Path]:
    found = [each for each in path.iterdir() if each.is_dir() and not each.name.startswith(".")]
    return sorted(found)


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in (records.RUN, records.TIMESHEET))


def _chosen(path: Path | None, command: str) -> Path:
    return (
        options.newest_run(f"checkpoint {command}", lambda run: bool(all_in(run)), "checkpoints")
        if path is None
        else path
    )


def _refuse_to_prune(path: Path) -> NoReturn:
    """Say where there are checkpoints, if any: what is below a folder is not its own to remove."""
    below = {str(entry.path.parent) for entry in _found(path)}
    found = ", ".join(sorted(below))
    _fail(
        f"There is no checkpoint in {path} itself.",
        f"those below it are in {found}.",
        "name that folder.",
    )


def _show(path: Path, manifest: Manifest) -> None:
    console = safe_console()
    console.print(_safe(path), soft_wrap=True)
    facts = _table("", "", show_header=False)
    facts.add_row("step", str(manifest.step))
    facts.add_row("saved", _time(manifest))
    facts.add_row("ranks", str(manifest.world_size))
    if manifest.metrics:
        facts.add_row("metrics", escape(_metrics(manifest)))
    facts.add_row("versions", escape(_versions(manifest)))
    for name, value in (manifest.meta or {}).items():
        if name != "parameters":  # hundreds of names, for programs to read
            facts.add_row(_safe(name), _safe(json.dumps(value)))
    console.print(facts)
    rows = _file_rows(path, manifest)
    head = ("file", "size", "tensors", "values")
    _print_rows(head, [[_safe(row["file"]), size(row["bytes"]), *_counts(row)] for row in rows])
    others = unlisted(path, frozenset(manifest.files))
    if others:
        console.print(f"Not in the manifest, and not checked: {_safe(', '.join(others))}")


def _details(path: Path, manifest: Manifest) -> dict[str, Any]:
    return {
        **_summary(Entry(path.name, path, manifest)),
        "parts": list(manifest.parts),
        "rank_parts": list(manifest.rank_parts),
        "models": [{"files": m.tensors, "ties": m.ties} for m in manifest.models],
        "files": list(_file_rows(path, manifest)),
        "unlisted": unlisted(path, frozenset(manifest.files)),
        "versions": manifest.versions,
        "meta": manifest.meta,
    }


def _file_rows(path: Path, manifest: Manifest) -> Iterable[dict[str, Any]]:
    for name, file in sorted(manifest.files.items()):
        row: dict[str, Any] = {"file": name, "bytes": file.num_bytes, "blake2b": file.blake2b}
        if name.endswith(".safetensors"):
            try:
                held = safetensors_format.read_entries(path, name)
                row["tensors"] = len(held)
                row["values"] = sum(
                    e.num_bytes // safetensors_format.DTYPE_BYTES[e.dtype] for e in held
                )
            except Damaged as damage:
                row["problem"] = damage.why
        yield row


def _counts(row: dict[str, Any]) -> tuple[str, str]:
    if "problem" in row:
        return f"[red]{_safe(row['problem'])}[/]", ""
    return (f"{row['tensors']:,}", f"{row['values']:,}") if "tensors" in row else ("", "")


def _summary(entry: Entry) -> dict[str, Any]:
    manifest = entry.manifest
    found: dict[str, Any] = {"name": entry.name, "path": str(entry.path)}
    problem = entry.problem or wrong_size(entry)
    found["problem"] = str(problem) if problem else None
    if manifest is None:
        return found
    return {
        **found,
        "step": manifest.step,
        "saved": datetime.fromtimestamp(manifest.created_ns / 1e9).isoformat(),
        "bytes": manifest.num_bytes,
        "world_size": manifest.world_size,
        "metrics": {k: v if math.isfinite(v) else str(v) for k, v in manifest.metrics.items()},
    }


def _row(entry: Entry) -> list[str]:
    manifest, problem = entry.manifest, entry.problem or wrong_size(entry)
    state = f"[red]{_safe(problem)}[/]" if problem else "[green]sizes match[/]"
    if manifest is None:
        return [_safe(entry.name), "", "", "", "", "", state]
    num_bytes, ranks = size(manifest.num_bytes), str(manifest.world_size)
    facts = [str(manifest.step), _time(manifest), num_bytes, ranks, escape(_metrics(manifest))]
    return [_safe(entry.name), *facts, state]


def _time(manifest: Manifest) -> str:
    return datetime.fromtimestamp(manifest.created_ns / 1e9).strftime("%Y-%m-%d %H:%M:%S")


def _metrics(manifest: Manifest) -> str:
    return ", ".join(f"{one_line(n)} {value:.6g}" for n, value in manifest.metrics.items())


def _safe(text: object) -> str:
    """Return a text of somebody else's for a table: no markup, on one line."""
    return escape(one_line(text))


def _versions(manifest: Manifest) -> str:
    return ", ".join(one_line(f"{name} {value}") for name, value in manifest.versions.items())


def _verdicts(name: str, problems: Iterable[Problem]) -> list[list[str]]:
    rows = [[_safe(name), "[red]damaged[/]", _safe(p.file), _safe(p.why)] for p in problems]
    return rows or [[_safe(name), "[green]whole[/]", "", ""]]


def _print_rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; where the terminal is too narrow, each row's cells below its name.

    A name is never cut: in a pipe a row is one line, however long.
    """
    console = safe_console()
    kept = [n for n in range(len(head)) if n == 0 or any(row[n] for row in rows)]
    head, rows = [head[n] for n in kept], [[row[n] for n in kept] for row in rows]
    table = _table(*head)
    for row in rows:
        table.add_row(*row)
    width = Measurement.get(console, console.options.update(max_width=_WIDEST), table).maximum
    if width <= console.width or not console.is_terminal:
        safe_console(width=max(width, 1)).print(table)
        return
    for name, *cells in rows:
        console.print(name, style="bold", soft_wrap=True)
        for title, cell in zip(head[1:], cells, strict=True):
            if cell:
                console.print(f"  {title}: {cell}", soft_wrap=True)


def _table(*head: str, **options: Any) -> Table:
    table = Table(box=box.SIMPLE_HEAD, **options)
    for title in head:
        table.add_column(title, overflow="fold")
    return table


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _fail(what: str, why: str, fix: str, code: int = 2) -> NoReturn:
    text = escape(f"anytrain: {what}\n  why: {why}\n  fix: {fix}")
    safe_console(stderr=True).print(text, soft_wrap=True)
    raise typer.Exit(code)
