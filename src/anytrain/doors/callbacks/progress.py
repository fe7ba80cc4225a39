"""Show a training as it goes: as a bar, or as HF's printed dictionaries."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from anytrain.doors.callbacks.callback import TrainerCallback, TrainerState
from anytrain.engine.recording.console import Course, Display, GuardedConsole, pick
from anytrain.engine.recording.formatting import LogEntry, Summary, entry, is_time, rank

if TYPE_CHECKING:
    from anytrain.doors.callbacks.dispatch import TrainerControl

Facts = Callable[[], Mapping[str, Any]]
"""Returns what the run knows of itself: "samples_per_step" (a number), "device_memory" (bytes in
use by device), "shares" (returns each name's share of the time), "remark" (returns a line on where
the time went, or None) and "compiled" (how many graphs, or None). Asked when the training begins,
at each log entry and at the end."""


class PrinterCallback(TrainerCallback):
    """Print every log entry as a dictionary, on each machine's first process."""

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Print the entry, floats to four figures."""
        if not state.is_local_process_zero or logs is None:
            return
        logs.pop("total_flos", None)
        shown = {name: f"{v:.4g}" if isinstance(v, float) else v for name, v in logs.items()}
        with suppress(OSError):  # a terminal that is closed must not end the run before it saves
            sys.stdout.write(f"{shown}\n")


class ProgressCallback(TrainerCallback):
    """Show progress where it suits: a bar in a terminal or a notebook, else one line an entry.

    Only the first process of all shows anything. Texts longer than `max_str_len` are cut.
    """

    def __init__(
        self, max_str_len: int = 100, console: Callable[[], Display] | None = None
    ) -> None:
        self.max_str_len = max_str_len
        self._pick = pick if console is None else console
        self._console: GuardedConsole | None = None
        self._num_predicted = 0
        self._is_training = False
        self._began = 0.0
        self._began_at = 0
        self._facts: Facts | None = None

    def on_train_begin(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        facts: Facts | None = None,
        **kwargs: Any,
    ) -> None:
        """Start showing."""
        if not state.is_world_process_zero:
            return
        self.close()
        self._is_training, self._began = True, time.monotonic()
        self._began_at = state.global_step
        self._facts = facts
        told = {} if facts is None else facts()
        self._shown().begin(
            Course(
                total=state.max_steps,
                step=state.global_step,
                samples_per_step=told.get("samples_per_step"),
                evaluates=args.eval_strategy != "no",
                memory=None if facts is None else lambda: facts().get("device_memory", {}),
                shares=told.get("shares"),
                spent_in="time of this start" if state.global_step else "time",
            )
        )

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Move the bar."""
        if self._console is not None:
            self._console.advance(state.global_step)

    def on_prediction_step(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        """Move the bar of the evaluation."""
        if state.is_world_process_zero:
            self._num_predicted += 1
            self._shown().evaluating(self._num_predicted, _length(eval_dataloader))

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the evaluation's bar away."""
        self._evaluated()

    def on_predict(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the prediction's bar away."""
        self._evaluated()

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show the entry; the one that sums up a training waits for the table at its end."""
        if self._console is None or not logs or "train_runtime" in logs:
            return
        shown = self._entry(state, logs)
        if self._is_training or shown.is_evaluation:
            self._console.note(shown)

    def on_train_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Show what came of the training."""
        if self._console is not None and self._is_training:
            summary = summarize(args, state, time.monotonic() - self._began, self._began_at)
            told = {} if self._facts is None else self._facts()
            remark = told.get("remark", lambda: None)()
            self._console.end(
                replace(
                    summary,
                    remark=remark,
                    compiled=told.get("compiled"),
                    unsaved=told.get("unsaved"),
                )
            )
        self._is_training, self._console, self._facts = False, None, None

    def close(self) -> None:
        """Stop showing, and leave the screen in order."""
        if self._console is not None:
            self._console.close()
        self._console, self._is_training, self._num_predicted = None, False, 0

    def _shown(self) -> GuardedConsole:
        if self._console is None:
            self._console = GuardedConsole(self._pick())
        return self._console

    def _evaluated(self) -> None:
        self._num_predicted = 0
        if self._console is not None:
            self._console.evaluated()
            if not self._is_training:
                self._console = None

    def _entry(self, state: TrainerState, logs: Mapping[str, Any]) -> LogEntry:
        cut = {name: self._cut(value) for name, value in logs.items()}
        return entry(state.global_step, state.epoch, cut)

    def _cut(self, value: Any) -> Any:
        if isinstance(value, str) and len(value) > self.max_str_len:
            return f"{value[: self.max_str_len]}... ({len(value)} characters)"
        return value


def summarize(args: Any, state: TrainerState, seconds: float, since: int = 0) -> Summary:
    """Return what the state's history tells of a training that is over."""
    losses = [(e["loss"], e.get("step", 0)) for e in state.log_history if "loss" in e]
    finite = [(loss, step) for loss, step in losses if math.isfinite(loss)]
    last: Mapping[str, Any] = next(
        (e for e in reversed(state.log_history) if "train_runtime" in e), {}
    )
    best = None
    if state.best_metric is not None:
        name = "eval_" + str(args.metric_for_best_model or "loss").removeprefix("eval_")
        best = (name, state.best_metric, state.best_global_step)
    return Summary(
        steps=state.global_step,
        max_steps=state.max_steps,
        epochs=None if state.epoch is None else float(state.epoch),
        seconds=last.get("train_runtime", seconds),
        samples_per_second=last.get("train_samples_per_second"),
        loss=losses[-1][0] if losses else None,
        lowest_loss=min(finite) if finite else None,
        metrics=_last_evaluation(state),
        best=best,
        best_checkpoint=state.best_model_checkpoint,
        results=str(args.output_dir) if args.output_dir else None,
        since=since,
    )


def _last_evaluation(state: TrainerState) -> dict[str, Any]:
    """Return the last figures of each evaluation set, without how long they took."""
    found: dict[str, Any] = {}
    for logs in state.log_history:
        found.update({name: value for name, value in logs.items() if name.startswith("eval_")})
    return {name: found[name] for name in sorted(found, key=rank) if not is_time(name)}


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
