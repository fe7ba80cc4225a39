"""auto_find_batch_size: a batch that does not fit is cut in place, and stays the same batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anytrain.core.errors import NothingFits, Notice
from equivalence import twins
from launching import launch


class Small(twins.Regression):
    """A module that does not fit more than so many rows."""

    most = 4

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        """Fail as the host's allocator does."""
        if self.training and len(x) > self.most:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: no memory")
        return super().forward(x, labels)


def small(most: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = Small()
    made.most = most
    return made


GIVEN: dict[str, Any] = {
    "train_dataset": twins.points(22),
    "per_device_train_batch_size": 8,
    "auto_find_batch_size": True,
}


@pytest.mark.parametrize(
    ("most", "parts"),
    [(4, 2), (3, 4), pytest.param(1, 8, marks=pytest.mark.full)],
    ids=["halves", "quarters", "rows"],
)
@pytest.mark.parametrize("micro", [1, 2])
def test_a_batch_that_does_not_fit_gives_the_weights_of_one_that_does(
    tmp_path: Path, most: int, parts: int, micro: int
) -> None:
    given = {**GIVEN, "gradient_accumulation_steps": micro, "max_grad_norm": 0.5}
    with pytest.warns(Notice, match=f"does not fit the memory: it is computed in {parts} parts"):
        cut = twins.train(twins.OURS, tmp_path / "cut", model=lambda: small(most), **given)
    fits = twins.train(twins.OURS, tmp_path / "fits", model=lambda: small(100), **given)
    twins.assert_same_run(cut, fits, rtol=1e-4, atol=1e-5)
    plain = {**given, "auto_find_batch_size": False}
    whole = twins.train(twins.OURS, tmp_path / "whole", model=lambda: small(100), **plain)
    twins.assert_same_run(cut, whole, rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_stops_where_nobody_asked_for_parts(tmp_path: Path) -> None:
    given = {**GIVEN, "auto_find_batch_size": False}
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        twins.train(twins.OURS, tmp_path, model=lambda: small(4), **given)


def test_one_row_that_does_not_fit_says_so(tmp_path: Path) -> None:
    with (
        pytest.warns(Notice, match="does not fit the memory"),
        pytest.raises(NothingFits, match="one row at a time"),
    ):
        twins.train(twins.OURS, tmp_path, model=lambda: small(0), **GIVEN)


def test_other_failures_are_not_taken_for_a_full_memory(tmp_path: Path) -> None:
    class Broken(twins.Regression):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        twins.train(twins.OURS, tmp_path, model=Broken, **GIVEN)


RANKS = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from equivalence import twins
sys.path.insert(0, {tests!r} + "/doors/trainer")
from test_trainer_memory import GIVEN, small

root, found = Path(sys.argv[1]), {{}}
rank = int(os.environ["RANK"])
for name, most in (("cut", 3 - rank), ("fits", 100)):
    ran = twins.train(
        twins.OURS, root / name, model=lambda: small(most),
        **{{**GIVEN, "per_device_train_batch_size": 4}},
    )
    found[name] = [ran.history, {{n: w.tolist() for n, w in ran.weights.items()}}]
if rank == 0:
    (root / "found.json").write_text(json.dumps(found))
"""


@pytest.mark.full
def test_ranks_cut_together_and_keep_the_batch(tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[2])
    launch(RANKS.format(tests=tests), 2, tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    twins.assert_same_history(found["cut"][0], found["fits"][0], rtol=1e-4)
    cut, fits = ({n: torch.tensor(w) for n, w in found[k][1].items()} for k in ("cut", "fits"))
    twins.assert_same_weights(cut, fits, atol=1e-5)
