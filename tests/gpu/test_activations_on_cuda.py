"""On a GPU, activations are given up before a batch is, when the memory is really full."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from anytrain.core.errors import Notice
from equivalence import twins

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    """A wide layer whose activations weigh more than its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1024, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(nn.functional.gelu(self.linear(x)), 0.1, self.training)


class Wide(nn.Module):
    """Eight of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.head = nn.Linear(1024, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = x.expand(-1, 1024) * self.head.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).squeeze(-1)
        return {"loss": (logits - labels).square().mean(), "logits": logits}


@pytest.mark.parametrize("engine", ["eager", "auto"])
def test_a_batch_that_does_not_fit_keeps_fewer_activations(tmp_path: Path, engine: str) -> None:
    rows = [{"x": [float(n % 7)], "labels": float(n % 3)} for n in range(5 * 32768)]

    def run(folder: str) -> twins.Ran:
        return twins.train(
            twins.OURS,
            tmp_path / folder,
            model=Wide,
            train_dataset=rows,
            per_device_train_batch_size=32768,
            learning_rate=1e-4,
            num_train_epochs=2,
            step_engine=engine,
            activation_checkpointing="fit",
            use_cpu=False,
        )

    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    whole = run("whole")
    peak = torch.cuda.max_memory_allocated() - before
    del whole.trainer.model, whole.trainer.optimizer, whole.trainer._engine_step
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    limit = torch.cuda.memory_reserved() + 0.75 * peak
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        with pytest.warns(Notice, match="repeated blocks are computed again"):
            fewer = run("fewer")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    twins.assert_same_history(fewer.history, whole.history, rtol=1e-5)
