from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import transformers.trainer_callback as theirs

from anytrain.core.errors import BadType, CheckpointError, Unsupported
from anytrain.doors.callbacks import (
    EarlyStoppingCallback,
    ExportableState,
    TrainerControl,
    TrainerState,
)


def test_the_state_has_hfs_fields_with_hfs_values() -> None:
    ours = dataclasses.asdict(TrainerState())
    assert ours == dataclasses.asdict(theirs.TrainerState())
    assert [f.name for f in dataclasses.fields(TrainerState)] == [
        f.name for f in dataclasses.fields(theirs.TrainerState)
    ]
    assert dataclasses.asdict(TrainerControl()) == dataclasses.asdict(theirs.TrainerControl())


def test_a_state_goes_to_a_file_and_back_and_hf_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    state = TrainerState(
        epoch=1.5,
        global_step=30,
        log_history=[{"loss": math.nan, "step": 10}, {"loss": np.float32(0.5), "step": 20}],
        stateful_callbacks=[EarlyStoppingCallback(2), TrainerControl()],  # type: ignore[arg-type]
    )
    state.save_to_json(path)
    again = TrainerState.load_from_json(path)
    hf = theirs.TrainerState.load_from_json(str(path))
    assert again.to_json() == state.to_json()
    assert again.log_history[1] == {"loss": 0.5, "step": 20}
    assert hf.global_step == 30
    assert set(hf.stateful_callbacks) == {"EarlyStoppingCallback", "TrainerControl"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["trainer_state.json"]


def test_a_state_that_hf_wrote_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    theirs.TrainerState(global_step=12, best_metric=0.9).save_to_json(str(path))
    state = TrainerState.load_from_json(path)
    assert (state.global_step, state.best_metric) == (12, 0.9)


def test_keys_of_other_versions_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"global_step": 5, "from_the_future": 1}))
    assert TrainerState.load_from_json(path).global_step == 5


@pytest.mark.parametrize("text", ["", "[1]", '{"global_step": 5'])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trainer_state.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"Cannot read .*trainer_state\.json"):
        TrainerState.load_from_json(path)


@pytest.mark.parametrize("interval", [1, 7, 500, 0.1, 0.3, 0.34, 0.999])
@pytest.mark.parametrize("max_steps", [1, 10, 101, 999])
def test_fractions_of_a_run_become_the_steps_that_hf_computes(
    interval: float, max_steps: int
) -> None:
    args = SimpleNamespace(logging_steps=interval, eval_steps=None, save_steps=interval)
    ours, hf = TrainerState(), theirs.TrainerState()
    ours.compute_steps(args, max_steps)
    hf.compute_steps(args, max_steps)
    assert dataclasses.asdict(ours) == dataclasses.asdict(hf)


def test_several_callbacks_of_one_class_are_kept_in_a_list() -> None:
    pair = [EarlyStoppingCallback(1), EarlyStoppingCallback(2)]
    kept = TrainerState(stateful_callbacks=pair).stateful_callbacks  # type: ignore[arg-type]
    patience = [one["args"]["early_stopping_patience"] for one in kept["EarlyStoppingCallback"]]
    assert patience == [1, 2]


def test_only_what_says_its_state_can_be_kept() -> None:
    with pytest.raises(BadType, match="Cannot save the state of a object"):
        TrainerState(stateful_callbacks=[object()])  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="does not say what of it to save"):
        ExportableState().state()


def test_an_exportable_state_is_made_again_from_its_arguments_and_attributes() -> None:
    stopper = EarlyStoppingCallback(4, 0.5)
    stopper.early_stopping_patience_counter = 3
    again = EarlyStoppingCallback.from_state(stopper.state())
    assert again.state() == stopper.state()


def test_a_training_notes_its_length_its_place_and_its_trial() -> None:
    trainer = SimpleNamespace(
        hp_name=lambda trial: f"trial-{trial.number}",
        _trial=SimpleNamespace(number=3),
        is_local_process_zero=lambda: True,
        is_world_process_zero=lambda: False,
    )
    state = TrainerState()
    trial = SimpleNamespace(params={"learning_rate": 1e-4})
    state.init_training_references(trainer, 100, 3, trial)
    assert (state.max_steps, state.num_train_epochs) == (100, 3)
    assert (state.is_local_process_zero, state.is_world_process_zero) == (True, False)
    assert (state.trial_name, state.trial_params) == ("trial-3", {"learning_rate": 1e-4})
