"""Every sample counts once, whoever holds it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from anytrain.engine.metrics import LossMean, gather_rows, own_rows
from anytrain.machine.parallel.world import Solo
from launching import launch

SCRIPT = """
import json, sys
from pathlib import Path
import torch
from anytrain.core import environment
from anytrain.core.errors import ShapesDiffer
from anytrain.engine.metrics import LossMean, gather_rows, own_rows
from anytrain.machine.parallel.torch_dist import join

world = join(environment.read().place, "gloo", torch.device("cpu"), timeout_s=120)
rank, said = world.rank, {}

rows = [2, 0, 3][rank]
length = [4, 1, 6][rank]
logits, labels = torch.full((rows, length), float(rank)), torch.full((rows,), rank)
tree = {"logits": logits, "labels": (labels, None)}
for name, mine in {"known": tree, "unknown": tree if rows else None}.items():
    joined = gather_rows(mine, world)
    said[name] = [joined["logits"].tolist(), joined["labels"][0].tolist(), joined["labels"][1]]

joined = gather_rows((torch.ones(1), None) if rank == 2 else (None, None), world)
said["one giver"] = [joined[0].tolist(), joined[1]]
said["nobody"] = gather_rows((None, None), world)
said["scalars"] = gather_rows(torch.tensor(rank), world).tolist()
said["no rows"] = list(gather_rows(torch.zeros(0, 5), world).shape)
mixed = gather_rows(torch.ones(1, 1 + rank, dtype=torch.bool), world)
said["booleans"] = [str(mixed.dtype), mixed.tolist()]
halves = gather_rows(torch.ones(1, dtype=torch.bfloat16 if rank else torch.float32), world)
said["dtypes"] = [str(halves.dtype), halves.tolist()]
try:
    gather_rows(torch.ones(2) if rank else {"a": torch.ones(2)}, world)
except ShapesDiffer as error:
    said["unlike"] = str(error)

# seven samples, two a rank and round: the second round holds one and repeats five
counted, mean = [], LossMean()
samples = torch.arange(7.0)
for first in (0, 6):
    positions = [(first + rank * 2 + i) % 7 for i in range(2)]
    remainder = -1 if first == 0 else 1
    batch, kept = own_rows({"x": samples[positions], "n": 1}, remainder, rank, 2)
    if kept:
        mean.add(batch["x"].mean(), kept)
    counted += gather_rows(batch["x"] if kept else None, world).tolist()
said["counted"] = counted
said["mean"] = mean.value(world)
said["none"] = LossMean().value(world)
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("rows")
    launch(SCRIPT, 3, folder)
    every = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]
    assert every[0] == every[1] == every[2]  # what is gathered is the same everywhere
    return every[0]


@pytest.mark.parametrize("name", ["known", "unknown"])
def test_ranks_with_unlike_rows_are_joined_in_order_and_padded(said, name) -> None:
    logits, labels, none = said[name]
    assert logits == [[0.0] * 4 + [-100.0] * 2] * 2 + [[2.0] * 6] * 3
    assert labels == [0, 0, 2, 2, 2]
    assert none is None


def test_one_rank_alone_may_have_rows(said) -> None:
    assert said["one giver"] == [[1.0], None]
    assert said["nobody"] == [None, None]
    assert said["no rows"] == [0, 5]


def test_scalars_booleans_and_kinds_of_numbers_are_joined(said) -> None:
    assert said["scalars"] == [0, 1, 2]
    assert said["booleans"] == ["torch.int8", [[1, -100, -100], [1, 1, -100], [1, 1, 1]]]
    assert said["dtypes"] == ["torch.float32", [1.0, 1.0, 1.0]]


def test_trees_that_are_built_differently_are_refused_on_every_rank(said) -> None:
    assert "built differently" in said["unlike"] and "rank 1" in said["unlike"]


def test_each_sample_of_an_uneven_end_counts_once(said) -> None:
    assert sorted(said["counted"]) == [0, 1, 2, 3, 4, 5, 6]
    assert said["mean"] == pytest.approx(3.0)
    assert said["none"] is None


@pytest.mark.parametrize(
    ("remainder", "kept"),
    [(1, [1, 0, 0]), (4, [4, 0, 0]), (6, [4, 2, 0]), (11, [4, 4, 3]), (12, [4, 4, 4])],
)
def test_true_samples_are_dealt_to_the_first_ranks(remainder: int, kept: list[int]) -> None:
    batch = {"ids": torch.arange(8).reshape(4, 2), "text": list("abcd"), "scale": torch.tensor(2)}
    for rank, expected in enumerate(kept):
        own, count = own_rows(batch, remainder, rank, 4)
        assert count == expected == len(own["ids"]) == len(own["text"])
        assert own["scale"].item() == 2


@pytest.mark.parametrize("remainder", [0, -1])
def test_a_full_round_is_left_alone(remainder: int) -> None:
    batch = torch.arange(4)
    own, count = own_rows(batch, remainder, 2, 4)
    assert own is batch and count == 4


def test_a_world_of_one_gets_its_tree_itself() -> None:
    tree = {"a": torch.ones(2)}
    assert gather_rows(tree, Solo()) is tree


def test_losses_weigh_as_many_rows_as_they_stand_for() -> None:
    mean = LossMean()
    assert mean.value(Solo()) is None
    mean.add(torch.tensor(1.0), 3)
    mean.add(torch.tensor([4.0, 6.0], requires_grad=True), 1)
    mean.add(torch.tensor(float("nan")), 0)
    assert mean.value(Solo()) == pytest.approx(2.0)


def test_many_small_losses_keep_their_digits() -> None:
    mean = LossMean()
    loss = torch.tensor(0.1)
    for _ in range(20_000):
        mean.add(loss, 1000)
    assert mean.value(Solo()) == pytest.approx(loss.item(), rel=1e-12)
    mean.add(torch.tensor(float("inf"), dtype=torch.bfloat16), 1)
    assert mean.value(Solo()) == float("inf")
