"""Trainer as a whole: what it takes, refuses, tells and leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anytrain.core import records
from anytrain.core.errors import BadInput, BadType, CheckpointError, Notice
from anytrain.doors.callbacks import DefaultFlowCallback, PrinterCallback, TrainerCallback
from anytrain.doors.trainer import Trainer
from anytrain.doors.training_args import TrainingArguments
from equivalence import twins


def build(tmp_path: Path, **given: Any) -> Any:
    given = {"model": twins.regression(), "train_dataset": twins.points(10), **given}
    return twins.build(twins.OURS, tmp_path, **given)


# -- what it refuses -------------------------------------------------------------------------------


def test_it_takes_either_a_model_or_a_maker(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(RuntimeError, match="either a model or model_init"):
        Trainer(args=args)
    with pytest.raises(BadInput, match="either a model or model_init"):
        Trainer(model=twins.regression(), args=args, model_init=twins.regression)
    with pytest.raises(BadType, match="Cannot train a function"):
        Trainer(model=twins.regression, args=args)  # type: ignore[arg-type]  # that is the point


def test_it_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no train_dataset"):
        build(tmp_path, train_dataset=None).train()
    with pytest.raises(BadInput, match="no eval_dataset"):
        build(tmp_path).evaluate()
    with pytest.raises(BadInput, match="empty data set"):
        build(tmp_path, train_dataset=[]).train()
    with pytest.raises(BadInput, match="how long to train"):
        build(tmp_path, train_dataset=twins.Stream(twins.points(9))).train()
    # HF raises a ValueError, and scripts wait for that.
    with pytest.raises(CheckpointError, match="No valid checkpoint found") as told:
        build(tmp_path).train(resume_from_checkpoint=True)
    assert isinstance(told.value, ValueError)


def test_a_training_without_a_batch_is_refused_or_told(tmp_path: Path) -> None:
    rows = twins.points(3)
    few = build(
        tmp_path, train_dataset=rows, dataloader_drop_last=True, per_device_train_batch_size=4
    )
    with pytest.raises(BadInput, match="there is no batch"):
        few.train()
    with pytest.warns(Notice, match="Nothing was trained: .* 5 steps before the end"):
        build(tmp_path, train_dataset=twins.Stream([]), max_steps=5).train()


def test_optimizers_that_would_train_another_model_are_refused(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(twins.regression().parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="optimizers= with model_init="):
        build(tmp_path, model=None, model_init=twins.regression, optimizers=(optimizer, None))
    with pytest.raises(BadInput, match="optimizers= and optimizer_cls_and_kwargs="):
        build(
            tmp_path,
            optimizers=(optimizer, None),
            optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 1.0}),
        )


def test_a_body_without_a_head_is_refused(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = BertModel(BertConfig(vocab_size=10, intermediate_size=8, **small))
    with pytest.raises(BadInput, match="no loss"):
        build(tmp_path, model=model)
    build(tmp_path, model=model, train_dataset=None)  # to predict with
    build(tmp_path, model=model, compute_loss_func=lambda outputs, labels, **items: 0)


def test_a_model_with_nothing_to_train_is_refused(tmp_path: Path) -> None:
    model = twins.regression().requires_grad_(False)
    with pytest.raises(BadInput, match="nothing to train"):
        build(tmp_path, model=model).train()


def test_columns_that_no_model_takes_are_told(tmp_path: Path) -> None:
    rows = [{"text": "a", "score": 1.0}] * 4
    with pytest.raises(BadInput, match=r"(?s)No column.*text, score.*remove_unused_columns"):
        build(tmp_path, train_dataset=rows).train()


def test_a_loss_that_is_no_tensor_is_told(tmp_path: Path) -> None:
    class Wrong(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            loss, _ = super().compute_loss(model, inputs, return_outputs=True)
            return loss, "outputs"

    trainer = build(tmp_path, kind=lambda base: Wrong)
    with pytest.raises(BadType, match="returned a tuple, not a tensor"):
        trainer.train()


# -- what it tells and leaves behind ---------------------------------------------------------------


def test_every_log_entry_is_in_the_history_and_the_journal(tmp_path: Path) -> None:
    ran = twins.train(
        twins.OURS,
        tmp_path,
        model=twins.regression,
        train_dataset=twins.points(10),
        eval_dataset=twins.points(5),
        eval_strategy="epoch",
    )
    lines = records.open_run(tmp_path).metrics
    assert [line["step"] for line in lines] == [e["step"] for e in ran.trainer.state.log_history]
    for line, entry in zip(lines, ran.trainer.state.log_history, strict=True):
        assert {name: line[name] for name in entry} == entry


def test_a_saved_model_loads_again(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForSequenceClassification

    plain = build(tmp_path / "plain")
    plain.save_model()
    assert load_file(tmp_path / "plain" / "model.safetensors").keys() == set(
        plain.model.state_dict()
    )
    named = build(tmp_path / "named", model=twins.bert(), train_dataset=twins.sentences(4))
    named.save_model(str(tmp_path / "elsewhere"))
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "elsewhere")
    for name, weight in named.model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)
    assert not any(path.suffix == ".bin" for path in tmp_path.rglob("*"))


def test_nothing_is_pickled_into_a_checkpoint(tmp_path: Path) -> None:
    twins.train(
        twins.OURS,
        tmp_path,
        model=twins.bert,
        train_dataset=twins.sentences(8),
        save_strategy="epoch",
        num_train_epochs=1,
    )
    suffixes = {path.suffix for path in (tmp_path / "checkpoint-2").rglob("*") if path.is_file()}
    assert suffixes <= {".json", ".safetensors", ".jsonl", ".txt", ".md"}


def test_metrics_come_back_with_the_output(tmp_path: Path) -> None:
    output = build(tmp_path, num_train_epochs=1).train()
    assert output.global_step == 3
    assert output.training_loss == output.metrics["train_loss"]
    assert {"train_runtime", "train_samples_per_second", "epoch"} <= set(output.metrics)


class Counts(TrainerCallback):
    """Count steps."""

    steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        assert {"model", "optimizer", "lr_scheduler", "train_dataloader"} <= set(known)
        self.steps += 1


def test_callbacks_are_added_popped_and_removed(tmp_path: Path) -> None:
    trainer = build(tmp_path, num_train_epochs=1)
    counts = Counts()
    trainer.add_callback(counts)
    trainer.train()
    assert counts.steps == 3
    assert trainer.pop_callback(Counts) is counts
    trainer.add_callback(Counts)
    trainer.remove_callback(Counts)
    trainer.train()
    assert counts.steps == 3
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert kinds == [DefaultFlowCallback, PrinterCallback]


def test_a_second_training_begins_afresh_with_what_was_learnt(tmp_path: Path) -> None:
    trainer = build(tmp_path, num_train_epochs=1)
    trainer.train()
    learnt = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    output = trainer.train()
    assert output.global_step == 3
    assert len([e for e in trainer.state.log_history if "loss" in e]) == 3
    moved = [not torch.equal(p, learnt[name]) for name, p in trainer.model.named_parameters()]
    assert any(moved)


def test_rates_groups_and_counts_can_be_asked_for(tmp_path: Path) -> None:
    trainer = build(tmp_path, weight_decay=0.1, learning_rate=0.02)
    with pytest.raises(BadInput, match="no optimizer yet"):
        trainer.get_learning_rates()
    trainer.create_optimizer()
    assert trainer.get_learning_rates() == [0.02, 0.02]
    decayed = trainer.get_optimizer_group("inner.weight")
    assert decayed["weight_decay"] == 0.1
    assert trainer.get_optimizer_group("norm.weight")["weight_decay"] == 0.0
    assert trainer.get_optimizer_group("inner.bias")["weight_decay"] == 0.0
    assert trainer.get_num_trainable_parameters() == sum(
        p.numel() for p in trainer.model.parameters()
    )
    assert trainer.num_examples(trainer.get_train_dataloader()) == 10


def test_a_tokenizer_under_its_old_name_is_taken(tmp_path: Path) -> None:
    class Tokens:
        pad_token_id = 0

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, disable_tqdm=True)
    tokens = Tokens()
    with pytest.warns(Notice, match="processing_class"):
        trainer = Trainer(model=twins.regression(), args=args, tokenizer=tokens)
    assert trainer.processing_class is tokens


def test_two_trainers_live_side_by_side(tmp_path: Path) -> None:
    first = build(tmp_path / "a", num_train_epochs=1)
    second = build(tmp_path / "b", num_train_epochs=2, gradient_accumulation_steps=2)
    assert first.train().global_step == 3
    assert second.train().global_step == 4
    alone = build(tmp_path / "c", num_train_epochs=1)
    alone.train()
    for mine, yours in zip(first.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(mine, yours)


def test_evaluation_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    trainer = build(tmp_path, model=twins.regression(dropout=0.5), eval_dataset=twins.points(6))
    before = [p.detach().clone() for p in trainer.model.parameters()]
    assert trainer.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"]
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_a_model_of_positional_batches_trains(tmp_path: Path) -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(self.layer(x).squeeze(-1), y)

    data = torch.utils.data.TensorDataset(torch.randn(10, 2), torch.randn(10))
    trainer = build(
        tmp_path,
        model=Pairs(),
        train_dataset=data,
        data_collator=torch.utils.data.default_collate,
        num_train_epochs=1,
    )
    assert trainer.train().global_step == 3


@pytest.mark.parametrize("library", [twins.OURS, twins.THEIRS])
def test_a_training_step_sees_whether_its_micro_batch_ends_the_step(
    tmp_path: Path, library: str
) -> None:
    seen: list[bool] = []

    def looking(base: Any) -> Any:
        class Looks(base):
            """Looks at the accelerator from within a step."""

            def training_step(self, *args: Any, **kwargs: Any) -> Any:
                seen.append(self.accelerator.sync_gradients)
                return super().training_step(*args, **kwargs)

        return Looks

    trainer = twins.build(
        library,
        tmp_path,
        kind=looking,
        model=twins.regression(),
        train_dataset=twins.points(24),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        max_steps=2,
    )
    trainer.train()
    assert seen == [False, False, True] * 2


def test_a_stream_without_an_end_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    stream = twins.Stream(twins.points(8))
    with pytest.raises(ValueError, match="Cannot tell how long to train"):
        twins.build(twins.OURS, tmp_path, model=twins.regression(), train_dataset=stream)
