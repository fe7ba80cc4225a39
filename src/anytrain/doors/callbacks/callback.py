"""The shape of a callback as HF's Trainer users write it, and the state that it is given.

A subclass overrides the events it cares for. Each gets `args`, `state` and `control` in place,
and by name what is known then: model, processing_class, tokenizer, optimizer, lr_scheduler,
train_dataloader, eval_dataloader, and `logs` or `metrics` where there are some. It may set flags
of `control`, and return it; returning nothing is as good.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from anytrain.core.documents import as_file
from anytrain.core.errors import BadType, CheckpointError, Unsupported
from anytrain.engine.checkpoint.schema import (
    Anything,
    Each,
    Either,
    Flag,
    Maybe,
    Misfit,
    Named,
    Number,
    Text,
    Whole,
    check,
)

if TYPE_CHECKING:
    from anytrain.doors.callbacks.dispatch import TrainerControl

_CALLBACK = {"args?": Named(Anything()), "attributes?": Named(Anything())}
FIELDS = {
    "epoch?": Maybe(Number(least=0)),
    "global_step?": Whole(),
    "max_steps?": Whole(-1),
    "logging_steps?": Maybe(Number()),
    "eval_steps?": Maybe(Number()),
    "save_steps?": Maybe(Number()),
    "train_batch_size?": Maybe(Whole(1)),
    "num_train_epochs?": Number(),
    "num_input_tokens_seen?": Number(least=0),
    "total_flos?": Number(least=0),
    "log_history?": Maybe(Each(Named(Anything()))),
    "best_metric?": Maybe(Number(finite=False)),
    "best_global_step?": Maybe(Whole()),
    "best_model_checkpoint?": Maybe(Text()),
    "is_local_process_zero?": Flag(),
    "is_world_process_zero?": Flag(),
    "is_hyper_param_search?": Flag(),
    "trial_name?": Maybe(Text()),
    "trial_params?": Maybe(Named(Anything())),
    "stateful_callbacks?": Maybe(Named(Either(Each(_CALLBACK), _CALLBACK))),
}
"""What a saved state holds, in a checkpoint and in `trainer_state.json`."""


class ExportableState:
    """Something whose condition travels in a checkpoint as plain JSON values."""

    def state(self) -> dict[str, Any]:
        """Return {"args": what the constructor takes, "attributes": what is set afterwards}."""
        raise Unsupported(
            f"{type(self).__name__} does not say what of it to save.",
            why="an ExportableState is saved by what its state() returns, and it has none.",
            fix='define state() to return {"args": {...}, "attributes": {...}}.',
        )

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Build one again from what `state` returned."""
        made = cls(**state.get("args", {}))
        for name, value in state.get("attributes", {}).items():
            setattr(made, name, value)
        return made


class TrainerCallback:
    """Watch a training run, and ask for things through the control object."""

    def on_init_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act when the Trainer has been built."""

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act before the first step of a training."""

    def on_train_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act when training is over, its results written."""

    def on_epoch_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act before the first batch of an epoch."""

    def on_epoch_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act after the last batch of an epoch."""

    def on_step_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act before an optimizer step, all of its micro-batches still to come."""

    def on_substep_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act after a micro-batch that is not the last of its step."""

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act when gradients are whole and clipped, before they are applied."""

    def on_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act when gradients have been applied, before they are cleared."""

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act after an optimizer step."""

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act after an evaluation; `metrics` holds its figures."""

    def on_predict(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act after a prediction; `metrics` holds its figures."""

    def on_save(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act after a checkpoint."""

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act after an entry was added to the log; `logs` holds it."""

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act after a batch of an evaluation or a prediction."""

    def on_push_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Act before a model goes to the Hub."""


@dataclass
class TrainerState:
    """The position, history and best result of a training.

    A step is an optimizer step, whatever number of micro-batches it takes.
    """

    epoch: float = 0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    log_history: list[dict[str, Any]] = None  # type: ignore[assignment]  # None becomes []
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, str | float | int | bool] | None = None
    stateful_callbacks: dict[str, Any] = None  # type: ignore[assignment]  # None becomes {}
    """Given as a list of callbacks, kept as their saved states by class name."""

    def __post_init__(self) -> None:
        if self.log_history is None:
            self.log_history = []
        if self.stateful_callbacks is None:
            self.stateful_callbacks = {}
        elif not isinstance(self.stateful_callbacks, Mapping):
            self.stateful_callbacks = exported(self.stateful_callbacks)

    def to_json(self) -> str:
        """Return the text of `trainer_state.json`. NaN stays NaN, as Python's json reads it."""
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True, default=_plain) + "\n"

    def save_to_json(self, json_path: str | os.PathLike[str]) -> None:
        """Write the state to a file, whole or not at all."""
        path = Path(json_path)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(self.to_json(), encoding="utf-8")
        beside.replace(path)

    @classmethod
    def load_from_json(cls, json_path: str | os.PathLike[str]) -> Self:
        """Read a state, also one that another version wrote: what it knows more is left out."""
        data = as_file(Path(json_path)).read_bytes()
        try:
            found = json.loads(data)
            check(found, FIELDS)
            known = {field.name for field in dataclasses.fields(cls)}
            return cls(**{name: value for name, value in found.items() if name in known})
        except (ValueError, RecursionError, Misfit) as error:
            raise CheckpointError(
                f"Cannot read {json_path}.",
                why=f"it does not hold a training state: {error}.",
                fix="resume from another checkpoint, or restore this file from a copy.",
            ) from error

    def compute_steps(self, args: Any, max_steps: int) -> None:
        """Take the intervals of logging, evaluation and saving from `args`, in whole steps.

        One below 1 is a share of `max_steps`, rounded up.
        """
        for kind in ("logging_steps", "eval_steps", "save_steps"):
            interval = getattr(args, kind)
            if interval is not None:
                whole = math.ceil(max_steps * interval) if interval < 1 else interval
                setattr(self, kind, whole)

    def init_training_references(
        self, trainer: Any, max_steps: int, num_train_epochs: int, trial: Any
    ) -> None:
        """Note what this training is: its length, this process's place, and its trial if any."""
        if trainer.hp_name is not None and trainer._trial is not None:
            self.trial_name = trainer.hp_name(trainer._trial)
        # optuna keeps a trial's values in `params`; other searches hand over the values.
        self.trial_params = None if trial is None else dict(getattr(trial, "params", trial))
        self.max_steps, self.num_train_epochs = max_steps, num_train_epochs
        self.is_local_process_zero = trainer.is_local_process_zero()
        self.is_world_process_zero = trainer.is_world_process_zero()


def exported(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Return the saved states by class name; several of one class make a list, in order."""
    states: dict[str, Any] = {}
    for callback in callbacks:
        if not isinstance(callback, ExportableState):
            raise BadType(
                f"Cannot save the state of a {type(callback).__name__}.",
                why="only an ExportableState says what of it to save.",
                fix="inherit from ExportableState and define state().",
            )
        name = type(callback).__name__
        if name not in states:
            states[name] = callback.state()
        elif isinstance(states[name], list):
            states[name].append(callback.state())
        else:
            states[name] = [states[name], callback.state()]
    return states


def _plain(value: Any) -> Any:
    """Turn a number of numpy or torch into Python's, and anything else into its text."""
    if hasattr(value, "item") and getattr(value, "size", None) != 0:
        try:
            return value.item()
        except (RuntimeError, ValueError):  # more than one element
            return value.tolist()
    return str(value)
