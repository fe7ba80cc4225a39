"""Rows are tokenized beside the model's making: to the same rows, model and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from anytrain.core.errors import BadInput
from anytrain.doors.trainer.outputs import set_seed
from anytrain.recipes.glue import job, models
from anytrain.recipes.glue.arguments import parse
from anytrain.recipes.glue.encode import encode
from tiny_bert import OVERRIDES, model_folder, pairs, write_rows


@pytest.fixture
def checked(tmp_path: Path) -> job.Checked:
    tiny = model_folder(tmp_path / "tiny")
    train, dev = (write_rows(tmp_path / f"{n}.tsv", pairs(40, seed=n)) for n in (1, 2))
    told = (
        f"--model_name_or_path {tiny} --config_overrides {OVERRIDES} --task_name mrpc "
        f"--train_file {train} --validation_file {dev} --do_train --do_eval --precision no "
        f"--max_seq_length 24 --output_dir {tmp_path / 'out'} --overwrite_cache"
    )
    return job.check(parse(told.split()))


def test_a_seed_gives_the_model_and_rows_that_it_gives_one_after_the_other(
    checked: job.Checked,
) -> None:
    asked, table = checked.job, checked.data.train
    assert table is not None
    set_seed(int(asked.training.seed))
    parts = models.prepare(asked.model, checked.labels, task="mrpc", trained=True)
    rows = encode(table, asked.data.task, parts.labels, parts.tokenizer, 24)
    model: Any = models.build(asked.model, parts)
    made = job.GlueRun(checked)
    state = made.trainer.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert made.train_set is not None
    assert len(made.train_set) == len(rows)
    for index in range(len(rows)):
        ours, expected = made.train_set[index], rows[index]
        assert {n: list(v) for n, v in ours.items() if n != "label"} == {
            n: list(v) for n, v in expected.items() if n != "label"
        }
        assert ours["label"] == expected["label"]


def test_rows_that_a_run_before_has_kept_are_told(checked: job.Checked) -> None:
    assert "run before" not in job.GlueRun(checked).introduction()
    checked.job.data.overwrite_cache = False
    assert "tokenized by a run before." in job.GlueRun(checked).introduction()


def test_a_cpu_trains_with_its_quick_kernels_and_says_so(checked: job.Checked) -> None:
    made = job.GlueRun(checked)
    model: Any = made.trainer.model
    assert model.config._attn_implementation == "eager"
    assert made.trainer.accelerator.plan.kernels.value == "quick dropout, eager attention"
    checked.job.training.max_steps = 2
    made.train()
    assert model.config.to_dict().get("attn_implementation") is None  # nothing of it is saved
    checked.job.training.do_train = False
    assert job.GlueRun(checked).trainer.accelerator.plan.kernels.value == "torch's"


def test_what_goes_wrong_beside_is_raised_where_the_rows_are_taken(
    checked: job.Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise BadInput("Cannot tokenize.", why="of this test.", fix="none.")

    monkeypatch.setattr(job, "encode", broken)
    with pytest.raises(BadInput, match="Cannot tokenize"):
        job.GlueRun(checked)
