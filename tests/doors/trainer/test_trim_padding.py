"""Padding that nobody reads is not computed, and nothing is learnt otherwise for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from anytrain import Trainer, TrainingArguments
from anytrain.engine.data.trimming import cut_columns, used_columns

LENGTH = 64


def rows(number: int = 24, *, left: bool = False, labels: str = "class") -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)
    made = []
    for place in range(number):
        length = 5 + place % 12
        ids = torch.zeros(LENGTH, dtype=torch.int64)
        mask = torch.zeros(LENGTH, dtype=torch.int64)
        where = slice(LENGTH - length, None) if left else slice(0, length)
        ids[where] = torch.randint(5, 90, (length,), generator=draw)
        mask[where] = 1
        row = {"input_ids": ids, "attention_mask": mask}
        if labels == "class":
            row["labels"] = ids[where][0] % 2
        elif labels == "tokens":
            row["labels"] = torch.where(mask.bool(), ids, -100)
        else:
            row["labels"] = ids.clone()
        made.append(row)
    return made


def bert(**more: Any) -> nn.Module:
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=100, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **more,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def llama() -> nn.Module:
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2,
        )
    )  # fmt: skip


class Seen:
    """Notes the widths of what a model's forward gets."""

    def __init__(self, model: nn.Module) -> None:
        self.training: list[int] = []
        self.evaluating: list[int] = []
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        (self.training if model.training else self.evaluating).append(kwargs["input_ids"].shape[1])


def train(
    folder: Path, model: nn.Module, data: list[dict[str, Any]], kind: Any = Trainer, **more: Any
) -> tuple[Any, Seen]:
    seen = Seen(model)
    settings: dict[str, Any] = {"max_steps": 6, "per_device_train_batch_size": 4}
    settings |= {"logging_steps": 1, "save_strategy": "no", "learning_rate": 1e-2}
    settings |= {"lr_scheduler_type": "constant", "report_to": [], "use_cpu": True, **more}
    arguments = TrainingArguments(folder, **settings)
    trainer = kind(model, arguments, train_dataset=data, eval_dataset=data)
    trainer.train()
    return trainer, seen


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def shapes(trainer: Any) -> Any:
    return trainer.accelerator.plan.shapes


@pytest.mark.parametrize("labels", ["class", "tokens"])
def test_masked_columns_are_cut_and_the_same_is_learnt(tmp_path: Path, labels: str) -> None:
    make = bert if labels == "class" else llama
    trimmed, seen = train(tmp_path / "cut", make(), rows(labels=labels))
    whole, all_seen = train(tmp_path / "whole", make(), rows(labels=labels), trim_padding=False)
    assert set(seen.training) <= {8, 16}
    assert set(all_seen.training) == {LENGTH}
    assert shapes(trimmed).value == "trimmed" and "trim_padding=False" in shapes(trimmed).because
    assert losses(trimmed) == pytest.approx(losses(whole), rel=1e-4)
    for one, other in zip(trimmed.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_labels_that_a_loss_counts_are_not_cut(tmp_path: Path) -> None:
    trainer, seen = train(tmp_path, llama(), rows(labels="padding too"))
    assert set(seen.training) == {LENGTH}
    assert shapes(trainer).value == "any"


def test_a_model_whose_positions_count_the_padding_keeps_it(tmp_path: Path) -> None:
    trainer, seen = train(tmp_path, bert(), rows(left=True))
    assert set(seen.training) == {LENGTH}
    assert shapes(trainer).value == "any" and "differed" in shapes(trainer).because


def test_padding_on_the_left_is_cut_where_positions_do_not_matter(tmp_path: Path) -> None:
    trainer, seen = train(tmp_path, llama(), rows(left=True, labels="tokens"))
    assert set(seen.training) <= {8, 16}
    assert shapes(trainer).value == "trimmed"


class Mean(nn.Module):
    """Reads its padding, unlike what its mask says."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(100, 8), nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        found = self.table(input_ids)
        if isinstance(self.norm, nn.BatchNorm1d):
            found = self.norm(found.transpose(1, 2)).transpose(1, 2) * attention_mask[..., None]
        logits = self.head(found.mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("norm", [False, True])
def test_a_model_that_reads_its_padding_keeps_it(tmp_path: Path, norm: bool) -> None:
    _, seen = train(tmp_path, Mean(norm), rows())
    assert set(seen.training) == {LENGTH}


def test_code_of_the_users_sees_batches_as_they_are(tmp_path: Path) -> None:
    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *given: Any, **more: Any) -> Any:
            assert inputs["input_ids"].shape[1] == LENGTH
            return super().compute_loss(model, inputs, *given, **more)

    _, seen = train(tmp_path, bert(), rows(), Own)
    assert set(seen.training) == {LENGTH}


def test_a_model_that_the_user_has_compiled_keeps_its_one_shape(tmp_path: Path) -> None:
    model = bert()
    model.bert.compile(backend="eager")
    _, seen = train(tmp_path, model, rows(), max_steps=1)
    assert set(seen.training) == {LENGTH}


def test_evaluation_is_the_same_with_less_to_compute(tmp_path: Path) -> None:
    found = {}
    for cuts in (True, False):
        trainer, seen = train(tmp_path / str(cuts), bert(), rows(), trim_padding=cuts, max_steps=1)
        seen.evaluating.clear()
        found[cuts] = trainer.evaluate(), trainer.predict(rows())
        trials = 2  # each of an evaluation's and a prediction's first batch, on a few rows
        assert (seen.evaluating.count(LENGTH) > trials) is not cuts
    assert found[True][0]["eval_loss"] == pytest.approx(found[False][0]["eval_loss"], rel=1e-5)
    assert found[True][1].predictions == pytest.approx(found[False][1].predictions, abs=1e-4)


def test_predictions_for_each_token_keep_their_length(tmp_path: Path) -> None:
    trainer, seen = train(tmp_path, llama(), rows(labels="tokens"), max_steps=1)
    seen.evaluating.clear()
    assert trainer.predict(rows(labels="tokens")).predictions.shape[1] == LENGTH
    seen.evaluating.clear()
    trainer.evaluate()  # keeps the loss alone
    assert set(seen.evaluating[2:]) <= {8, 16}


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        config = BertConfig(
            vocab_size=100, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=32,
        )  # fmt: skip
        return BertForSequenceClassification(config)

    def run(folder: Path, **more: Any) -> Any:
        arguments = TrainingArguments(
            folder, use_cpu=True, per_device_train_batch_size=4, save_steps=3, report_to=[],
            lr_scheduler_type="constant", **more,
        )  # fmt: skip
        return Trainer(make(), arguments, train_dataset=rows())

    whole = run(tmp_path / "whole", max_steps=8)
    whole.train()
    run(tmp_path / "parts", max_steps=3).train()
    rest = run(tmp_path / "parts", max_steps=8)
    rest.train(resume_from_checkpoint=True)
    assert shapes(rest).value == "trimmed"
    for one, other in zip(whole.model.parameters(), rest.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_trial_moves_no_generator_and_no_mode(tmp_path: Path) -> None:
    states = []
    for cuts in (True, False):
        model = bert()
        model.dropout.p = 0.5
        trainer, _ = train(tmp_path / str(cuts), model, rows(), trim_padding=cuts, max_steps=1)
        model.train()
        model.bert.eval()
        torch.manual_seed(5)
        trainer.evaluate()
        states.append((torch.get_rng_state().tolist(), model.bert.training, model.training))
    assert states[0] == states[1]


def test_what_is_cut() -> None:
    mask = torch.zeros(2, 40, dtype=torch.int64)
    mask[:, 3:14] = 1
    batch = {"input_ids": mask + 4, "attention_mask": mask, "labels": torch.ones(2), "n": 3}
    columns = used_columns(batch)
    assert columns is not None
    cut = cut_columns(batch, columns)
    assert cut["input_ids"].shape == cut["attention_mask"].shape == (2, 16)
    assert int(cut["attention_mask"].sum()) == int(mask.sum())
    assert cut["labels"] is batch["labels"] and cut["n"] == 3 and batch["input_ids"].shape[1] == 40
    for no in ({}, [mask], {"attention_mask": mask.float()}, {"attention_mask": mask[:, :8]}):
        assert used_columns(no) is None
    assert used_columns({"attention_mask": torch.ones_like(mask)}) is None
    assert used_columns({"attention_mask": torch.zeros_like(mask)}) is None
