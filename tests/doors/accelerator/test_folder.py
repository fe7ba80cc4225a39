"""A run's folder is one process's while that trains there."""

from __future__ import annotations

from pathlib import Path

from launching import run_script

TRAINS = """
import os, signal, sys
from pathlib import Path
import torch
from anytrain import Accelerator
from anytrain.core.errors import BadInput
from anytrain.engine.checkpoint import locks

def train():
    accelerator = Accelerator(cpu=True, project_dir=sys.argv[1])
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(batch).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator

read, write = os.pipe()
other = os.fork()
if other == 0:
    with locks.claimed(Path(sys.argv[1])):
        os.write(write, b"holds")
        signal.pause()
os.read(read, 5)
try:
    train()
except BadInput as error:
    print(str(error).replace(str(other), "OTHER"))
print("record", os.path.exists(os.path.join(sys.argv[1], "run.json")))
os.kill(other, signal.SIGKILL)
os.waitpid(other, 0)
here = train()
child = os.fork()
if child == 0:  # as a notebook's launcher starts it
    train()
    os._exit(0)
print("started by who trained", os.waitpid(child, 0)[1])
here.end_training()
print("left", os.path.exists(os.path.join(sys.argv[1], ".training")))
"""


def test_an_accelerator_does_not_train_where_another_process_does(tmp_path: Path) -> None:
    said = run_script(TRAINS, tmp_path).stdout
    assert f"Cannot begin a run in {tmp_path}." in said
    assert "process OTHER trains there at this moment" in said
    assert "record False" in said, "and what the other has written is left as it is"
    assert said.endswith("started by who trained 0\nleft False\n")
