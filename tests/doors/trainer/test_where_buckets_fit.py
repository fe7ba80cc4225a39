"""A few lengths change nothing that a model reads, and are refused where they would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import RandomSampler, SequentialSampler

from anytrain.core.errors import BadInput
from anytrain.core.plan import Choice
from anytrain.doors.trainer import Seq2SeqTrainer
from anytrain.doors.training_args import Seq2SeqTrainingArguments
from equivalence import twins

ROWS = twins.sentences(45, 24, ragged=True)
TINY: dict[str, Any] = {
    "vocab_size": 40,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}


def made(folder: Path, model: nn.Module, **given: Any) -> Any:
    given = {"train_dataset": twins.Mapped(ROWS), "data_collator": twins.pad, **given}
    return twins.build(twins.OURS, folder, model=model, **given)


def shapes_of(model: nn.Module, name: str = "input_ids") -> set[tuple[int, ...]]:
    found: set[tuple[int, ...]] = set()
    model.register_forward_pre_hook(
        lambda model, args, given: found.add(tuple(given[name].shape)), with_kwargs=True
    )
    return found


@pytest.mark.parametrize("buckets", ["auto", [20, 48]])
def test_a_collator_that_cuts_rows_to_the_models_places_is_not_padded_beyond_them(
    buckets: Any, tmp_path: Path
) -> None:
    def cut(rows: twins.Rows) -> dict[str, torch.Tensor]:
        return {name: v[:, :29] if v.ndim > 1 else v for name, v in twins.pad(rows).items()}

    model = twins.bert(max_position_embeddings=29)
    shapes = shapes_of(model)
    rows = twins.Mapped(twins.sentences(45, 60, ragged=True))
    trainer = made(tmp_path, model, train_dataset=rows, data_collator=cut, length_buckets=buckets)
    trainer.train()
    assert max(width for _, width in shapes) == 29


def test_targets_are_not_padded_beyond_the_models_places(tmp_path: Path) -> None:
    config = transformers.BartConfig(**TINY, max_position_embeddings=25)
    model = transformers.BartForConditionalGeneration(config)
    shapes = shapes_of(model, "labels")
    rows = [{**row, "labels": [5] * 25} for row in ROWS]
    trainer = made(tmp_path, model, train_dataset=twins.Mapped(rows), length_buckets="auto")
    trainer.train()
    assert {width for _, width in shapes} == {25}


def gpt(pad: int | None) -> Any:
    config = transformers.GPT2Config(
        vocab_size=40,
        n_positions=32,
        n_embd=16,
        n_layer=1,
        n_head=2,
        num_labels=3,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=pad,
    )
    torch.manual_seed(0)
    return transformers.GPT2ForSequenceClassification(config)


def tokenizer() -> Any:
    words = [f"w{number}" for number in range(39)]
    vocab = {word: number for number, word in enumerate(["[UNK]", *words])}
    return transformers.BertTokenizer(vocab=vocab, pad_token="w38")


def test_a_classifier_that_knows_no_padding_token_is_refused(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "length_buckets": [8, 24],
    }
    made(tmp_path, gpt(None), **{**given, "length_buckets": None}, max_steps=1).train()
    with pytest.raises(BadInput, match="no pad_token_id"):
        made(tmp_path, gpt(None), **given).train()
    trainer = made(tmp_path, gpt(None), **given, processing_class=tokenizer(), max_steps=1)
    with pytest.raises(BadInput, match="no pad_token_id"):
        trainer.predict(twins.Mapped(ROWS))
    trainer.train()  # which tells the model of the tokenizer's
    assert len(trainer.predict(twins.Mapped(ROWS)).predictions) == len(ROWS)


def test_a_classifiers_own_padding_token_ends_its_texts(tmp_path: Path) -> None:
    """The tokenizer's is another one: the model would take it for a word."""
    found = []
    for buckets in (None, [8, 24]):
        trainer = made(
            tmp_path,
            gpt(0),
            processing_class=tokenizer(),
            length_buckets=buckets,
            per_device_eval_batch_size=1,
        )
        found.append(trainer.predict(twins.Mapped(ROWS)).predictions)
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)


def test_a_model_that_reads_the_last_place_is_refused_with_padding_there(tmp_path: Path) -> None:
    config = transformers.XLNetConfig(vocab_size=40, d_model=16, n_layer=1, n_head=2, d_inner=16)
    model = transformers.XLNetForSequenceClassification(config)
    with pytest.raises(BadInput, match="from the last position"):
        made(tmp_path, model, length_buckets=2).train()


@pytest.mark.parametrize(
    "sampler",
    [
        lambda rows: RandomSampler(rows, num_samples=26),
        lambda rows: RandomSampler(rows, replacement=True, num_samples=26),
        lambda rows: SequentialSampler(rows.rows[:26]),
    ],
)
def test_every_sample_of_a_sampler_of_the_users_own_counts(sampler: Any, tmp_path: Path) -> None:
    counted = []
    model = twins.bert()
    model.register_forward_pre_hook(
        lambda model, args, given: counted.append(int((given["labels"] != -100).sum())),
        with_kwargs=True,
    )

    def kind(trainer: Any) -> Any:
        class Own(trainer):  # type: ignore[misc]  # either library's
            def _get_train_sampler(self, dataset: Any = None) -> Any:
                return sampler(self.train_dataset)

            _get_eval_sampler = _get_train_sampler

        return Own

    trainer = made(tmp_path, model, kind=kind, length_buckets=[8, 24], num_train_epochs=1)
    trainer.train()
    assert sum(counted) == 26
    because = trainer._session.plan.shapes.because
    assert because == "buckets of 8, 24; the last batch stays small: the sampler is your own"
    assert len(trainer.predict(trainer.train_dataset).predictions) == 26


def test_what_reduces_logits_sees_the_rows_that_are_there(tmp_path: Path) -> None:
    sizes = []

    def chances(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        sizes.append(len(logits))
        return logits.log_softmax(-1).gather(1, labels[:, None])

    found = []
    for buckets in (None, [8, 16, 24]):
        trainer = made(
            tmp_path,
            twins.bert(),
            length_buckets=buckets,
            eval_dataset=twins.Mapped(ROWS),
            compute_metrics=lambda p: {"chance": float(p.predictions.mean())},
            preprocess_logits_for_metrics=chances,
        )
        found.append(twins.untimed(trainer.evaluate()))
    twins.assert_same_history([found[1]], [found[0]])
    assert sum(sizes) == 2 * len(ROWS)


@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification"])
def test_encoder_decoders_that_classify_are_padded_like_others(head: str, tmp_path: Path) -> None:
    rows = [{**row, "input_ids": [*row["input_ids"][:-1], 2]} for row in ROWS]
    rows = [{**row, "input_ids": [w if w != 2 or i == len(row["input_ids"]) - 1 else 3
             for i, w in enumerate(row["input_ids"])]} for row in rows]  # fmt: skip
    if head == "SequenceClassification":
        model: Any = transformers.BartForSequenceClassification(
            transformers.BartConfig(**TINY, num_labels=3, max_position_embeddings=32)
        )
    else:
        model = transformers.T5ForTokenClassification(
            transformers.T5Config(
                vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, num_labels=3
            )
        )
        rows = [{**row, "labels": [1] * len(row["input_ids"])} for row in rows]
    shapes = shapes_of(model)
    made(tmp_path, model, train_dataset=twins.Mapped(rows), length_buckets=[9, 25]).train()
    assert shapes == {(4, 9), (4, 25)}


class Counted(nn.Module):
    """A model with two columns of its own: one by token, and one with 16 numbers a row."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.parts = nn.Embedding(40, 3), nn.Linear(16, 3)

    def forward(
        self, input_ids: Any, attention_mask: Any, votes: Any, parts: Any, labels: Any
    ) -> dict[str, torch.Tensor]:
        told = (self.words(input_ids) * (attention_mask * votes)[..., None]).sum(1)
        told = told + self.parts(parts.float())
        return {"loss": nn.functional.cross_entropy(told, labels), "logits": told}


def test_a_column_grows_if_it_has_a_value_for_each_token(tmp_path: Path) -> None:
    def pad(rows: twins.Rows) -> dict[str, torch.Tensor]:
        own = [{name: row.pop(name) for name in ("votes", "parts")} for row in rows]
        batch = twins.pad(rows)
        width = batch["input_ids"].shape[1]
        votes = torch.tensor([row["votes"] + [0] * (width - len(row["votes"])) for row in own])
        return {**batch, "votes": votes, "parts": torch.tensor([row["parts"] for row in own])}

    rows = [
        {**row, "votes": [1] * len(row["input_ids"]), "parts": [1] * 16}
        for row in twins.sentences(60, 20, ragged=True)
    ]
    model = Counted()
    shapes = shapes_of(model)
    data = twins.Mapped(rows)
    made(tmp_path, model, train_dataset=data, data_collator=pad, length_buckets=[10, 20]).train()
    assert {width for _, width in shapes} == {10, 20}


def test_the_plan_tells_of_a_streams_lengths(tmp_path: Path) -> None:
    stream = twins.Stream(ROWS)
    trainer = made(
        tmp_path, twins.bert(), train_dataset=stream, length_buckets=[16, 24], max_steps=2
    )
    trainer.train()
    assert trainer._session.plan.shapes == Choice(
        "buckets",
        "buckets of 16, 24; the last batch stays small: "
        "a stream does not tell how many samples come",
    )


def test_all_answers_of_every_sample_are_kept_and_no_others(tmp_path: Path) -> None:
    rows = [{**row, "labels": row["input_ids"][:4]} for row in ROWS[:5]]
    found = []
    for buckets in (None, [8, 24]):
        args = Seq2SeqTrainingArguments(
            output_dir=str(tmp_path),
            **{**twins.DEFAULTS, "per_device_eval_batch_size": 4},
            predict_with_generate=True,
            length_buckets=buckets,
        )
        trainer = Seq2SeqTrainer(
            twins.t5(), args, data_collator=twins.pad, train_dataset=twins.Mapped(ROWS)
        )
        trainer.model.generation_config.pad_token_id = 0
        said = trainer.predict(
            twins.Mapped(rows), num_beams=3, num_return_sequences=3, max_length=6
        )
        found.append(said.predictions)
    assert found[0].shape[0] == 15
    np.testing.assert_array_equal(found[0], found[1])
