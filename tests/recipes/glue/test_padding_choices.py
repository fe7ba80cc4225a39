"""`anytrain glue` pads to a few lengths, unless somebody says how to pad."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from anytrain.core.errors import BadInput
from anytrain.recipes.glue.arguments import GlueJob, parse


def asked(tmp_path: Path, *words: str) -> GlueJob:
    return parse(
        ["--model_name_or_path", "some/model", "--task_name", "mrpc", "--do_train"]
        + ["--output_dir", str(tmp_path), *words]
    )


@pytest.mark.parametrize(
    ("words", "pads", "buckets"),
    [
        ((), None, "auto"),
        (("--length_buckets", "5"), None, 5),
        (("--pad_to_max_length",), True, None),
        (("--pad_to_max_length", "True"), True, None),
        (("--pad_to_max_length", "False"), False, None),
        (("--no_pad_to_max_length",), False, None),
        (("--pad_to_max_length", "False", "--length_buckets", "auto"), False, "auto"),
        (("--train_sampling_strategy", "group_by_length"), None, None),
    ],
)
def test_what_is_said_about_padding_holds(
    words: tuple[str, ...], pads: bool | None, buckets: Any, tmp_path: Path
) -> None:
    job = asked(tmp_path, *words)
    assert job.data.pad_to_max_length is pads
    assert job.training.length_buckets == buckets
    assert job.settings()["length_buckets"] == buckets


def test_one_length_and_a_few_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--pad_to_max_length with --length_buckets"):
        asked(tmp_path, "--pad_to_max_length", "--length_buckets", "auto")
