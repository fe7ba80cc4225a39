"""`anytrain report`: a run as one HTML file that can be mailed. Loads no torch."""

from __future__ import annotations

import os
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import typer

RUN = typer.Argument(help="A run's output_dir; an Accelerator's project_dir.")
OUTPUT = typer.Option(
    None, "-o", "--output", help="The file to write. Default: report.html in the run's folder."
)
OPEN = typer.Option(False, "--open", help="Open it in the browser.")


def report(run: Path = RUN, output: Path | None = OUTPUT, opens: bool = OPEN) -> None:
    """Write a run's report: curves, time, evaluation, plan, and how to reproduce it.

    It is one file that needs no network. The run may be over, going on, or killed.
    """
    path = write(run, output)
    typer.echo(typer.format_filename(path))  # a name of a file need not be text
    if opens:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())


def write(run: Path, output: Path | None = None) -> Path:
    """Write the report of the run in a folder, in one piece; return where it is."""
    from anytrain.core.errors import BadInput
    from anytrain.core.records import open_run
    from anytrain.insight.report.page import page

    path = run / "report.html" if output is None else output
    text = page(open_run(run), _defaults())
    if _is_of_the_run(path, run):
        raise BadInput(
            f"Cannot write the report to {path}.",
            why="That file belongs to the run itself.",
            fix="pass -o with another file, such as report.html.",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, text)
    except OSError as error:
        raise BadInput(
            f"Cannot write the report to {path}.", why=f"{error}.", fix="pass -o with another file."
        ) from None
    return path


def _is_of_the_run(path: Path, run: Path) -> bool:
    """Whether it is, or may become, a file that the run wrote; pages are nobody's record."""
    path, run = path.resolve(), run.resolve()
    if not path.is_relative_to(run) or path.suffix in (".html", ".htm"):
        return False
    return path.is_file() or (path.parent == run and path.suffix in (".json", ".jsonl"))


def _replace(path: Path, text: str) -> None:
    """Write a file: what was there stays until the new one is whole."""
    path = path.resolve()  # a link stays one
    if path.exists() and not path.is_file():  # a pipe or a device, or a folder, which says so
        path.write_text(text, encoding="utf-8")
        return
    draft = path.with_name(f"{path.name}.new-{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _defaults() -> dict[str, Any]:
    """Return the arguments of training that nobody has to choose."""
    from anytrain.doors.training_args import TrainingArguments
    from anytrain.doors.training_args.loaders import AcceleratorConfig

    found: dict[str, Any] = {}
    for field in fields(TrainingArguments):
        if field.default is not MISSING:
            found[field.name] = getattr(field.default, "value", field.default)
        elif field.default_factory is not MISSING:
            found[field.name] = field.default_factory()
    return {**found, "accelerator_config": AcceleratorConfig().to_dict()}
