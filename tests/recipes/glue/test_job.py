"""Whole jobs with a tiny BERT: what is learnt, what is written, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from anytrain.core.errors import BadInput
from anytrain.recipes.glue import command
from tiny_bert import OVERRIDES, WORDS, model_folder, pairs, sentence, write_rows

SHORT = "--max_seq_length 24 --per_device_train_batch_size 8 --max_steps 3 --precision no"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model") / "tiny")


def _glue(out: Path, *words: object, short: str = SHORT) -> dict[str, Any]:
    command.run([*map(str, words), "--output_dir", str(out), *short.split()])
    found: dict[str, Any] = json.loads((out / "all_results.json").read_text())
    return found


def _new(tiny: Path) -> tuple[object, ...]:
    return ("--model_name_or_path", tiny, "--config_overrides", OVERRIDES)


def _predictions(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text().splitlines()]


def test_a_task_is_learnt_from_files_and_leaves_what_run_glue_leaves(
    tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, dev = (write_rows(tmp_path / f"{n}.tsv", pairs(40, seed=n)) for n in (1, 2))
    files = ("--train_file", train, "--validation_file", dev, "--test_file", dev)
    work = ("--do_train", "--do_eval", "--do_predict", "--max_predict_samples", 7)
    out = tmp_path / "out"
    results = _glue(out, *_new(tiny), "--task_name", "mrpc", *files, *work)
    assert {"eval_accuracy", "eval_f1", "eval_combined_score", "eval_loss"} <= set(results)
    assert (results["train_samples"], results["eval_samples"]) == (40, 40)
    whole = {**_json(out / "train_results.json"), **_json(out / "eval_results.json")}
    assert results == whole
    assert _json(out / "trainer_state.json")["global_step"] == 3
    said = _predictions(out / "predict_results_mrpc.txt")
    assert said[0] == ["index", "prediction"]
    assert [row[0] for row in said[1:]] == [str(index) for index in range(7)]
    assert {row[1] for row in said[1:]} <= {"equivalent", "not_equivalent"}
    found = _json(out / "evaluation.json")
    assert found["classes"] == ["not_equivalent", "equivalent"]
    right = sum(found["confusion"][number][number] for number in range(2))
    assert right / 40 == pytest.approx(results["eval_accuracy"])
    for sample in found["worst"]:
        row = pairs(40, seed=2)[sample["index"]]
        assert sample["inputs"] == {name: row[name] for name in ("sentence1", "sentence2")}
    shown = capsys.readouterr().out
    assert f"{results['eval_f1']:.4f}" in shown
    assert f'pipeline("text-classification", "{out}")' in shown


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _moods(count: int) -> list[dict[str, object]]:
    rng = random.Random(count)
    names = ("bad", "fine", "good")
    words = ("red", "blue", "old")
    rows: list[dict[str, object]] = []
    for index in range(count):
        text = f"{words[index % 3]} {sentence(rng)}"
        rows.append({"text": text, "label": names[index % 3]})
    return rows


def test_own_labels_stay_with_the_model_and_serve_it_later(tmp_path: Path, tiny: Path) -> None:
    train = write_rows(tmp_path / "train.csv", _moods(48))
    dev = write_rows(tmp_path / "dev.csv", _moods(12))
    out = tmp_path / "out"
    first = _glue(
        out,
        *_new(tiny),
        *("--train_file", train, "--validation_file", dev, "--do_train", "--do_eval"),
        *("--pad_to_max_length", "false"),
    )
    assert _json(out / "config.json")["id2label"] == {"0": "bad", "1": "fine", "2": "good"}
    # A file that holds two of the three labels is evaluated with the model's own numbers.
    few = write_rows(tmp_path / "few.csv", [r for r in _moods(12) if r["label"] != "fine"])
    again = tmp_path / "again"
    trained = ("--model_name_or_path", out)
    second = _glue(again, *trained, "--validation_file", dev, "--do_eval")
    assert second["eval_accuracy"] == first["eval_accuracy"]
    assert second["eval_loss"] == pytest.approx(first["eval_loss"], rel=1e-5)
    _glue(tmp_path / "few", *trained, "--validation_file", few, "--do_eval")
    command.run(
        [*map(str, (*trained, "--test_file", dev, "--do_predict")), "--output_dir", str(again)]
    )
    said = _predictions(again / "predict_results.txt")
    assert len(said) == 13
    assert {row[1] for row in said[1:]} <= {"bad", "fine", "good"}


def test_numbers_are_predicted_where_labels_have_a_point(tmp_path: Path, tiny: Path) -> None:
    rng = random.Random(0)
    rows: list[dict[str, object]] = [
        {"sentence1": sentence(rng), "sentence2": sentence(rng), "label": index / 4}
        for index in range(24)
    ]
    file = write_rows(tmp_path / "rows.json", rows)
    files = ("--train_file", file, "--validation_file", file, "--test_file", file)
    out = tmp_path / "out"
    results = _glue(out, *_new(tiny), *files, "--do_train", "--do_eval", "--do_predict")
    assert results["eval_mse"] == pytest.approx(results["eval_loss"], rel=1e-4)
    config = _json(out / "config.json")
    assert config["problem_type"] == "regression"
    said = _predictions(out / "predict_results.txt")
    assert all(len(row[1].partition(".")[2]) == 3 for row in said[1:])
    found = _json(out / "evaluation.json")
    assert (found["kind"], len(found["points"])) == ("regression", 24)
    for sample in found["worst"]:
        row = rows[sample["index"]]
        assert sample["label"] == row["label"]
        assert sample["inputs"]["sentence2"] == row["sentence2"]


def test_mnli_is_evaluated_and_predicted_on_both_sets(tmp_path: Path, tiny: Path) -> None:
    names = ("entailment", "neutral", "contradiction")
    rng = random.Random(0)
    rows: list[dict[str, object]] = [
        {"premise": sentence(rng), "hypothesis": sentence(rng), "label": names[index % 3]}
        for index in range(24)
    ]
    one = write_rows(tmp_path / "one.tsv", rows)
    other = write_rows(tmp_path / "other.tsv", rows[:6])
    files = ("--train_file", one, "--validation_file", one, "--test_file", one)
    second = ("--validation_mismatched_file", other, "--test_mismatched_file", other)
    work = ("--do_train", "--do_eval", "--do_predict", "--task_name", "mnli")
    new = ("--config_name", tiny, "--tokenizer_name", tiny, "--config_overrides", OVERRIDES)
    results = _glue(tmp_path / "out", *new, *files, *second, *work)
    assert (results["eval_samples"], results["eval_samples_mm"]) == (24, 6)
    assert {"eval_accuracy", "eval_accuracy_mm"} <= set(results)
    assert len(_predictions(tmp_path / "out/predict_results_mnli.txt")) == 25
    assert len(_predictions(tmp_path / "out/predict_results_mnli-mm.txt")) == 7
    assert _json(tmp_path / "out/evaluation.json")["num_samples"] == 24
    second_set = _json(tmp_path / "out/evaluation-mnli-mm.json")
    assert (second_set["num_samples"], second_set["split"]) == (6, "mnli-mm")
    assert sorted(second_set["classes"]) == sorted(names)


def test_a_folder_in_use_is_refused_before_a_model_is_loaded(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = write_rows(tmp_path / "train.tsv", pairs(16))
    words = ("--task_name", "mrpc", "--train_file", train, "--do_train")
    out = tmp_path / "out"
    _glue(out, *_new(tiny), *words)
    (out / "notes.md").write_text("mine")
    weights = (out / "model.safetensors").read_bytes()

    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    with monkeypatch.context() as patched:
        patched.setattr("anytrain.recipes.glue.models.prepare", loaded)
        with pytest.raises(BadInput, match="finished"):
            _glue(out, *_new(tiny), *words)
        with pytest.raises(BadInput, match="seed was 42, is 7; .*|seed was 42, is 7"):
            _glue(out, *_new(tiny), *words, "--seed", 7)
    _glue(out, *_new(tiny), *words, "--seed", 7, "--overwrite_output_dir")
    assert (out / "model.safetensors").read_bytes() != weights
    assert (out / "notes.md").read_text() == "mine"


WRONG = {
    "a value the configuration lacks": ("hiden_size=8", "hidden_size"),
    "a value of another kind": ("hidden_size=big", "same kind"),
}


@pytest.mark.parametrize("what", WRONG)
def test_overrides_that_cannot_be_are_refused(tmp_path: Path, tiny: Path, what: str) -> None:
    text, why = WRONG[what]
    train = write_rows(tmp_path / "train.tsv", pairs(16))
    words = ("--model_name_or_path", tiny, "--config_overrides", text, "--train_file", train)
    with pytest.raises(BadInput, match=why):
        _glue(tmp_path / "out", *words, "--do_train")
    assert not (tmp_path / "out").exists()


def test_a_head_of_another_size_is_refused_or_made_anew(tmp_path: Path, tiny: Path) -> None:
    three = write_rows(tmp_path / "three.csv", _moods(16))
    two = write_rows(tmp_path / "two.csv", [r for r in _moods(24) if r["label"] != "fine"])
    _glue(tmp_path / "one", *_new(tiny), "--train_file", three, "--do_train")
    words = ("--model_name_or_path", tmp_path / "one", "--train_file", two, "--do_train")
    with (
        pytest.raises(BadInput, match="does not fit") as refused,
    ):
        _glue(tmp_path / "two", *words)
    assert "--ignore_mismatched_sizes" in refused.value.fix
    _glue(tmp_path / "two", *words, "--ignore_mismatched_sizes")
    assert _json(tmp_path / "two/config.json")["id2label"] == {"0": "bad", "1": "good"}


def test_a_tokenizer_that_is_not_the_models_is_refused(tmp_path: Path, tiny: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    small = tmp_path / "small"
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = BertConfig(vocab_size=len(WORDS) - 5, intermediate_size=8, **sizes)
    BertForSequenceClassification(config).save_pretrained(small)
    train = write_rows(tmp_path / "train.tsv", pairs(16))
    words = ("--model_name_or_path", small, "--tokenizer_name", tiny, "--train_file", train)
    with pytest.raises(BadInput, match="do not belong together"):
        _glue(tmp_path / "out", *words, "--do_train")


BAD_ROWS: dict[str, tuple[dict[str, object], str]] = {
    "no label": ({"sentence1": "a", "sentence2": "b"}, "no column 'label'"),
    "a label that training lacks": (
        {"sentence1": "a", "sentence2": "b", "label": 7},
        "label '7' of .*dev.tsv, row 1",
    ),
    "no text": ({"sentence1": "a", "label": 1}, "no column 'sentence2'"),
}


@pytest.mark.parametrize("what", BAD_ROWS)
def test_rows_to_evaluate_are_looked_at_before_a_model_is_loaded(tmp_path: Path, what: str) -> None:
    row, why = BAD_ROWS[what]
    train = write_rows(tmp_path / "train.tsv", pairs(16))
    dev = write_rows(tmp_path / "dev.tsv", [row])
    files = ("--train_file", train, "--validation_file", dev, "--task_name", "mrpc")
    with pytest.raises(BadInput, match=why):
        _glue(tmp_path / "out", "--model_name_or_path", "none", *files, "--do_train", "--do_eval")


def test_the_best_model_by_f1_is_kept_with_rows_of_like_length_together(
    tmp_path: Path, tiny: Path
) -> None:
    train, dev = (write_rows(tmp_path / f"{n}.tsv", pairs(32, seed=n)) for n in (1, 2))
    files = ("--train_file", train, "--validation_file", dev, "--task_name", "mrpc")
    best = ["--load_best_model_at_end", "--metric_for_best_model", "f1", "--eval_strategy", "epoch"]
    more = ["--save_strategy", "epoch", "--group_by_length", "--pad_to_max_length", "false"]
    short = "--num_train_epochs 2 --precision no --max_seq_length 24"
    work = ("--do_train", "--do_eval", *best, *more)
    out = tmp_path / "out"
    results = _glue(out, *_new(tiny), *files, *work, "--batch_eval_metrics", short=short)
    state = _json(tmp_path / "out/trainer_state.json")
    assert state["best_metric"] == results["eval_f1"]


@pytest.mark.parametrize("padding", [[], ["--pad_to_max_length", "false"]])
def test_a_model_with_an_odd_number_of_places_learns_in_half_precision(
    padding: list[str], tmp_path: Path, tiny: Path
) -> None:
    train = write_rows(tmp_path / "train.tsv", pairs(40))
    places = ("--config_overrides", f"{OVERRIDES},max_position_embeddings=17")
    words = ("--model_name_or_path", tiny, *places, "--train_file", train, "--task_name", "mrpc")
    short = "--max_seq_length 17 --max_steps 5 --per_device_train_batch_size 8 --precision bf16"
    results = _glue(tmp_path / "out", *words, "--do_train", *padding, short=short)
    assert results["train_samples"] == 40


def test_a_run_cut_short_after_its_last_step_only_finishes(
    tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = write_rows(tmp_path / "train.tsv", pairs(16))
    files = ("--train_file", train, "--validation_file", train, "--task_name", "mrpc")
    words = (*_new(tiny), *files, "--do_train", "--do_eval")
    out = tmp_path / "out"
    first = _glue(out, *words)
    weights = (out / "model.safetensors").read_bytes()
    record = _json(out / "run.json")
    (out / "run.json").write_text(json.dumps({**record, "state": "unfinished"}))
    (out / "model.safetensors").unlink()
    again = _glue(out, *words)
    assert "Continuing" in capsys.readouterr().out
    assert (out / "model.safetensors").read_bytes() == weights
    assert again["eval_loss"] == first["eval_loss"]
    assert _json(out / "run.json")["state"] == "finished"


def test_a_language_models_tokenizer_pads_with_the_token_that_ends_a_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, PreTrainedTokenizerFast

    vocab = {word: number for number, word in enumerate(["<end>", "<unk>", *WORDS])}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "gpt"
    PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<end>", unk_token="<unk>"
    ).save_pretrained(folder)
    GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=32).save_pretrained(folder)
    train = write_rows(tmp_path / "train.csv", _moods(24))
    words = ("--config_name", folder, "--tokenizer_name", folder, "--train_file", train)
    results = _glue(tmp_path / "out", *words, "--do_train", "--pad_to_max_length", "false")
    assert results["train_samples"] == 24
    assert "'<end>' is used for it" in capsys.readouterr().err
    assert _json(tmp_path / "out/config.json")["pad_token_id"] == 0
