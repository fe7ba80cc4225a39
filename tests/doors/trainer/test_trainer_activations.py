"""activation_checkpointing="fit": activations go first, the batch is cut last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anytrain.core.errors import BadInput, Notice
from equivalence import twins
from launching import launch

GIVEN: dict[str, Any] = {
    "train_dataset": twins.points(22),
    "per_device_train_batch_size": 8,
    "activation_checkpointing": "fit",
}


FULL = "DefaultCPUAllocator: not enough memory"


class Block(nn.Module):
    """A block with dropout that keeps its rows in the model's memory, unless checkpointed."""

    def __init__(self, memory: dict[str, int]) -> None:
        super().__init__()
        self.memory, self.linear, self.drop = memory, nn.Linear(4, 4), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        checkpointed = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        if self.training and not checkpointed:
            self.memory["held"] += len(x)
            if self.memory["held"] > self.memory["size"]:
                raise RuntimeError(FULL)
        return x + self.drop(torch.tanh(self.linear(x)))


class Deep(nn.Module):
    """A regression of four blocks, whose memory holds so many rows."""

    def __init__(self, size: int, most: int) -> None:
        super().__init__()
        self.memory, self.most = {"size": size, "held": 0}, most
        self.blocks = nn.ModuleList(Block(self.memory) for _ in range(4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.memory["held"] = 0
        if len(x) > self.most:
            raise RuntimeError(FULL)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).squeeze(-1)
        loss = None if labels is None else (logits - labels).square().mean()
        return {"loss": loss, "logits": logits}


def train(folder: Path, size: int, most: int = 100, **given: Any) -> twins.Ran:
    def make() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Deep(size, most)

    return twins.train(twins.OURS, folder, model=make, **{**GIVEN, **given})


@pytest.mark.parametrize(("size", "told"), [(16, ["2"]), (15, ["2", "all"])], ids=["half", "all"])
@pytest.mark.parametrize("micro", [1, 2])
def test_a_batch_that_does_not_fit_gives_the_weights_of_one_that_does(
    tmp_path: Path, size: int, told: list[str], micro: int
) -> None:
    with pytest.warns(Notice, match="does not fit the memory") as notices:
        few = train(tmp_path / "few", size, gradient_accumulation_steps=micro)
    found = [str(each.message) for each in notices if "repeated" in str(each.message)]
    assert [text.split("memory: ")[1].split(" of ")[0] for text in found] == told
    whole = train(tmp_path / "whole", 100, gradient_accumulation_steps=micro)
    twins.assert_same_run(few, whole, rtol=0, atol=0)
    assert all(block._compiled_call_impl is None for block in few.trainer.model.blocks)


def test_the_batch_is_cut_once_every_block_is_checkpointed(tmp_path: Path) -> None:
    with pytest.warns(Notice, match="does not fit the memory") as notices:
        train(tmp_path, 16, most=4, auto_find_batch_size=True)
    found = [str(each.message) for each in notices if "does not fit" in str(each.message)]
    assert ["repeated blocks" in text for text in found] == [True, True, False]
    assert "in 2 parts" in found[-1]


def test_what_does_not_fit_even_so_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.warns(Notice, match="all of the model's 4 repeated blocks"),
        pytest.raises(RuntimeError, match=FULL),
    ):
        train(tmp_path, 100, most=4)


def test_nothing_changes_where_the_batch_fits(tmp_path: Path) -> None:
    fits = train(tmp_path / "fits", 100)
    off = train(tmp_path / "off", 100, activation_checkpointing="off")
    twins.assert_same_run(fits, off, rtol=0, atol=0)


def test_a_model_that_repeats_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="Cannot use activation_checkpointing with Regression"):
        twins.train(twins.OURS, tmp_path, model=twins.regression, **GIVEN)


def test_two_ways_of_checkpointing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="with gradient_checkpointing"):
        train(tmp_path, 100, gradient_checkpointing=True)


RANKS = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
sys.path.insert(0, {tests!r} + "/doors/trainer")
from test_trainer_activations import train

root, found = Path(sys.argv[1]), {{}}
rank = int(os.environ["RANK"])
for name, size in (("few", 8 - rank), ("whole", 100)):
    ran = train(root / name, size, per_device_train_batch_size=4)
    found[name] = [ran.history, {{n: w.tolist() for n, w in ran.weights.items()}}]
if rank == 0:
    (root / "found.json").write_text(json.dumps(found))
"""


@pytest.mark.full
def test_ranks_checkpoint_together(tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[2])
    launch(RANKS.format(tests=tests), 2, tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["few"] == found["whole"]
