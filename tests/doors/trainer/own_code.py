"""Trainers with code of the user's, on however many ranks this is started with.

    python own_code.py <folder>

Each rank writes what it found into rank<N>.json. Import it as `from doors.trainer import own_code`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from anytrain.doors.callbacks import TrainerCallback
from anytrain.doors.trainer import Trainer
from anytrain.doors.training_args import TrainingArguments

BATCH = 2
COUNTS = (3, 5)
"""Rows of a data set: on 2 and 3 ranks some are dealt none of the last round, or half a batch."""


class Line(nn.Module):
    """A line through the origin, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss and the guess."""
        guess = self.weight * x
        return {"loss": nn.functional.mse_loss(guess, labels), "logits": guess}


def rows(count: int) -> list[dict[str, float]]:
    """Return so many points of one line."""
    return [{"x": 1.0 + number, "labels": 2.0 * (1 + number)} for number in range(count)]


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    """Return arguments that every training here shares."""
    return TrainingArguments(
        **{
            "output_dir": str(folder / "out"),
            "per_device_train_batch_size": BATCH,
            "per_device_eval_batch_size": BATCH,
            "num_train_epochs": 1,
            "learning_rate": 1e-3,
            "optim": "sgd",
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "train_sampling_strategy": "sequential",
            "save_strategy": "no",
            "logging_steps": 1,
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            **more,
        }
    )


# -- code that speaks with the other ranks' -------------------------------------------------------


class Gathering(Trainer):
    """Gathers every row's loss, and a metric as an object."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen: list[list[float]] = []
        super().__init__(*args, **kwargs)

    def gather(self, tensor: torch.Tensor) -> None:
        """Gather a tensor of each rank's, and note what came."""
        self.seen.append(self.accelerator.gather(tensor).tolist())


class OwnLoss(Gathering):
    """A compute_loss that gathers."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the mean of the rows' losses."""
        guess = model(**inputs)["logits"]
        each = (guess - inputs["labels"]) ** 2
        self.gather(each.detach())
        return (each.mean(), {"logits": guess}) if return_outputs else each.mean()


class OwnPrediction(Gathering):
    """A prediction_step that gathers."""

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Gather the inputs."""
        self.gather(inputs["x"])
        return super().prediction_step(model, inputs, *args, **kwargs)


class OwnStep(Gathering):
    """A training_step that gathers."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Gather the inputs."""
        self.gather(inputs["x"])
        return super().training_step(model, inputs, num_items_in_batch)


class Meeting(TrainerCallback):
    """A callback that gathers whatever it is told."""

    trainer: Gathering

    def _meet(self, *told: Any, **known: Any) -> None:
        self.trainer.gather(torch.ones(1))

    on_step_begin = on_step_end = on_substep_end = on_prediction_step = _meet
    on_evaluate = on_predict = on_log = on_epoch_end = on_train_end = _meet


def squares(found: Any) -> dict[str, float]:
    """Return numbers that change when a row is counted twice or not at all."""
    return {"rows": float(len(found.label_ids)), "sum": float(np.sum(found.label_ids))}


def gathered(folder: Path, kind: type[Gathering], count: int, accumulation: int) -> dict[str, Any]:
    """Train and evaluate on so many rows; return what every rank must agree on."""
    meeting = Meeting()
    trainer = kind(
        Line(),
        arguments(folder, gradient_accumulation_steps=accumulation, eval_strategy="epoch"),
        train_dataset=rows(count),
        eval_dataset=rows(count),
        compute_metrics=squares,
        callbacks=[meeting],
        preprocess_logits_for_metrics=lambda logits, labels: logits,
    )
    meeting.trainer = trainer
    trainer.train()
    found = trainer.predict(rows(count))
    return {
        "seen": trainer.seen,
        "weight": float(trainer.model.weight.detach()),
        "rows": found.metrics["test_rows"],
        "sum": found.metrics["test_sum"],
        "predictions": found.predictions.tolist(),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }


class Contrasting(Line):
    """A model whose forward gathers what all ranks compute, as contrastive losses do."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss and the guess."""
        found = super().forward(x, labels)
        if torch.distributed.is_initialized():
            others = [torch.empty_like(x) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(others, x)
        return found


def contrasted(folder: Path) -> dict[str, Any]:
    """Return what a model that gathers in its forward has learnt from an odd number of rows."""
    found = {}
    for count in COUNTS:
        trainer = Trainer(
            Contrasting(),
            arguments(folder, eval_strategy="epoch"),
            train_dataset=rows(count),
            eval_dataset=rows(count),
            compute_metrics=squares,
        )
        trainer.train()
        metrics = trainer.predict(rows(count)).metrics
        found[str(count)] = {"rows": metrics["test_rows"], "sum": metrics["test_sum"]}
    return found


def speaking(folder: Path) -> dict[str, Any]:
    """Return what came of every kind of code that gathers."""
    return {
        f"{kind.__name__} {count} {accumulation}": gathered(folder, kind, count, accumulation)
        for kind in (OwnLoss, OwnPrediction, OwnStep)
        for count in COUNTS
        for accumulation in (1, 2)
    }


# -- code that makes the batches it trains on -----------------------------------------------------


class More(Trainer):
    """Trains on each row of a batch, and on its first one again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.made: list[list[float]] = []
        super().__init__(*args, **kwargs)

    def change(self, inputs: Any) -> Any:
        """Return the batch that is trained on."""
        return {name: torch.cat([value, value[:1]]) for name, value in inputs.items()}

    def _prepare_inputs(self, inputs: Any) -> Any:
        found = super()._prepare_inputs(self.change(inputs))
        self.made.append(next(iter(found.values())).tolist())
        return found


class Fewer(More):
    """Trains on the first half of every other batch, on the others whole."""

    def change(self, inputs: Any) -> Any:
        """Return the batch that is trained on."""
        kept = BATCH if len(self.made) % 2 else BATCH // 2
        return {name: value[:kept] for name, value in inputs.items()}


class Answered(More):
    """Makes rows of other names from prompts, enough for two micro-batches, of many lengths."""

    def change(self, inputs: Any) -> Any:
        """Return the batch that is trained on."""
        half = len(self.made) % 2
        if half == 0:
            xs = [float(len(row["prompt"]) + more) for row in inputs for more in range(5)]
            self.buffered = torch.tensor(xs)
        part = self.buffered[:3] if half == 0 else self.buffered[3:]
        return {"asked": part, "answered": 2 * part}

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the mean over the rows that were made."""
        return model(inputs["asked"], inputs["answered"])["loss"]


def made(folder: Path, kind: type[More], accumulation: int) -> dict[str, Any]:
    """Train on batches of the user's making; return them, and the weight that came of them."""
    prompts = [{"prompt": "a" * (1 + number)} for number in range(24)]
    talks = issubclass(kind, Answered)
    trainer = kind(
        Line(),
        arguments(
            folder,
            gradient_accumulation_steps=accumulation,
            max_steps=2,
            remove_unused_columns=not talks,
        ),
        train_dataset=prompts if talks else rows(24),
        data_collator=list if talks else None,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"made": trainer.made, "weight": float(trainer.model.weight.detach()), "losses": losses}


def making(folder: Path) -> dict[str, Any]:
    """Return what came of every kind of batch."""
    return {
        f"{kind.__name__} {accumulation}": made(folder, kind, accumulation)
        for kind in (More, Fewer, Answered)
        for accumulation in (1, 2)
    }


# -- parameters that go unused --------------------------------------------------------------------


class Heads(nn.Module):
    """Two heads over a body; which are used follows the batch, and one never is."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.calls = kind, 0
        self.body, self.first, self.second = (nn.Linear(1, 1) for _ in range(3))
        if kind == "unused":
            self.spare = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        self.calls += self.training
        inner = self.body(x[:, None])
        late = self.kind == "late" and self.calls > 5
        far = self.kind == "by rank" and bool(x[0] > 4)
        found = self.first(inner) if late or far else self.first(inner) + self.second(inner)
        return {"loss": nn.functional.mse_loss(found[:, 0], labels)}


def shared(folder: Path, kind: str, **more: Any) -> dict[str, Any]:
    """Train a model with two heads; return its weights, and what the plan says."""
    told = arguments(folder, max_steps=8, weight_decay=0.1, optim="adamw_torch", **more)
    trainer = Trainer(Heads(kind), told, train_dataset=rows(24))
    error = None
    try:
        trainer.train()
    except ValueError as caught:
        error = str(caught)
    return {
        "error": error,
        "weights": {n: p.flatten().tolist() for n, p in trainer.model.named_parameters()},
        "strategy": trainer._session.plan.strategy.because,
        "searches": getattr(trainer.model_wrapped, "find_unused_parameters", None),
    }


class Wide(nn.Module):
    """Layers that come in another order than they are used in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.middle, self.last, self.first = nn.Linear(40, 40), nn.Linear(40, 1), nn.Linear(1, 40)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        found = self.last(torch.tanh(self.middle(torch.tanh(self.first(x[:, None])))))
        return {"loss": nn.functional.mse_loss(found[:, 0], labels)}


def lives(folder: Path) -> list[list[float]]:
    """Train in one go, and again from the middle on; return what came of each."""
    found: list[list[float]] = []
    for resume in (None, str(folder / "out" / "checkpoint-4")):
        told = arguments(folder, max_steps=6, save_strategy="steps", save_steps=4)
        trainer = Trainer(Wide(), told, train_dataset=rows(48))
        trainer.train(resume_from_checkpoint=resume)
        found.append([w for p in trainer.model.parameters() for w in p.flatten().tolist()])
    return found


def sharing(folder: Path) -> dict[str, Any]:
    """Return what came of models that use their parameters, and of some that do not."""
    found = {kind: shared(folder, kind) for kind in ("all", "unused", "by rank")}
    for kind in ("unused", "by rank", "late"):
        found[f"searched {kind}"] = shared(folder, kind, ddp_find_unused_parameters=True)
    twice = shared(folder, "by rank", gradient_accumulation_steps=2)
    return {**found, "twice": twice, "late": shared(folder, "late")}


def answers(folder: Path) -> dict[str, Any]:
    """Return what came of each question."""
    found = {"speaking": speaking(folder), "making": making(folder)}
    found["contrasted"] = contrasted(folder)
    return {**found, "sharing": sharing(folder), "lives": lives(folder)}


if __name__ == "__main__":
    target = Path(sys.argv[1])
    found = answers(target)
    (target / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
