"""One process and four devices: the compiler splits batches, and the losses stay the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from launching import child_environment, run_command, run_script
from xla_runs import train

RUNS = Path(__file__).parents[1] / "xla_runs.py"
FOUR = {
    "PJRT_DEVICE": "CPU",
    "ANYTRAIN_DEVICE": "xla",
    "ANYTRAIN_STRATEGY": "spmd",
    "CPU_NUM_DEVICES": "4",
}
_SPLIT = """
import torch
from torch.utils.data import DataLoader
from anytrain import Accelerator
accelerator = Accelerator()
for size in (8, 6):
    loader = accelerator.prepare(DataLoader(torch.arange(24.0).reshape(24, 1), batch_size=size))
    for batch in loader:
        import torch_xla
        print(size, len(batch), torch_xla._XLAC._get_xla_sharding_spec(batch), batch.sum().item())
        break
print(accelerator.plan.strategy.because, accelerator.num_processes)
"""


def test_four_devices_learn_what_one_learns(tmp_path: Path) -> None:
    one = train(tmp_path / "one")
    ran = run_command(
        [sys.executable, RUNS, tmp_path / "four", json.dumps({})], env=child_environment(FOUR)
    )
    four: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert four["plan"]["strategy"][0] == "spmd"
    assert four["losses"] == pytest.approx(one.losses, abs=1e-5)
    assert four["eval_losses"] == pytest.approx(one.eval_losses, abs=1e-5)


def test_a_batch_is_split_by_rows_or_said_to_be_computed_whole() -> None:
    told = run_script(_SPLIT, env=FOUR)
    split, whole, plan = told.stdout.splitlines()[-3:]
    assert split == "8 8 {devices=[4,1]0,1,2,3} 28.0"
    assert whole.startswith("6 6 ")
    assert "devices=[4" not in whole
    assert whole.endswith(" 15.0")
    assert "A batch of 6 rows cannot be split over 4 devices" in told.stderr
    assert plan == (
        "environment variable ANYTRAIN_STRATEGY: one process, batches split over 4 devices 1"
    )
