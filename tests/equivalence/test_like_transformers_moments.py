"""When things happen: steps, logs, evaluations, saves and events, beside transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from equivalence import twins
from equivalence.twins import Each

BY_STEPS = {"logging_strategy": "steps", "eval_strategy": "steps", "save_strategy": "steps"}
BY_EPOCHS = {"logging_strategy": "epoch", "eval_strategy": "epoch", "save_strategy": "epoch"}
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}

TABLE: dict[str, dict[str, Any]] = {
    "all by steps": {**BY_STEPS, "logging_steps": 2, "eval_steps": 3, "save_steps": 4},
    "all by epochs": BY_EPOCHS,
    "nothing": {"logging_strategy": "no"},
    "log by epoch, evaluate by steps": {"logging_strategy": "epoch", "eval_strategy": "steps"},
    "evaluate by epoch, save by steps": {
        "eval_strategy": "epoch",
        "save_strategy": "steps",
        "save_steps": 5,
        "logging_steps": 4,
    },
    "evaluate as often as logs": {"eval_strategy": "steps", "logging_steps": 3},
    "fractions": {**BY_STEPS, "logging_steps": 0.2, "eval_steps": 0.3, "save_steps": 0.4},
    "first step": {"logging_first_step": True, "logging_steps": 5},
    "first step without others": {"logging_first_step": True, "logging_strategy": "no"},
    "delay in steps": {"eval_strategy": "steps", "eval_steps": 2, "eval_delay": 5},
    "delay in epochs": {"eval_strategy": "epoch", "eval_delay": 1.5, "num_train_epochs": 3},
    "evaluate on start": {"eval_strategy": "epoch", "eval_on_start": True},
    "evaluate on start by steps": {"eval_strategy": "steps", "eval_steps": 4, "eval_on_start": 1},
    "end in mid-epoch": {**BY_EPOCHS, "max_steps": 8},
    "end in mid-epoch by steps": {
        **BY_STEPS,
        "max_steps": 8,
        "logging_steps": 3,
        "eval_steps": 3,
        "save_steps": 3,
    },
    "part of an epoch": {**BY_EPOCHS, "num_train_epochs": 1.5},
    "few checkpoints": {**BY_STEPS, "save_steps": 2, "save_total_limit": 2, "logging_steps": 9},
    "one checkpoint": {**BY_STEPS, "save_steps": 3, "save_total_limit": 1, "logging_steps": 9},
    "best by epochs": {**BY_EPOCHS, **BEST, "num_train_epochs": 3},
    "best by epochs, one kept": {
        **BY_EPOCHS,
        **BEST,
        "num_train_epochs": 4,
        "save_total_limit": 1,
        "learning_rate": 0.3,
    },
    "best by steps, two kept": {
        **BY_STEPS,
        **BEST,
        "eval_steps": 2,
        "save_steps": 4,
        "save_total_limit": 2,
        "learning_rate": 0.3,
        "logging_steps": 4,
    },
    "highest is best": {
        **BY_EPOCHS,
        "load_best_model_at_end": True,
        "metric_for_best_model": "level",
        "num_train_epochs": 3,
        "compute_metrics": lambda found: {"level": float(found.predictions.mean())},
    },
    "save the best": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "best",
        "metric_for_best_model": "eval_loss",
        "learning_rate": 0.3,
    },
    "save the best and load it": {
        "eval_strategy": "epoch",
        "save_strategy": "best",
        "num_train_epochs": 3,
        "save_total_limit": 1,
        **BEST,
    },
    "stop early": {
        **BY_STEPS,
        **BEST,
        "eval_steps": 1,
        "save_steps": 1,
        "learning_rate": 0.5,
        "callbacks": Each(lambda library: [early_stopping(library, patience=2)]),
    },
    "stop early by epochs": {
        **BY_EPOCHS,
        **BEST,
        "learning_rate": 0.5,
        "num_train_epochs": 6,
        "callbacks": Each(lambda library: [early_stopping(library, patience=1)]),
    },
    "several evaluation sets": {
        **BY_EPOCHS,
        "eval_dataset": {"near": twins.points(5), "far": twins.points(9)},
        "metric_for_best_model": "near_loss",
        "load_best_model_at_end": True,
    },
    "metrics": {
        "eval_strategy": "epoch",
        "compute_metrics": lambda found: {"mean": float(found.label_ids.mean())},
    },
    # Whole batches to evaluate: anytrain drops in training alone.
    "drop the rest": {
        **BY_EPOCHS,
        "dataloader_drop_last": True,
        "eval_dataset": twins.points(8),
    },
    "one batch an epoch": {**BY_EPOCHS, "per_device_train_batch_size": 64},
    "a stream": {
        **BY_STEPS,
        "train_dataset": twins.Stream(twins.points(22)),
        "max_steps": 8,
        "logging_steps": 2,
        "save_steps": 3,
        "eval_steps": 4,
    },
    "a sized stream": {**BY_EPOCHS, "train_dataset": twins.SizedStream(twins.points(22))},
}


def early_stopping(library: str, patience: int) -> Any:
    if library == twins.OURS:
        from anytrain.doors.callbacks import EarlyStoppingCallback
    else:
        from transformers import EarlyStoppingCallback
    return EarlyStoppingCallback(early_stopping_patience=patience)


FIELDS = (
    "epoch",
    "global_step",
    "max_steps",
    "logging_steps",
    "eval_steps",
    "save_steps",
    "train_batch_size",
    "num_train_epochs",
    "num_input_tokens_seen",
    "total_flos",
    "best_global_step",
    "is_local_process_zero",
    "is_world_process_zero",
    "is_hyper_param_search",
    "trial_name",
    "trial_params",
)


# The quick tests take these; the others are much like them.
QUICK = (
    "all by steps",
    "all by epochs",
    "fractions",
    "first step",
    "delay in epochs",
    "evaluate on start",
    "end in mid-epoch",
    "few checkpoints",
    "best by epochs, one kept",
    "save the best",
    "stop early",
    "several evaluation sets",
    "a stream",
)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in TABLE],
)
def test_everything_happens_when_it_does_in_transformers(tmp_path: Path, name: str) -> None:
    given = {"train_dataset": twins.points(22), "eval_dataset": twins.points(9), **TABLE[name]}
    ours, theirs = twins.both(tmp_path, model=twins.regression, **given)
    assert ours.events == theirs.events
    twins.assert_same_history(ours.history, theirs.history, rtol=1e-3)
    assert ours.folders == theirs.folders
    mine, yours = ours.trainer.state, theirs.trainer.state
    assert {f: getattr(mine, f) for f in FIELDS} == {f: getattr(yours, f) for f in FIELDS}
    best = yours.best_metric
    assert mine.best_metric == (None if best is None else pytest.approx(best, rel=1e-3))
    assert _name(mine.best_model_checkpoint) == _name(yours.best_model_checkpoint)
    twins.assert_same_weights(ours.weights, theirs.weights, atol=1e-3)
    assert_same_states_on_disk(ours.folder, theirs.folder)


def assert_same_states_on_disk(ours: Path, theirs: Path) -> None:
    for path in theirs.glob("checkpoint-*/trainer_state.json"):
        yours = json.loads(path.read_text())
        mine = json.loads((ours / path.relative_to(theirs)).read_text())
        assert set(mine) == set(yours)
        assert {f: mine[f] for f in FIELDS} == {f: yours[f] for f in FIELDS}
        assert [sorted(e) for e in mine["log_history"]] == [sorted(e) for e in yours["log_history"]]
        control = [state["stateful_callbacks"]["TrainerControl"]["args"] for state in (mine, yours)]
        assert control[0] == control[1]


def _name(path: str | None) -> str | None:
    return None if path is None else Path(path).name


class Asks:
    """What a callback may ask for, at a given step."""

    def __init__(self, step: int, flag: str) -> None:
        self.step, self.flag = step, flag

    def make(self, library: str) -> Any:
        _, _, base = twins.parts(library)
        step, flag = self.step, self.flag

        def on_step_end(self: Any, args: Any, state: Any, control: Any, **known: Any) -> Any:
            if state.global_step == step:
                setattr(control, flag, True)
            return control

        return type("Asking", (base,), {"on_step_end": on_step_end})()


@pytest.mark.parametrize(
    "flag",
    ["should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop"],
)
def test_a_callbacks_flags_are_followed_alike(tmp_path: Path, flag: str) -> None:
    asks = Asks(3, flag)
    ours, theirs = twins.both(
        tmp_path,
        model=twins.regression,
        train_dataset=twins.points(22),
        eval_dataset=twins.points(9),
        logging_steps=100,
        callbacks=Each(lambda library: [asks.make(library)]),
    )
    assert ours.events == theirs.events
    twins.assert_same_history(ours.history, theirs.history)
    assert ours.folders == theirs.folders


def test_accumulation_tells_the_same_events(tmp_path: Path) -> None:
    ours, theirs = twins.both(
        tmp_path,
        model=twins.regression,
        train_dataset=twins.points(22),
        eval_dataset=twins.points(9),
        gradient_accumulation_steps=4,
        **BY_EPOCHS,
    )
    assert ours.events == theirs.events
    assert [sorted(e) for e in ours.history] == [sorted(e) for e in theirs.history]
    assert ours.folders == theirs.folders
