"""Models with adapters: what is saved, and what a resume brings back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from anytrain.doors.trainer import Trainer
from anytrain.doors.training_args import TrainingArguments


def adapted(*names: str) -> Any:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    settings = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["c_attn"])
    model: Any = get_peft_model(GPT2LMHeadModel(config), settings, names[0])
    for name in names[1:]:
        model.add_adapter(name, settings)
    return model


def trainer(model: Any, folder: Path) -> Trainer:
    row = torch.arange(8)
    return Trainer(
        model,
        TrainingArguments(
            output_dir=str(folder),
            max_steps=4,
            save_steps=2,
            learning_rate=0.1,
            per_device_train_batch_size=2,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row.roll(i)} for i in range(16)],
    )


@pytest.mark.parametrize("names", [("default",), ("first", "second"), ("default", "second")])
def test_every_adapter_is_saved_and_resumed(tmp_path: Path, names: tuple[str, ...]) -> None:
    whole = trainer(adapted(*names), tmp_path)
    whole.train()
    again = trainer(adapted(*names), tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    mine, theirs = again.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert not (tmp_path / "checkpoint-2" / "model.safetensors").exists()
