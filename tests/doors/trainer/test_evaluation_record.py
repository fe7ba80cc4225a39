"""What an evaluation showed is written down, and nothing else changes for it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from anytrain.core.errors import Notice
from anytrain.core.records import open_run
from anytrain.doors.trainer import evaluation_record
from anytrain.doors.trainer.evaluation_record import look_up
from equivalence import twins
from launching import launch

HTML = '<script>alert(1)</script> & "quotes" — 東京'


def build(folder: Path, **given: Any) -> Any:
    known = {"data_collator": twins.pad, "model": twins.bert()}
    return twins.build(twins.OURS, folder, **{**known, **given})


def read(folder: Path, name: str = "evaluation") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return found


def untimed(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "time"}


def accuracy(prediction: Any) -> dict[str, float]:
    said = np.asarray(prediction.predictions).argmax(-1)
    return {"accuracy": float((said == prediction.label_ids).mean())}


class Streaming:
    """Metrics that keep no predictions."""

    def update(self, predictions: Any, labels: Any) -> None:
        pass

    def compute(self) -> dict[str, float]:
        return {}


def argmax(logits: Any, labels: Any) -> Any:
    return logits.argmax(-1)


WAYS = {
    "nothing": {},
    "metrics": {"compute_metrics": accuracy},
    "reduced": {"compute_metrics": lambda p: {}, "preprocess_logits_for_metrics": argmax},
    "streaming": {"compute_metrics": Streaming()},
    "loss only": {"compute_metrics": accuracy, "prediction_loss_only": True},
    "apart": {"compute_metrics": lambda p: {}, "eval_do_concat_batches": False},
    "filled": {"length_buckets": "auto"},
}


def test_classes_are_counted_whatever_the_metrics_keep(tmp_path: Path) -> None:
    rows = twins.sentences(11, ragged=True)
    files = {}
    for name, given in WAYS.items():
        trainer = build(tmp_path / name, eval_dataset=rows, **given)
        trainer.evaluate()
        files[name] = untimed(read(tmp_path / name))
    predicted = build(tmp_path / "predicting").predict(rows)
    assert not list((tmp_path / "predicting").glob("evaluation*")), "predicting tells nothing"
    said = predicted.predictions.argmax(-1)
    assert files["nothing"]["confusion"] == confusion_matrix(predicted.label_ids, said).tolist()
    wrong = {w["index"] for w in files["nothing"]["worst"]}
    assert wrong == set(np.flatnonzero(said != predicted.label_ids).tolist())
    for name, found in files.items():
        sure = [w.pop("confidence") for w in found["worst"]]
        other = [w.get("confidence") for w in files["nothing"]["worst"]]
        if name != "nothing":
            np.testing.assert_allclose(sure, other, rtol=1e-5, err_msg=name)
            assert {**found, "worst": 0} == {**files["nothing"], "worst": 0}, name
        for sample, confidence in zip(found["worst"], sure, strict=True):
            sample["confidence"] = confidence


def test_tokens_are_counted_where_they_have_a_class(tmp_path: Path) -> None:
    rows, model = twins.tagged(10), twins.bert("TokenClassification")
    trainer = build(tmp_path, model=model, eval_dataset=rows)
    trainer.evaluate()
    found = read(tmp_path)
    predicted = trainer.predict(rows)
    label, said = predicted.label_ids.reshape(-1), predicted.predictions.argmax(-1).reshape(-1)
    counted = label != -100
    assert found["confusion"] == confusion_matrix(label[counted], said[counted]).tolist()
    assert found["num_tokens"] == int(counted.sum())
    for sample in found["worst"]:
        row = rows[sample["index"]]
        assert row["labels"][sample["token"]] == int(sample["label"])
        assert sample["inputs"]["input_ids"].startswith(f"8 numbers: {row['input_ids'][0]}, ")


def test_values_have_residuals(tmp_path: Path) -> None:
    rows, model = twins.points(10), twins.regression()
    trainer = build(tmp_path, model=model, eval_dataset=rows, data_collator=None)
    trainer.evaluate()
    found, predicted = read(tmp_path), trainer.predict(rows)
    error = predicted.predictions - predicted.label_ids
    assert found["kind"] == "regression"
    assert sum(found["residuals"]["counts"]) == 10
    assert [each["index"] for each in found["worst"]] == np.argsort(-abs(error)).tolist()
    assert abs(found["worst"][0]["error"]) == pytest.approx(abs(error).max(), abs=1e-5)
    np.testing.assert_allclose(
        found["points"], np.stack([predicted.label_ids, predicted.predictions], 1), atol=1e-5
    )


def test_nothing_is_written_of_what_predicts_the_next_word(tmp_path: Path) -> None:
    trainer = build(tmp_path, model=twins.gpt2(), eval_dataset=twins.texts(6))
    assert trainer.evaluate()["eval_loss"] > 0
    assert not list(tmp_path.glob("evaluation*"))


def test_each_of_several_sets_has_its_file(tmp_path: Path) -> None:
    sets = {"dev": twins.sentences(6), "odd": twins.sentences(5)}
    trainer = build(tmp_path, eval_dataset=sets, compute_metrics=accuracy)
    trainer.evaluate()
    trainer.evaluate(twins.sentences(4), metric_key_prefix="extra")
    assert sorted(path.name for path in tmp_path.glob("evaluation*")) == [
        "evaluation-dev.json",
        "evaluation-extra.json",
        "evaluation-odd.json",
    ]
    found = read(tmp_path, "evaluation-odd")
    assert (found["split"], found["num_samples"]) == ("odd", 5)


def test_texts_are_kept_as_they_are(tmp_path: Path) -> None:
    rows = [{**row, "text": f"{HTML} {n}", "tokens": ["a"]} for n, row in enumerate(ROWS)]
    long = rows[0] | {"text": "x" * 600}
    trainer = build(tmp_path, eval_dataset=[long, *rows[1:]], compute_metrics=accuracy)
    trainer.evaluate()
    for sample in read(tmp_path)["worst"]:
        shown = sample["inputs"]["text"]
        assert shown == (f"{HTML} {sample['index']}" if sample["index"] else "x" * 499 + "…")
        assert sample["inputs"]["tokens"] == "a"


ROWS = twins.sentences(12)


def test_names_of_classes_come_from_the_model(tmp_path: Path) -> None:
    named = {0: "no", 1: "perhaps", 2: "yes"}
    model = twins.bert(id2label=named, label2id={n: i for i, n in named.items()})
    build(tmp_path, model=model, eval_dataset=ROWS).evaluate()
    assert read(tmp_path)["classes"] == ["no", "perhaps", "yes"]
    build(tmp_path, eval_dataset=ROWS).evaluate()
    assert read(tmp_path)["classes"] == ["0", "1", "2"]


def test_a_table_of_datasets_shows_its_texts_and_its_names(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{**row, "said": f"text {n}"} for n, row in enumerate(ROWS)]
    table = datasets.Dataset.from_list(rows)
    table = table.cast_column("labels", datasets.ClassLabel(names=["no", "perhaps", "yes"]))
    build(tmp_path, eval_dataset=table).evaluate()
    found = read(tmp_path)
    assert found["classes"] == ["no", "perhaps", "yes"]
    assert found["worst"]
    for sample in found["worst"]:
        assert sample["inputs"] == {"said": f"text {sample['index']}"}


class Words:
    """As much of a tokenizer as is asked for."""

    padding_side = "right"
    pad_token_id = 0

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(f"w{token}" for token in tokens if token or not skip_special_tokens)


def test_tokens_are_decoded_where_there_is_no_text(tmp_path: Path) -> None:
    rows = [row | {"input_ids": [*row["input_ids"][:-1], 0]} for row in ROWS]
    build(tmp_path, eval_dataset=rows, processing_class=Words()).evaluate()
    for sample in read(tmp_path)["worst"]:
        words = rows[sample["index"]]["input_ids"][:-1]
        assert sample["inputs"] == {"text": " ".join(f"w{word}" for word in words)}
    tags, model = twins.tagged(6), twins.bert("TokenClassification")
    build(tmp_path, model=model, eval_dataset=tags, processing_class=Words()).evaluate()
    for sample in read(tmp_path)["worst"]:
        word = tags[sample["index"]]["input_ids"][sample["token"]]
        assert sample["inputs"]["token"] == f"w{word}"


class Linear(nn.Module):
    """Scores by place; rows that begin with a thousand get none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        scores = torch.where(x[:, :1] == 1000, float("nan"), self.linear(x))
        return scores if y is None else (scores.nan_to_num(0).sum(), scores)


def test_scores_that_are_no_numbers_are_wrong(tmp_path: Path) -> None:
    inputs = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    inputs[3, 0] = inputs[7, 0] = 1000
    data = TensorDataset(inputs, torch.arange(10) % 3)
    twins.build(twins.OURS, tmp_path, model=Linear(), eval_dataset=data).evaluate()
    found = read(tmp_path)
    assert found["num_undecided"] == 2
    assert np.sum(found["confusion"]) == 8
    last = found["worst"][-2:]
    assert [(each["index"], each["confidence"], each["predicted"]) for each in last] == [
        (3, None, None),
        (7, None, None),
    ]
    assert last[0]["inputs"]["0"].startswith("4 numbers: 1000, ")


class Backwards:
    """A sampler with an order of its own."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Any:
        return iter(range(self.size - 1, -1, -1))


def test_an_order_of_ones_own_still_names_the_samples(tmp_path: Path) -> None:
    def kind(base: Any) -> Any:
        def sampler(self: Any, dataset: Any) -> Any:
            return Backwards(len(dataset))

        return type("Own", (base,), {"_get_eval_sampler": sampler})

    plain, own = tmp_path / "plain", tmp_path / "own"
    rows = [{**row, "text": f"text {n}"} for n, row in enumerate(twins.sentences(11))]
    build(plain, eval_dataset=rows).evaluate()
    build(own, eval_dataset=rows, kind=kind).evaluate()
    one, other = read(plain)["worst"], read(own)["worst"]
    assert {w["index"]: w["inputs"] for w in one} == {w["index"]: w["inputs"] for w in other}
    assert len(one) > 2


def test_rows_of_another_set_are_not_shown_as_these(tmp_path: Path) -> None:
    rows = [{**row, "text": f"text {n}"} for n, row in enumerate(ROWS)]

    def kind(base: Any) -> Any:
        def loader(self: Any, eval_dataset: Any = None) -> Any:
            return base.get_eval_dataloader(self, rows[4:])

        return type("Own", (base,), {"get_eval_dataloader": loader})

    build(tmp_path, eval_dataset=rows, kind=kind).evaluate()
    found = read(tmp_path)
    assert found["num_samples"] == 8
    for sample in found["worst"]:
        assert sample["inputs"] == {"text": f"text {sample['index'] + 4}"}


def test_a_stream_tells_places_alone(tmp_path: Path) -> None:
    rows = twins.sentences(11)
    build(tmp_path / "rows", eval_dataset=rows).evaluate()
    build(tmp_path / "stream", eval_dataset=twins.Stream(rows)).evaluate()
    found = read(tmp_path / "stream")
    expected = read(tmp_path / "rows")
    assert found["confusion"] == expected["confusion"]
    assert [w["index"] for w in found["worst"]] == [w["index"] for w in expected["worst"]]
    assert all(w["inputs"] == {} for w in found["worst"])


class Once(Dataset[Any]):
    """Rows that must not be asked for again; its own words fail."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return ROWS[index]


class Speechless(Once):
    """A set whose own words cannot be had."""

    @property
    def class_names(self) -> Any:
        raise OSError("no names")

    def in_words(self, index: int) -> dict[str, str]:
        raise OSError("the disk is gone")


@pytest.mark.parametrize("kind", [Once, Speechless])
def test_no_row_is_asked_for_twice(tmp_path: Path, kind: type[Once]) -> None:
    rows = kind()
    build(tmp_path, eval_dataset=rows, compute_metrics=accuracy).evaluate()
    assert sorted(rows.asked) == list(range(len(ROWS)))
    worst = read(tmp_path)["worst"]
    assert worst and all(sample["inputs"] == {} for sample in worst)
    assert all(sample["index"] is not None for sample in worst)


def test_parts_of_rows_in_memory_show_them(tmp_path: Path) -> None:
    rows = [{**row, "text": f"text {n}"} for n, row in enumerate(ROWS)]
    parts = ConcatDataset([Subset(rows, range(8, 12)), rows[:8]])  # type: ignore[arg-type]
    build(tmp_path, eval_dataset=parts).evaluate()
    worst = read(tmp_path)["worst"]
    assert len(worst) > 2
    for sample in worst:
        assert sample["inputs"] == {"text": f"text {(sample['index'] + 8) % 12}"}
    assert look_up(Subset(Once(), [1]), [0]) == {}
    assert look_up(ConcatDataset([Once(), Once()]), [0]) == {}


def test_a_transform_of_a_table_is_not_run(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([{"text": f"text {n}", "labels": 0} for n in range(4)])
    asked: list[Any] = []
    found = look_up(table.with_transform(asked.append).select([2, 3]), [1])
    assert found[1].inputs == {"text": "text 3"}
    assert not asked


def test_what_goes_wrong_is_one_notice(tmp_path: Path) -> None:
    (tmp_path / "evaluation.json").mkdir()
    trainer = build(tmp_path, eval_dataset=ROWS, compute_metrics=accuracy)
    with pytest.warns(Notice, match="could not be written down: IsADirectoryError") as told:
        assert "eval_accuracy" in trainer.evaluate()
    assert len(told) == 1


class Noisy(Dataset[Any]):
    """Rows that are drawn anew each time, from every generator."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        row = ROWS[index]
        shift = random.randrange(20) + int(np.random.randint(10)) + int(torch.randint(9, ()))
        return row | {"input_ids": [(word + shift) % 40 for word in row["input_ids"]]}


def test_training_is_the_same_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def losses(name: str, **given: Any) -> Any:
        trainer = build(
            tmp_path / name,
            model=twins.bert(dropout=0.1),
            train_dataset=Noisy(),
            eval_dataset=Noisy(),
            eval_strategy="steps",
            eval_steps=1,
            **given,
        )
        trainer.train()
        return [twins.untimed(entry) for entry in trainer.state.log_history]

    looked = losses("looked", compute_metrics=accuracy)
    assert (tmp_path / "looked/evaluation.json").exists()
    blind = evaluation_record.look_on
    look = lambda t, loader, _: blind(t, loader, "")  # noqa: E731
    monkeypatch.setattr(evaluation_record, "look_on", look)
    assert losses("blind", compute_metrics=accuracy) == looked
    assert not (tmp_path / "blind/evaluation.json").exists()


def test_metrics_and_callbacks_are_those_of_transformers(tmp_path: Path) -> None:
    given = {"eval_dataset": twins.sentences(11), "data_collator": twins.pad}
    found = {}
    for library in twins.LIBRARIES:
        watcher = twins.recorder(twins.parts(library)[2])
        trainer = twins.build(
            library, tmp_path / library, model=twins.bert(), callbacks=[watcher], **given
        )
        found[library] = sorted(twins.untimed(trainer.evaluate())), watcher.told
    assert found[twins.OURS] == found[twins.THEIRS]


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from equivalence import twins

root = Path(sys.argv[1])
rows = [{**row, "text": f"text {n}"} for n, row in enumerate(twins.sentences(13))]

class Backwards:
    def __len__(self):
        return 13
    def __iter__(self):
        return iter(range(12, -1, -1))

class Own(twins.parts(twins.OURS)[0]):
    def _get_eval_sampler(self, dataset):
        return Backwards()

def evaluate(name, kind=None, **given):
    known = {"model": twins.bert(), "data_collator": twins.pad, "eval_dataset": rows}
    twins.build(twins.OURS, root / name, kind=kind, **{**known, **given}).evaluate()

evaluate("plain")
evaluate("metrics", compute_metrics=lambda p: {})
evaluate("filled", length_buckets="auto")
evaluate("split", accelerator_config={"split_batches": True})
evaluate("own", kind=lambda base: Own)
evaluate("stream", eval_dataset=twins.Stream(rows))
evaluate("tokens", model=twins.bert("TokenClassification"), eval_dataset=twins.tagged(13))
evaluate("values", model=twins.regression(), eval_dataset=twins.points(13), data_collator=None)
"""


def test_two_processes_write_what_one_does(tmp_path: Path) -> None:
    tests = Path(__file__).parents[2]
    launch(SCRIPT, 2, tmp_path, tests)
    rows = [{**row, "text": f"text {n}"} for n, row in enumerate(twins.sentences(13))]
    build(tmp_path / "one", eval_dataset=rows).evaluate()
    expected = read(tmp_path / "one")
    assert len(expected["worst"]) > 4
    for name in ("plain", "metrics", "filled", "split", "own", "stream"):
        found = read(tmp_path / name)
        assert found["confusion"] == expected["confusion"], name
        assert found["num_samples"] == 13, name
        for sample in found["worst"]:
            expects = {} if name == "stream" else {"text": f"text {sample['index']}"}
            assert sample["inputs"] == expects, name
        shown, wanted = (
            {w["index"]: (w["label"], w["predicted"]) for w in each["worst"]}
            for each in (found, expected)
        )
        assert shown == wanted, name
    model = twins.bert("TokenClassification")
    build(tmp_path / "one", model=model, eval_dataset=twins.tagged(13)).evaluate()
    both = read(tmp_path / "tokens"), read(tmp_path / "one")
    assert both[0]["confusion"] == both[1]["confusion"]
    assert [w["index"] for w in both[0]["worst"]] == [w["index"] for w in both[1]["worst"]]
    points: dict[str, Any] = {"eval_dataset": twins.points(13), "data_collator": None}
    build(tmp_path / "one", model=twins.regression(), **points).evaluate()
    values = read(tmp_path / "values")["points"], read(tmp_path / "one")["points"]
    np.testing.assert_allclose(*values, rtol=1e-5)


def test_a_process_that_only_evaluates_leaves_the_history_alone(tmp_path: Path) -> None:
    given: dict[str, Any] = {"train_dataset": ROWS, "eval_dataset": ROWS}
    build(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1, **given).train()
    before = open_run(tmp_path)
    assert before.evaluations["eval"]["step"] == 2
    build(tmp_path, **given).evaluate()
    after = open_run(tmp_path)
    assert after.metrics == before.metrics
    assert after.evaluations["eval"]["step"] is None
