"""The same loops through anytrain and through HF Accelerate, compared live."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import needs
from launching import run_command

SCRIPT = Path(__file__).with_name("traced_loop.py")


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda n: f"{n}-process")
def traces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict:
    needs.tool("accelerate")
    folder = tmp_path_factory.mktemp("traces")
    nprocs = request.param
    for library in ("anytrain", "accelerate"):
        launcher = [sys.executable]
        if nprocs > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", nprocs]
        run_command([*launcher, SCRIPT, library, folder], timeout=240)
    return {
        library: [json.loads((folder / f"{library}-{r}.json").read_text()) for r in range(nprocs)]
        for library in ("anytrain", "accelerate")
    }


def compare(traces: dict, what: str) -> None:
    wrong = []
    for rank, (ours, theirs) in enumerate(
        zip(traces["anytrain"], traces["accelerate"], strict=True)
    ):
        for name in theirs:
            if ours[name][what] != theirs[name][what]:
                wrong.append(f"{name}, rank {rank}: {ours[name][what]} != {theirs[name][what]}")
    assert not wrong, "\n".join(wrong[:10])


@pytest.mark.parametrize(
    "what", ["batches", "losses", "rates", "sync", "gathered", "length", "weights"]
)
def test_every_rank_sees_what_it_would_see_under_accelerate(traces: dict, what: str) -> None:
    compare(traces, what)


def test_cases_of_every_kind_were_compared(traces: dict) -> None:
    names = set(traces["anytrain"][0])
    assert names == set(traces["accelerate"][0])
    assert len(names) > 100
