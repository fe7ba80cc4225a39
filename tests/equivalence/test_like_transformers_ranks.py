"""Steps that ranks and micro-batches share, beside transformers' run of the whole batch.

transformers 5.22 multiplies the loss and the gradient of models that take keyword arguments and
leave num_items_in_batch alone, so its own cut runs are no measure. See
docs/decisions/loss-of-a-step.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from equivalence import ranked_runs, twins
from launching import run_command

SCRIPT = Path(__file__).with_name("ranked_runs.py")
CUTS = [(1, 2), (2, 1), pytest.param((2, 2), marks=pytest.mark.full)]


def ran(folder: Path, library: str, sets: str, ranks: int, micro: int = 1) -> dict[str, Any]:
    if ranks == 1:
        return ranked_runs.run(library, folder, sets, micro)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(ranks)]
    run_command([*launcher, SCRIPT, library, folder, sets, micro], timeout=240)
    return dict(json.loads((folder / f"{library}-{ranks}x{micro}.json").read_text()))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return transformers' run of the whole batch, in one process."""
    folder = tmp_path_factory.mktemp("whole")
    return ranked_runs.run(twins.THEIRS, folder, "train,uneven,predict", 1)


def assert_same_training(mine: dict[str, Any], yours: dict[str, Any], case: str) -> None:
    assert mine["steps"] == yours["steps"]
    ours, theirs = ([_kept(e, case) for e in run["history"]] for run in (mine, yours))
    twins.assert_same_history(ours, theirs, rtol=2e-4)
    weights = [{n: torch.tensor(w) for n, w in run["weights"].items()} for run in (mine, yours)]
    twins.assert_same_weights(*weights, atol=2e-4)
    assert mine["loss"] == pytest.approx(yours["loss"], rel=1e-4), case


def _kept(entry: dict[str, Any], case: str) -> dict[str, Any]:
    """Leave out what depends on the cut: operations of repeats, and shares of an odd epoch."""
    left_out = ("total_flos", "epoch") if "uneven" in case else ("total_flos",)
    return {name: value for name, value in entry.items() if name not in left_out}


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: f"{cut[0]} ranks x {cut[1]}")
def test_a_step_that_is_cut_is_the_whole_batchs_step(
    tmp_path: Path, whole: dict[str, Any], cut: tuple[int, int]
) -> None:
    found = ran(tmp_path, twins.OURS, "train,uneven,predict", *cut)
    for which in ("train", "uneven"):
        assert set(found[which]) == set(whole[which])
        for name, mine in found[which].items():
            assert_same_training(mine, whole[which][name], f"{which}: {name}")
    assert_same_predictions(found["predict"], whole["predict"])


def assert_same_predictions(found: dict[str, Any], whole: dict[str, Any]) -> None:
    for count, yours in whole.items():
        mine = found[count]
        assert mine["labels"] == yours["labels"], count
        assert mine["metrics"] == pytest.approx(yours["metrics"], rel=1e-5, abs=1e-5), count
        assert mine["evaluated"] == pytest.approx(yours["evaluated"], rel=1e-5, abs=1e-5), count
        torch.testing.assert_close(
            torch.tensor(mine["predictions"]), torch.tensor(yours["predictions"])
        )


@pytest.mark.full
def test_every_row_counts_once_on_three_ranks(tmp_path: Path, whole: dict[str, Any]) -> None:
    found = ran(tmp_path, twins.OURS, "predict", 3)
    assert_same_predictions(found["predict"], whole["predict"])


@pytest.mark.full
def test_two_ranks_train_like_two_ranks_of_transformers(tmp_path: Path) -> None:
    # The plain module takes no keyword arguments, so transformers leaves its loss as it is.
    both = [ran(tmp_path, library, "train", 2)["train"] for library in twins.LIBRARIES]
    mine, yours = (found["mlp"] for found in both)
    assert_same_training(mine, yours, "mlp")
    assert mine["events"] == yours["events"]
    # What transformers does to the others: the loss and the gradient come out doubled.
    first = [found["bert"]["history"][0] for found in both]
    assert first[1]["loss"] == pytest.approx(2 * first[0]["loss"], rel=1e-4)
