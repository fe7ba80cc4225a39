"""A plain PyTorch loop, written as people write it: what a library is measured against."""

from __future__ import annotations

from typing import Any

import torch

from anytrain.recipes.bench.task import MAX_GRAD_NORM, Task, Trained


def loop(task: Task) -> Trained:
    """Train with nothing but torch."""
    model = task.model().to(task.device)
    optimizer = task.optimizer(model)
    schedule = task.schedule(optimizer)
    half = task.precision == "bf16"

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        placed = {n: tensor.to(task.device, non_blocking=True) for n, tensor in batch.items()}
        with torch.autocast(task.device.type, torch.bfloat16, enabled=half):
            out: Any = model(**placed)
        loss: torch.Tensor = out.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss.detach()

    return Trained(model, task.run(task.loader(), step), task.precision)
