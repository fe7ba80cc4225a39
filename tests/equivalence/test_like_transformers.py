"""The same training through anytrain's Trainer and transformers', compared step by step."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from equivalence import twins
from equivalence.twins import Each


def rare(value: Any) -> Any:
    """Return a parameter that the quick tests leave out."""
    return pytest.param(value, marks=pytest.mark.full)


CLASSES: dict[str, Any] = {"model": twins.bert, "train_dataset": twins.sentences(22)}
WORDS: dict[str, Any] = {"model": twins.gpt2, "train_dataset": twins.texts(22)}
TAGS: dict[str, Any] = {
    "model": partial(twins.bert, "TokenClassification"),
    "train_dataset": twins.tagged(22),
}
POINTS: dict[str, Any] = {"model": twins.regression, "train_dataset": twins.points(22)}


def compare(tmp_path: Path, *, rtol: float = twins.RTOL, atol: float = 2e-6, **given: Any) -> None:
    ours, theirs = twins.both(tmp_path, **given)
    twins.assert_same_run(ours, theirs, rtol=rtol, atol=atol)
    assert any("grad_norm" in entry for entry in ours.history)
    assert ours.trainer.state.total_flos == theirs.trainer.state.total_flos


@pytest.mark.parametrize("job", [CLASSES, WORDS, TAGS, POINTS], ids=["bert", "gpt2", "tags", "mlp"])
def test_losses_norms_rates_and_weights_are_those_of_transformers(
    tmp_path: Path, job: dict[str, Any]
) -> None:
    compare(tmp_path, **job)


@pytest.mark.parametrize(
    "wish",
    [{"max_grad_norm": 0.05}, {"max_grad_norm": 0}, {"weight_decay": 0.1}],
    ids=["clipped", "unclipped", "decayed"],
)
def test_clipping_and_decay_change_what_they_change_there(
    tmp_path: Path, wish: dict[str, Any]
) -> None:
    compare(tmp_path, **CLASSES, **wish)


@pytest.mark.parametrize("model", [twins.t5, twins.llama])
def test_models_of_other_kinds_train_alike(tmp_path: Path, model: Any) -> None:
    rows = [{**row, "labels": row["input_ids"]} for row in twins.texts(22)]
    compare(tmp_path, model=model, train_dataset=rows, weight_decay=0.1, max_steps=7)


def test_the_first_label_of_a_causal_model_is_no_item_whatever_the_class_is_called(
    tmp_path: Path,
) -> None:
    # transformers counts it for GPT2LMHeadModel, and so logs 7/8 of this loss.
    rows = [{**row, "labels": row["input_ids"]} for row in twins.sentences(4)]
    ours, theirs = twins.both(tmp_path, model=twins.gpt2, train_dataset=rows, max_steps=1)
    batch = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    own = float(twins.gpt2()(**batch).loss.detach())
    assert ours.history[0]["loss"] == pytest.approx(own, rel=1e-6)
    assert theirs.history[0]["loss"] == pytest.approx(own * 7 / 8, rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_micro_batches_without_a_single_item_add_nothing(tmp_path: Path, smoothing: float) -> None:
    rows = twins.tagged(16)
    for row in rows[::3]:
        row["labels"] = [-100] * len(row["labels"])
    given = {**TAGS, "train_dataset": rows, "label_smoothing_factor": smoothing}
    whole = twins.train(twins.THEIRS, tmp_path / "whole", **given)
    cut = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    ours = twins.train(twins.OURS, tmp_path / "cut", **given, **cut)
    twins.assert_same_run(ours, whole, rtol=1e-4, atol=1e-4)


SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"lr_end": 1e-4, "power": 2.0},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {},
    "cosine_with_min_lr": {"min_lr": 1e-3},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-3},
    "warmup_stable_decay": {"num_decay_steps": 3},
}


USUAL = ("linear", "cosine", "constant_with_warmup")


@pytest.mark.parametrize("name", [n if n in USUAL else rare(n) for n in SCHEDULES])
def test_every_schedule_moves_the_rate_alike(tmp_path: Path, name: str) -> None:
    wish = {"lr_scheduler_type": name, "lr_scheduler_kwargs": SCHEDULES[name] or None}
    compare(tmp_path, **POINTS, **wish, warmup_steps=4)


@pytest.mark.parametrize("name", ["linear", rare("warmup_stable_decay")])
def test_a_share_of_all_steps_warms_up_alike(tmp_path: Path, name: str) -> None:
    wish = {"lr_scheduler_type": name, "lr_scheduler_kwargs": SCHEDULES[name] or None}
    compare(tmp_path, **POINTS, **wish, warmup_steps=0.3)


@pytest.mark.parametrize("name", ["reduce_lr_on_plateau", "greedy"])
def test_schedules_that_follow_a_metric_move_the_rate_alike(tmp_path: Path, name: str) -> None:
    compare(
        tmp_path,
        **POINTS,
        eval_dataset=twins.points(9),
        lr_scheduler_type=name,
        lr_scheduler_kwargs={"patience": 1},
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="eval_loss",
        learning_rate=0.3,
        num_train_epochs=4,
        atol=1e-4,
        rtol=1e-3,
    )


@pytest.mark.parametrize("job", [CLASSES, WORDS, TAGS], ids=["classes", "words", "tags"])
def test_smoothed_labels_give_the_same_losses(tmp_path: Path, job: dict[str, Any]) -> None:
    compare(tmp_path, **job, label_smoothing_factor=0.1)


@pytest.mark.parametrize(
    "wish",
    [
        {"optim": "sgd"},
        rare({"optim": "sgd", "optim_args": "momentum=0.9,nesterov=True"}),
        {"optim": "adagrad"},
        rare({"optim": "rmsprop"}),
        {"optim": "adafactor"},
        {"optim": "adamw_torch", "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6},
        rare({"optim": "adamw_torch_fused", "weight_decay": 0.2}),
    ],
    ids=lambda wish: "-".join(str(value) for value in wish.values()),
)
def test_every_optimizer_steps_alike(tmp_path: Path, wish: dict[str, Any]) -> None:
    compare(tmp_path, **CLASSES, **wish, atol=1e-5)


def test_bf16_on_a_cpu_gives_the_same_losses(tmp_path: Path) -> None:
    compare(tmp_path, **CLASSES, bf16=True, rtol=1e-3, atol=1e-4)


@pytest.mark.full
def test_gradient_checkpointing_gives_the_same_losses(tmp_path: Path) -> None:
    compare(tmp_path, **WORDS, gradient_checkpointing=True)


@pytest.mark.parametrize(
    "wish",
    [
        {"dataloader_drop_last": True},
        {"max_steps": 9},
        {"max_steps": 3},
        {"num_train_epochs": 1.5},
        rare({"num_train_epochs": 0.4}),
        {"data_seed": 7},
        rare({"seed": 5}),
        {"train_sampling_strategy": "sequential"},
        {"dataloader_num_workers": 2},
        rare({"per_device_train_batch_size": 40}),
    ],
    ids=lambda wish: "-".join(f"{name}={value}" for name, value in wish.items()),
)
def test_lengths_and_orders_of_data_are_alike(tmp_path: Path, wish: dict[str, Any]) -> None:
    compare(tmp_path, **POINTS, **wish)


@pytest.mark.full
def test_batches_of_like_lengths_are_as_many(tmp_path: Path) -> None:
    # transformers draws the order from the global generator, anytrain from seed and epoch, so that
    # it can be resumed: the batches differ, and what is compared is how many there are.
    ours, theirs = twins.both(
        tmp_path,
        model=twins.bert,
        train_dataset=twins.sentences(22, ragged=True),
        data_collator=twins.pad,
        train_sampling_strategy="group_by_length",
    )
    for mine, yours in zip(ours.history, theirs.history, strict=True):
        assert list(mine) == list(yours)
        assert mine["step"] == yours["step"]
        assert mine["epoch"] == yours["epoch"]


@pytest.mark.parametrize(
    "wrap",
    [list, twins.Mapped, "datasets", "datasets-torch"],
    ids=["list", "torch", "datasets", "datasets-torch"],
)
def test_every_kind_of_data_set_trains_alike(tmp_path: Path, wrap: Any) -> None:
    rows = twins.sentences(22)
    if isinstance(wrap, str):
        import datasets

        data: Any = datasets.Dataset.from_list([{**row, "unused": "text"} for row in rows])
        data = data.with_format("torch") if wrap.endswith("torch") else data
    else:
        data = wrap(rows)
    compare(tmp_path, model=twins.bert, train_dataset=data)


@pytest.mark.parametrize("kind", [twins.Stream, twins.SizedStream], ids=["stream", "sized"])
@pytest.mark.parametrize("max_steps", [3, 8])
def test_streams_train_alike(tmp_path: Path, kind: Any, max_steps: int) -> None:
    compare(
        tmp_path, model=twins.regression, train_dataset=kind(twins.points(22)), max_steps=max_steps
    )


def test_a_stream_of_datasets_trains_alike(tmp_path: Path) -> None:
    import datasets

    data = datasets.Dataset.from_list(twins.points(22)).to_iterable_dataset()
    compare(tmp_path, model=twins.regression, train_dataset=data, max_steps=8)


def test_a_dict_of_columns_trains_like_its_rows(tmp_path: Path) -> None:
    # transformers asks a dict for its row 0, and fails.
    rows = twins.points(22)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    ours, theirs = (
        twins.train(
            library,
            tmp_path / library,
            model=twins.regression,
            train_dataset=data,
            eval_dataset=data,
            eval_strategy="epoch",
        )
        for library, data in ((twins.OURS, columns), (twins.THEIRS, rows))
    )
    twins.assert_same_run(ours, theirs, atol=2e-6)


def test_a_sized_stream_trains_by_epochs_alike(tmp_path: Path) -> None:
    compare(tmp_path, model=twins.regression, train_dataset=twins.SizedStream(twins.points(22)))


@pytest.mark.parametrize("gives", ["dict", "tuple"])
def test_plain_modules_train_alike(tmp_path: Path, gives: str) -> None:
    compare(
        tmp_path,
        model=partial(twins.regression, gives),
        train_dataset=twins.points(22),
        max_steps=5,
    )


def test_a_module_that_returns_its_loss_alone_trains_like_one_that_names_it(
    tmp_path: Path,
) -> None:
    # transformers takes the first value of what it calls a tuple, and fails on a bare tensor.
    bare = twins.train(
        twins.OURS, model=partial(twins.regression, "loss"), train_dataset=twins.points(22)
    )
    named = twins.train(twins.THEIRS, model=twins.regression, train_dataset=twins.points(22))
    twins.assert_same_run(bare, named)


def squared(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    each = (outputs["logits"] - labels) ** 2
    return each.sum() / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def absolute(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return (outputs["logits"] - labels).abs().mean()


@pytest.mark.parametrize("function", [squared, absolute])
def test_ones_own_loss_function_trains_alike(tmp_path: Path, function: Any) -> None:
    compare(tmp_path, **POINTS, compute_loss_func=function)


def with_own_loss(base: Any) -> Any:
    class Own(base):  # type: ignore[misc]  # a base that is chosen
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = (outputs["logits"] - labels).abs().mean()
            return (loss, outputs) if return_outputs else loss

    return Own


def with_own_step(base: Any) -> Any:
    class Own(base):  # type: ignore[misc]  # a base that is chosen
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            model.train()
            inputs = self._prepare_inputs(inputs)
            loss = 2 * self.compute_loss(model, inputs)
            self.accelerator.backward(loss)
            return loss.detach()

    return Own


def with_step_around(base: Any) -> Any:
    class Own(base):  # type: ignore[misc]  # a base that is chosen
        seen = 0

        def training_step(self, *args: Any, **more: Any) -> Any:
            type(self).seen += 1
            return super().training_step(*args, **more)

    return Own


@pytest.mark.parametrize("kind", [with_own_loss, with_own_step, with_step_around])
def test_overridden_steps_and_losses_train_alike(tmp_path: Path, kind: Any) -> None:
    compare(tmp_path, **POINTS, kind=kind)


def own_optimizers(base: Any) -> Any:
    class Own(base):  # type: ignore[misc]  # a base that is chosen
        def __init__(self, *args: Any, model: nn.Module, **more: Any) -> None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
            super().__init__(*args, model=model, optimizers=(optimizer, schedule), **more)

    return Own


def own_optimizer_alone(base: Any) -> Any:
    class Own(base):  # type: ignore[misc]  # a base that is chosen
        def __init__(self, *args: Any, model: nn.Module, **more: Any) -> None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            super().__init__(*args, model=model, optimizers=(optimizer, None), **more)

    return Own


def overridden_factories(base: Any) -> Any:
    class Own(base):  # type: ignore[misc]  # a base that is chosen
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.05)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            held = self.optimizer if optimizer is None else optimizer
            held = getattr(held, "optimizer", held)
            self.lr_scheduler = torch.optim.lr_scheduler.StepLR(held, 2, gamma=0.7)
            return self.lr_scheduler

        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(
                self.train_dataset, batch_size=5, collate_fn=self.data_collator
            )

    return Own


@pytest.mark.parametrize("kind", [own_optimizers, own_optimizer_alone, overridden_factories])
def test_ones_own_optimizers_and_loaders_train_alike(tmp_path: Path, kind: Any) -> None:
    compare(tmp_path, **POINTS, kind=kind)


@pytest.mark.full
def test_an_optimizer_class_with_its_options_trains_alike(tmp_path: Path) -> None:
    compare(
        tmp_path, **POINTS, optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1, "momentum": 0.5})
    )


def test_a_model_that_is_made_for_each_training_trains_alike(tmp_path: Path) -> None:
    compare(
        tmp_path, model_init=lambda: twins.Regression(dropout=0.2), train_dataset=twins.points(22)
    )


def test_dropout_draws_alike(tmp_path: Path) -> None:
    compare(tmp_path, model=partial(twins.bert, dropout=0.2), train_dataset=twins.sentences(22))


@pytest.mark.full
def test_noise_on_embeddings_draws_alike(tmp_path: Path) -> None:
    compare(tmp_path, **WORDS, neftune_noise_alpha=5.0)


@pytest.mark.full
def test_training_twice_goes_on_alike(tmp_path: Path) -> None:
    both = []
    for library in twins.LIBRARIES:
        ran = twins.train(library, tmp_path / library, **POINTS)
        ran.trainer.train()
        both.append(ran)
    twins.assert_same_history(both[0].history, both[1].history)
    twins.assert_same_weights(both[0].weights, both[1].weights)


def test_a_model_with_a_tokenizer_pads_alike(tmp_path: Path) -> None:
    from transformers import BertTokenizer

    import tiny_bert

    folder = tiny_bert.model_folder(tmp_path / "model")
    tokenizer = BertTokenizer.from_pretrained(folder)
    compare(
        tmp_path,
        model=twins.bert,
        train_dataset=[
            {k: v for k, v in row.items() if k != "attention_mask"}
            | {"input_ids": [w % 20 for w in row["input_ids"]]}
            for row in twins.sentences(22, ragged=True)
        ],
        processing_class=tokenizer,
    )


def test_tokens_seen_are_counted_alike(tmp_path: Path) -> None:
    for asked in ("all", "non_padding"):
        ours, theirs = twins.both(
            tmp_path / asked,
            model=twins.bert,
            train_dataset=twins.sentences(22, ragged=True),
            data_collator=Each(lambda library: twins.pad),
            include_num_input_tokens_seen=asked,
        )
        seen = [ran.trainer.state.num_input_tokens_seen for ran in (ours, theirs)]
        assert seen[0] == seen[1] > 0
        keys = [[list(entry) for entry in ran.history] for ran in (ours, theirs)]
        assert keys[0] == keys[1]
