"""All that a run has written down about itself, read from its folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from anytrain.core.records.history import add_entries, parts
from anytrain.core.records.life import TIMESHEET, Life, add_lines, no_record, number, standing
from anytrain.core.records.lines import Appended, Replaced

RUN = "run.json"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
EVALUATION = "evaluation.json"
FORMAT = 1
"""Of run.json and the evaluations. A later one may add names, and keeps what these mean."""


def evaluation_name(split: str | None = None) -> str:
    """Return the file of an evaluation: of the only evaluation set, or of one among several."""
    return EVALUATION if split is None else f"evaluation-{split}.json"


def open_run(folder: str | os.PathLike[str]) -> RunRecord:
    """Return the record of the run in a folder; refuse a folder that holds none."""
    return RunRecord(folder)


def is_run(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds the record of a run."""
    return any(_files(Path(folder)))


class RunRecord:
    """The record of one run, as it was when it was last looked at."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.lives: list[Life] = []
        """Its starts and what became of them, the oldest first; from the timesheet."""
        self.metrics: list[dict[str, Any]] = []
        """Every log entry that counts, in order: what a kill made a later life repeat is once."""
        self.apart: list[dict[str, Any]] = []
        """Evaluations after a training that are no points of its curves; `of` names the weights."""
        self.events: list[dict[str, Any]] = []
        """Notices, checkpoints and the like; the same notice is one event, with a `count`."""
        self.evaluations: dict[str, dict[str, Any]] = {}
        """What the last evaluation of each set found, by the set's name."""
        self.record: dict[str, Any] = {}
        """The whole of run.json."""
        self._run = Replaced(self.folder / RUN)
        self._sheet = Appended(self.folder / TIMESHEET)
        self._log = Appended(self.folder / METRICS)
        self._told = Appended(self.folder / EVENTS)
        self._evaluated: dict[str, Replaced] = {}
        self._history: list[dict[str, Any]] = []
        if not any(_files(self.folder)):
            raise no_record(folder, f"it holds neither {TIMESHEET} nor {METRICS} nor {RUN}")
        self.refresh()

    def refresh(self) -> bool:
        """Read what was written since the last time; return whether there was anything."""
        looks = (self._look_at_run, self._read_sheet, self._read_log, self._read_events)
        changed = [look() for look in looks]
        return any([*changed, self._look_at_evaluations(is_due=changed[0])])

    @property
    def name(self) -> str:
        """What the run is called; its folder's name where nobody named it."""
        name = self.record.get("name")
        return name if isinstance(name, str) and name else self.folder.resolve().name

    @property
    def starts(self) -> list[dict[str, Any]]:
        """What was known each time the run was started, the newest last; from run.json."""
        found = self.record.get("starts")
        return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []

    @property
    def state(self) -> str:
        """How the run stands now: "running", or how it ended (see `Life.state`)."""
        start = self.starts[-1] if self.starts else None
        life = self.lives[-1] if self.lives else None
        if life is not None and not (start and _time(start) > (life.heard or 0.0)):
            return life.state
        if start is not None and "ended" in start:
            return "ended"
        return "unknown" if start is None else standing(start)

    def _look_at_run(self) -> bool:
        has_changed = self._run.look()
        if has_changed and self._run.value:  # a damaged one tells less than what was known
            self.record = self._run.value
        return has_changed

    def _read_sheet(self) -> bool:
        is_other, entries = self._sheet.new()
        if is_other:
            self.lives.clear()
        add_lines(self.lives, entries)
        return is_other or bool(entries)

    def _read_log(self) -> bool:
        is_other, entries = self._log.new()
        if is_other:
            self._history.clear()
        add_entries(self._history, entries)
        if is_other or entries:
            self.metrics[:], self.apart[:] = parts(self._history)
        return is_other or bool(entries)

    def _read_events(self) -> bool:
        is_other, entries = self._told.new()
        if is_other:
            self.events.clear()
        for entry in entries:
            if entry.get("event") == "begin":  # a fresh start: what came before is another run's
                since = number(entry.get("since"))
                self.events[:] = [] if since is None else _later(self.events, since)
            else:
                _add_event(self.events, entry)
        return is_other or bool(entries)

    def _look_at_evaluations(self, *, is_due: bool) -> bool:
        for path in sorted(self.folder.glob("evaluation-*.json")) + [self.folder / EVALUATION]:
            self._evaluated.setdefault(path.name, Replaced(path))
        looked = [file.look() for file in self._evaluated.values()]  # at each of them
        has_changed = any(looked)
        if has_changed or is_due:
            since = self._since()
            found = {name: file.value for name, file in self._evaluated.items() if file.value}
            self.evaluations = {
                _split(name, value): value
                for name, value in found.items()
                if _time(value, since) >= since
            }
        return has_changed

    def _since(self) -> float:
        """Return when the run began that is here now; another one's files are older."""
        fresh = [start for start in self.starts if start.get("step") == 0]
        return _time({"time": fresh[-1].get("since")}) if fresh else 0.0


def _files(folder: Path) -> list[Path]:
    named = [folder / name for name in (TIMESHEET, METRICS, RUN, EVENTS, EVALUATION)]
    return [path for path in (*named, *folder.glob("evaluation-*.json")) if path.exists()]


def _later(events: list[dict[str, Any]], since: float) -> list[dict[str, Any]]:
    return [event for event in events if _time(event) >= since]


def _add_event(events: list[dict[str, Any]], entry: dict[str, Any]) -> None:
    """Add an event; one that is told again with its count is the same one."""
    if entry.get("kind") == "notice" and "count" in entry:
        for known in reversed(events):
            if known.get("kind") == "notice" and known.get("text") == entry.get("text"):
                known["count"] = entry["count"]
                return
    events.append(entry)


def _split(name: str, value: dict[str, Any]) -> str:
    """Return the name of the set that an evaluation was on."""
    told = value.get("split")
    if isinstance(told, str) and told:
        return told
    return "eval" if name == EVALUATION else name.removeprefix("evaluation-").removesuffix(".json")


def _time(entry: dict[str, Any], otherwise: float = 0.0) -> float:
    found = number(entry.get("time"))
    return otherwise if found is None else found
