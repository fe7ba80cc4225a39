"""The TPU guide's loop, as it stands but for its import, on one and on two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import needs
from launching import launch, run_script

LOOP = """
import sys
import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification
from anytrain import Accelerator

folder, batch_size, output = sys.argv[1], int(sys.argv[2]), sys.argv[3]
hyperparameters = {
    "learning_rate": 1e-3, "num_epochs": 2, "train_batch_size": batch_size,
    "eval_batch_size": batch_size,
}

def create_dataloaders(train_batch_size=8, eval_batch_size=32):
    torch.manual_seed(3)
    rows = [
        {
            "input_ids": torch.randint(5, 90, (12,)),
            "attention_mask": torch.ones(12, dtype=torch.long),
            "labels": torch.randint(0, 2, ()),
        }
        for _ in range(48)
    ]
    train = DataLoader(rows, batch_size=train_batch_size)
    return train, DataLoader(rows, batch_size=eval_batch_size)

def training_function():
    accelerator = Accelerator()
    model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased", num_labels=2)
    train_dataloader, eval_dataloader = create_dataloaders(
        train_batch_size=hyperparameters["train_batch_size"], eval_batch_size=hyperparameters["eval_batch_size"]
    )
    optimizer = AdamW(params=model.parameters(), lr=hyperparameters["learning_rate"])
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    for epoch in range(hyperparameters["num_epochs"]):
        model.train()
        for step, batch in enumerate(train_dataloader):
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_model(model, output)

training_function()
"""  # noqa: E501 -- the guide's lines stay as they stand


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where `bert-base-cased` is a small BERT without dropout."""
    needs.tool("transformers")
    from transformers import BertConfig, BertForSequenceClassification

    home = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertForSequenceClassification(config).save_pretrained(home / "bert-base-cased")
    return home


def weights(home: Path, nprocs: int, batch_size: int) -> dict[str, torch.Tensor]:
    output = home / f"out-{nprocs}-{batch_size}"
    # The name in the loop is the guide's; a folder of that name stands in for the hub.
    script = LOOP.replace("import sys\n", f"import sys, os\nos.chdir({str(home)!r})\n", 1)
    if nprocs == 1:
        run_script(script, home, batch_size, output)
    else:
        launch(script, nprocs, home, batch_size, output)
    return load_file(output / "model.safetensors")


def test_two_processes_learn_what_one_learns_from_the_same_global_batch(bert: Path) -> None:
    alone = weights(bert, 1, 8)
    together = weights(bert, 2, 4)
    assert alone.keys() == together.keys()
    worst = max(float((alone[name] - together[name]).abs().max()) for name in alone)
    # Means of two halves are averaged instead of one mean being taken: the sums differ in their
    # last bits, and 12 AdamW steps at 1e-3 let that grow to at most a thousandth of a step each.
    assert worst < 12 * 1e-3 * 1e-2, worst
    before = load_file(bert / "bert-base-cased" / "model.safetensors")
    moved = max(float((alone[name] - before[name]).abs().max()) for name in alone)
    assert moved > 1e-3


def test_the_loop_is_repeated_to_the_bit(bert: Path) -> None:
    first, second = weights(bert, 2, 4), weights(bert, 2, 4)
    assert all(torch.equal(first[name], second[name]) for name in first)
