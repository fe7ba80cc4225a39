"""Record a run as a table with one row a log; needs no library."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from anytrain.core.documents import as_file
from anytrain.engine.recording.trackers.files import (
    append,
    is_after,
    replace,
    store_config,
    to_json,
)
from anytrain.engine.recording.trackers.general import GeneralTracker
from anytrain.engine.recording.trackers.values import flatten, read


class CSVTracker(GeneralTracker):
    """Write `metrics.csv` and `config.json` into `logging_dir/run_name`.

    The first columns are `_step` and `_timestamp` (seconds since 1970). A name that is logged for
    the first time becomes a new column, empty in the rows above. A run that is started again goes
    on at the end of the file; one that goes on from an earlier step takes back what was written
    after that.
    """

    name = "csv"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str]) -> None:
        super().__init__()
        self.run_name = run_name
        self.path = Path(logging_dir) / run_name / "metrics.csv"
        self._columns: list[str] = []
        self._goes_on_at: int | None = None

    @property
    def tracker(self) -> Path:
        """The file that is written."""
        return self.path

    def go_on(self, run: str, step: int) -> None:
        """Take back what an earlier life of the run wrote after that step: it comes again."""
        self._goes_on_at = step

    def kept_as(self) -> str | None:
        """Return the folder's name."""
        return self.run_name

    def start(self) -> None:
        """Make the folder and the file, or take up the columns of the one that is there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        self._columns, rows = _read(self.path)
        last = self._goes_on_at
        if last is not None and "_step" in self._columns:
            place = self._columns.index("_step")
            known = [row for row in rows if not is_after("".join(row[place : place + 1]), last)]
            if len(known) < len(rows):
                self._rewrite(known)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the run's settings as `config.json`."""
        store_config(self.path.parent, values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add a row, and columns where a name is new."""
        row = {"_step": step, "_timestamp": time.time(), **flatten(read(values))}
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
