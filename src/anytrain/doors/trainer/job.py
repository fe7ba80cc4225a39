"""What the loop works for: a Trainer, seen as the moments it is told and the things it does."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytrain.core.errors import add_to_message
from anytrain.core.events import EventKind
from anytrain.doors.trainer import signatures
from anytrain.doors.trainer.outputs import PREFIX_CHECKPOINT_DIR
from anytrain.engine.loop import Requests

if TYPE_CHECKING:
    from anytrain.doors.trainer.trainer import Trainer


class TrainerJob:
    """Serve the loop on a Trainer's behalf, through the methods that users may override."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._has_own_way = trainer._is_own("_maybe_log_save_evaluate")

    def tell(self, kind: EventKind) -> Requests:
        """Show the position in the Trainer's state, and tell the callbacks."""
        trainer = self._trainer
        progress, state = trainer._progress, trainer.state
        state.global_step = progress.step
        # An epoch that was left, or a stream's, ends where its last step did.
        if kind == "step_end":
            state.epoch = progress.epochs
        if trainer._coming_best is not None:
            trainer._tell_best()
        asked = trainer.callback_handler.tell(kind, trainer.args, state)
        if self._has_own_way and kind in ("step_end", "epoch_end"):
            return trainer._serve_own_way()
        return asked

    def log(self) -> None:
        """Read what the steps left behind: the one wait for the device."""
        trainer = self._trainer
        with trainer._session.ledger.span("wait"):
            reading = trainer._meter.read(trainer._session.world)
        if reading is None:
            return
        trainer._take_loss(reading)
        trainer._read_tokens()
        trainer.store_flos()
        logs: dict[str, Any] = {"loss": reading.loss}
        if reading.grad_norm is not None:
            logs["grad_norm"] = reading.grad_norm
        logs["learning_rate"] = reading.learning_rate
        if trainer._is_own("_get_learning_rate"):
            logs["learning_rate"] = trainer._get_learning_rate()
        if reading.num_bad and trainer.args.on_nonfinite == "skip":
            logs["skipped_steps"] = reading.num_bad
        trainer._answer_bad_steps(reading)
        trainer._globalstep_last_logged = trainer.state.global_step
        signatures.call(trainer.log, logs, trainer._began)

    def settle(self) -> None:
        """Wait for the device; who evaluates or saves would wait for it anyway."""
        session = self._trainer._session
        session.backend.synchronize(session.device)

    def evaluate(self) -> Requests:
        """Evaluate; a new best asks for a save where saves follow the best."""
        trainer = self._trainer
        try:
            metrics = trainer._evaluate(trainer._trial, trainer._ignored_in_eval)
            trainer._last_metrics = {**metrics, "step": trainer.state.global_step}
            is_best = trainer._determine_best_metric(metrics, trainer._trial)
        except Exception as error:
            self._save_in_spite_of(error)
            raise
        if trainer.args.save_strategy == "best":
            trainer.control.should_save = is_best
        return trainer.callback_handler.requests

    def _save_in_spite_of(self, error: Exception) -> None:
        """Save what was to be saved after an evaluation that failed: a mistake in it costs no step.

        Of several processes nobody knows which others have failed.
        """
        trainer = self._trainer
        if not trainer.control.should_save or trainer._session.world.size > 1:
            return
        with suppress(Exception):  # the evaluation's error is the one to tell
            trainer._save_checkpoint(trainer.model, trainer._trial, wait=True)
            add_to_message(
                error,
                f"anytrain: the evaluation failed after step {trainer.state.global_step}, whose "
                "checkpoint was saved; pass resume_from_checkpoint=True to go on from there.",
            )

    def save(self) -> Requests:
        """Save the run, tell once it is committed, and push it where it is to be pushed."""
        trainer = self._trainer
        trainer._answer_bad_steps()
        trainer._save_checkpoint(trainer.model, trainer._trial)
        if trainer.args.push_to_hub or trainer.callback_handler.listens("save"):
            trainer._between.finish()  # who is told of a save may look at it, or add to it
            trainer._tell_best()
        if trainer._between.unsaved is not None:
            trainer.control.should_save = False
            return trainer.callback_handler.requests  # nothing was saved, and nobody is told so
        if trainer.args.push_to_hub:
            folder = Path(trainer._get_output_dir(trainer._trial))
            trainer._push_from_checkpoint(
                str(folder / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}")
            )
        return trainer._tell("save")

    def between(self) -> None:
        """Save and leave, if a signal has come that no step of this epoch could answer."""
        self._trainer._between.boundary()
