"""Tell callbacks, the history, the record and the trackers; measure time and memory."""

from __future__ import annotations

import atexit
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from anytrain.core.clock import OUTSIDE
from anytrain.core.events import EventKind
from anytrain.core.notices import give_notice
from anytrain.doors.trainer.outputs import speed_metrics
from anytrain.engine.assemble import session as sessions
from anytrain.engine.assemble.session import Session
from anytrain.engine.loop import Requests
from anytrain.engine.recording import origin
from anytrain.engine.recording.record import Record
from anytrain.engine.recording.timesheet import Timesheet
from anytrain.engine.recording.trackers import Trackers, resolve
from anytrain.engine.recording.trackers.general import as_numbers
from anytrain.insight.report.why import judge
from anytrain.machine.backends.cpu import Cpu

if TYPE_CHECKING:
    from anytrain.doors.trainer.trainer import Trainer

_PARTS = ("eval", "test")
_FILES = ("tensorboard", "csv", "jsonl")
"""Trackers that write files, each run's in a folder of its own."""
_PLAIN = (bool, int, float, str, type(None))
_left_open: set[Trackers] = set()
"""Of runs that may yet evaluate. Libraries know one run a process: a training ends the others."""
_WORTH_A_REMARK_S = 10.0
# What a remedy may have to do with.
_SETTINGS = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "eval_strategy",
    "eval_steps",
    "save_strategy",
    "save_steps",
    "async_save",
    "logging_steps",
    "push_to_hub",
)


class RunRecorder:
    """What is written down and told while a Trainer's run goes on."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.record: Record | None = None
        self.trackers: Trackers | None = None
        self.timesheet: Timesheet | None = None
        self.weights_of: str | None = None
        """The checkpoint whose weights the model holds since its training ended; None: its own."""
        self.tokens_before = 0
        """The tokens that were seen when this training began."""
        self._has_recorded_training = False
        """Whether the trackers that are open have a training already."""

    def tell(self, kind: EventKind, **extra: Any) -> Requests:
        """Tell the callbacks where the run stands; return what they ask for."""
        trainer = self._trainer
        return trainer.callback_handler.tell(kind, trainer.args, trainer.state, **extra)

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Write values down everywhere: history, journal, trackers, callbacks."""
        state = self._trainer.state
        logs["epoch"] = state.epoch
        if self._trainer.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = state.num_input_tokens_seen
            if start_time is not None:
                seen = state.num_input_tokens_seen - self.tokens_before
                logs.update(speed_metrics("train", start_time, num_tokens=seen))
        state.log_history.append(_for_history({**logs, "step": state.global_step}))
        self.open()
        if self.record is not None:
            step, epoch, of = state.global_step, state.epoch, self.weights_of
            self.record.log(step, epoch, logs, needs_training=True, of=of)
        if self.trackers is not None:
            self.trackers.log(_named_for_trackers(logs), step=state.global_step)
        self.tell("log", logs=logs)

    def begin(self) -> None:
        """Record a training: its log goes on from its step, its trackers are its own."""
        trainer = self._trainer
        if self.trackers is not None and not self._has_recorded_training:
            _left_open.discard(self.trackers)  # evaluations that came first are the run's too
        _finish_left_open()
        self.open()
        self._has_recorded_training, self.weights_of = True, None
        if self.record is not None:
            self.record.journal.begin(trainer.state.global_step)

    def begin_start(self) -> None:
        """Write down that a training starts, and what is known of it."""
        trainer = self._trainer
        self._open_record()
        trainer._between.record = self.record
        if self.record is None:
            return
        args, evaluated = trainer.args, trainer.eval_dataset
        sets = {"train": trainer.train_dataset}
        if isinstance(evaluated, dict) and trainer._parts.loaders.are_several(evaluated):
            sets |= {f"eval/{name}": found for name, found in evaluated.items()}
        else:
            sets["eval"] = evaluated
        named = args.run_name if args.run_name != args.output_dir else None

        def facts() -> dict[str, Any]:
            found = sessions.start_facts(trainer._session, trainer.model, sets)
            found["arguments"] = origin.settings(args.to_dict())
            return (
                {**found, "used": dict(trainer._parts.saver.settled)}
                if trainer._parts.saver.settled
                else found
            )

        self.record.begin(facts, named, trainer.state.global_step)

    def happened(self, kind: str, **values: Any) -> None:
        """Write an event of the training down."""
        if self.record is not None:
            self.record.tell(kind, **values)

    def has_trained(self) -> bool:
        """Whether this process has trained here: else nobody knows which step a model is of."""
        return self.record is not None and self.record.journal.has_begun

    def _open_record(self) -> None:
        """Have the record of the run's folder open; each trial of a search has its own."""
        trainer = self._trainer
        if not trainer.is_world_process_zero() or trainer.args.output_dir is None:
            return
        folder = Path(trainer._get_output_dir(trainer._trial))
        if self.record is None or self.record.folder != folder:
            self.record = Record(folder, step=lambda: trainer.state.global_step)

    def open(self) -> None:
        """Have the record and the trackers open, in training or out of it."""
        trainer = self._trainer
        args = trainer.args
        self._open_record()
        if self.trackers is not None and self.trackers.is_running:
            return
        chosen = resolve(self._report_to(), self._logging_dir())
        if not chosen or not trainer.is_world_process_zero():
            return
        kept_in = None if self.record is None else self.record.folder
        trackers = Trackers(chosen, self._logging_dir(), run_folder=kept_in)
        settings = {k: v for k, v in args.to_sanitized_dict().items() if v is not None}
        trackers.start(
            str(args.project),
            settings,
            self._tracker_options(chosen),
            goes_on_at=trainer.state.global_step if trainer.is_in_train else None,
        )
        self.trackers, self._has_recorded_training = trackers, False
        if not trainer.is_in_train:
            _left_open.add(trackers)

    def leave(self) -> None:
        """Leave the trackers to evaluations that may follow, until the next run or the end."""
        if self.trackers is not None:
            _left_open.add(self.trackers)

    def _report_to(self) -> Any:
        if self._trainer._session.observer.is_watching:  # nothing of it is a run's
            return []
        asked = self._trainer.args.report_to
        asked = [asked] if isinstance(asked, str) else asked or []
        return [name for name in asked if name != "none"]

    def _logging_dir(self) -> str:
        given = getattr(self._trainer.args, "logging_dir", None)
        return str(given or Path(str(self._trainer.args.output_dir)) / "runs")

    def _tracker_options(self, chosen: list[Any]) -> dict[str, dict[str, Any]]:
        """Return what of the arguments is a tracker's own: the run's name, trackio's Space."""
        args, folder = self._trainer.args, self._folder_of_events()
        keys = {"wandb": "name", "trackio": "name", "mlflow": "run_name"}
        named: dict[str, dict[str, Any]] = {
            n: {keys[n]: args.run_name} for n in chosen if n in keys and args.run_name
        }
        if folder is not None:
            named |= {name: {"folder": folder} for name in _FILES if name in chosen}
        elif "tensorboard" in chosen and getattr(args, "logging_dir", None):
            named["tensorboard"] = {"folder": ""}  # as in transformers: in that very folder
        space = {"space_id": args.trackio_space_id, "bucket_id": args.trackio_bucket_id}
        given = {key: value for key, value in space.items() if value is not None}
        if given and "trackio" in chosen:
            private = args.hub_private_repo
            shared = {} if private is None else {"private": private}
            named["trackio"] = {**named.get("trackio", {}), **given, **shared}
        return named

    def _folder_of_events(self) -> str | None:
        """Return the folder of a run that has a name, and of a trial of a search."""
        trainer = self._trainer
        name = trainer.args.run_name if trainer.args.run_name != trainer.args.output_dir else None
        parts = [re.sub(r"[^\w.=,+-]+", "-", name).strip(".-")] if name else []
        if trainer.hp_search_backend is not None and trainer._trial is not None:
            parts.append(
                os.path.relpath(
                    trainer._get_output_dir(trainer._trial),
                    trainer.args.output_dir,
                )
            )
        return "/".join(filter(None, parts)) or None

    def close(self) -> None:
        if self.trackers is not None:
            _left_open.discard(self.trackers)
            self.trackers.finish()
        self.trackers = None

    def facts(self) -> dict[str, Any]:
        """Return what a progress bar shows besides the log."""
        session, memory = self._trainer._run.session, {}
        if session.device.type != "cpu":  # the host's own memory is shown anyway
            used = session.backend.memory(session.device).used_bytes
            memory = {} if used is None else {str(session.device): used}
        return {
            "samples_per_step": self.samples_per_step(),
            "device_memory": memory,
            "shares": session.ledger.shares,
            "remark": lambda: remark(self.timesheet),
            "compiled": None if session.graphs is None else session.graphs.summary(),
            "unsaved": self._trainer._parts.saver.unsaved(),
        }

    def samples_per_step(self) -> int:
        args = self._trainer.args
        return args.train_batch_size * args.gradient_accumulation_steps * args.world_size

    # -- the record of its time ---------------------------------------------------------------

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Keep the record of a training in its folder; the time after it is the user's own."""
        trainer = self._trainer
        ledger, first = trainer._session.ledger, trainer.state.global_step
        sheet = None
        if trainer.args.output_dir is not None:
            sheet = sessions.timesheet(
                trainer._session,
                trainer._get_output_dir(trainer._trial),
                begin=lambda: {"step": first, **self._length()},
                standing=self._standing,
            )
            sheet.start()
        else:
            ledger.begin()
        self.timesheet = trainer._between.timesheet = sheet
        self.begin_start()
        how, failure = "failed", None
        try:
            yield
            how = "finished"
        except (SystemExit, KeyboardInterrupt):
            how = "stopped"
            raise
        except Exception as error:
            failure = error
            raise
        finally:
            if sheet is not None:
                sheet.end(how, failure)
            failure = None  # its traceback holds this frame
            if self.record is not None:
                self.record.end()
            ledger.rest(OUTSIDE)

    def _length(self) -> Mapping[str, Any]:
        trainer = self._trainer
        args = trainer.args
        return {
            "max_steps": trainer.state.max_steps,
            "samples_per_step": self.samples_per_step(),
            "settings": {name: _value(getattr(args, name)) for name in _SETTINGS},
        }

    def _standing(self) -> Mapping[str, Any]:
        trainer = self._trainer
        loaders = trainer._run.loaders
        shapes = [
            "x".join(map(str, shape)) for shape in trainer._parts.steps.flos_of if shape is not None
        ]
        return {
            "step": trainer._progress.step,
            "epoch": trainer._progress.epochs,
            "shapes": shapes,
            "padding_share": trainer._parts.steps.padding.share,
            "workers": getattr(loaders[0], "num_workers", None) if loaders else None,
        }


@atexit.register
def _finish_left_open() -> None:
    while _left_open:
        _left_open.pop().finish()


def _for_history(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a saved history can hold: numbers, texts, and lists and dicts of them.

    Callbacks and trackers get the rest too.
    """
    kept: dict[str, Any] = {}
    for name, value in as_numbers(logs).items():
        try:
            kept[name] = _plain(value)
        except TypeError:
            give_notice(
                f"{name!r} is not kept in the history of the run: a {type(value).__name__} cannot "
                "be saved with it.",
                stacklevel=3,
            )
    return kept


def _plain(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError


def _named_for_trackers(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return values under the names that trackers' pages group by: eval/loss, train/loss.

    The mean over a training, train_loss, is no point of the curve of losses: train/train_loss.
    """
    named = {}
    for name, value in logs.items():
        part, _, rest = name.partition("_")
        grouped = f"{part}/{rest}" if part in _PARTS and rest else f"train/{name}"
        named[grouped] = value
    return named


def remark(sheet: Timesheet | None) -> str | None:
    """Return where the time went, in a line, if something other than the step took much of it."""
    if sheet is None or sheet.seconds_since_start() < _WORTH_A_REMARK_S:
        return None
    finding = judge(sheet.life())
    return None if finding is None or finding.is_step else finding.line()


def _value(value: Any) -> Any:
    return getattr(value, "value", value)


class StageMemory:
    """Bytes before and after a stage, on the host and on the device; off unless asked for."""

    def __init__(self, session: Session, *, off: bool) -> None:
        self._session = session
        self._off = off
        self._before: list[tuple[int, int, int | None]] = []
        self._building: dict[str, Any] = {}
        self.start()

    def _now(self) -> tuple[int, int, int | None]:
        """Return the host's bytes, the most they ever were, and the device's bytes."""
        host = Cpu().memory(torch.device("cpu"))
        used, peak = host.used_bytes or 0, host.peak_bytes or 0
        if self._session.device.type == "cpu":  # its memory is the host's
            return used, peak, None
        return used, peak, self._session.backend.memory(self._session.device).used_bytes

    def start(self) -> None:
        """Begin a stage; an evaluation inside training is a stage of its own."""
        if not self._off:
            self._before.append(self._now())

    def built(self) -> None:
        """End the Trainer's making; the first stage to end tells what it took."""
        self.stop("init", self._building)

    def stop(self, stage: str, metrics: dict[str, Any]) -> None:
        """End the stage that was begun last, and put what it took into the metrics."""
        if self._off or not self._before:
            return
        if metrics is not self._building:
            metrics |= self._building
            self._building = {}
        host, peak_before, device = self._before.pop()
        host_now, host_peak, device_now = self._now()
        metrics[f"{stage}_mem_cpu_alloc_delta"] = host_now - host
        grew = host_peak > peak_before  # a stage that set no new peak peaked below it
        metrics[f"{stage}_mem_cpu_peaked_delta"] = max(0, host_peak - host_now) if grew else 0
        if device is not None and device_now is not None:
            metrics[f"{stage}_mem_gpu_alloc_delta"] = device_now - device
            peak = self._session.backend.memory(self._session.device).peak_bytes
            if peak is not None:
                metrics[f"{stage}_mem_gpu_peaked_delta"] = max(0, peak - device_now)
