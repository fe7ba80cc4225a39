"""Where each shape is compiled, a Trainer keeps to few of them unasked, and says so."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiny_bert
from anytrain.core import records
from anytrain.core.errors import Notice
from anytrain.doors.callbacks import ProgressCallback
from anytrain.doors.trainer import Trainer
from anytrain.doors.training_args import TrainingArguments
from anytrain.engine.recording.console import PlainDisplay
from anytrain.machine.backends import probe
from anytrain.machine.backends.fake import Fake
from equivalence import twins

ROWS = twins.sentences(43, 24, ragged=True)


class Compiler:
    """Counts a graph for each new shape that a model sees, for training and evaluation."""

    def __init__(self) -> None:
        self.shapes: set[tuple[Any, ...]] = set()

    def watch(self, model: nn.Module) -> nn.Module:
        def look(module: nn.Module, args: Any, given: dict[str, Any]) -> None:
            self.shapes.add((module.training, *given["input_ids"].shape))

        model.register_forward_pre_hook(look, with_kwargs=True)
        return model


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    backend = Fake(compiled=lambda: len(made.shapes))
    monkeypatch.setattr(probe, "choose", lambda asked: backend)
    return made


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_bert.model_folder(tmp_path / "tiny"))


def trainer(folder: Path, model: nn.Module, tokenizer: Any, rows: Any = ROWS, **given: Any) -> Any:
    given = {"num_train_epochs": 2, "per_device_train_batch_size": 4, **given}
    collate = given.pop("data_collator", None)
    args = TrainingArguments(output_dir=str(folder), report_to=[], save_strategy="no", **given)
    train, held_out = twins.Mapped(rows), twins.Mapped(rows[:13])
    return Trainer(model, args, collate, train, held_out, processing_class=tokenizer)


def test_a_run_has_as_many_graphs_as_lengths_in_training_and_in_evaluation(
    compiler: Compiler, tokenizer: Any, tmp_path: Path
) -> None:
    made = trainer(tmp_path / "run", compiler.watch(twins.bert()), tokenizer, eval_strategy="epoch")
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)
        made.train()
    assert {shape[:2] for shape in compiler.shapes} == {(True, 4), (False, 4)}
    lengths = {shape[2] for shape in compiler.shapes}
    assert len(compiler.shapes) <= 2 * len(lengths)
    plan = made._session.plan
    assert plan.shapes.value == "buckets"
    assert plan.evaluation.value == "batches of 4"
    assert "per_device_eval_batch_size was not given" in plan.evaluation.because
    (life,) = records.read(tmp_path / "run")
    assert life.last["graphs"] == len(compiler.shapes)
    assert life.last["late_shapes"] == {}
    assert life.choice("evaluation")[0] == "batches of 4"


def test_a_size_that_was_given_stays(compiler: Compiler, tokenizer: Any, tmp_path: Path) -> None:
    made = trainer(tmp_path, twins.bert(), tokenizer, per_device_eval_batch_size=8)
    assert made.get_eval_dataloader().total_batch_size == 8
    assert made._session.plan.evaluation.value == "as asked"


def test_samples_of_one_length_keep_their_order(
    compiler: Compiler, tokenizer: Any, tmp_path: Path
) -> None:
    """Unasked, buckets may pad: where there is but one length they must not shuffle anew."""
    from torch.utils.data import RandomSampler

    made = trainer(tmp_path, twins.bert(), tokenizer, rows=twins.sentences(10, 8))
    loader = made.get_train_dataloader()
    assert isinstance(loader.get_sampler(), RandomSampler)
    assert {tuple(batch["input_ids"].shape) for batch in loader} == {(4, 8)}


def test_what_keeps_shapes_from_being_few_is_in_the_plan(
    compiler: Compiler, tokenizer: Any, tmp_path: Path
) -> None:
    model = compiler.watch(twins.bert())
    made = trainer(tmp_path / "run", model, tokenizer, data_collator=twins.pad)
    with pytest.warns(Notice, match=r"batch tensor 'input_ids' is 4x\d+, was 4x\d+: it compiles"):
        made.train()
    shapes = made._session.plan.shapes
    assert shapes.value == "any"
    assert shapes.because.startswith(
        "fake compiles each, but the data_collator is your own: function; the last batch is filled"
    )
    (life,) = records.read(tmp_path / "run")
    assert life.last["late_shapes"]["input_ids"] > 1


def test_last_batches_of_images_are_filled_up_and_count_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    draw = torch.Generator().manual_seed(1)
    rows = [
        {"pixel_values": torch.randn(3, 8, 8, generator=draw), "labels": index % 2}
        for index in range(10)
    ]
    found = []
    for compiles in (True, False):
        sizes: set[int] = set()
        monkeypatch.setattr(
            probe, "choose", lambda asked, c=compiles: Fake(compiled=(lambda: 0) if c else None)
        )
        torch.manual_seed(0)
        config = ViTConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
        )
        config.image_size, config.patch_size = 8, 4
        model = ViTForImageClassification(config)
        model.register_forward_pre_hook(
            lambda _, args, given, s=sizes: s.add(len(given["pixel_values"])), with_kwargs=True
        )
        args = TrainingArguments(
            output_dir=str(tmp_path / str(compiles)),
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            num_train_epochs=1,
            eval_strategy="epoch",
            logging_steps=1,
            report_to=[],
            save_strategy="no",
        )
        made = Trainer(model, args, None, rows, rows[:7], compute_metrics=_count)
        made.train()
        assert sizes == ({4} if compiles else {4, 2, 3})
        history = made.state.log_history
        names = ("loss", "eval_loss", "eval_rows")
        found.append([entry[name] for entry in history for name in names if name in entry])
        if compiles:
            assert made._session.plan.shapes.because.endswith("the last batch is filled up")
    assert found[0] == pytest.approx(found[1], abs=1e-6)
    assert found[0][-1] == 7


def _own_loss(outputs: Any, labels: Any, num_items_in_batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.logits, labels)


def _count(predicted: Any) -> dict[str, float]:
    return {"rows": len(predicted.predictions)}


def test_the_remedy_for_a_small_last_batch_is_the_trainers(
    compiler: Compiler, tokenizer: Any, tmp_path: Path
) -> None:
    model = compiler.watch(twins.bert())
    rows = twins.sentences(15, 8)
    made = trainer(tmp_path, model, tokenizer, rows, num_train_epochs=1, data_collator=twins.pad)
    made.compute_loss_func = _own_loss
    with pytest.warns(Notice, match="is 3x8, was 4x8.*dataloader_drop_last=True"):
        made.train()


def test_the_summary_tells_how_many_graphs_there_were(
    compiler: Compiler, tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = compiler.watch(twins.bert())
    made = trainer(tmp_path, model, tokenizer, rows=twins.sentences(8, 8), disable_tqdm=True)
    made.add_callback(ProgressCallback(console=PlainDisplay))
    made.train()
    assert "compiled  " in (shown := capsys.readouterr().out)
    assert "1 graph\n" in shown


def test_nothing_changes_where_nothing_compiles(tokenizer: Any, tmp_path: Path) -> None:
    made = trainer(tmp_path, twins.bert(), tokenizer, use_cpu=True)
    assert made.get_eval_dataloader().total_batch_size == 8
    made.get_train_dataloader()
    assert made._session.plan.shapes.value == "any"
    assert made._session.plan.evaluation.value == "as asked"
