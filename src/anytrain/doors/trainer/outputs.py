"""What a Trainer gives back and writes, and the small functions that scripts import beside it."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from anytrain.core import documents
from anytrain.core.documents import as_file
from anytrain.core.errors import BadInput, NotAFile
from anytrain.core.notices import give_notice
from anytrain.engine import rng
from anytrain.engine.checkpoint import catalog
from anytrain.engine.checkpoint.manifest import MANIFEST
from anytrain.engine.recording.disk import in_text, reason, to_json

PREFIX_CHECKPOINT_DIR = "checkpoint"
TRAINER_STATE_NAME = "trainer_state.json"
Arrays: TypeAlias = Any
"""A numpy array, or arrays nested in tuples, lists and dicts."""

_OWN_FILES = (MANIFEST, "state.json", "cursor.json")
"""What no other library writes into a checkpoint."""
_CHECKPOINT = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")


class EvalPrediction:
    """What `compute_metrics` is given: predictions, labels, and on request inputs and losses.

    Unpacks and indexes like a tuple of those that are there.
    """

    def __init__(
        self,
        predictions: Arrays,
        label_ids: Arrays,
        inputs: Arrays | None = None,
        losses: Arrays | None = None,
    ) -> None:
        self.predictions = predictions
        self.label_ids = label_ids
        self.inputs = inputs
        self.losses = losses
        extra = tuple(part for part in (inputs, losses) if part is not None)
        self.elements = (predictions, label_ids, *extra)

    def __iter__(self) -> Iterator[Arrays]:
        return iter(self.elements)

    def __getitem__(self, index: int) -> Arrays:
        if not 0 <= index < len(self.elements):
            raise IndexError(f"no element {index}: there are {len(self.elements)}")
        return self.elements[index]


class EvalLoopOutput(NamedTuple):
    """What one pass over an evaluation set gave."""

    predictions: Arrays
    label_ids: Arrays | None
    metrics: dict[str, float] | None
    num_samples: int | None


class PredictionOutput(NamedTuple):
    """What `Trainer.predict` returns."""

    predictions: Arrays
    label_ids: Arrays | None
    metrics: dict[str, float] | None


class TrainOutput(NamedTuple):
    """What `Trainer.train` returns."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class BestRun(NamedTuple):
    """The best trial of a search; its checkpoints are in the folder run-<run_id>."""

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: Any | None = None


class HPSearchBackend(StrEnum):
    """Libraries that HF's search knows by name; anytrain drives optuna."""

    OPTUNA = "optuna"
    RAY = "ray"
    WANDB = "wandb"


def default_compute_objective(metrics: Mapping[str, float]) -> float:
    """Return the sum of the user's metrics, or the evaluation loss where there are none."""
    about_speed = ("_runtime", "_per_second")
    chosen = {
        name: value
        for name, value in metrics.items()
        if name not in ("eval_loss", "epoch") and not name.endswith(about_speed)
    }
    if chosen:
        return sum(chosen.values())
    if "eval_loss" not in metrics:
        raise BadInput(
            "The search has nothing to compare its trials by.",
            why=f"the evaluation gave {sorted(metrics) or 'no metrics'}: no loss and no metric.",
            fix="pass compute_metrics= or compute_objective=, or give the labels to the model.",
        )
    return metrics["eval_loss"]


def default_hp_space_optuna(trial: Any) -> dict[str, Any]:
    """Suggest a learning rate, epochs, a seed and a batch size from an optuna trial."""
    batch_sizes = [4, 8, 16, 32, 64]
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 5),
        "seed": trial.suggest_int("seed", 1, 40),
        "per_device_train_batch_size": trial.suggest_categorical(
            "per_device_train_batch_size", batch_sizes
        ),
    }


def speed_metrics(
    split: str,
    start_time: float,
    num_samples: float | None = None,
    num_steps: float | None = None,
    num_tokens: float | None = None,
) -> dict[str, float]:
    """Return the seconds since `start_time`, and what was done in each of them."""
    runtime = time.time() - start_time
    result = {f"{split}_runtime": round(runtime, 4)}
    if runtime <= 0:
        return result
    counts = {"samples": num_samples, "steps": num_steps, "tokens": num_tokens}
    for what, count in counts.items():
        if count is not None:
            result[f"{split}_{what}_per_second"] = round(count / runtime, 3)
    return result


def metrics_format(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as people read them: times, megabytes, four decimals."""
    return {name: _readable(name, value) for name, value in metrics.items()}


def _readable(name: str, value: Any) -> Any:
    if "_mem_" in name:
        return f"{int(value) >> 20}MB"
    if "_runtime" in name:
        whole, hundredths = divmod(int(value * 100), 100)
        return f"{timedelta(seconds=whole)}.{hundredths:02d}"
    if name == "total_flos":
        return f"{int(value) >> 30}GF"
    return round(value, 4) if isinstance(value, float) else value


def get_last_checkpoint(folder: str | Path) -> str | None:
    """Return the checkpoint-<step> folder that was saved last and is whole; None without one.

    It is the one that `resume_from_checkpoint=True` goes on from. A newer one that is damaged is
    passed over, with a notice that names the file. Folders that another Trainer wrote have no
    manifest to check: where there are no others, the highest step of them is taken as it is.
    """
    found = last_checkpoint(Path(folder))
    for damage in found.passed_over:
        told = f"{damage.path} is passed over: {damage.file}: {damage.why}"
        give_notice(f"{told}. The next older checkpoint is taken.", stacklevel=2)
    return None if found.path is None else str(found.path)


def last_checkpoint(folder: Path) -> catalog.Newest:
    """Return the checkpoint-<step> folder that was saved last, and what was passed over for it."""
    newest = catalog.newest_whole(folder, _CHECKPOINT)
    theirs = dict(_foreign(folder))
    damaged = tuple(each for each in newest.passed_over if each.path not in theirs.values())
    path = theirs[max(theirs)] if newest.path is None and theirs else newest.path
    return replace(newest, path=path, passed_over=damaged)


def _foreign(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield step and path of the checkpoints that another library wrote."""
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _CHECKPOINT.fullmatch(path.name)
        held = os.listdir(path) if match and path.is_dir() else []
        if match and held and not any(name in held for name in _OWN_FILES):
            yield int(match[1]), path


def has_length(dataset: Any) -> bool:
    """Whether `len` works on a dataset."""
    try:
        return len(dataset) is not None
    except (TypeError, AttributeError, NotImplementedError):
        return False


def denumpify_detensorize(metrics: Any) -> Any:
    """Return metrics with numpy scalars and one-element tensors made plain numbers."""
    if isinstance(metrics, dict):
        return type(metrics)({k: denumpify_detensorize(v) for k, v in metrics.items()})
    if isinstance(metrics, list | tuple):
        return type(metrics)(denumpify_detensorize(value) for value in metrics)
    if isinstance(metrics, np.generic) or (
        isinstance(metrics, torch.Tensor) and metrics.numel() == 1
    ):
        return metrics.item()
    return metrics


def set_seed(seed: int, deterministic: bool = False) -> None:
    """Seed python, numpy and torch on every device it knows."""
    rng.seed_everything(seed, deterministic=deterministic)


def enable_full_determinism(seed: int, warn_only: bool = False) -> None:
    """Seed everything and let torch refuse (or only name) operations that may differ."""
    rng.seed_everything(seed)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def seed_worker(worker_id: int, num_workers: int, rank: int) -> None:
    """Seed a loader's worker, differently on each rank."""
    del worker_id  # torch has already put it into initial_seed
    rng.seed_everything((torch.initial_seed() + num_workers * rank) % 2**32)


def print_metrics(split: str, metrics: Mapping[str, Any]) -> None:
    """Print the metrics of a split as an aligned table."""
    shown = {str(name): str(value) for name, value in metrics_format(metrics).items()}
    left = max(map(len, shown), default=0)
    right = max(map(len, shown.values()), default=0)
    lines = [f"  {name:<{left}} = {shown[name]:>{right}}" for name in sorted(shown)]
    sys.stdout.write("\n".join([f"***** {split} metrics *****", *lines]) + "\n")


def write_metrics(folder: Path, split: str, metrics: Mapping[str, Any], *, combined: bool) -> None:
    """Write <split>_results.json and, when `combined`, add to all_results.json."""
    plain = denumpify_detensorize(dict(metrics))
    _write_results(folder / f"{split}_results.json", plain)
    if combined:
        together = folder / "all_results.json"
        _write_results(together, {**_read_results(together), **plain})


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: beside its name first, then over it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _write_results(path: Path, metrics: Mapping[str, Any]) -> None:
    ordered = sorted(metrics.items(), key=lambda named: in_text(named[0]))
    write_text(path, to_json(dict(ordered), indent=4))


def _read_results(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = documents.from_json(as_file(path).read_text(encoding="utf-8"))
    except (ValueError, NotAFile) as error:
        found = reason(error)
    if isinstance(found, dict):
        return found
    give_notice(f"{path} held no table of results ({found}); it begins anew.", stacklevel=4)
    return {}
