"""The trackers by name, which of them a run uses, and the ones that are running.

INVARIANT: a tracker that fails while the run goes on never stops it, and no tracker changes the
random numbers that the run draws.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from anytrain.core import documents, environment
from anytrain.core.documents import as_file
from anytrain.core.errors import AnytrainError, BadInput, BadType, Unsupported
from anytrain.core.nearest import unknown
from anytrain.core.notices import give_notice
from anytrain.engine.recording.disk import replace, to_json
from anytrain.engine.recording.trackers.files import CSVTracker, JSONLTracker
from anytrain.engine.recording.trackers.general import (
    GeneralTracker,
    as_numbers,
    check_config,
    check_members,
    is_installed,
    not_installed,
)
from anytrain.engine.recording.trackers.mlflow import MLflowTracker
from anytrain.engine.recording.trackers.tensorboard import TensorBoardTracker
from anytrain.engine.recording.trackers.trackio import TrackioTracker
from anytrain.engine.recording.trackers.wandb import WandBTracker

Folder = str | os.PathLike[str]

REFUSED = ("aim", "comet_ml", "clearml", "dvclive", "swanlab")
FAILURES_IN_A_ROW = 3
SLOW_S = 5.0
"""From when on a log is told to be slow: the training waits for it."""

TABLE: dict[str, type[GeneralTracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandBTracker,
    "mlflow": MLflowTracker,
    "trackio": TrackioTracker,
    "jsonl": JSONLTracker,
    "csv": CSVTracker,
}
_LIBRARIES = ("tensorboard", "wandb", "mlflow", "trackio")
_OURS = frozenset(TABLE.values())
_REMEMBERED = "trackers.json"
"""Which run of each tracker a training logged to, so that its resume goes on there."""


def available() -> list[str]:
    """Return the names that can be logged with here: their libraries are installed."""
    return [name for name in TABLE if name not in _LIBRARIES or is_installed(name)]


def register(tracker_class: type[GeneralTracker]) -> None:
    """Let a user's tracker class be chosen by its name.

    It is built with the project's name, then the logging folder if it requires one, then what
    `init_kwargs` holds under its name.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise BadType(
            f"Cannot register {tracker_class!r} as a tracker.",
            why="only a class made from GeneralTracker can be chosen by name.",
            fix="pass the class itself, not an instance, and let it inherit GeneralTracker.",
        )
    name = getattr(tracker_class, "name", None)
    needs_folder = getattr(tracker_class, "requires_logging_directory", None)
    if not isinstance(name, str) or not name or not isinstance(needs_folder, bool):
        raise BadInput(
            f"Cannot register {tracker_class.__name__} as a tracker.",
            why="its `name` and `requires_logging_directory` must be known before it is built.",
            fix=f"set both as attributes of the class {tracker_class.__name__}.",
        )
    TABLE[name] = tracker_class


def resolve(log_with: object, logging_dir: Folder | None) -> list[str | GeneralTracker]:
    """Return the trackers that `log_with` means, each once, or refuse it.

    It may be None, a name, "all" for every installed library's tracker, an enum member whose
    value is a name, a GeneralTracker, or a list of these.
    """
    chosen: list[str | GeneralTracker] = []
    for item in _items(log_with):
        for tracker in _meaning(item, logging_dir):
            if tracker not in chosen:
                chosen.append(tracker)
    return chosen


def _items(log_with: object) -> list[object]:
    if log_with is None:
        return []
    return list(log_with) if isinstance(log_with, list | tuple | set) else [log_with]


def _meaning(item: object, logging_dir: Folder | None) -> list[str | GeneralTracker]:
    if isinstance(item, GeneralTracker):
        check_members(item)
        return [item]
    name = getattr(item, "value", item)
    if not isinstance(name, str):
        raise BadType(
            f"Cannot log with {item!r}.",
            why="a tracker is chosen by its name, or is an instance of a GeneralTracker subclass.",
            fix=f"pass one of {_listed(TABLE)}, or an instance of your own GeneralTracker.",
        )
    names = _every_library() if name == "all" else [name]
    for one in names:
        _check(one, logging_dir)
    return list(names)


def _every_library() -> list[str]:
    names = [name for name in available() if name in _LIBRARIES]
    if not names:
        raise not_installed("all", f"none of {_listed(_LIBRARIES)} is installed")
    absent = [name for name in _LIBRARIES if name not in names]
    if absent and environment.read().place.rank == 0:
        message = f"'all' means {_listed(names)} here: {_listed(absent)} cannot be imported."
        give_notice(message, stacklevel=4)
    return names


def _check(name: str, logging_dir: Folder | None) -> None:
    if name in TABLE:
        if name in _LIBRARIES and not is_installed(name):
            raise not_installed(name, f"the library {name!r} is not installed")
        if logging_dir is None and _needs_folder(TABLE[name]):
            raise BadInput(
                f"Logging with `{name}` requires a `logging_dir`.",
                why="it writes files, and no folder was given for them.",
                fix="pass project_dir=..., or logging_dir=... in ProjectConfiguration.",
            )
    elif name in REFUSED:
        raise Unsupported(
            f"Cannot log with {name!r}.",
            why="anytrain has no tracker for it: it ships only those that its tests run.",
            fix='use "tensorboard", "wandb", "mlflow" or "trackio", or pass an instance of your '
            "own GeneralTracker subclass.",
        )
    else:
        fix = "pass one of them, or an instance of your own GeneralTracker subclass."
        raise unknown("tracker", name, (*TABLE, "all"), fix=fix)


def _needs_folder(kind: type[GeneralTracker]) -> bool:
    return bool(getattr(kind, "requires_logging_directory", False))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


@dataclass(slots=True)
class _Running:
    name: str
    tracker: GeneralTracker
    failures: int = 0
    reported: bool = False
    is_slow: bool = False
    off: bool = False


class Trackers:
    """The trackers of one run: start them, log to all, finish.

    On other ranks than the main one every call does nothing. `run_folder` is where the run keeps
    its own record, which no tracker may write into.
    """

    def __init__(
        self,
        chosen: Sequence[str | GeneralTracker] = (),
        logging_dir: Folder | None = None,
        *,
        is_main: bool = True,
        run_folder: Folder | None = None,
    ) -> None:
        self._chosen = list(chosen) if is_main else []
        self._run_folder = run_folder
        self._logging_dir = logging_dir
        self._running: list[_Running] = []
        self._has_started = False
        self._absent: set[str] = set()
        self._idle_reported = False

    def __iter__(self) -> Iterator[GeneralTracker]:
        return iter([running.tracker for running in self._running])

    @property
    def is_running(self) -> bool:
        """Whether trackers were started and not finished, even if none of them came up."""
        return self._has_started

    def start(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        goes_on_at: int | None = None,
    ) -> None:
        """Start every chosen tracker and store the config; a run still open is finished first.

        A wish that cannot be met is refused, and nothing stays half started: an absent library,
        an option that does not exist. A tracker that fails to start is told of and left out.

        A tracker that writes files does so in a folder of the project's name below the logging
        folder; its option `folder` is another name.

        With `goes_on_at` the trackers' runs are remembered in the logging folder, and a step
        above 0 takes up the ones that are remembered there.
        """
        if config is not None:
            check_config(config)
        options = init_kwargs or {}
        self._check_options(options)
        self._check_folder(project_name, options)
        self.finish()
        known = {}
        if goes_on_at and self._logging_dir is not None:
            known = _read_runs(self._logging_dir, project_name)
        self._has_started = bool(self._chosen)
        with _generators_kept():
            for item in self._chosen:
                self._start_one(item, project_name, config, options, (known, goes_on_at or 0))
            if goes_on_at is not None:
                self._remember(project_name)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log to every tracker; one that fails is reported, and the run goes on."""
        if not self._has_started:
            self._report_idle()
            return
        options = log_kwargs or {}
        # Read outside of the guard: an error of the device is the run's, not a tracker's.
        plain = as_numbers(values) if any(type(t) in _OURS for t in self) else {}
        with _generators_kept():
            for running in self._running:
                if running.off:
                    continue
                # A user's tracker gets what was logged, tensors and all, as it would elsewhere.
                given = plain if type(running.tracker) in _OURS else dict(values)
                extra = options.get(running.name, {})
                began = perf_counter()
                self._attempt(running, running.tracker.log, given, step=step, **extra)
                self._report_slow(running, perf_counter() - began)

    def get(self, name: str, unwrap: bool = False) -> Any:
        """Return a started tracker, or with `unwrap` its library's object.

        Where nothing is tracked, on another rank for one or by a tracker that failed to start, it
        is a tracker that records nothing.
        """
        if not self._running or name in self._absent:
            return GeneralTracker(_blank=True)
        for tracker in self:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        raise BadInput(
            f"No tracker {name!r} has been started.",
            why=f"this run logs with {_listed(tracker.name for tracker in self)}.",
            fix=f"add {name!r} to log_with, or ask for one of those.",
        )

    def finish(self) -> None:
        """Close every tracker, those that were switched off too; failures are reported."""
        ending, self._running = self._running, []
        self._has_started, self._absent = False, set()
        with _generators_kept():
            for running in ending:
                self._attempt(running, running.tracker.finish)

    def _start_one(
        self,
        item: str | GeneralTracker,
        project_name: str,
        config: Mapping[str, Any] | None,
        options: Mapping[str, Mapping[str, Any]],
        goes_on: tuple[Mapping[str, str], int],
    ) -> None:
        name = item if isinstance(item, str) else item.name
        given = options.get(name, {})
        known, step = goes_on
        try:
            tracker = self._build(item, project_name, given) if isinstance(item, str) else item
            if name in known:
                tracker.go_on(known[name], step)
            tracker.start()
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, the run goes on
            self._cannot_start(name, error, has_options=bool(given))
            return
        running = _Running(name, tracker)
        self._running.append(running)
        if config is not None:
            self._attempt(running, tracker.store_init_configuration, dict(config))

    def _build(self, name: str, project_name: str, options: Mapping[str, Any]) -> GeneralTracker:
        kind: Callable[..., GeneralTracker] = TABLE[name]
        if _needs_folder(TABLE[name]):
            rest = {key: value for key, value in options.items() if key != "folder"}
            return kind(options.get("folder", project_name), self._logging_dir, **rest)
        return kind(project_name, **options)

    def _cannot_start(self, name: str, error: Exception, has_options: bool) -> None:
        """Refuse a wish that cannot be met; tell of a tracker that failed, and go on without."""
        if isinstance(error, AnytrainError):
            self.finish()
            raise error
        # A call that does not fit is the mistake of whoever passed options to it.
        if has_options and isinstance(error, TypeError):
            self.finish()
            raise _bad_option(name, error) from error
        self._absent.add(name)
        message = (
            f"The tracker {name!r} cannot start, and the run goes on without it: "
            f"{type(error).__name__}: {error}"
        )
        give_notice(message, stacklevel=5)

    def _remember(self, project_name: str) -> None:
        """Keep the trackers' runs in the logging folder, where there is one."""
        if self._logging_dir is None:
            return
        try:
            found = {running.name: running.tracker.kept_as() for running in self._running}
            runs = {name: run for name, run in found.items() if run is not None}
            if runs:
                _write_runs(self._logging_dir, project_name, runs)
        except Exception as error:  # noqa: BLE001 - see above
            message = (
                "Cannot remember which runs the trackers log to, so a resumed run begins new "
                f"ones: {type(error).__name__}: {error}"
            )
            give_notice(message, stacklevel=3)

    def _check_options(self, options: Mapping[str, Any]) -> None:
        own = [item.name for item in self._chosen if isinstance(item, GeneralTracker)]
        unknown = [name for name in options if name not in (*TABLE, *REFUSED, *own)]
        if unknown and self._chosen:
            raise BadInput(
                f"Cannot use init_kwargs for {_listed(unknown)}.",
                why=f"there is no such tracker; the known names are {_listed((*TABLE, *own))}.",
                fix='name the tracker, as in init_kwargs={"wandb": {"tags": ["first"]}}.',
            )

    def _check_folder(self, project: str, options: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuse files of a tracker that would lie in, or be, those of the run."""
        if self._run_folder is None or self._logging_dir is None:
            return
        for name in (name for name in ("csv", "jsonl") if name in self._chosen):
            folder = Path(self._logging_dir) / options.get(name, {}).get("folder", project)
            if folder.resolve() == Path(self._run_folder).resolve():
                raise BadInput(
                    f"Cannot log with {name!r} into {folder}.",
                    why=f"{self._run_folder} is the run's own folder: its metrics.jsonl, and the "
                    "config.json of a saved model, would be mixed with the tracker's.",
                    fix="choose another logging folder, or another name for the project.",
                )

    def _attempt(
        self, running: _Running, call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        try:
            call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, the run goes on
            running.failures += 1
            self._report(running, error)
        else:
            running.failures = 0

    def _report(self, running: _Running, error: Exception) -> None:
        who = f"The tracker {running.name!r}"
        what = f"{type(error).__name__}: {error}"
        if not running.reported:
            running.reported = True
            message = f"{who} failed and the run goes on without what it was given: {what}"
            give_notice(message, stacklevel=4)
        if running.failures == FAILURES_IN_A_ROW and not running.off:
            running.off = True
            message = f"{who} is switched off after {running.failures} failures in a row: {what}"
            give_notice(message, stacklevel=4)

    def _report_slow(self, running: _Running, seconds: float) -> None:
        if seconds > SLOW_S and not running.is_slow:
            running.is_slow = True
            message = (
                f"The tracker {running.name!r} took {seconds:.0f} s for one log, and the run "
                "waited for it: log more rarely, or look at what it waits for."
            )
            give_notice(message, stacklevel=3)

    def _report_idle(self) -> None:
        if self._chosen and not self._idle_reported:
            self._idle_reported = True
            names = _listed(t if isinstance(t, str) else t.name for t in self._chosen)
            message = f"Nothing is recorded with {names}: call init_trackers before you log."
            give_notice(message, stacklevel=3)


def _bad_option(name: str, error: TypeError) -> BadInput:
    return BadInput(
        f"Cannot start the tracker {name!r}.",
        why=f"{type(error).__name__}: {error}",
        fix=f"pass in init_kwargs[{name!r}] only what {name} itself takes.",
    )


def _read_runs(folder: str | os.PathLike[str], project: str) -> dict[str, str]:
    """Return the trackers' runs by name; none where nothing readable is kept for the project."""
    try:
        kept = documents.from_json(as_file(Path(folder) / _REMEMBERED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    runs = kept.get("runs") if isinstance(kept, dict) and kept.get("project") == project else None
    known = runs.items() if isinstance(runs, dict) else ()
    return {name: run for name, run in known if isinstance(run, str)}


def _write_runs(folder: str | os.PathLike[str], project: str, runs: Mapping[str, str]) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    replace(
        Path(folder) / _REMEMBERED, to_json({"project": project, "runs": runs}, indent=2) + "\n"
    )


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Leave the random generators of python, numpy and torch as they were before.

    A library that draws a name for its run from the generator that the training draws from would
    give another training. A device's generators are nothing that trackers draw from.
    """
    python, numpys, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpys)
        torch.set_rng_state(torchs)
