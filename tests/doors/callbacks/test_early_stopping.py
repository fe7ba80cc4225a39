from __future__ import annotations

import math
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from anytrain.core.errors import BadInput, Notice
from anytrain.doors.callbacks import (
    Callbacks,
    DefaultFlowCallback,
    EarlyStoppingCallback,
    TrainerControl,
    TrainerState,
)


def arguments(**changed: Any) -> Any:
    usual = {
        "metric_for_best_model": "accuracy",
        "greater_is_better": True,
        "eval_strategy": "epoch",
        "load_best_model_at_end": True,
    }
    return SimpleNamespace(**{**usual, **changed})


def stops_after(callback: Any, args: Any, values: list[float]) -> int | None:
    """Return which evaluation asked for the end, the best one kept as the Trainer keeps it."""
    state, control = TrainerState(), TrainerControl()
    callback.on_train_begin(args, state, control)
    for index, value in enumerate(values):
        callback.on_evaluate(args, state, control, metrics={"eval_accuracy": value})
        if control.should_training_stop:
            return index
        best = state.best_metric
        is_better = best is None or (value > best if args.greater_is_better else value < best)
        state.best_metric = value if is_better else best
    return None


@pytest.mark.parametrize("greater_is_better", [True, False])
@pytest.mark.parametrize(("patience", "threshold"), [(1, 0.0), (2, 0.0), (2, 0.05), (3, None)])
@pytest.mark.parametrize(
    "values",
    [
        [0.5, 0.6, 0.7, 0.8],
        [0.5, 0.5, 0.5, 0.5, 0.5],
        [0.5, 0.6, 0.62, 0.63, 0.64, 0.9],
        [0.9, 0.8, 0.7, 0.6],
        [0.5, math.nan, 0.4, math.nan, 0.9],
    ],
)
def test_training_stops_where_hf_stops_it(
    values: list[float], patience: int, threshold: float | None, greater_is_better: bool
) -> None:
    args = arguments(greater_is_better=greater_is_better)
    ours = EarlyStoppingCallback(patience, threshold)
    theirs = transformers.EarlyStoppingCallback(patience, threshold or 0.0)
    assert stops_after(ours, args, values) == stops_after(theirs, args, values)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"early_stopping_patience": 0}, "a patience of 0"),
        ({"early_stopping_threshold": -0.1}, "a threshold of -0.1"),
        ({"early_stopping_threshold": math.nan}, "a threshold of nan"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        EarlyStoppingCallback(**settings)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"metric_for_best_model": None}, "metric_for_best_model is not set"),
        ({"eval_strategy": "no"}, 'eval_strategy is "no"'),
    ],
)
def test_arguments_that_leave_nothing_to_compare_are_refused_before_the_first_step(
    changed: dict[str, Any], said: str
) -> None:
    callbacks = Callbacks([DefaultFlowCallback, EarlyStoppingCallback()])
    with pytest.raises(BadInput, match=said) as caught:
        callbacks.tell("train_begin", arguments(**changed), TrainerState())
    assert isinstance(caught.value, AssertionError)  # what HF's raises


def test_stopping_without_the_best_model_is_told_of() -> None:
    callback = EarlyStoppingCallback()
    with pytest.warns(Notice, match="load_best_model_at_end=True"):
        callback.on_train_begin(
            arguments(load_best_model_at_end=False), TrainerState(), TrainerControl()
        )


def test_a_figure_that_no_evaluation_gives_is_told_of_once() -> None:
    callback, state, control = EarlyStoppingCallback(), TrainerState(), TrainerControl()
    callback.on_train_begin(arguments(), state, control)
    with pytest.warns(Notice, match="'eval_accuracy', which no evaluation has given") as told:
        for state.global_step in (10, 20, 30):
            callback.on_evaluate(arguments(), state, control, metrics={"eval_loss": 1.0})
    assert len(told) == 1
    assert not control.should_training_stop


def test_a_figure_that_another_evaluation_set_gives_is_not_missed() -> None:
    args = arguments(metric_for_best_model="eval_second_loss", greater_is_better=False)
    callback, state, control = EarlyStoppingCallback(2), TrainerState(), TrainerControl()
    callback.on_train_begin(args, state, control)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for state.global_step in (10, 20, 30):
            callback.on_evaluate(args, state, control, metrics={"eval_first_loss": 1.0})
            callback.on_evaluate(args, state, control, metrics={"eval_second_loss": 1.0})
            state.best_metric = 1.0
    assert control.should_training_stop
