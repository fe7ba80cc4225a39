"""The part of `Trainer` that tells callbacks, the history, the record and the trackers."""

from __future__ import annotations

import atexit
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anytrain.core.events import EventKind
from anytrain.core.notices import give_notice
from anytrain.doors.callbacks import Callbacks, TrainerControl
from anytrain.doors.trainer.outputs import speed_metrics
from anytrain.doors.trainer.reports import Reports
from anytrain.doors.trainer.timing import remark
from anytrain.engine.assemble import timing as starting
from anytrain.engine.assemble.run import Run
from anytrain.engine.assemble.step_boundary import BetweenSteps
from anytrain.engine.loop import Progress, Requests
from anytrain.engine.recording import origin
from anytrain.engine.recording.padding import Padding
from anytrain.engine.recording.record import Record
from anytrain.engine.recording.timesheet import Timesheet
from anytrain.engine.recording.trackers import Trackers, resolve
from anytrain.engine.recording.trackers.values import read

_PARTS = ("eval", "test")
_FILES = ("tensorboard", "csv", "jsonl")
"""Trackers that write files, each run's in a folder of its own."""
_PLAIN = (bool, int, float, str, type(None))
_left_open: set[Trackers] = set()
"""Of runs that may yet evaluate. Libraries know one run a process: a training ends the others."""


class Recording(Reports):
    """What is written down while a run goes on."""

    model: nn.Module
    train_dataset: Any
    eval_dataset: Any
    _are_several: Callable[[Any], bool]
    callback_handler: Callbacks
    _run: Run
    _progress: Progress
    _trackers: Trackers | None
    _timesheet: Timesheet | None
    _record: Record | None
    _between: BetweenSteps
    _tokens: torch.Tensor | int | None
    _padding = Padding(is_on=False)
    current_flos: float
    _flos_of: dict[Any, float]
    _counted_input: str
    """The name of what a batch's size is counted by."""
    _began: float
    _tokens_before: int
    _trial: Any
    hp_search_backend: Any
    _get_output_dir: Callable[[Any], str]
    processing_class: Any
    is_in_train: bool
    _settled: Mapping[str, Any]
    _weights_of: str | None = None
    """The checkpoint whose weights the model holds since its training ended; None: its own."""
    _has_recorded_training = False
    """Whether the trackers that are open have a training already."""

    @property
    def control(self) -> TrainerControl:
        """The flags that callbacks set."""
        return self.callback_handler.control

    @control.setter
    def control(self, control: TrainerControl) -> None:
        self.callback_handler.control = control

    def _tell(self, kind: EventKind, **extra: Any) -> Requests:
        """Tell the callbacks where the run stands; return what they ask for."""
        return self.callback_handler.tell(kind, self.args, self.state, **extra)

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Write values down everywhere: history, journal, trackers, callbacks.

        Args:
            logs: Numbers by name; the epoch is added.
            start_time: When the training began, for tokens a second where tokens are
                counted.
        """
        state = self.state
        logs["epoch"] = state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = state.num_input_tokens_seen
            if start_time is not None:
                seen = state.num_input_tokens_seen - self._tokens_before
                logs.update(speed_metrics("train", start_time, num_tokens=seen))
        state.log_history.append(_for_history({**logs, "step": state.global_step}))
        self._open_records()
        if self._record is not None:
            step, epoch, of = state.global_step, state.epoch, self._weights_of
            self._record.log(step, epoch, logs, needs_training=True, of=of)
        if self._trackers is not None:
            self._trackers.log(_named_for_trackers(logs), step=state.global_step)
        self._tell("log", logs=logs)

    def _begin_records(self) -> None:
        """Record a training: its log goes on from its step, its trackers are its own."""
        self._counted_input = getattr(self.model, "main_input_name", "input_ids")
        self._padding = Padding(is_on=self._session.end_step is None)
        if self._trackers is not None and not self._has_recorded_training:
            _left_open.discard(self._trackers)  # evaluations that came first are the run's too
        _finish_left_open()
        self._open_records()
        self._has_recorded_training, self._weights_of = True, None
        if self._record is not None:
            self._record.journal.begin(self.state.global_step)

    def _begin_start(self) -> None:
        """Write down that a training starts, and what is known of it."""
        self._open_record()
        self._between.record = self._record
        if self._record is None:
            return
        args, evaluated = self.args, self.eval_dataset
        sets = {"train": self.train_dataset}
        if isinstance(evaluated, dict) and self._are_several(evaluated):
            sets |= {f"eval/{name}": found for name, found in evaluated.items()}
        else:
            sets["eval"] = evaluated
        named = args.run_name if args.run_name != args.output_dir else None

        def facts() -> dict[str, Any]:
            found = starting.start(self._session, self.model, sets)
            found["arguments"] = origin.settings(args.to_dict())
            return {**found, "used": dict(self._settled)} if self._settled else found

        self._record.begin(facts, named, self.state.global_step)

    def _happened(self, kind: str, **values: Any) -> None:
        """Write an event of the training down."""
        if self._record is not None:
            self._record.tell(kind, **values)

    def _has_trained(self) -> bool:
        """Whether this process has trained here: else nobody knows which step a model is of."""
        return self._record is not None and self._record.journal.has_begun

    def _open_record(self) -> None:
        """Have the record of the run's folder open; each trial of a search has its own."""
        if not self.is_world_process_zero() or self.args.output_dir is None:
            return
        folder = Path(self._get_output_dir(self._trial))
        if self._record is None or self._record.folder != folder:
            self._record = Record(folder, step=lambda: self.state.global_step)

    def _open_records(self) -> None:
        """Have the record and the trackers open, in training or out of it."""
        args = self.args
        self._open_record()
        if self._trackers is not None and self._trackers.is_running:
            return
        chosen = resolve(self._report_to(), self._logging_dir())
        if not chosen or not self.is_world_process_zero():
            return
        kept_in = None if self._record is None else self._record.folder
        trackers = Trackers(chosen, self._logging_dir(), run_folder=kept_in)
        settings = {k: v for k, v in args.to_sanitized_dict().items() if v is not None}
        trackers.start(
            str(args.project),
            settings,
            self._tracker_options(chosen),
            goes_on_at=self.state.global_step if self.is_in_train else None,
        )
        self._trackers, self._has_recorded_training = trackers, False
        if not self.is_in_train:
            _left_open.add(trackers)

    def _leave_records(self) -> None:
        """Leave the trackers to evaluations that may follow, until the next run or the end."""
        if self._trackers is not None:
            _left_open.add(self._trackers)

    def _report_to(self) -> Any:
        if self._session.observer.is_watching:  # nothing of it is a run's
            return []
        asked = self.args.report_to
        asked = [asked] if isinstance(asked, str) else asked or []
        return [name for name in asked if name != "none"]

    def _logging_dir(self) -> str:
        given = getattr(self.args, "logging_dir", None)
        return str(given or Path(str(self.args.output_dir)) / "runs")

    def _tracker_options(self, chosen: list[Any]) -> dict[str, dict[str, Any]]:
        """Return what of the arguments is a tracker's own: the run's name, trackio's Space."""
        args, folder = self.args, self._folder_of_events()
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
        name = self.args.run_name if self.args.run_name != self.args.output_dir else None
        parts = [re.sub(r"[^\w.=,+-]+", "-", name).strip(".-")] if name else []
        if self.hp_search_backend is not None and self._trial is not None:
            parts.append(os.path.relpath(self._get_output_dir(self._trial), self.args.output_dir))
        return "/".join(filter(None, parts)) or None

    def _close_records(self) -> None:
        if self._trackers is not None:
            _left_open.discard(self._trackers)
            self._trackers.finish()
        self._trackers = None

    # -- what went in -------------------------------------------------------------------------

    def floating_point_ops(self, inputs: Any) -> float:
        """Return the operations of one batch: six a token and parameter, where both are known.

        Args:
            inputs: The batch.
        """
        name = getattr(self.model, "main_input_name", "input_ids")
        main = inputs.get(name) if isinstance(inputs, Mapping) else None
        count: Any = getattr(self.model, "num_parameters", None)
        if not isinstance(main, torch.Tensor) or not callable(count):
            return 0.0
        return 6.0 * main.numel() * int(count(exclude_embeddings=True))

    def store_flos(self) -> None:
        """Add the operations since the last time to the state."""
        self.state.total_flos += sum(self._session.world.gather_object(self.current_flos))
        self.current_flos = 0.0

    def _count_inputs(self, micro: tuple[Any, ...]) -> None:
        """Count a step's operations by shapes, and its tokens on the device: nobody waits."""
        counts_tokens = self.args.include_num_input_tokens_seen != "no"
        for batch in micro:
            main = batch.get(self._counted_input) if isinstance(batch, Mapping) else None
            key = main.shape if isinstance(main, torch.Tensor) else None
            if key not in self._flos_of:
                self._flos_of[key] = self.floating_point_ops(batch)
            self.current_flos += self._flos_of[key]
            if self._padding.is_due and isinstance(main, torch.Tensor):
                self._padding.look(main, batch.get("attention_mask"))
            if counts_tokens and isinstance(main, torch.Tensor):
                self._count_tokens(batch, main)

    def _count_tokens(self, batch: Any, main: torch.Tensor) -> None:
        asked = self.args.include_num_input_tokens_seen
        mask = batch.get("attention_mask")
        padding = getattr(self.processing_class, "pad_token_id", None)
        if asked == "non_padding" and isinstance(mask, torch.Tensor):
            seen: torch.Tensor | int = mask.sum()
        elif asked == "non_padding" and padding is not None:
            seen = (main != padding).sum()
        else:
            seen = main.numel()  # on the host: to make a tensor of it would wait for the device
        self._tokens = seen if self._tokens is None else self._tokens + seen

    def _read_tokens(self) -> None:
        """Add the tokens since the last log point to the state; waits for the device."""
        self._padding.read()
        if self._tokens is not None:
            own = torch.as_tensor(self._tokens, device=self._session.device)
            total = self._session.world.reduce(own, "sum")
            self.state.num_input_tokens_seen += int(total.item())
            self._tokens = None

    def _facts(self) -> dict[str, Any]:
        """Return what a progress bar shows besides the log."""
        session, memory = self._run.session, {}
        if session.device.type != "cpu":  # the host's own memory is shown anyway
            used = session.backend.memory(session.device).used_bytes
            memory = {} if used is None else {str(session.device): used}
        return {
            "samples_per_step": self._samples_per_step(),
            "device_memory": memory,
            "shares": session.ledger.shares,
            "remark": lambda: remark(self._timesheet),
            "compiled": None if session.graphs is None else session.graphs.summary(),
        }

    def _samples_per_step(self) -> int:
        args = self.args
        return args.train_batch_size * args.gradient_accumulation_steps * args.world_size


@atexit.register
def _finish_left_open() -> None:
    while _left_open:
        _left_open.pop().finish()


def _for_history(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a saved history can hold: numbers, texts, and lists and dicts of them.

    Callbacks and trackers get the rest too.
    """
    kept: dict[str, Any] = {}
    for name, value in read(logs).items():
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
