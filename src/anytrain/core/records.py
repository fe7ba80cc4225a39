"""The record that a run keeps of itself in its folder: what is in it, and how it is read back.

`open_run(folder)` gives all of it; `read(folder)` the lives alone; `open_sweep(folder)` the trials
of a search. Every file may be missing, cut off in its last line by a kill, or of an older version:
reading tells what is there.

`timesheet.jsonl` holds one JSON object a line, appended, so that a killed run has a record too. A
"begin" line opens each life, one for each time that the run was started: its plan and settings.
"time" lines follow, each with all seconds of that life so far; an "end" line is the last one of a
life that was not killed. A "failed" line is another rank's: it says which error ended it, where the
main rank may never come to say so.

`metrics.jsonl` is a log that several lives have appended to. Each begins with a marker
`{"step": N, "event": "begin", "prelude": P}`: it goes on from step N, so what earlier lives wrote
beyond N never happened to it. From step 0 nothing earlier counts. The last P entries before the
marker are its own: figures of the model before training. A loop of the user's own logs at steps of
its own counting, such as batches. The losses that are taken from its `backward` are at updates, and
a life that goes on says for each kind from where: `{"step": N, "event": "begin", "of": "log"}`, or
"backward".
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anytrain.core.documents import (
    Appended,
    Replaced,
    as_file,
    finite,
    listed,
    mapping,
    mappings,
    whole,
    with_floats,
)
from anytrain.core.errors import BadInput

RUN = "run.json"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
EVALUATION = "evaluation.json"
TIMESHEET = "timesheet.jsonl"
SWEEP = "sweep.json"
FORMAT = 1
"""Of run.json and the evaluations. A later one may add names, and keeps what these mean."""
ASIDE = "evaluation"
"""The event of an entry that a later process has added: it belongs to no step."""
BACKWARD = "backward"
"""The event of a loss that was taken from `backward`, and of which markers are of these."""
LOADED = "loaded"
"""The event of an evaluation after the training, of weights that were loaded: those `of` names."""
LOGGED = "log"
"""What markers are of that are of all other entries."""


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
        return mappings(self.record.get("starts"))

    @property
    def start(self) -> dict[str, Any]:
        """What was known at the newest start; nothing where none is recorded."""
        return self.starts[-1] if self.starts else {}

    @property
    def life(self) -> Life:
        """The newest life; an empty one where there is none yet."""
        return self.lives[-1] if self.lives else Life({})

    @property
    def counted_lives(self) -> list[Life]:
        """The lives that the run's history is made of."""
        return counted(self.lives)

    @property
    def total(self) -> Life:
        """All these lives as if they were one."""
        return together(self.counted_lives) if self.lives else Life({})

    @property
    def state(self) -> str:
        """How the run stands now: "running", or how it ended (see `Life.state`)."""
        start = self.start
        if self.lives and not (start and _time(start) > (self.life.heard or 0.0)):
            return self.life.state
        if "ended" in start:
            return "ended"
        return standing(start) if self.starts else "unknown"

    @property
    def unsaved(self) -> tuple[str, str] | None:
        """Since when nothing that was learnt is in a checkpoint, and why; None: the end is saved.

        Known where the last save failed.
        """
        began = _time(self.start)
        for event in reversed(self.events):
            if event.get("kind") in ("unsaved", "checkpoint") and _time(event) >= began:
                is_it = event["kind"] == "unsaved"
                return (str(event.get("since", "")), str(event.get("why", ""))) if is_it else None
        return None

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
                since = finite(entry.get("since"))
                kept = [] if since is None else [e for e in self.events if _time(e) >= since]
                self.events[:] = kept
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
    found = finite(entry.get("time"))
    return otherwise if found is None else found


# -- the lives: where the time of each start went -------------------------------------------------


@dataclass(slots=True)
class Life:
    """One life of a run, from its start to its end or its kill."""

    began: dict[str, Any]
    """What was known at its begin: plan, settings, first step, process."""
    last: dict[str, Any] = field(default_factory=dict)
    """What its newest line says: step, seconds by name, memory, shapes."""
    revisions: list[dict[str, Any]] = field(default_factory=list)
    """The choices of the plan that moved, in their order."""
    times: list[dict[str, Any]] = field(default_factory=list)
    """All that was written after its begin, the oldest first."""
    failure: dict[str, Any] = field(default_factory=dict)
    """What another rank than the main one said of its failure, the first that did."""

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time by name."""
        found = mapping(self.last.get("seconds"))
        return {name: known for name, s in found.items() if (known := finite(s)) is not None}

    @property
    def end_step(self) -> int:
        """The step that it is known to have come to."""
        last = whole(self.last.get("step"))
        return self._first_step if last is None else last

    @property
    def num_steps(self) -> int:
        """Optimizer steps of this life."""
        return self.end_step - self._first_step

    @property
    def _first_step(self) -> int:
        return whole(self.began.get("step")) or 0

    def passed(self, name: str) -> float:
        """Return how much a clock that its lines tell went on in it; 0 where they do not."""
        first, last = finite(self.began.get(name)), finite(self.last.get(name))
        return 0.0 if first is None or last is None else last - first

    @property
    def state(self) -> str:
        """How it stands: "running", or how it ended.

        "finished", "failed", "stopped" (by a signal or a key), "ended" (with its process, which
        never said how), "killed", or "unknown": only the host that it runs on can tell whether a
        run that has not ended is still there.
        """
        found = str(self.last["how"]) if "how" in self.last else standing(self.began)
        return "failed" if self.failure and found not in ("finished", "running") else found

    @property
    def error(self) -> str | None:
        """By which error it failed, where that is known; with the rank that it was raised on."""
        if isinstance(told := self.failure.get("error"), str):
            return f"rank {whole(self.failure.get('rank')) or 0}: {told}"
        own = self.last.get("error")
        return own if isinstance(own, str) else None

    @property
    def heard(self) -> float | None:
        """When it last wrote, in seconds since the epoch; None where it does not say."""
        return finite(self.last.get("time", self.began.get("time")))

    def choice(self, name: str) -> tuple[str, str]:
        """Return the newest value of one of the plan's choices, and the reason for it."""
        found = mapping(mapping(self.began.get("plan")).get(name))
        for revision in self.revisions:
            if revision.get("choice") == name:
                found = revision
        return str(found.get("value", "")), str(found.get("because", ""))


def read(folder: str | os.PathLike[str]) -> list[Life]:
    """Return the lives of the run in a folder, the oldest first; refuse a folder without any."""
    path = Path(folder) / TIMESHEET
    if not as_file(path).exists():
        raise no_record(folder, f"it holds no {TIMESHEET}, which a run writes from its first step")
    lives: list[Life] = []
    add_lines(lives, Appended(path).new()[1])
    if not lives or not lives[-1].last:
        raise BadInput(
            f"The record in {path} says nothing yet.",
            why="no step has been taken yet, or the file is damaged.",
            fix="wait for the run's first seconds of training, or pass another folder.",
        )
    return lives


def add_lines(lives: list[Life], entries: Iterable[dict[str, Any]]) -> None:
    """Tell the lives so far what a timesheet's next lines say."""
    for entry in entries:
        if entry.get("kind") == "begin":
            lives.append(Life(entry))
        elif lives and entry.get("kind") == "failed":
            lives[-1].failure = lives[-1].failure or entry
        elif lives:
            lives[-1].revisions.extend(mappings(entry.pop("revisions", [])))
            lives[-1].last = entry
            lives[-1].times.append(entry)


def counted(lives: Sequence[Life]) -> list[Life]:
    """Return the lives that a run's history is made of: the newest, and those it goes on from.

    A life that began at step 0 makes all before it another story.
    """
    fresh = [n for n, life in enumerate(lives) if not finite(life.began.get("step"))]
    return list(lives[fresh[-1] if fresh else 0 :])


def together(lives: Sequence[Life]) -> Life:
    """Return lives of one run as if they were one: what adds up added, all else the newest's."""
    newest = lives[-1]
    if len(lives) == 1:
        return newest
    seconds: dict[str, float] = {}
    for life in lives:
        for name, spent in life.seconds.items():
            seconds[name] = seconds.get(name, 0.0) + spent
    last = {**newest.last, "seconds": seconds}
    began = {**newest.began, "step": newest.end_step - sum(life.num_steps for life in lives)}
    for name in ("time", "cpu_seconds"):
        if (end := finite(last.get(name))) is not None:
            began[name] = end - sum(life.passed(name) for life in lives)
    hidden = [finite(life.last.get("hidden")) or 0.0 for life in lives]
    peaks = [finite(life.last.get("peak_bytes")) for life in lives]
    shapes = [shape for life in lives for shape in listed(life.last.get("shapes"))]
    last |= {
        "hidden": sum(hidden),
        "peak_bytes": max((peak for peak in peaks if peak is not None), default=None),
        "shapes": list(dict.fromkeys(map(str, shapes))) or newest.last.get("shapes"),
    }
    return Life(began, last, [moved for life in lives for moved in life.revisions])


def no_record(folder: str | os.PathLike[str], lacks: str) -> BadInput:
    """Return the refusal of a folder that holds no record."""
    path = Path(folder)
    other = f"{path} is a file" if path.is_file() else f"there is no such folder: {path}"
    return BadInput(
        f"There is no record of a run in {path}.",
        why=f"{lacks if path.is_dir() else other}.",
        fix="pass the output_dir of a Trainer or of `anytrain glue`, or the project_dir of an "
        "Accelerator.",
    )


def standing(began: dict[str, Any]) -> str:
    """Return whether the process that wrote this is "running" or "killed"; "unknown" elsewhere."""
    here = socket.gethostname()
    if began.get("host", here) != here:
        return "unknown"
    return "running" if _is_alive(began) else "killed"


def _is_alive(began: dict[str, Any]) -> bool:
    """Whether the process of this host that wrote this is still there."""
    import psutil

    try:
        process = psutil.Process(int(began.get("pid", -1)))
        if process.status() == psutil.STATUS_ZOMBIE:  # dead, and its parent has not looked yet
            return False
        return process.create_time() <= float(began.get("time", 0.0))
    except (psutil.Error, ValueError, TypeError, OverflowError):
        return False


# -- the log: one history of all lives ------------------------------------------------------------


def add_entries(history: list[dict[str, Any]], entries: Iterable[dict[str, Any]]) -> bool:
    """Add a log's next lines to the history so far; return whether some of it was dropped."""
    has_dropped = False
    for entry in entries:
        if entry.get("event") == "begin":
            has_dropped |= _begin(history, entry)
        else:
            history.append(with_floats(entry))
    return has_dropped


def step_of(entry: dict[str, Any]) -> float | None:
    """Return the step that an entry was written at; None where it does not say."""
    step = entry.get("step")
    return step if isinstance(step, int | float) and not isinstance(step, bool) else None


def parts(history: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the history as it is shown, and the evaluations that stand apart from it.

    Where the user logs a loss, that is the curve. Apart is what a step's own evaluation must not
    be replaced by: one of loaded weights, or another of the same step once the training is over.
    """
    apart = _apart(history)
    left = {id(entry) for entry in apart}
    shown = [e for e in history if e.get("event") != ASIDE and id(e) not in left]
    logged = [entry for entry in shown if not is_unasked(entry)]
    return logged if any("loss" in entry for entry in logged) else shown, apart


def _apart(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    end: float | None = None
    known: set[str] = set()
    for place, entry in enumerate(history):
        if entry.get("event") == LOADED:
            found.append(entry)
        elif "train_runtime" in entry:
            end, known = step_of(entry), _evaluated_before(history, place)
        elif end is not None and step_of(entry) == end and (timed := _timed(entry)):
            if timed <= known:
                found.append(entry)
            known |= timed
    return found


def _evaluated_before(history: list[dict[str, Any]], end: int) -> set[str]:
    """Return what was evaluated at the last step of a training, by the names of its times."""
    step, known = step_of(history[end]), set[str]()
    for entry in reversed(history[:end]):
        if step_of(entry) != step:
            break
        known |= _timed(entry)
    return known


def _timed(entry: dict[str, Any]) -> set[str]:
    return {name for name in entry if name.endswith("_runtime")}


def is_unasked(entry: dict[str, Any]) -> bool:
    """Whether it is a loss that was taken from `backward`: its step is an update."""
    return entry.get("event") == BACKWARD


def _begin(history: list[dict[str, Any]], marker: dict[str, Any]) -> bool:
    first, prelude, of = step_of(marker) or 0, marker.get("prelude", 0), marker.get("of")
    concerned = [entry for entry in history if of is None or is_unasked(entry) == (of == BACKWARD)]
    num_own = min(prelude, len(concerned)) if isinstance(prelude, int) and prelude > 0 else 0
    earlier, own = concerned[: len(concerned) - num_own], concerned[len(concerned) - num_own :]
    kept = _up_to(earlier, first) if first > 0 else []
    left = {id(entry) for entry in concerned} - {id(entry) for entry in [*kept, *own]}
    taken = {id(entry): _taken(entry, first) for entry in own}
    history[:] = [taken.get(id(entry), entry) for entry in history if id(entry) not in left]
    return bool(left)


def _taken(entry: dict[str, Any], step: float) -> dict[str, Any]:
    """Return an entry that stood aside as one of the history."""
    if entry.get("event") != ASIDE:
        return entry
    return {**{name: value for name, value in entry.items() if name != "event"}, "step": step}


def _up_to(earlier: list[dict[str, Any]], last: float) -> list[dict[str, Any]]:
    """Return the entries up to a step; one without a step is at the step of the one before it."""
    kept, at = [], 0.0
    for entry in earlier:
        step = step_of(entry)
        at = at if step is None else step
        if at <= last:
            kept.append(entry)
    return kept


# -- a search: its trials -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trial:
    """One training of a search."""

    number: int
    folder: Path
    """Its own, with the record of its run."""
    state: str
    """complete, pruned, failed; running where it has not said how it ended."""
    parameters: Mapping[str, Any]
    objectives: tuple[float, ...]
    """What it is compared by; of one that was given up, how it stood."""

    @property
    def is_complete(self) -> bool:
        return self.state == "complete" and all(map(math.isfinite, self.objectives or (math.nan,)))


@dataclass(frozen=True, slots=True)
class Sweep:
    """A search: its folder, and the trials in the order in which they were begun."""

    folder: Path
    directions: tuple[str, ...]
    """minimize or maximize, for each objective."""
    trials: tuple[Trial, ...]

    def ranked(self) -> list[Trial]:
        """Return the trials, the best by the first objective first, and then the rest."""
        sign = -1.0 if self.directions[0] == "maximize" else 1.0
        counted = [trial for trial in self.trials if trial.is_complete]
        rest = [trial for trial in self.trials if not trial.is_complete]
        return sorted(counted, key=lambda trial: sign * trial.objectives[0]) + rest

    @property
    def best(self) -> Trial | None:
        """The best trial; None where there are several objectives, or nothing to compare."""
        first = self.ranked()[:1] if len(self.directions) == 1 else []
        return first[0] if first and first[0].is_complete else None

    def recorded(self) -> list[Trial]:
        """Return the trials whose folder holds the record of a run."""
        return [trial for trial in self.trials if is_run(trial.folder)]


def open_sweep(folder: str | os.PathLike[str]) -> Sweep | None:
    """Return the search that a folder holds; None where it holds none."""
    file = Replaced(Path(folder) / SWEEP)
    file.look()
    entries = file.value.get("trials")
    if not isinstance(entries, list):
        return None
    directions = tuple(map(str, listed(file.value.get("directions"))))
    trials = (_trial(Path(folder), entry) for entry in entries if isinstance(entry, dict))
    return Sweep(Path(folder), directions or ("minimize",), tuple(filter(None, trials)))


def _trial(root: Path, entry: dict[str, Any]) -> Trial | None:
    which, place = finite(entry.get("number")), entry.get("folder")
    if which is None or not isinstance(place, str):
        return None
    if "\0" in place or ".." in Path(place).parts or Path(place).is_absolute():
        place = f"run-{int(which)}"  # a report is written there: nowhere but inside
    found = map(finite, listed(entry.get("objectives")))
    known = tuple(math.nan if each is None else each for each in found)
    named = mapping(entry.get("parameters"))
    return Trial(int(which), root / place, str(entry.get("state")), named, known)
