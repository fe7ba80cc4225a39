"""A strategy is one class and one row: a toy whose last rank writes needs nothing else."""

from __future__ import annotations

from pathlib import Path

import torch

from anytrain.engine.checkpoint import load, manifest
from launching import launch

SCRIPT = """
import sys
from pathlib import Path
import torch
from anytrain import Accelerator
from anytrain.machine.strategies import table
from anytrain.machine.strategies.ddp import DDP
from anytrain.machine.strategies.solo import whole_parts

class LastWrites(DDP):
    def parts(self, *held):
        return whole_parts(held, writer=self._world.size - 1)

table.TABLE["ddp"] = LastWrites

folder = Path(sys.argv[1])
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(16, 8), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

def epoch():
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(model(batch).square().mean())
        optimizer.step()

epoch()
accelerator.save_state(folder / "saved")
if accelerator.is_main_process:
    found = accelerator.unwrap_model(model).state_dict()
    torch.save((found, optimizer.state_dict()), folder / "wanted.pt")
epoch()
accelerator.load_state(folder / "saved")
accelerator.save_state(folder / "again")
"""


def test_a_new_strategy_needs_one_class_and_one_row(tmp_path: Path) -> None:
    launch(SCRIPT, 2, tmp_path)
    weights, moments = torch.load(tmp_path / "wanted.pt")
    for name in ("saved", "again"):
        written = manifest.read(tmp_path / name)
        assert written.parts["optimizer"].document == "state-rank1.json"
        assert written.parts["cursor"].document == "state.json"
        loaded = load(tmp_path / name)
        found, kept = loaded.model(), loaded.part("optimizer")["state"]
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[key], weights[key]) for key in weights)
        for number, own in moments["state"].items():
            assert all(torch.equal(kept[number][key], own[key]) for key in own)
