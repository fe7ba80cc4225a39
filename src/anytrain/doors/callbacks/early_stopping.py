"""Stop a training when its evaluations no longer get better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from anytrain.core.errors import BadInput
from anytrain.core.notices import give_notice
from anytrain.doors.callbacks.callback import ExportableState, TrainerCallback, TrainerState

if TYPE_CHECKING:
    from anytrain.doors.callbacks.dispatch import TrainerControl


class NothingToCompare(BadInput, AssertionError):
    """No evaluation could ever be better than another; HF's callback asserts that one can."""


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Ask for the end after `early_stopping_patience` evaluations without improvement.

    An improvement beats the best `metric_for_best_model` so far by more than the threshold.
    """

    def __init__(
        self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0
    ) -> None:
        threshold = 0.0 if early_stopping_threshold is None else early_stopping_threshold
        if early_stopping_patience < 1:
            raise BadInput(
                f"Cannot stop early with a patience of {early_stopping_patience}.",
                why="it counts the evaluations without improvement after which to stop.",
                fix="give early_stopping_patience 1 or more.",
            )
        if not 0 <= threshold < math.inf:
            raise BadInput(
                f"Cannot stop early with a threshold of {threshold}.",
                why="it is the least improvement that counts, a finite number of at least 0.",
                fix="give early_stopping_threshold 0 or more.",
            )
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = threshold
        self.early_stopping_patience_counter = 0
        self._found = False
        self._missed_at: int | None = None

    def check_metric_value(
        self, args: Any, state: TrainerState, control: TrainerControl, metric_value: float
    ) -> None:
        """Count an evaluation: an improvement starts the count again."""
        best = state.best_metric
        if best is None or math.isnan(best):
            self.early_stopping_patience_counter = 0
            return
        gain = metric_value - best if args.greater_is_better else best - metric_value
        # Comparing with NaN is False, so a figure that is none counts as no improvement.
        if gain > 0 and gain > self.early_stopping_threshold:
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuse arguments under which nothing could ever be compared."""
        self._found, self._missed_at = False, None
        if args.metric_for_best_model is None:
            raise NothingToCompare(
                "EarlyStoppingCallback has nothing to compare.",
                why="metric_for_best_model is not set, so no evaluation is better than another.",
                fix='set metric_for_best_model="loss", for example.',
            )
        if args.eval_strategy == "no":
            raise NothingToCompare(
                "EarlyStoppingCallback has nothing to compare.",
                why='eval_strategy is "no", so nothing is evaluated during the training.',
                fix='set eval_strategy="epoch", or "steps".',
            )
        if not args.load_best_model_at_end:
            give_notice(
                "Early stopping ends the training at a model that is worse than the best one; "
                "set load_best_model_at_end=True to get the best one back.",
                stacklevel=2,
            )

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Ask for the end when patience has run out."""
        name = args.metric_for_best_model
        name = name if name.startswith("eval_") else f"eval_{name}"
        value = (metrics or {}).get(name)
        if value is None:
            self._miss(name, state.global_step, metrics or {})
            return
        self._found = True
        self.check_metric_value(args, state, control, value)
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def state(self) -> dict[str, Any]:
        """Return the settings, and how many evaluations were without improvement."""
        return {
            "args": {
                "early_stopping_patience": self.early_stopping_patience,
                "early_stopping_threshold": self.early_stopping_threshold,
            },
            "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter},
        }

    def _miss(self, name: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Say so once, where no evaluation set of an earlier step had the figure either."""
        if self._found or self._missed_at == -1:
            return
        if self._missed_at in (None, step):  # another set of this step may still bring it
            self._missed_at = step
            return
        self._missed_at = -1
        give_notice(
            f"Early stopping looks for {name!r}, which no evaluation has given (the last gave "
            f"{', '.join(metrics) or 'nothing'}). It stops nothing until one does.",
            stacklevel=2,
        )
