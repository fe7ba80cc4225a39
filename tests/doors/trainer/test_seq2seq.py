from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GenerationConfig, T5Config, T5ForConditionalGeneration

from anytrain.core.errors import BadInput, BadType
from anytrain.doors.trainer.outputs import EvalPrediction
from anytrain.doors.trainer.seq2seq import Seq2SeqTrainer
from anytrain.doors.training_args import Seq2SeqTrainingArguments

PAD, END = 0, 1


def model() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=20,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=PAD,
        pad_token_id=PAD,
        eos_token_id=END,
    )
    return T5ForConditionalGeneration(config)


def rows(count: int, length: int = 5) -> list[dict[str, list[int]]]:
    """Copy the input."""
    made = []
    for i in range(count):
        words = [2 + (i + j) % 18 for j in range(length)]
        made.append({"input_ids": words, "attention_mask": [1] * length, "labels": [*words, END]})
    return made


def trainer(folder: Path, **given: Any) -> Seq2SeqTrainer:
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 3,
        "max_steps": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "predict_with_generate": True,
    }
    kwargs = {k: given.pop(k) for k in ("model", "compute_metrics") if k in given}
    args = Seq2SeqTrainingArguments(**{**options, **given})
    kwargs.setdefault("model", model())
    return Seq2SeqTrainer(args=args, train_dataset=rows(8), eval_dataset=rows(7), **kwargs)


def test_metrics_judge_what_the_model_writes(tmp_path: Path) -> None:
    seen: list[EvalPrediction] = []

    def compute(found: EvalPrediction) -> dict[str, float]:
        seen.append(found)
        return {"words": float(found.predictions.shape[0])}

    made = trainer(tmp_path, compute_metrics=compute, generation_max_length=9)
    metrics = made.evaluate()
    assert metrics["eval_words"] == 7
    assert metrics["eval_loss"] > 0
    assert np.issubdtype(seen[0].predictions.dtype, np.integer)
    # The model's config says nothing of a length, so both are padded to the usual twenty.
    assert seen[0].predictions.shape == seen[0].label_ids.shape == (7, 20)
    assert (seen[0].predictions[:, 9:] == PAD).all()
    assert (seen[0].label_ids[:, 6:] == PAD).all()


def test_a_call_says_how_to_generate(tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []
    made = trainer(
        tmp_path,
        compute_metrics=lambda found: {},
        generation_max_length=9,
        generation_num_beams=2,
    )
    generate = made.model.generate

    def watched(**kwargs: Any) -> Any:
        calls.append({k: v for k, v in kwargs.items() if k not in ("input_ids", "labels")})
        return generate(**kwargs)

    made.model.generate = watched
    made.predict(rows(2))
    made.predict(rows(2), max_new_tokens=3, num_beams=1)
    made.evaluate(rows(2), max_length=4)
    said = [{k: v for k, v in c.items() if k != "attention_mask"} for c in calls]
    assert said == [
        {"max_length": 9, "num_beams": 2},
        {"max_new_tokens": 3, "num_beams": 1},
        {"max_length": 4, "num_beams": 2},
    ]


def test_the_model_is_not_handed_the_answer(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    given: list[set[str]] = []
    generate = made.model.generate

    def watched(**kwargs: Any) -> Any:
        given.append(set(kwargs))
        return generate(**kwargs)

    made.model.generate = watched
    labels = torch.tensor([[3, 4, END]])
    batch = {"input_ids": torch.tensor([[3, 4]]), "labels": labels, "decoder_input_ids": labels}
    made.prediction_step(made.model, batch, prediction_loss_only=False)
    assert "decoder_input_ids" not in given[0]
    prompted = {"input_ids": torch.tensor([[3, 4]]), "decoder_input_ids": torch.tensor([[3]])}
    made.prediction_step(made.model, prompted, prediction_loss_only=False)
    assert "decoder_input_ids" in given[1]


def test_without_generating_the_logits_are_the_predictions(tmp_path: Path) -> None:
    made = trainer(tmp_path, predict_with_generate=False)
    found = made.predict(rows(4))
    assert found.predictions[0].shape == (4, 6, 20)


def test_data_without_labels_is_predicted_without_a_loss(tmp_path: Path) -> None:
    bare = [{"input_ids": row["input_ids"]} for row in rows(3)]
    found = trainer(tmp_path).predict(bare, max_length=6)
    assert found.predictions.shape == (3, 20)
    assert found.label_ids is None
    assert "test_loss" not in (found.metrics or {})


def test_a_generation_config_of_the_arguments_is_the_models(tmp_path: Path) -> None:
    wanted = GenerationConfig(
        max_length=12, num_beams=2, pad_token_id=PAD, eos_token_id=END, decoder_start_token_id=PAD
    )
    made = trainer(tmp_path / "a", generation_config=wanted)
    assert made.model.generation_config.max_length == 12
    assert made.model.generation_config is not wanted
    assert made.predict(rows(2)).predictions.shape == (2, 12)
    wanted.save_pretrained(tmp_path / "config")
    by_folder = Seq2SeqTrainer.load_generation_config(str(tmp_path / "config"))
    by_file = Seq2SeqTrainer.load_generation_config(tmp_path / "config" / "generation_config.json")
    assert by_folder.num_beams == by_file.num_beams == 2


def test_a_generation_config_that_cannot_be_saved_is_refused_at_once() -> None:
    wrong = GenerationConfig()
    wrong.num_beams, wrong.num_return_sequences, wrong.do_sample = 1, 3, False
    with pytest.raises(BadInput, match="Cannot use the generation config"):
        Seq2SeqTrainer.load_generation_config(wrong)


def test_a_model_that_cannot_write_is_refused(tmp_path: Path) -> None:
    class Mute(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Embedding(20, 20)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
            logits = self.layer(input_ids)
            return {"loss": logits.mean(), "logits": logits}

    same = [{"input_ids": [2, 3], "labels": [2, 3]}]
    with pytest.raises(BadType, match="Mute cannot generate text"):
        trainer(tmp_path, model=Mute()).predict(same)
