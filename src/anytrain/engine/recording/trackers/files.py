"""Record a run in a file of JSON lines or of comma-separated values; needs no library."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from anytrain.core import documents
from anytrain.core.documents import as_file
from anytrain.engine.recording.disk import append, replace, to_json
from anytrain.engine.recording.trackers.general import GeneralTracker, as_numbers, flatten, settings


class FileTracker(GeneralTracker):
    """Writes a file of its own and `config.json` into `logging_dir/run_name`.

    A run that is started again goes on at the end of the file; one that goes on from an earlier
    step takes back what was written after that: it comes again.
    """

    file_name: str
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str]) -> None:
        super().__init__()
        self.run_name = run_name
        self.path = Path(logging_dir) / run_name / self.file_name
        self._goes_on_at: int | None = None

    @property
    def tracker(self) -> Path:
        return self.path

    def go_on(self, run: str, step: int) -> None:
        """Take back what an earlier life of the run wrote after that step."""
        self._goes_on_at = step

    def kept_as(self) -> str | None:
        return self.run_name

    def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        replace(self.path.parent / "config.json", to_json(settings(values), indent=2) + "\n")


class JSONLTracker(FileTracker):
    """Write `metrics.jsonl`: each line holds `_step`, `_timestamp` (seconds since 1970) and values.

    It lies in `logging_dir/run_name`, beside `config.json`.
    """

    name = "jsonl"
    file_name = "metrics.jsonl"

    def start(self) -> None:
        """Make the file, or take back its lines after the step that the run goes on from."""
        super().start()
        if self._goes_on_at is not None:
            # Not splitlines(): JSON may hold other characters that it takes for an end.
            lines = as_file(self.path).read_text(encoding="utf-8").split("\n")
            known = [line for line in lines if not is_after(_step(line), self._goes_on_at)]
            if len(known) < len(lines):
                replace(self.path, "\n".join(known))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        append(self.path, to_json({"_step": step, "_timestamp": time.time(), **as_numbers(values)}))


class CSVTracker(FileTracker):
    """Write `metrics.csv`, a table with one row a log, into `logging_dir/run_name`.

    The first columns are `_step` and `_timestamp` (seconds since 1970). A name that is logged for
    the first time becomes a new column, empty in the rows above.
    """

    name = "csv"
    file_name = "metrics.csv"

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str]) -> None:
        super().__init__(run_name, logging_dir)
        self._columns: list[str] = []

    def start(self) -> None:
        """Make the file, or take up the columns of the one that is there."""
        super().start()
        self._columns, rows = _read(self.path)
        last = self._goes_on_at
        if last is not None and "_step" in self._columns:
            place = self._columns.index("_step")
            known = [row for row in rows if not is_after("".join(row[place : place + 1]), last)]
            if len(known) < len(rows):
                self._rewrite(known)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add a row, and columns where a name is new."""
        row = {"_step": step, "_timestamp": time.time(), **flatten(as_numbers(values))}
        new = [name for name in row if name not in self._columns]
        if new:
            self._widen([*self._columns, *new])
        append(self.path, _line(_cell(row.get(name)) for name in self._columns))

    def _widen(self, columns: list[str]) -> None:
        _, rows = _read(self.path)
        self._columns = columns
        self._rewrite([row + [""] * (len(columns) - len(row)) for row in rows])

    def _rewrite(self, rows: Iterable[list[str]]) -> None:
        replace(self.path, "".join(f"{_line(row)}\n" for row in [self._columns, *rows]))


def is_after(step: object, last: int) -> bool:
    """Whether what was logged at a step, as a number or its text, came after the last one.

    >>> is_after(11, 10), is_after("11", 10), is_after(None, 10)
    (True, True, False)
    """
    try:
        return int(step) > last  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError):  # logged without a step
        return False


def _step(line: str) -> object:
    try:
        found = documents.from_json(line)
    except ValueError:  # torn
        return None
    return found.get("_step") if isinstance(found, dict) else None


def _read(path: Path) -> tuple[list[str], list[list[str]]]:
    with as_file(path).open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    return (rows[0], rows[1:]) if rows else ([], [])


def _line(cells: Iterable[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    return to_json({"": value})[len('{"": ') : -1]
