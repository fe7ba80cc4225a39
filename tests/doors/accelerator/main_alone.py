"""Train as many scripts do, which save on the main process alone.

anytrain launch --num_processes 2 main_alone.py FOLDER [CHECKPOINT]
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from anytrain import Accelerator, ProjectConfiguration, set_seed

FOLDER = Path(sys.argv[1])
set_seed(0)
config = ProjectConfiguration(str(FOLDER), automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, project_config=config)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
x = torch.randn(64, 4)
rows = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
step = 0
if sys.argv[2:]:
    accelerator.load_state(sys.argv[2])
    step = 3
    config.iteration = 9
losses, seconds = [], []
for inputs, labels in rows:
    loss = nn.functional.mse_loss(model(inputs), labels)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    losses.append(loss.item())
    if step in (3, 5) and accelerator.is_main_process:
        begin = time.perf_counter()
        accelerator.save_state()
        seconds.append(time.perf_counter() - begin)
    if step == 6:
        accelerator.save_state()
    if step == 8:
        break
if accelerator.is_main_process:
    accelerator.save_model(model, FOLDER / "model")
accelerator.wait_for_everyone()
weights = [p.tolist() for p in model.parameters()]
told = {"losses": losses[-5:], "weights": weights, "seconds": seconds}
(FOLDER / f"told-{accelerator.process_index}.json").write_text(json.dumps(told))
accelerator.end_training()
