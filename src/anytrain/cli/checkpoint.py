"""`anytrain checkpoint`: what checkpoints there are, what is in them, and whether they are whole.

Loads no torch: looking at a checkpoint takes no longer than reading it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from anytrain.engine.checkpoint import claims, layout
from anytrain.engine.checkpoint.catalog import Entry, Problem, entries, unlisted, verify, wrong_size
from anytrain.engine.checkpoint.files import Damaged
from anytrain.engine.checkpoint.manifest import MANIFEST, Manifest, read
from anytrain.engine.checkpoint.retention import Retention, prunable

app = typer.Typer(help="List, show, verify and prune checkpoints.", no_args_is_help=True)

_FOLDER = typer.Argument(help="A checkpoint, or the folder that holds several.")
_JSON = typer.Option(False, "--json", help="Print JSON instead of a table.")


@app.command("list")
def list_(path: Path = _FOLDER, as_json: bool = _JSON) -> None:
    """List the checkpoints in a folder, newest first."""
    found = _found(path)
    if as_json:
        _print_json([_summary(entry) for entry in found])
        return
    table = Table("checkpoint", "step", "saved", "size", "ranks", "metrics", "state")
    for entry in found:
        table.add_row(*_row(entry))
    _console().print(table)


@app.command()
def show(path: Path = _FOLDER, as_json: bool = _JSON) -> None:
    """Show what one checkpoint holds; of a folder of several, the newest."""
    entry = _found(path)[0]
    if entry.manifest is None:
        _fail(f"Cannot show {entry.path}.", f"{entry.problem}", code=1)
    if as_json:
        _print_json(_details(entry.path, entry.manifest))
        return
    _show(entry.path, entry.manifest)


@app.command("verify")
def verify_(path: Path = _FOLDER, as_json: bool = _JSON) -> None:
    """Read every byte and compare it with the manifest; exit with 1 where something is wrong."""
    found = {str(entry.path): verify(entry.path) for entry in _found(path)}
    if as_json:
        _print_json({name: [asdict(p) for p in problems] for name, problems in found.items()})
    else:
        table = Table("checkpoint", "state", "file", "what is wrong")
        for name, problems in found.items():
            for problem in problems:
                table.add_row(escape(name), "[red]damaged[/]", escape(problem.file), problem.why)
            if not problems:
                table.add_row(escape(name), "[green]whole[/]", "", "")
        _console().print(table)
    if any(found.values()):
        raise typer.Exit(1)


@app.command()
def prune(
    path: Path = typer.Argument(help="The folder that holds the checkpoints."),
    keep_last: int = typer.Option(..., min=1, help="How many of the newest to keep."),
    metric: str | None = typer.Option(None, help="Keep the best by this metric too."),
    greater_is_better: bool = typer.Option(False, help="The greater the metric, the better."),
    keep_every: int | None = typer.Option(None, min=1, help="Keep every step this divides."),
    yes: bool = typer.Option(False, "--yes", "-y", help="Remove without asking."),
    dry_run: bool = typer.Option(False, help="Only say what would be removed."),
) -> None:
    """Remove old checkpoints; never the newest whole one, nor a damaged one."""
    rule = Retention(keep_last, metric, greater_is_better, keep_every=keep_every)
    _found(path)
    going = prunable(path, rule)
    console = _console()
    if not dry_run:
        left = claims.clear_abandoned(path)
        if left:
            console.print(f"Cleared what {len(left)} killed saves left.")
    if not going:
        console.print("Nothing to remove.")
        return
    table = Table("to be removed", "step", "saved", "size", "ranks", "metrics", "state")
    for entry in going:
        table.add_row(*_row(entry))
    console.print(table)
    if dry_run or not (yes or typer.confirm(f"Remove {len(going)}?")):
        return
    for entry in going:
        claims.remove(entry.path)
    console.print(f"Removed {len(going)}.")


def _found(path: Path) -> list[Entry]:
    """Return the checkpoint at a path, or those in it; leave with a message if there is none."""
    if not path.is_dir():
        _fail(f"There is no folder {path}.", "pass a checkpoint, or a folder that holds some.")
    if (path / MANIFEST).exists():
        try:
            return [Entry(path.name, path, read(path))]
        except Damaged as damage:
            return [Entry(path.name, path, None, Problem(damage.file, damage.why))]
    found = entries(path)
    if not found:
        _fail(f"There is no checkpoint in {path}.", f"no folder in it has a {MANIFEST}.")
    return found


def _show(path: Path, manifest: Manifest) -> None:
    console = _console()
    facts = Table(title=escape(str(path)), show_header=False, title_justify="left")
    facts.add_row("step", str(manifest.step))
    facts.add_row("saved", _time(manifest))
    facts.add_row("ranks", str(manifest.world_size))
    facts.add_row("metrics", _metrics(manifest))
    facts.add_row("versions", ", ".join(f"{k} {v}" for k, v in manifest.versions.items()))
    for name, value in (manifest.meta or {}).items():
        if name != "parameters":  # hundreds of names, for programs to read
            facts.add_row(escape(str(name)), escape(json.dumps(value)))
    console.print(facts)
    table = Table("file", "size", "tensors", "values")
    for row in _file_rows(path, manifest):
        table.add_row(escape(row["file"]), _size(row["bytes"]), *_counts(row))
    console.print(table)
    others = unlisted(path, frozenset(manifest.files))
    if others:
        console.print(f"Not in the manifest, and not checked: {escape(', '.join(others))}")


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
                held = layout.read_entries(path, name)
                row["tensors"] = len(held)
                row["values"] = sum(e.num_bytes // layout.DTYPE_BYTES[e.dtype] for e in held)
            except Damaged as damage:
                row["problem"] = damage.why
        yield row


def _counts(row: dict[str, Any]) -> tuple[str, str]:
    if "problem" in row:
        return f"[red]{escape(row['problem'])}[/]", ""
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
    state = f"[red]{escape(str(problem))}[/]" if problem else "[green]sizes match[/]"
    if manifest is None:
        return [escape(entry.name), "", "", "", "", "", state]
    size, ranks = _size(manifest.num_bytes), str(manifest.world_size)
    facts = [str(manifest.step), _time(manifest), size, ranks, escape(_metrics(manifest))]
    return [escape(entry.name), *facts, state]


def _time(manifest: Manifest) -> str:
    return datetime.fromtimestamp(manifest.created_ns / 1e9).strftime("%Y-%m-%d %H:%M:%S")


def _metrics(manifest: Manifest) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in manifest.metrics.items())


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def _console() -> Console:
    return Console(highlight=False)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _fail(what: str, why: str, code: int = 2) -> NoReturn:
    Console(stderr=True, highlight=False).print(f"{escape(what)}\n  why: {escape(why)}")
    raise typer.Exit(code)
