"""The part of `Trainer` that writes results where people and scripts look for them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anytrain.core import documents
from anytrain.core.documents import as_file
from anytrain.core.errors import NotAFile
from anytrain.core.notices import give_notice
from anytrain.doors.callbacks import TrainerState
from anytrain.doors.trainer.outputs import denumpify_detensorize, metrics_format
from anytrain.doors.training_args import TrainingArguments
from anytrain.engine.assemble.session import Session
from anytrain.engine.recording.disk import in_text, reason, to_json

TRAINER_STATE_NAME = "trainer_state.json"


class Reports:
    """Result tables and files, written by the main process alone."""

    args: TrainingArguments
    state: TrainerState
    _session: Session

    def is_world_process_zero(self) -> bool:
        """Whether this process is the one that writes for all."""
        return self._session.world.rank == 0

    def is_local_process_zero(self) -> bool:
        """Whether this process is the first one of its machine."""
        return self._session.world.local_rank == 0

    def metrics_format(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return metrics as people read them: times, megabytes, four decimals.

        Args:
            metrics: Numbers by name.
        """
        return metrics_format(metrics)

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print the metrics of a split ("train", "eval", "test") as an aligned table.

        Args:
            split: What they are of: "train", "eval" or "test".
            metrics: Numbers by name, as `train().metrics` and `evaluate` give them.
        """
        if not self.is_world_process_zero():
            return
        shown = {str(name): str(value) for name, value in metrics_format(metrics).items()}
        left = max(map(len, shown), default=0)
        right = max(map(len, shown.values()), default=0)
        lines = [f"  {name:<{left}} = {shown[name]:>{right}}" for name in sorted(shown)]
        sys.stdout.write("\n".join([f"***** {split} metrics *****", *lines]) + "\n")

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write <split>_results.json and, when `combined`, add to all_results.json.

        Args:
            split: What they are of; it begins the file's name.
            metrics: Numbers by name.
            combined: Whether to add them to all_results.json too.
        """
        if not self.is_world_process_zero():
            return
        plain = denumpify_detensorize(dict(metrics))
        folder = Path(str(self.args.output_dir))
        _write_results(folder / f"{split}_results.json", plain)
        if combined:
            together = folder / "all_results.json"
            _write_results(together, {**_read_results(together), **plain})

    def save_state(self) -> None:
        """Write trainer_state.json into the output folder."""
        if self.is_world_process_zero():
            target = Path(str(self.args.output_dir)) / TRAINER_STATE_NAME
            target.parent.mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(str(target))


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
