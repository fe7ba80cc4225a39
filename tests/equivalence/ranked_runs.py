"""Run cases with one library on all ranks; rank 0 writes what came out.

    python ranked_runs.py <library> <folder> <sets of cases> <micro-batches a step>

Trainings are cut in ranks and micro-batches so that every step sees the same global batch.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from equivalence import twins  # noqa: E402  # found by the line above

GLOBAL_BATCH = 4

TRAIN: dict[str, dict[str, Any]] = {
    "mlp": {"model": twins.regression, "train_dataset": twins.points(24)},
    "bert": {"model": twins.bert, "train_dataset": twins.sentences(24), "max_grad_norm": 0.1},
    "tags": {
        "model": partial(twins.bert, "TokenClassification"),
        "train_dataset": twins.tagged(24),
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
    },
    "gpt2": {"model": twins.gpt2, "train_dataset": twins.texts(24)},
    "llama": {"model": twins.llama, "train_dataset": twins.texts(24)},
    "t5": {"model": twins.t5, "train_dataset": twins.texts(24)},
    "smoothed": {
        "model": partial(twins.bert, "TokenClassification"),
        "train_dataset": twins.tagged(24),
        "label_smoothing_factor": 0.1,
    },
    "max steps": {"model": twins.regression, "train_dataset": twins.points(24), "max_steps": 8},
}
UNEVEN: dict[str, dict[str, Any]] = {
    "mlp": {"model": twins.regression, "train_dataset": twins.points(22)},
    "tags": {
        "model": partial(twins.bert, "TokenClassification"),
        "train_dataset": twins.tagged(22),
    },
    "gpt2": {"model": twins.gpt2, "train_dataset": twins.texts(22)},
}


def accuracy(found: Any) -> dict[str, float]:
    """Return numbers that change when a row is counted twice or not at all."""
    counted = found.predictions[found.label_ids != -100]
    return {"rows": float(len(found.label_ids)), "sum": float(counted.sum())}


def trained(library: str, folder: Path, case: dict[str, Any], micro: int) -> dict[str, Any]:
    """Return a training's log and weights, where micro-batches and ranks share the batch."""
    world = world_size()
    ran = twins.train(
        library,
        folder,
        **case,
        per_device_train_batch_size=GLOBAL_BATCH // (world * micro),
        gradient_accumulation_steps=micro,
    )
    return {
        "history": ran.history,
        "weights": {name: weight.tolist() for name, weight in ran.weights.items()},
        "steps": ran.output.global_step,
        "loss": ran.output.training_loss,
        "events": len(ran.events),
    }


def predicted(library: str, folder: Path, count: int) -> dict[str, Any]:
    """Return the metrics and predictions of so many rows."""
    made = twins.build(
        library,
        folder,
        model=twins.bert("TokenClassification"),
        compute_metrics=accuracy,
        data_collator=twins.pad,
        eval_dataset=twins.tagged(count),
        per_device_eval_batch_size=3,
    )
    rows = twins.sentences(count, ragged=True)
    rows = [{**row, "labels": [word % 3 for word in row["input_ids"]]} for row in rows]
    found = made.predict(rows)
    return {
        "evaluated": twins.untimed(made.evaluate()),
        "metrics": twins.untimed(found.metrics),
        "predictions": found.predictions[found.label_ids != -100].tolist(),
        "labels": found.label_ids.tolist(),
    }


def world_size() -> int:
    """Return how many processes run this."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def run(library: str, folder: Path, sets: str, micro: int) -> dict[str, Any]:
    """Run sets of cases; return what came out by set and name."""
    found: dict[str, Any] = {}
    for which in sets.split(","):
        if which == "predict":
            found[which] = {
                str(count): predicted(library, folder / f"predict-{count}", count)
                for count in (1, 2, 5, 7, 12, 13)
            }
        else:
            found[which] = {
                name: trained(library, folder / f"{which}-{name}", case, micro)
                for name, case in (TRAIN if which == "train" else UNEVEN).items()
            }
    return found


def main(library: str, folder: Path, sets: str, micro: int) -> None:
    """Run sets of cases on every rank; the first writes what came out."""
    found = run(library, folder, sets, micro)
    if os.environ.get("RANK", "0") == "0":
        (folder / f"{library}-{world_size()}x{micro}.json").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
