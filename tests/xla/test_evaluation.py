"""An evaluation has one graph, though its last batch is filled up and metrics are computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from anytrain import Trainer, TrainingArguments
from xla_runs import counted


def _texts(count: int) -> list[dict[str, Any]]:
    draw = np.random.default_rng(2)
    return [
        {
            "input_ids": draw.integers(3, 90, 16).tolist(),
            "attention_mask": [1] * 16,
            "labels": index % 2,
        }
        for index in range(count)
    ]


def _trainer(folder: Path, **told: Any) -> Trainer:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100, hidden_size=28, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    config.intermediate_size = 28
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        report_to="none",
        disable_tqdm=True,
        **told,
    )
    model = BertForSequenceClassification(config)
    return Trainer(
        model, args, train_dataset=_texts(64), eval_dataset=_texts(30), compute_metrics=_scores
    )


def _scores(predicted: Any) -> dict[str, float]:
    hits = np.argmax(predicted.predictions, -1) == predicted.label_ids
    return {"accuracy": float(hits.mean()), "rows": len(hits)}


def test_a_last_batch_that_is_filled_up_costs_no_graph(tmp_path: Path) -> None:
    ours = _trainer(tmp_path / "xla")
    before = counted()
    found = ours.evaluate()
    after = counted()
    assert after[0] - before[0] == 1
    assert after[1] - before[1] == 4
    expected = _trainer(tmp_path / "cpu", use_cpu=True).evaluate()
    for name in ("eval_loss", "eval_accuracy", "eval_rows"):
        assert found[name] == pytest.approx(expected[name], abs=1e-5)
    assert found["eval_rows"] == 30
