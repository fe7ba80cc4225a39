"""Rows become numbers, and batches come out as the library's own collator makes them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from anytrain.core.errors import BadInput, Notice
from anytrain.engine.data.workers import unlike
from anytrain.engine.recording.fingerprint import describe
from anytrain.recipes.glue.encode import Encoded, Pad, encode, fitting_length, token_cache
from anytrain.recipes.glue.tasks import TASKS, Labels, TextTable
from tiny_bert import model_folder, pairs


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder(tmp_path_factory.mktemp("tiny")))


def _table(count: int) -> TextTable:
    rows = pairs(count)
    return TextTable({name: [row[name] for row in rows] for name in rows[0]}, "pairs.tsv")


def _encoded(tokenizer: Any, count: int = 6, max_length: int = 12) -> Encoded:
    task = TASKS["mrpc"]
    return encode(_table(count), task, Labels(task.labels, task.labels), tokenizer, max_length)


@pytest.mark.parametrize("padding", ["max_length", "longest"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_are_those_of_the_librarys_collator(
    tokenizer: Any, padding: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import DataCollatorWithPadding

    monkeypatch.setattr(tokenizer, "padding_side", side)
    rows = [_encoded(tokenizer)[index] for index in range(6)]
    fixed = padding == "max_length"
    theirs = DataCollatorWithPadding(
        tokenizer, padding=padding, max_length=12, pad_to_multiple_of=None if fixed else 8
    )
    plain = [{k: v if k == "label" else v.tolist() for k, v in row.items()} for row in rows]
    pad = Pad(
        token=tokenizer.pad_token_id,
        left=side == "left",
        length=12 if fixed else None,
        multiple=1 if fixed else 8,
    )
    at_once = pad(_encoded(tokenizer).__getitems__(range(6)))
    expected = theirs(plain)
    for ours in (pad(rows), at_once):
        assert set(ours) == set(expected)
        for name, tensor in ours.items():
            assert torch.equal(tensor, expected[name]), name
            assert tensor.dtype == expected[name].dtype


def test_rows_are_cut_to_the_length_and_keep_their_order(tokenizer: Any) -> None:
    rows = _encoded(tokenizer, count=9000)
    assert len(rows) == 9000
    assert max(len(rows[index]["input_ids"]) for index in range(500)) == 12
    assert [rows[index]["label"] for index in (0, 1, 8998, 8999)] == [0, 1, 0, 1]
    with pytest.raises(IndexError):
        rows[9000]


def test_values_become_floats(tokenizer: Any) -> None:
    table = TextTable({"sentence1": ["a"], "sentence2": ["cat"], "score": ["2.5"]}, "sts.tsv")
    rows = encode(table, TASKS["stsb"], Labels(()), tokenizer, 12)
    assert Pad(token=0)([rows[0]])["labels"].dtype == torch.float32


def test_rows_at_once_are_the_rows_one_by_one(tokenizer: Any) -> None:
    rows = _encoded(tokenizer)
    some = rows.__getitems__([4, 0, 0])
    assert [row["label"] for row in some] == [rows[n]["label"] for n in (4, 0, 0)]
    assert [len(row["input_ids"]) for row in some[1:]] == [rows.lengths[0]] * 2
    assert list(some.only({"label", "input_ids"})[0]) == ["input_ids", "label"]
    pad = Pad(token=0)
    shuffled = pad(rows.__getitems__(np.array([5, 2])))
    assert torch.equal(shuffled["labels"], torch.tensor([rows[5]["label"], rows[2]["label"]]))
    assert "labels" not in pad(some.only({"input_ids"}))
    with pytest.raises(BadInput, match="longer than that"):
        Pad(token=0, length=3)(some)


@pytest.mark.parametrize(("most", "width"), [(None, 16), (16, 16), (14, 14), (12, 12)])
def test_batches_are_not_rounded_up_beyond_the_models_places(
    tokenizer: Any, most: int | None, width: int
) -> None:
    rows = _encoded(tokenizer).__getitems__(range(6))
    assert Pad(token=0, multiple=8, most=most)(rows)["input_ids"].shape == (6, width)


def test_a_second_run_takes_the_rows_from_the_disk(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYTRAIN_CACHE", str(tmp_path))
    task, names = TASKS["mrpc"], Labels(TASKS["mrpc"].labels, TASKS["mrpc"].labels)

    def run(count: int = 6, length: int = 12, fresh: bool = False) -> Encoded:
        cache = token_cache(fresh=fresh)
        return encode(_table(count), task, names, tokenizer, length, cache)

    first, again = run(), run()
    assert (first.was_kept, again.was_kept) == (False, True)
    for one, other in zip(first, again, strict=True):
        assert {k: np.asarray(v).tolist() for k, v in one.items()} == {
            k: np.asarray(v).tolist() for k, v in other.items()
        }
    assert describe(first) == describe(again), "a record says that the data are the same"
    other_label = run()
    other_label.labels[0] = 1 - other_label.labels[0]
    assert describe(first)["fingerprint"] not in (None, describe(other_label)["fingerprint"])
    # What would come out otherwise is not taken; what the user wants anew is not either.
    assert not run(count=5).was_kept
    assert not run(length=8).was_kept
    assert not run(fresh=True).was_kept
    tokenizer.add_tokens(["zebrafish"])
    assert not run().was_kept


def test_labels_are_not_looked_at_where_they_are_to_be_predicted(tokenizer: Any) -> None:
    table = TextTable({"sentence1": ["a"], "sentence2": ["cat"], "label": ["-1"]}, "test.tsv")
    assert "label" not in encode(table, TASKS["rte"], None, tokenizer, 12)[0]


def test_a_row_without_text_is_named(tokenizer: Any) -> None:
    table = TextTable({"text": ["a", None], "label": [0, 1]}, "train.json")
    with pytest.raises(BadInput, match="row 2 of column 'text' in train.json"):
        encode(table, None, Labels(("0", "1")), tokenizer, 12)


def test_a_length_above_the_models_is_cut_and_told(tokenizer: Any) -> None:
    config = SimpleNamespace(max_position_embeddings=32)
    with pytest.warns(Notice, match="more than the 32 places"):
        assert fitting_length(128, tokenizer, config, pairs=True) == 32
    assert fitting_length(16, tokenizer, config, pairs=True) == 16
    with pytest.raises(BadInput, match="at least 5 places for a pair"):
        fitting_length(4, tokenizer, config, pairs=True)


def test_a_tokenizer_without_a_limit_takes_the_models(tokenizer: Any, tmp_path: Path) -> None:
    endless = SimpleNamespace(
        model_max_length=10**30, num_special_tokens_to_add=tokenizer.num_special_tokens_to_add
    )
    assert fitting_length(99, endless, SimpleNamespace(), pairs=False) == 99


def test_rows_and_batches_may_be_made_by_any_process(tokenizer: Any) -> None:
    rows: Any = _encoded(tokenizer)
    assert unlike(DataLoader(rows, collate_fn=Pad(token=0))) is None
