"""Evaluation and prediction beside transformers': metrics, predictions, labels."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equivalence import twins

TAGS = partial(twins.bert, "TokenClassification")


def trainers(tmp_path: Path, model: Any, **given: Any) -> tuple[Any, Any]:
    return tuple(  # type: ignore[return-value]  # two of them
        twins.build(library, tmp_path / library, model=model(), **given)
        for library in twins.LIBRARIES
    )


def assert_same(mine: Any, yours: Any) -> None:
    if isinstance(yours, (tuple, list)):
        assert type(mine) is type(yours)
        assert len(mine) == len(yours)
        for a, b in zip(mine, yours, strict=True):
            assert_same(a, b)
    elif isinstance(yours, dict):
        assert list(mine) == list(yours)
        for name in yours:
            assert_same(mine[name], yours[name])
    elif yours is None or isinstance(yours, str):
        assert mine == yours
    else:
        np.testing.assert_allclose(mine, yours, rtol=1e-5, atol=1e-6)
        assert np.shape(mine) == np.shape(yours)
        assert np.asarray(mine).dtype == np.asarray(yours).dtype


def assert_same_outputs(ours: Any, theirs: Any) -> None:
    assert_same(ours.predictions, theirs.predictions)
    assert_same(ours.label_ids, theirs.label_ids)
    assert_same(twins.untimed(ours.metrics), twins.untimed(theirs.metrics))


def ragged_tags(count: int) -> twins.Rows:
    rows = twins.sentences(count, ragged=True)
    return [{**row, "labels": [word % 3 for word in row["input_ids"]]} for row in rows]


def right(found: Any) -> dict[str, float]:
    logits = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
    counted = found.label_ids != -100
    return {"right": float(((logits.argmax(-1) == found.label_ids) & counted).sum())}


@pytest.mark.parametrize("count", [3, 8, 11])
def test_predictions_labels_and_metrics_are_the_same(tmp_path: Path, count: int) -> None:
    ours, theirs = trainers(tmp_path, twins.bert, compute_metrics=right)
    data = twins.sentences(count)
    assert_same_outputs(ours.predict(data), theirs.predict(data))
    mine, yours = (twins.untimed(each.evaluate(data)) for each in (ours, theirs))
    assert_same(mine, yours)


def test_ragged_logits_are_padded_alike(tmp_path: Path) -> None:
    ours, theirs = trainers(tmp_path, TAGS, compute_metrics=right, data_collator=twins.pad)
    data = ragged_tags(11)
    assert_same_outputs(ours.predict(data), theirs.predict(data))


def test_batches_that_are_not_joined_come_as_lists(tmp_path: Path) -> None:
    kept: list[Any] = []

    def compute(found: Any) -> dict[str, float]:
        kept.append(found)
        return {}

    ours, theirs = trainers(
        tmp_path,
        TAGS,
        compute_metrics=compute,
        data_collator=twins.pad,
        eval_do_concat_batches=False,
    )
    data = ragged_tags(11)
    assert_same_outputs(ours.predict(data), theirs.predict(data))
    assert_same(kept[0].predictions, kept[1].predictions)
    assert_same(kept[0].label_ids, kept[1].label_ids)


def test_losses_and_inputs_reach_the_metrics_alike(tmp_path: Path) -> None:
    kept: list[Any] = []

    def compute(found: Any) -> dict[str, float]:
        kept.append(found)
        return {"losses": float(np.sum(found.losses)), "words": float(np.sum(found.inputs))}

    ours, theirs = trainers(
        tmp_path, twins.bert, compute_metrics=compute, include_for_metrics=["loss", "inputs"]
    )
    data = twins.sentences(11)
    mine, yours = (twins.untimed(each.evaluate(data)) for each in (ours, theirs))
    assert_same(kept[0].inputs, kept[1].inputs)
    # transformers gathers one loss a row of a full batch, and cuts the last ones; so do we.
    assert_same(kept[0].losses, kept[1].losses)
    assert_same(mine, yours)


class Streamed:
    """Count right answers batch by batch, as batch_eval_metrics asks."""

    def __init__(self) -> None:
        self.right, self.seen, self.calls = 0, 0, []

    def __call__(self, found: Any, compute_result: bool = False) -> dict[str, float]:
        self.calls.append((tuple(found.predictions.shape), compute_result))
        self.right += int((torch.as_tensor(found.predictions).argmax(-1) == found.label_ids).sum())
        self.seen += len(found.label_ids)
        return {"right": self.right / self.seen} if compute_result else {}


def test_metrics_by_the_batch_get_the_same_batches(tmp_path: Path) -> None:
    counts = [Streamed(), Streamed()]
    made = [
        twins.build(
            library,
            tmp_path / library,
            model=twins.bert(),
            compute_metrics=count,
            batch_eval_metrics=True,
        )
        for library, count in zip(twins.LIBRARIES, counts, strict=True)
    ]
    mine, yours = (twins.untimed(each.evaluate(twins.sentences(11))) for each in made)
    assert_same(mine, yours)
    assert counts[0].calls == counts[1].calls


def test_logits_are_reduced_before_they_are_kept_alike(tmp_path: Path) -> None:
    ours, theirs = trainers(
        tmp_path,
        twins.bert,
        compute_metrics=lambda found: {"sum": float(found.predictions.sum())},
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    data = twins.sentences(11)
    assert_same_outputs(ours.predict(data), theirs.predict(data))


@pytest.mark.parametrize("wish", [{"prediction_loss_only": True}, {}], ids=["loss only", "all"])
def test_several_sets_are_evaluated_under_their_names(tmp_path: Path, wish: Any) -> None:
    sets = {"a": twins.sentences(5), "b": twins.sentences(9)}
    ours, theirs = trainers(
        tmp_path, twins.bert, eval_dataset=sets, compute_metrics=None if wish else right, **wish
    )
    assert_same(twins.untimed(ours.evaluate()), twins.untimed(theirs.evaluate()))
    other = {"c": twins.sentences(3)}
    assert_same(twins.untimed(ours.evaluate(other)), twins.untimed(theirs.evaluate(other)))
    assert [e["step"] for e in ours.state.log_history] == [0, 0, 0]


def test_a_prefix_names_the_metrics(tmp_path: Path) -> None:
    ours, theirs = trainers(tmp_path, twins.bert, compute_metrics=right)
    mine, yours = (
        each.evaluate(twins.sentences(5), metric_key_prefix="final") for each in (ours, theirs)
    )
    assert_same(twins.untimed(mine), twins.untimed(yours))


def test_data_without_labels_is_predicted(tmp_path: Path) -> None:
    ours, theirs = trainers(tmp_path, twins.bert, compute_metrics=right)
    rows = [{k: v for k, v in row.items() if k != "labels"} for row in twins.sentences(11)]
    assert_same_outputs(ours.predict(rows), theirs.predict(rows))


def test_only_losses_are_kept_where_nothing_else_is_wanted(tmp_path: Path) -> None:
    ours, theirs = trainers(tmp_path, twins.bert, prediction_loss_only=True)
    data = twins.sentences(11)
    assert_same_outputs(ours.predict(data), theirs.predict(data))


@pytest.mark.parametrize("model", [twins.gpt2, twins.t5])
def test_models_with_several_outputs_give_the_same_ones(tmp_path: Path, model: Any) -> None:
    ours, theirs = trainers(tmp_path, model)
    data = twins.texts(7)
    assert_same_outputs(ours.predict(data), theirs.predict(data))
    ignored = {"ignore_keys": ["past_key_values", "encoder_last_hidden_state"]}
    assert_same_outputs(ours.predict(data, **ignored), theirs.predict(data, **ignored))


@pytest.mark.parametrize("gives", ["dict", "tuple"])
def test_plain_modules_are_evaluated_alike(tmp_path: Path, gives: str) -> None:
    ours, theirs = trainers(tmp_path, partial(twins.regression, gives))
    data = twins.points(11)
    assert_same_outputs(ours.predict(data), theirs.predict(data))
    assert_same(twins.untimed(ours.evaluate(data)), twins.untimed(theirs.evaluate(data)))


@pytest.mark.parametrize("kind", [twins.Stream, twins.SizedStream], ids=["stream", "sized"])
def test_streams_are_evaluated_alike(tmp_path: Path, kind: Any) -> None:
    ours, theirs = trainers(tmp_path, twins.bert, compute_metrics=right)
    data = kind(twins.sentences(11))
    assert_same_outputs(ours.predict(data), theirs.predict(data))


def test_a_whole_model_in_bf16_evaluates_alike(tmp_path: Path) -> None:
    ours, theirs = trainers(tmp_path, twins.bert, compute_metrics=right, bf16_full_eval=True)
    data = twins.sentences(11)
    mine, yours = (twins.untimed(each.evaluate(data)) for each in (ours, theirs))
    assert mine == pytest.approx(yours, rel=1e-3)


def test_smoothed_labels_are_evaluated_alike(tmp_path: Path) -> None:
    ours, theirs = trainers(tmp_path, TAGS, label_smoothing_factor=0.1)
    data = twins.tagged(11)
    assert_same_outputs(ours.predict(data), theirs.predict(data))


def test_ones_own_prediction_step_is_used(tmp_path: Path) -> None:
    def kind(base: Any) -> Any:
        class Own(base):  # type: ignore[misc]  # a base that is chosen
            def prediction_step(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
                loss, logits, labels = super().prediction_step(model, inputs, *more, **named)
                return loss, logits * 2, labels

        return Own

    ours, theirs = trainers(tmp_path, twins.bert, kind=kind, compute_metrics=right)
    data = twins.sentences(11)
    assert_same_outputs(ours.predict(data), theirs.predict(data))
