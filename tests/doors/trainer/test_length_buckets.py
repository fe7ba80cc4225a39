"""Training and evaluating in a few shapes gives what it gives in any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch import nn

from anytrain.core.errors import BadInput, Notice
from anytrain.doors.callbacks import TrainerCallback
from anytrain.doors.trainer import Trainer
from equivalence import twins
from launching import launch

ROWS = twins.sentences(45, 24, ragged=True)


class Watched(nn.Module):
    """A model, and the shapes and words that it was trained and asked on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.shapes: dict[bool, list[tuple[int, ...]]] = {True: [], False: []}
        self.words: list[list[int]] = []
        model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, model: nn.Module, args: Any, given: dict[str, Any]) -> None:
        self.shapes[model.training].append(tuple(given["input_ids"].shape))
        labels = given.get("labels")
        if model.training and labels is not None:
            counted = labels if labels.ndim == 1 else labels[:, 0]
            rows = zip(given["input_ids"], given["attention_mask"], counted, strict=True)
            self.words += [ids[mask.bool()].tolist() for ids, mask, label in rows if label != -100]


def watched(model: nn.Module, folder: Path, **given: Any) -> tuple[Any, Watched]:
    told = Watched(model)
    given = {"train_dataset": twins.Mapped(ROWS), "data_collator": twins.pad, **given}
    return twins.build(twins.OURS, folder, model=model, **given), told


def test_every_step_has_one_of_a_few_shapes_and_each_sample_comes_once(tmp_path: Path) -> None:
    trainer, told = watched(twins.bert(), tmp_path, length_buckets=3, num_train_epochs=1)
    trainer.train()
    assert len(set(told.shapes[True])) <= 3
    assert {rows for rows, _ in told.shapes[True]} == {4}
    assert all(length % 8 == 0 for _, length in told.shapes[True])
    assert sorted(told.words) == sorted(row["input_ids"] for row in ROWS)
    choice = trainer._session.plan.shapes
    assert choice.value == "buckets"
    assert choice.because.startswith("buckets of 8, 16, 24: padding ")
    assert "small" not in choice.because


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("case", ["classes", "tags", "words", "soft"])
def test_rows_that_fill_a_last_batch_change_nothing(
    case: str, accumulation: int, tmp_path: Path
) -> None:
    """The same order, once with the last batch filled and once small."""
    model, rows, more = {
        "classes": (twins.bert, ROWS, {}),
        "tags": (lambda: twins.bert("TokenClassification"), twins.tagged(45), {}),
        "words": (twins.gpt2, twins.texts(45), {}),
        "soft": (twins.bert, ROWS, {"label_smoothing_factor": 0.1}),
    }[case]
    ran = []
    for fills in (True, False):
        trainer, told = watched(
            model(),
            tmp_path / str(fills),
            train_dataset=twins.Mapped(rows),
            length_buckets=[8, 16, 24],
            gradient_accumulation_steps=accumulation,
            **more,
        )
        if not fills:
            trainer._small_because = lambda *a, **k: "for comparison"
        trainer.train()
        assert ({rows for rows, _ in told.shapes[True]} == {4}) is fills
        ran.append(trainer)
    logs = [[twins.untimed(entry) for entry in each.state.log_history] for each in ran]
    for log in logs:
        del log[-1]["total_flos"]  # the rows were computed
    twins.assert_same_history(*logs)
    weights = [dict(each.model.named_parameters()) for each in ran]
    twins.assert_same_weights(*weights, atol=2e-5)


def test_an_evaluation_counts_each_sample_once(tmp_path: Path) -> None:
    found = []
    for buckets in (None, [8, 16, 24]):
        trainer, told = watched(
            twins.bert(),
            tmp_path,
            length_buckets=buckets,
            eval_dataset=twins.Mapped(ROWS),
            compute_metrics=lambda p: {"num": len(p.label_ids), "sum": float(p.label_ids.sum())},
            include_for_metrics=["loss"],
        )
        metrics = twins.untimed(trainer.evaluate())
        said = trainer.predict(twins.Mapped(ROWS))
        bare = [{k: v for k, v in row.items() if k != "labels"} for row in ROWS]
        unlabelled = trainer.predict(twins.Mapped(bare)).predictions
        found.append((metrics, said.predictions, said.label_ids, unlabelled, told))
    (plain, *arrays, _), (metrics, *others, told) = found
    assert {rows for rows, _ in told.shapes[False]} == {4}
    assert metrics["eval_num"] == 45
    twins.assert_same_history([metrics], [plain])
    for mine, other in zip(arrays, others, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)


def test_a_run_that_is_resumed_in_an_epoch_ends_the_same_to_the_bit(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "train_dataset": twins.Mapped(ROWS),
        "data_collator": twins.pad,
        "length_buckets": "auto",
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 4,
        "dataloader_num_workers": 0,
    }

    def model() -> nn.Module:
        return twins.bert(dropout=0.2)

    whole = twins.train(twins.OURS, tmp_path / "whole", model=model, **given)
    stop = Stop(5)
    twins.train(twins.OURS, tmp_path / "parts", model=model, callbacks=[stop], **given)
    rest = twins.train(twins.OURS, tmp_path / "parts", model=model, resume=True, **given)
    assert whole.history == rest.history
    for name, weight in whole.weights.items():
        assert torch.equal(weight, rest.weights[name]), name


class Stop(TrainerCallback):
    """End the run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        if state.global_step == self.step:
            control.should_training_stop = True


def test_another_layout_goes_on_with_the_samples_that_are_left(tmp_path: Path) -> None:
    shared: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 1}
    first, seen = watched(twins.bert(), tmp_path, length_buckets=3, callbacks=[Stop(3)], **shared)
    first.train()
    second, left = watched(
        twins.bert(), tmp_path, length_buckets=[24], gradient_accumulation_steps=3, **shared
    )
    with pytest.warns(Notice, match="1 batches in a step"):
        second.train(resume_from_checkpoint=True)
    assert len(seen.words) == 12
    assert sorted(seen.words + left.words) == sorted(row["input_ids"] for row in ROWS)


def test_batches_of_another_size_go_on_with_the_samples_that_are_left(tmp_path: Path) -> None:
    shared: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 1}
    shared["length_buckets"] = "auto"
    first, seen = watched(twins.bert(), tmp_path, callbacks=[Stop(3)], **shared)
    first.train()
    second, left = watched(twins.bert(), tmp_path, per_device_train_batch_size=2, **shared)
    with pytest.warns(Notice, match="batch"):
        second.train(resume_from_checkpoint=True)
    assert len(seen.words) == 12
    assert sorted(seen.words + left.words) == sorted(row["input_ids"] for row in ROWS)


class OwnLoss(Trainer):
    """A loss of the user's own."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **more)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("own", "compute_loss is your own"),
        ("func", "compute_loss_func is your own"),
        ("regression", "its labels are not classes"),
        ("floats", "its labels are not classes"),
        ("norm", "batch normalisation would count"),
        ("unknown", "the loss of Plain is not known to leave out rows labelled -100"),
    ],
)
def test_a_last_batch_stays_small_where_its_rows_would_count(
    case: str, why: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"length_buckets": 2, "num_train_epochs": 1}
    model, rows = twins.bert(), ROWS[:-3]
    if case == "own":
        given["kind"] = lambda trainer: OwnLoss
    elif case == "func":
        given["compute_loss_func"] = lambda outputs, labels, **more: nn.functional.cross_entropy(
            outputs["logits"], labels
        )
    elif case in ("regression", "floats"):
        model = twins.bert(num_labels=1 if case == "regression" else 3)
        labels: Any = 0.5 if case == "regression" else [0.0, 1.0, 0.0]
        rows = [{**row, "labels": labels} for row in rows]
    elif case == "norm":
        model.classifier = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 3))
    else:
        model = Plain()
    trainer, told = watched(model, tmp_path, train_dataset=twins.Mapped(rows), **given)
    trainer.train()
    because = trainer._session.plan.shapes.because
    assert f"the last batch stays small: {why}" in because
    assert told.shapes[True][-1][0] == 2


class Plain(nn.Module):
    """A module whose loss nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 3)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        told = (self.words(input_ids) * attention_mask[..., None]).sum(1)
        return {"loss": nn.functional.cross_entropy(told, labels, reduction="sum") / len(labels)}


def test_a_translation_has_as_many_shapes_as_lengths(tmp_path: Path) -> None:
    rows = [{**row, "labels": row["input_ids"][: 1 + i % 9]} for i, row in enumerate(ROWS)]
    trainer, told = watched(
        twins.t5(), tmp_path, train_dataset=twins.Mapped(rows), length_buckets=3
    )
    shapes = set()
    trainer.model.register_forward_pre_hook(
        lambda model, args, given: shapes.add(
            (tuple(given["input_ids"].shape), tuple(given["labels"].shape))
        ),
        with_kwargs=True,
    )
    trainer.train()
    assert len(shapes) == len({inputs for inputs, _ in shapes}) <= 3


def test_lengths_come_from_a_column_or_from_a_table_of_arrow(tmp_path: Path) -> None:
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    table = datasets.Dataset.from_dict(columns).shuffle(seed=0)
    trainer, told = watched(
        twins.bert(), tmp_path, train_dataset=table, length_buckets=2, num_train_epochs=1
    )
    trainer.train()
    assert len(set(told.shapes[True])) == 2
    assert sorted(told.words) == sorted(row["input_ids"] for row in ROWS)


def test_a_stream_is_padded_to_lengths_that_are_listed(tmp_path: Path) -> None:
    stream = twins.Stream(ROWS)
    trainer, told = watched(
        twins.bert(), tmp_path, train_dataset=stream, length_buckets=[16, 24], max_steps=9
    )
    trainer.train()
    assert {length for _, length in told.shapes[True]} <= {16, 24}
    other, _ = watched(
        twins.bert(), tmp_path / "auto", train_dataset=stream, length_buckets="auto", max_steps=9
    )
    with pytest.raises(BadInput, match="from a stream"):
        other.train()


def test_counting_lengths_draws_nothing(tmp_path: Path) -> None:
    class Drawing(twins.Mapped):
        def __getitem__(self, index: int) -> dict[str, Any]:
            torch.rand(1)
            return super().__getitem__(index)

    trainer, _ = watched(twins.bert(), tmp_path, train_dataset=Drawing(ROWS), length_buckets="auto")
    before = torch.get_rng_state()
    trainer._lengths_of(trainer.train_dataset)
    assert torch.equal(before, torch.get_rng_state())


SCRIPT = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from equivalence import twins

rows = twins.sentences(45, 24, ragged=True)
shapes, words, found = [], [], {}
model = twins.bert()

def look(model, args, given):
    if model.training:
        shapes.append(list(given["input_ids"].shape))
        rows = zip(given["input_ids"], given["attention_mask"], given["labels"])
        words.extend(ids[mask.bool()].tolist() for ids, mask, label in rows if label != -100)

model.register_forward_pre_hook(look, with_kwargs=True)
trainer = twins.build(
    twins.OURS, sys.argv[1] + "/out", model=model, train_dataset=twins.Mapped(rows),
    eval_dataset=twins.Mapped(rows), data_collator=twins.pad, num_train_epochs=1,
    per_device_train_batch_size=4, gradient_accumulation_steps=2, length_buckets=[8, 16, 24],
    compute_metrics=lambda p: {"num": len(p.label_ids), "sum": int(p.label_ids.sum())},
)
trainer.train()
metrics = twins.untimed(trainer.evaluate())
weights = {n: p.tolist() for n, p in trainer.model.named_parameters()}
rank = trainer.args.process_index
told = {"shapes": shapes, "words": words, "metrics": metrics, "weights": weights}
Path(sys.argv[1], f"rank{rank}.json").write_text(json.dumps(told))
"""


@pytest.mark.full
def test_ranks_train_on_one_shape_at_a_time_and_count_each_sample_once(tmp_path: Path) -> None:
    launch(SCRIPT, 2, tmp_path, Path(__file__).parents[2])
    first, second = (json.loads((tmp_path / f"rank{r}.json").read_text()) for r in range(2))
    assert sorted(first["words"] + second["words"]) == sorted(row["input_ids"] for row in ROWS)
    assert {rows for rows, _ in first["shapes"] + second["shapes"]} == {4}
    full = 45 // 16 * 2  # batches of steps that are full
    assert first["shapes"][:full] == second["shapes"][:full]
    assert first["metrics"] == second["metrics"]
    assert first["metrics"]["eval_num"] == 45
    assert first["weights"] == second["weights"]
