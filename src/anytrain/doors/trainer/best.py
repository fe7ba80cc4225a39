"""Know which checkpoint is best, and end with it.

Only a checkpoint that was committed can be best: where the best model's save failed, the best of
those that are there takes its place.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytrain.core.errors import BadType, CheckpointError
from anytrain.core.notices import give_notice
from anytrain.doors.trainer.outputs import PREFIX_CHECKPOINT_DIR
from anytrain.engine import checkpoint
from anytrain.engine.checkpoint import locks
from anytrain.engine.checkpoint.catalog import is_runs_own
from anytrain.engine.checkpoint.manifest import MANIFEST

if TYPE_CHECKING:
    from anytrain.doors.trainer.trainer import Trainer

_GIVES_METRICS = ("evaluate", "evaluation_loop", "log", "_evaluate", "_determine_best_metric")
_ALWAYS_GIVEN = ("loss", "_runtime", "_per_second", "_time", "_num_input_tokens_seen", "epoch")
_STEP = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")


class Best:
    """The best evaluation so far, and its checkpoint."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.coming: str | None = None
        """The best checkpoint while it is written behind the loop, and the state names another."""
        self._untold: dict[str, Any] | None = None
        """A best checkpoint that is being written."""
        self._left: Mapping[Path, tuple[int, int]] = {}
        """Checkpoints of a branch that was left: of later steps than this run began with."""
        self._stays = False
        """Whether the best weights are in no checkpoint, so that those in memory stay."""

    def metric_name(self) -> str | None:
        name = self._trainer.args.metric_for_best_model
        return name if name is None or name.startswith("eval_") else f"eval_{name}"

    def check_metric(self) -> None:
        """Refuse, before a step is made, to choose by a metric that no evaluation can give.

        A subclass, a callback or compute_metrics may give any; without them there are few.
        """
        trainer, name = self._trainer, self.metric_name()
        given = [trainer, *trainer.callback_handler.callbacks]
        is_all_ours = all(type(each).__module__.startswith("anytrain.") for each in given)
        is_own = any(trainer._is_own(method) for method in _GIVES_METRICS)
        is_asked = trainer.args.eval_strategy != "no" and trainer.compute_metrics is None
        follows = str(trainer.args.lr_scheduler_type).endswith("plateau")  # it says so itself
        if name is None or not is_asked or not is_all_ours or is_own or follows:
            return
        if not name.endswith(_ALWAYS_GIVEN) and "_mem_" not in name:
            raise CheckpointMetricMissing(name, None)

    def is_new(self, metrics: dict[str, float]) -> bool:
        """Whether this evaluation is the best so far, by metric_for_best_model."""
        trainer = self._trainer
        name = self.metric_name()
        if name is None:
            return False
        if name not in metrics:
            raise CheckpointMetricMissing(name, list(metrics))
        value, best = _number(name, metrics[name]), trainer.state.best_metric
        better = best is None or (value > best if trainer.args.greater_is_better else value < best)
        if better and value == value:  # a NaN is never best
            trainer.state.best_metric = value
            trainer.state.best_global_step = trainer.state.global_step
            return True
        return False

    def settle(self, root: Path, coming: str | None = None) -> None:
        """Name the best checkpoint: one that is there, or the one about to be written."""
        state, world = self._trainer.state, self._trainer._session.world

        def find() -> str | None:
            best = root / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
            if best.name == coming or self._is_of_this_run(best):  # older than its evaluation, too
                return str(best)
            known = state.best_model_checkpoint
            is_held = known is None or self._is_of_this_run(Path(known))
            return known if is_held else self._best_saved(root)

        self.tell()
        self.coming = None
        before = state.best_model_checkpoint
        best = state.best_model_checkpoint = world.broadcast_object(
            find() if world.rank == 0 else None
        )
        if best is not None and (before is None or not _is_same(best, before)):
            name, value = self.metric_name(), state.best_metric
            self._untold = {"path": best, "metric": name, "value": value}
            self._untold["step"] = state.best_global_step
            self.tell()

    def leave_branch(self, root: Path) -> None:
        """Note the checkpoints of steps that this run, which began earlier, has yet to do."""
        found = ((path, _STEP.fullmatch(path.name)) for path in root.glob("*-*") if path.is_dir())
        here = self._trainer.state.global_step
        self._left = {path: _mark(path) for path, step in found if step and int(step[1]) > here}

    def _is_of_this_run(self, path: Path) -> bool:
        """Whether a checkpoint is there, and none that a run left which took another way."""
        return path.is_dir() and self._left.get(path) != _mark(path)

    def hold_back(self, path: Path, before: str | None) -> None:
        """Name the earlier best again while the new one, saved already in the state, is written."""
        if self._trainer.state.best_model_checkpoint == str(path):
            self.coming = str(path)
            self._trainer.state.best_model_checkpoint = before

    def tell(self) -> None:
        """Name a new best checkpoint, and write it down, once it is committed."""
        trainer = self._trainer
        coming, untold = self.coming, self._untold
        if coming is not None:
            if trainer._between.saved != Path(coming):
                return
            trainer.state.best_model_checkpoint = coming
            self.coming = None
        if untold is not None and Path(untold["path"]).is_dir():
            self._untold = None
            trainer._parts.recorder.happened("best", **untold)

    def _best_saved(self, root: Path) -> str | None:
        """Return the best of the checkpoints there are, by their steps' evaluations."""
        name = self.metric_name()
        logged = {
            entry["step"]: entry.get(name)
            for entry in self._trainer.state.log_history
            if name in entry
        }
        found: list[tuple[float, str]] = []
        for entry in checkpoint.Store(root).entries():
            step = _STEP.fullmatch(entry.name)
            if step is None or entry.manifest is None or not self._is_of_this_run(entry.path):
                continue
            value = logged.get(int(step[1]), entry.manifest.metrics.get(name or ""))
            if isinstance(value, (int, float)) and not math.isnan(value):
                found.append((float(value), str(entry.path)))
        if not found:
            return None
        pick = max if self._trainer.args.greater_is_better else min
        return pick(found, key=lambda pair: pair[0])[1]

    def end(self) -> None:
        """Once the last save is over, load the best model and keep the best alone, as asked."""
        trainer = self._trainer
        root = Path(trainer._get_output_dir(trainer._trial))
        self.settle(root)
        if trainer.args.load_best_model_at_end and not trainer._session.observer.is_watching:
            self._stays = False
            trainer._load_best_model()
            loaded = None if self._stays else trainer.state.best_model_checkpoint
            trainer._parts.recorder.weights_of = None if loaded is None else Path(loaded).name
        if trainer.args.save_total_limit == 1 and trainer.args.should_save:
            self._remove_all_but_best(root)

    def load(self) -> None:
        """Put the best checkpoint's weights into the model, as load_best_model_at_end asks."""
        trainer = self._trainer
        state, world = trainer.state, trainer._session.world
        best = state.best_model_checkpoint
        if best is None:
            root = Path(trainer._get_output_dir(trainer._trial))
            best = world.broadcast_object(self._best_saved(root) if world.rank == 0 else None)
        if best is None:
            _tell(
                f"load_best_model_at_end found no best model: {self._why_no_best()}. The model is "
                "as the last step left it."
            )
            return
        state.best_model_checkpoint = best
        if self._is_in_memory(best):
            self._stays = True
            _tell(
                f"The best model, of step {state.best_global_step}, was not saved. It is the one "
                "in memory, and stays there: trainer.save_model(FOLDER) saves it. The best of "
                f"those that were saved is {best}."
            )
            return
        if Path(best).name != f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}":
            _tell(
                f"The best model, of step {state.best_global_step}, was not saved. The best of "
                f"those that were is loaded: {best}."
            )
        trainer._parts.saver.load_weights(best)

    def _is_in_memory(self, best: str) -> bool:
        """Whether the last step is the best, and its save failed: no saved model is as good."""
        state = self._trainer.state
        is_last = state.best_global_step == state.global_step
        was_saved = Path(best).name == f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
        return is_last and not was_saved and self._trainer._between.unsaved is not None

    def _why_no_best(self) -> str:
        name = self.metric_name()
        if self._trainer.state.best_metric is not None:
            return "none of it was saved"
        if any(name in entry for entry in self._trainer.state.log_history):
            return f"every {name} was NaN"
        return "nothing was evaluated"

    def _remove_all_but_best(self, root: Path) -> None:
        """Keep the best alone; where it lies in another run's folder, keep what is here."""
        best = self._trainer.state.best_model_checkpoint
        if best is None or Path(best).resolve().parent != root.resolve():
            return
        if not (Path(best) / MANIFEST).is_file():
            return  # the name comes from a document: what it names must be a checkpoint
        for entry in root.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
            is_other = entry.name != Path(best).name and is_runs_own(entry)
            if is_other and (entry / MANIFEST).exists():
                with suppress(OSError):
                    locks.remove(root, entry.name)
                    self._trainer._parts.recorder.happened("removed", path=str(entry))


def _is_same(path: str, other: str) -> bool:
    """Whether two paths are one, of which each may be relative."""
    return os.path.abspath(path) == os.path.abspath(other)


def _mark(folder: Path) -> tuple[int, int]:
    found = folder.stat()
    return found.st_ino, found.st_mtime_ns


def _number(name: str, value: Any) -> float:
    """Return a metric's value as a number, or say that it is none."""
    if isinstance(value, (int, float)):
        return value
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # of numpy, or a tensor
        return _number(name, value.item())
    size = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise BadType(
        f"Cannot find the best model by {name!r}: it is a {type(value).__name__}{size}.",
        why="evaluations are compared by it, and one number alone is more or less than another.",
        fix=f"let compute_metrics return one number for {name.removeprefix('eval_')!r}, or let "
        "metric_for_best_model name another metric.",
    )


class CheckpointMetricMissing(CheckpointError, KeyError):
    """metric_for_best_model names what no evaluation gives."""

    def __init__(
        self, name: str, known: list[str] | None, use: str = "find the best model by"
    ) -> None:
        gave = "without compute_metrics an evaluation gives eval_loss and its times alone."
        super().__init__(
            f"Cannot {use} {name!r}.",
            why=gave if known is None else f"the evaluation gave {', '.join(known)}.",
            fix="let metric_for_best_model name one of these, or return it from compute_metrics.",
        )


def _tell(text: str) -> None:
    give_notice(text, stacklevel=5)
