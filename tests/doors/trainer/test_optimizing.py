"""A Trainer's optimizer and schedule are the ones its arguments name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anytrain.core.errors import CheckpointError
from anytrain.doors.trainer import Trainer
from anytrain.doors.training_args import TrainingArguments
from anytrain.doors.training_args.support import RUNNING
from anytrain.engine.optim import build
from equivalence import twins


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.norm = nn.LayerNorm(1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.norm(self.linear(x)).squeeze(-1) + self.linear(x).squeeze(-1)
        return {"loss": (out - labels).square().mean(), "logits": out}


def data() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(16, 3, generator=draw)
    return [{"x": row, "labels": row.sum()} for row in rows]


def trainer(folder: Path, **options: Any) -> Trainer:
    torch.manual_seed(1)
    settings: dict[str, Any] = {
        "num_train_epochs": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.01,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 10,
        "metric_for_best_model": "loss",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    args = TrainingArguments(output_dir=str(folder), **{**settings, **options})
    return Trainer(Regression(), args, train_dataset=data(), eval_dataset=data())


def rates(done: Trainer) -> list[float]:
    return [entry["learning_rate"] for entry in done.state.log_history if "learning_rate" in entry]


BY_METRIC: list[dict[str, Any]] = [
    {
        "lr_scheduler_type": "greedy",
        "lr_scheduler_kwargs": {"patience": 0, "min_lr": 1e-5, "factor": 0.5, "max_lr": 0.05},
    },
    {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "mode": "max"},
    },
]


@pytest.mark.parametrize("options", BY_METRIC)
def test_a_schedule_by_metric_moves_at_evaluations_alone(
    options: dict[str, Any], tmp_path: Path
) -> None:
    done = trainer(tmp_path, **options)
    done.train()
    seen = rates(done)
    assert len(seen) == 24
    assert len(set(seen)) > 2
    # A step's entry has the rate that the step was made with: evaluations are at even steps.
    moved = [step for step in range(1, 24) if seen[step] != seen[step - 1]]
    assert moved
    assert all(step % 2 == 0 for step in moved)


@pytest.mark.parametrize(
    "options",
    [
        *BY_METRIC,
        {"optim": "adafactor", "lr_scheduler_type": "cosine", "warmup_steps": 0.2},
        {
            "optim": "adafactor",
            "optim_args": "relative_step=true,scale_parameter=true",
            "lr_scheduler_type": "constant",
        },
        {"optim": "sgd", "optim_args": "momentum=0.9", "lr_scheduler_type": "polynomial"},
    ],
)
def test_a_resumed_training_ends_with_the_same_weights(
    options: dict[str, Any], tmp_path: Path
) -> None:
    whole = trainer(tmp_path / "whole", **options)
    whole.train()
    first = trainer(tmp_path / "parts", **options)
    first.train()
    again = trainer(tmp_path / "parts", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-10"))
    assert rates(again) == rates(whole)
    for own, other in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(own, other)


def test_weight_decay_spares_norms_and_biases(tmp_path: Path) -> None:
    made = trainer(tmp_path, weight_decay=0.3)
    decayed, spared = made.create_optimizer().param_groups
    model: Any = made.model
    assert [id(p) for p in decayed["params"]] == [id(model.linear.weight)]
    assert decayed["weight_decay"] == 0.3
    assert len(spared["params"]) == 3
    assert spared["weight_decay"] == 0.0


class Modes(torch.optim.SGD):
    """Remembers the mode it was in at each step, as schedule-free optimizers have them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.told: list[str] = []

    def train(self) -> None:
        self.told.append("train")

    def eval(self) -> None:
        self.told.append("eval")

    def step(self, closure: Any = None) -> Any:
        self.told.append("step")
        return super().step(closure)


def test_an_optimizer_with_modes_steps_in_training_mode(tmp_path: Path) -> None:
    made = trainer(tmp_path, eval_strategy="steps", eval_steps=2, max_steps=4, save_strategy="no")
    made.optimizer_cls_and_kwargs = (Modes, {"lr": 0.1})
    made.eval_dataset = data()
    made.train()
    step = ["step", "step", "eval", "train"]
    assert made.optimizer.told == ["train", *step, *step]
    made.evaluate()
    assert made.optimizer.told[-1] == "eval"


def test_a_schedule_that_follows_an_unknown_metric_says_which_are_known(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "no"}
    made = trainer(
        tmp_path,
        lr_scheduler_type="reduce_lr_on_plateau",
        metric_for_best_model="accuracy",
        **options,
    )
    made.eval_dataset = data()
    with pytest.raises(CheckpointError, match=r"(?s)schedule follow 'eval_accuracy'.*eval_loss"):
        made.train()


def test_the_arguments_let_through_the_optimizers_that_are_built() -> None:
    assert set(RUNNING) == set(build.names())


class TwoOptimizers(Trainer):
    """Prepares an optimizer of its own before the Trainer's is."""

    def create_optimizer(self, *given: Any) -> Any:
        self.extra = nn.Parameter(torch.zeros(()))
        self.second = self.accelerator.prepare(torch.optim.SGD([self.extra], lr=0.1))
        return super().create_optimizer(*given)


def test_an_optimizer_that_is_prepared_beside_the_trainers_takes_nothing_from_it(tmp_path) -> None:
    def trained(kind: type[Trainer]) -> torch.Tensor:
        torch.manual_seed(1)
        args = TrainingArguments(str(tmp_path / kind.__name__), max_steps=4, save_strategy="no")
        made = kind(Regression(), args, train_dataset=data())
        made.train()
        return made.model.linear.weight.detach()

    assert torch.equal(trained(TwoOptimizers), trained(Trainer))


def test_what_is_trained_may_stand_among_an_optimizers_options(tmp_path: Path) -> None:
    model = Regression()
    before = model.norm.weight.detach().clone()
    groups = [{"params": [model.linear.weight], "lr": 0.1}, {"params": [model.linear.bias]}]
    made = Trainer(
        model,
        TrainingArguments(
            str(tmp_path), max_steps=2, save_strategy="no", lr_scheduler_type="constant"
        ),
        train_dataset=data(),
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"params": groups, "lr": 0.01}),
    )
    made.train()
    assert made.get_learning_rates() == [0.1, 0.01]
    assert torch.equal(model.norm.weight, before)


class Halves(nn.Module):
    """A body and a head, of which one may be left to nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(1, 1), nn.Linear(1, 1)
        self.seen: list[float | None] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        gradient = self.body.weight.grad
        self.seen.append(None if gradient is None else float(gradient))
        return {"loss": (self.head(self.body(x)) - labels).square().mean()}


@pytest.mark.parametrize("library", twins.LIBRARIES)
def test_gradients_that_no_optimizer_takes_are_measured_and_let_go(
    library: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Halves()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=1e-3)
    trainer = twins.build(
        library,
        tmp_path,
        model=model,
        train_dataset=[{"x": torch.ones(1), "labels": 9 * torch.ones(1)}] * 24,
        optimizers=(optimizer, None),
        max_steps=3,
        logging_steps=1,
    )
    trainer.train()
    assert model.seen == [None] * 3
    assert model.body.weight.grad is None
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    torch.manual_seed(0)
    fresh = Halves()
    fresh(torch.ones(8, 1), 9 * torch.ones(8, 1))["loss"].backward()
    whole = torch.nn.utils.get_total_norm([p.grad for p in fresh.parameters()])
    assert norms[0] == pytest.approx(float(whole), rel=1e-5)
