"""`anytrain glue` end to end on torch_xla, beside the same command on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from launching import child_environment, run_command
from tiny_bert import OVERRIDES, model_folder, pairs, write_rows

_NO_DROPOUT = "hidden_dropout_prob=0,attention_probs_dropout_prob=0"


def _glue(folder: Path, device: str, *more: str) -> dict[str, Any]:
    """Train and evaluate; return the run's losses and scores."""
    out = folder / f"out-{device}"
    told = (
        f"--model_name_or_path {folder / 'tiny'} --config_overrides {OVERRIDES},{_NO_DROPOUT} "
        f"--task_name mrpc --train_file {folder / 'train.tsv'} "
        f"--validation_file {folder / 'dev.tsv'} --do_train --do_eval --max_seq_length 24 "
        f"--per_device_train_batch_size 8 --per_device_eval_batch_size 8 --max_steps 8 "
        f"--learning_rate 5e-3 --precision no --logging_steps 2 --save_strategy no "
        f"--pad_to_max_length --output_dir {out}"
    ).split()
    env = child_environment({"PJRT_DEVICE": "CPU", "ANYTRAIN_DEVICE": device})
    run_command([sys.executable, "-m", "anytrain", "glue", *told, *more], env=env, timeout=140)
    state = json.loads((out / "trainer_state.json").read_text())
    scores = json.loads((out / "all_results.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    return {"losses": losses, "scores": scores, "out": out}


def test_glue_trains_on_xla_to_the_cpus_losses_scores_and_weights(tmp_path: Path) -> None:
    model_folder(tmp_path / "tiny")
    write_rows(tmp_path / "train.tsv", pairs(96, seed=1))
    write_rows(tmp_path / "dev.tsv", pairs(20, seed=2))  # its last batch is not full
    ours, cpu = _glue(tmp_path, "xla"), _glue(tmp_path, "cpu")
    assert len(ours["losses"]) == 4
    assert ours["losses"] == pytest.approx(cpu["losses"], abs=1e-4)
    assert ours["scores"]["eval_loss"] == pytest.approx(cpu["scores"]["eval_loss"], abs=1e-4)
    assert ours["scores"]["eval_accuracy"] == cpu["scores"]["eval_accuracy"]
    mine, theirs = (load_file(run["out"] / "model.safetensors") for run in (ours, cpu))
    assert set(mine) == set(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, atol=2e-3, rtol=1e-2)
