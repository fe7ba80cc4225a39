"""What a run's record tells: its report, and where its time went. Loads no torch."""

from __future__ import annotations

import os
import webbrowser
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

from anytrain.core import records
from anytrain.core.documents import as_file
from anytrain.core.errors import BadInput
from anytrain.core.records import Sweep, open_run
from anytrain.insight.pages.markup import tag
from anytrain.insight.report import sweep_page
from anytrain.insight.report.page import page
from anytrain.insight.report.run_folders import has_times, named, newest, newest_trial, search_in
from anytrain.insight.report.why import Why, explain

Folder = str | os.PathLike[str]


class ReportPage:
    """A report that was written: a notebook shows the page, anything else where it is."""

    def __init__(self, run: Path, path: Path) -> None:
        self.run = run
        """The run's folder."""
        self.path = path
        """The file, which needs nothing else and can be mailed."""

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def __repr__(self) -> str:
        return f"Report of {named([self.run])}: {self.path}"

    def _repr_html_(self) -> str:
        # A page of its own inside the other one: neither's style reaches the other.
        frame = tag(
            "iframe",
            srcdoc=self.path.read_text(encoding="utf-8"),
            style="width:100%;height:40rem;border:1px solid #8886",
            sandbox="allow-scripts",
            title=f"Report of {self.run.name}",
        )
        return tag(
            "div", tag("p", f"Report of {named([self.run])}: ", tag("code", str(self.path))), frame
        )


def report(
    run: Folder | None = None, output: Folder | None = None, *, opens: bool = False
) -> ReportPage:
    """Write a run's report as one HTML file; a notebook shows the page.

    The run may be over, going on, or killed. Of a search's folder, the page compares the trials.

    Args:
        run: A Trainer's output_dir, or an Accelerator's project_dir. None: the newest run below
            the current folder.
        output: The file. None: report.html in the run's folder.
        opens: Whether to open it in the browser.
    """
    folder = newest(1, 'anytrain.report("PATH")')[0] if run is None else Path(run)
    path = write(folder, None if output is None else Path(output))[0]
    if opens:
        webbrowser.open(path.resolve().as_uri())
    return ReportPage(folder, path)


def why(run: Folder | None = None) -> Why:
    """Return where a run's time went, and one remedy where something takes too much.

    Print it, or let a notebook show it; `told` holds the numbers by name.

    Args:
        run: A Trainer's output_dir, or an Accelerator's project_dir. None: the newest run below
            the current folder.
    """
    folder = newest(1, 'anytrain.why("PATH")', has_times)[0] if run is None else Path(run)
    folder = newest_trial(folder, _say_nothing, "why")
    told = {"run": str(folder), **explain(records.counted(records.read(folder)))}
    unsaved = records.open_run(folder).unsaved
    if unsaved is not None:
        told["unsaved"] = {"since": unsaved[0], "why": unsaved[1]}
    return Why(told)


def _say_nothing(text: str) -> None:
    """Leave it to the result to say which run was taken."""


def write(run: Path, output: Path | None = None) -> list[Path]:
    """Write the report of a folder's run or search; return its file first.

    Where a folder holds both, the search has a page of its own beside the run's.
    """
    path = _write(run, output)
    sweep = records.open_sweep(run) if output is None and records.is_run(run) else None
    if sweep is None:
        return [path]
    beside = run / "sweep.html"
    _replace(beside, _of_trials(sweep, beside))
    return [path, beside]


def _write(run: Path, output: Path | None) -> Path:
    """Write a page in one piece; return where it is."""
    # A pipe is written to where somebody names one.
    path = as_file(run / "report.html") if output is None else output
    sweep = search_in(run)
    text = page(open_run(run), _defaults()) if sweep is None else _of_trials(sweep, path)
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


def _of_trials(sweep: Sweep, path: Path) -> str:
    """Return the page of a search, which links to a report of each trial that has a record."""
    links, states = {}, {}
    for trial in sweep.recorded():
        own = _write(trial.folder, None).resolve()
        links[trial.number] = quote(Path(os.path.relpath(own, path.resolve().parent)).as_posix())
        states[trial.number] = open_run(trial.folder).state
    return sweep_page.build(sweep, links, states)


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
    from anytrain.doors.training_args.accelerator_config import AcceleratorConfig

    found: dict[str, Any] = {}
    for field in fields(TrainingArguments):
        if field.default is not MISSING:
            found[field.name] = getattr(field.default, "value", field.default)
        elif field.default_factory is not MISSING:
            found[field.name] = field.default_factory()
    return {**found, "accelerator_config": AcceleratorConfig().to_dict()}
