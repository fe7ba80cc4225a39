"""A small training on torch_xla and what it cost in graphs; child processes run it as a script.

Import it as `from xla_runs import Run, train`; tests/ is on the path.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anytrain import Trainer, TrainingArguments

NUM_ROWS = 64


class Tied(nn.Module):
    """A classifier that uses one matrix in two layers."""

    def __init__(self, dropout: float, width: int) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(8, width), nn.Linear(8, width)
        self.last = nn.Linear(width, 2)
        self.other.weight = self.first.weight
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.last(self.drop(torch.relu(self.first(x) + self.other(x))))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@dataclass
class Run:
    """What a training left behind."""

    losses: list[float]
    eval_losses: list[float]
    weights: dict[str, torch.Tensor]
    plan: Any
    compilations: int
    executions: int
    model: nn.Module


def rows() -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(8, generator=draw), "labels": torch.tensor(index % 2)}
        for index in range(NUM_ROWS)
    ]


def counted() -> tuple[int, int]:
    """Return how many graphs were compiled, and how often one ran."""
    if "torch_xla" not in sys.modules:
        return 0, 0
    import torch_xla
    from torch_xla.debug import metrics

    torch_xla.sync(wait=True)  # a graph is counted when it has run
    ran = metrics.counter_value("ExecuteComputation") or 0
    return int(metrics.counter_value("UncachedCompile") or 0), int(ran)


def train(
    out: Path,
    *,
    dropout: float = 0.0,
    width: int = 32,
    resume: Path | None = None,
    data: Any = None,
    **told: Any,
) -> Run:
    """Train two epochs of eight steps, evaluating after each on four batches.

    A process keeps the graphs that it has compiled: only a new `width` is compiled anew.
    """
    torch.manual_seed(0)
    model = Tied(dropout, width)
    given: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "num_train_epochs": 2,
        "logging_steps": 3,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "save_strategy": "no",
        "eval_strategy": "epoch",
        "report_to": "none",
        "disable_tqdm": True,
    }
    args = TrainingArguments(output_dir=str(out), **{**given, **told})
    found = rows() if data is None else data
    trainer = Trainer(model, args, train_dataset=found, eval_dataset=rows()[: NUM_ROWS // 2])
    before = counted()
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    after = counted()
    history = trainer.state.log_history
    return Run(
        losses=[entry["loss"] for entry in history if "loss" in entry],
        eval_losses=[entry["eval_loss"] for entry in history if "eval_loss" in entry],
        weights={name: value.cpu().clone() for name, value in model.state_dict().items()},
        plan=trainer._session.plan,
        compilations=after[0] - before[0],
        executions=after[1] - before[1],
        model=trainer.model,
    )


def main() -> None:
    """Train in a process of its own; print the losses and the plan as JSON."""
    told = json.loads(sys.argv[2])
    run = train(Path(sys.argv[1]), **told)
    plan = {name: [choice.value, choice.because] for name, choice in run.plan.reasons().items()}
    print(json.dumps({"losses": run.losses, "eval_losses": run.eval_losses, "plan": plan}))


if __name__ == "__main__":
    main()
