"""The part of `Trainer` that saves, resumes, and ends with the best model."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from anytrain.core import environment
from anytrain.core.errors import CheckpointError, NoCheckpoint
from anytrain.core.notices import give_notice
from anytrain.doors.callbacks import TrainerState
from anytrain.doors.trainer import adapters, added_files, changed
from anytrain.doors.trainer.earlier_runs import alone, clear_the_way
from anytrain.doors.trainer.outputs import PREFIX_CHECKPOINT_DIR, last_checkpoint
from anytrain.doors.trainer.reports import TRAINER_STATE_NAME, write_text
from anytrain.doors.trainer.resumed import check_standing, position_of
from anytrain.doors.trainer.saving_hooks import Pieces
from anytrain.engine import checkpoint
from anytrain.engine.assemble import run_state
from anytrain.engine.assemble.step_boundary import BetweenSteps, stop_on_signals
from anytrain.engine.checkpoint import files, huggingface
from anytrain.engine.checkpoint.manifest import MANIFEST
from anytrain.engine.checkpoint.model import export_model, host_weights
from anytrain.engine.loop import Progress
from anytrain.engine.recording.meter import Meter

ARGUMENTS_NAME = "training_args.json"
_RUST_OS_ERROR = re.compile(r"os error (\d+)|Os \{ code: (\d+)")
_HELD_ANYWAY = (
    "model*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
)


class Standing:
    """What a checkpoint holds of the loop: its position, its history, its callbacks' states."""

    def __init__(self, trainer: Saving) -> None:
        self._trainer = trainer
        self.num_samples: int | None = None
        """How many samples the loaded run trained on; None where that was not saved."""
        self.state: Mapping[str, Any] = {}
        """The fields of the loaded run's state."""
        self.is_laid_out_anew = False
        """Whether the loaded run had batches or steps of another size."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors, as they are now."""
        own = self._trainer
        return {
            "progress": own._progress.state_dict(),
            "state": dataclasses.asdict(own.state),
            "meter": own._meter.state_dict(own._session.world),
            "loss_so_far": own._loss_so_far,
            "num_samples": own._num_samples(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Put the loop back where it was."""
        own = self._trainer
        own._meter.load_state_dict(saved["meter"], own._session.world)
        own._loss_so_far = tuple(saved["loss_so_far"])
        own._take_state(TrainerState(**saved["state"]))
        self.num_samples, self.state = saved.get("num_samples"), saved["state"]
        self.is_laid_out_anew = not own._progress.is_laid_out_like(saved["progress"])


class Saving(Pieces):
    """Checkpoints, the model alone, and the best one."""

    processing_class: Any
    data_collator: Any
    _progress: Progress
    _meter: Meter
    _loss_so_far: tuple[float, int]
    _between: BetweenSteps
    _trial: Any
    _last_metrics: dict[str, Any]
    _own_folders: set[Path]
    _trained_before: bool
    """Whether a training of this Trainer came to its end."""
    _went_on_from: Path | None = None
    _given: Path | None = None
    _settled: Mapping[str, Any] = MappingProxyType({})
    """What a checkpoint has brought in the place of arguments that were given."""
    _tell: Callable[..., Any]
    _read_tokens: Callable[[], None]
    store_flos: Callable[[], None]
    _push_from_checkpoint: Callable[[str], None]
    _push_after_save: Callable[[], None]

    # -- the model alone ----------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model so that from_pretrained loads it; each file is whole or absent.

        Args:
            output_dir: The folder. None: args.output_dir.
            _internal_call: Whether the Trainer itself is saving; then nothing is pushed to
                the hub.
        """
        folder = Path(str(self.args.output_dir if output_dir is None else output_dir))
        try:
            if self.args.should_save:
                self._save(str(folder))
        finally:  # where it fails, the other ranks must not wait for ever
            self._session.world.barrier("saving the model")
        if self.args.push_to_hub and not _internal_call:
            self._push_after_save()

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the model, the tokenizer and the arguments, on the process that saves."""
        folder = Path(str(self.args.output_dir if output_dir is None else output_dir))
        files.make_folders(folder)
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as beside:
            if hasattr(self.model, "save_pretrained"):
                model: Any = self.model
                weights = host_weights(model) if state_dict is None else state_dict
                model.save_pretrained(beside, state_dict=weights)
            else:
                export_model(self.model, folder, max_shard_size="5GB", safe_serialization=True)
            self._save_beside(Path(beside))
            made = Path(beside)
            files.sync_files(made, files.names_in(made))  # whole on the disk before it has its name
            _put_in_place(Path(beside), folder)
        files.sync_folder(folder)

    def _save_beside(self, folder: Path) -> None:
        """Write what makes a model usable: its tokenizer, and how it was trained."""
        tokenizer: Any = self.processing_class
        if tokenizer is None:
            tokenizer = getattr(self.data_collator, "tokenizer", None)
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(str(folder))
        told = self.args.to_json_string()
        if self._settled:  # what a run that goes on from here goes on with
            told = json.dumps({**self.args.to_dict(), **self._settled}, indent=2)
        write_text(folder / ARGUMENTS_NAME, told + "\n")

    # -- checkpoints --------------------------------------------------------------------------

    def _begin_saving(self) -> None:
        """Save and leave between two steps when a signal asks."""
        session = self._run.session
        self._between, self._settled = BetweenSteps(), {}
        if self.args.save_on_signal and self.args.output_dir is not None:
            self._between.interrupts = stop_on_signals(session, self._save_interrupted)
        session.cursor.stops = self._between

    def _alone_in_folder(self) -> AbstractContextManager[None]:
        """Return what keeps the folder to this run while it trains."""
        root = Path(self._get_output_dir(self._trial)).resolve()
        return alone(root, self._session.world, saves=self._saves_between())

    def _saves_between(self) -> bool:
        """Whether this training saves by itself; one that is only watched does not."""
        return self.args.save_strategy != "no" and not self._session.observer.is_watching

    def _begin_folder(self, resumed: Path | None) -> None:
        """Keep what an earlier run left in the folder apart, unless it is gone on from."""
        root = Path(self._get_output_dir(self._trial)).resolve()
        self._went_on_from = resumed
        if resumed is not None and resumed.resolve().parent == root:
            self._own_folders.add(root)
        elif self._saves_between():
            self._own_folder(root)
        if self._session.world.rank == 0:  # which alone looks for the best
            self._leave_branch(root)

    def _own_folder(self, root: Path) -> None:
        """Make the folder this Trainer's own, the first time that a run of it saves there."""
        if root.resolve() not in self._own_folders:
            limit = self.args.earlier_total_limit
            limit = None if limit is not None and limit < 0 else limit
            limit = 0 if self.args.overwrite_output_dir else limit
            clear_the_way(root, self._session.world, limit)
            self._own_folders.add(root.resolve())

    def _end_saving(self) -> None:
        """Wait for the last save, and give the signals back: no step is left to save after."""
        self._run.session.cursor.stops = None
        try:
            with self._run.session.ledger.span("save"):
                self._between.finish()
        finally:
            self._between.end()

    def _tell_unsaved(self) -> None:
        """Say that the run's end is in no checkpoint, while its weights can still be saved."""
        failed = self._between.unsaved
        if failed is None or failed.kind == "nonfinite":  # such weights are nothing to save
            return
        last = self._between.saved or self._went_on_from
        since = "the beginning" if last is None else last.name
        give_notice(
            f"The last save failed: what was learnt since {since} is in no checkpoint.\n"
            f"  why: {failed.why}\n"
            "  fix: trainer.save_model(FOLDER), with a folder that can be written, saves the "
            "weights while this process is running.",
            stacklevel=2,
        )

    def _save_checkpoint(self, model: nn.Module, trial: Any, *, wait: bool = False) -> None:
        """Write the whole run to checkpoint-<step>, behind the loop unless told to wait."""
        state, store = self.state, self._store(trial)
        name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        self._between.finish()
        self._own_folder(store.root)
        best = state.best_model_checkpoint
        self._settle_best(store.root, coming=name)
        self._read_tokens()
        self.store_flos()
        state.stateful_callbacks = self.callback_handler.exported()
        world = self._session.world
        self._given = added_files.set_aside(store.root / name) if world.rank == 0 else None
        # A subclass may go on with the folder once this returns.
        wait = wait or self._is_own("_save_checkpoint")
        if wait or world.broadcast_object(self._given is not None) or not self.args.async_save:
            try:
                saved = self._between.told(store.save(name, self._take, world=world))
            finally:
                added_files.settle(self._given, store.root / name)
            if saved:
                self._settle_best(store.root)
            return
        if self._between.writer is None or self._between.writer.root != store.root:
            session = self._run.session
            ready = partial(session.backend.synchronize, session.device)
            self._between.writer = checkpoint.Writer(store, world=session.world, synchronize=ready)
        self._between.writer.begin(name, self._take)
        self._hold_back_best(store.root / name, best)

    def _take(self, folder: Path) -> checkpoint.Snapshot:
        """Return the run as it is now; files that others read go into the folder."""
        has_adapters = adapters.has_adapters(self.model)
        apart = has_adapters or self._has_own_model()
        hooks: list[run_state.SaveHook] = [_leave_out_models] if apart else []
        taken = run_state.take(self._run, [Standing(self)], hooks, folder)
        # Files come last: a rank that cannot write one must not leave the others waiting above.
        with disk_errors():
            self._save_own_files(folder)
            added_files.add(self._given, folder)
            taken = self._save_pieces(taken, folder)
            if self._session.world.rank == 0:
                if has_adapters:
                    adapters.save(self.model, str(folder))
                self._save_beside(folder)
                self.state.save_to_json(folder / TRAINER_STATE_NAME)
        metric = self._best_metric_name()
        evaluated = self._last_metrics.get("step") == self.state.global_step
        value = self._last_metrics.get(metric) if metric is not None and evaluated else None
        metrics = {metric: float(value)} if metric and isinstance(value, (int, float)) else {}
        if self.args.save_only_model:
            return dataclasses.replace(taken, parts={}, rank_parts={}, metrics=metrics)
        return dataclasses.replace(taken, metrics=metrics)

    def _save_own_files(self, folder: Path) -> None:
        """Add what a user's own way to save writes, less what a checkpoint holds anyway."""
        if not self._saves_own_way():
            return
        held = () if self._has_own_model() else _HELD_ANYWAY
        with tempfile.TemporaryDirectory(prefix=".own-", dir=folder) as beside:
            self.save_model(beside, _internal_call=True)
            for found in list(Path(beside).iterdir()):
                if found.is_file() and any(fnmatch(found.name, name) for name in held):
                    found.unlink()
            _put_in_place(Path(beside), folder)

    def _store(self, trial: Any) -> checkpoint.Store:
        root = Path(self._get_output_dir(trial)).expanduser().resolve()

        def known_best() -> str | None:
            best = self._coming_best or self.state.best_model_checkpoint
            is_here = best is not None and Path(best).resolve().parent == root
            return Path(best).name if best is not None and is_here else None

        rule = checkpoint.Retention(
            keep_last=self._most_kept(), best_counts=True, known_best=known_best
        )
        return checkpoint.Store(root, retention=rule)

    def _most_kept(self) -> int | None:
        """Return how many checkpoints stay; None, as 0 and less in the arguments, keeps all."""
        limit = self.args.save_total_limit
        return None if limit is None or limit <= 0 else limit

    def _save_interrupted(self) -> str:
        """Save the run because a signal ends it; return a sentence about what was saved."""
        step = self.state.global_step
        self._between.finish()
        self._save_checkpoint(self.model, self._trial, wait=True)
        path = Path(self._get_output_dir(self._trial)) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        saved, failed = self._between.saved, self._between.unsaved
        is_older = failed is not None and (saved is None or saved.name != path.name)
        if is_older or not path.exists():
            return f"the run could not be saved after step {step}; see the notice above."
        return (
            f"saved {path} after step {step}. "
            "Go on with resume_from_checkpoint=True (--resume_from_checkpoint True)."
        )

    # -- resuming -----------------------------------------------------------------------------

    def _find_checkpoint(self, asked: str | os.PathLike[str] | bool | None) -> Path | None:
        """Return the checkpoint to go on from: the one named, or with True the newest whole.

        With "auto" it is the newest whole one where there is one. What train() is not told is
        taken from the arguments, else from the environment, for the Trainer's first training.
        """
        is_first = not self._trained_before and self._trial is None
        if asked is None and is_first and not self._session.observer.is_watching:
            asked = environment.resume_from(self.args.resume_from_checkpoint)
        if asked is None or asked is False:
            return None
        if asked is not True and str(asked).lower() not in ("true", "latest", "auto"):
            return Path(asked)
        root, world = Path(str(self.args.output_dir)).expanduser().absolute(), self._session.world
        newest = world.broadcast_object(last_checkpoint(root) if world.rank == 0 else None)
        assert newest is not None
        for damage in newest.passed_over:
            give_notice(f"Passed over a damaged checkpoint: {damage}", stacklevel=3)
        if newest.path is None and str(asked).lower() != "auto":
            raise NoCheckpoint(
                f"No valid checkpoint found in output directory ({root}).",
                why="nothing was saved there yet, or all of it is damaged.",
                fix='pass resume_from_checkpoint="auto" to start afresh where there is none, or '
                "name the folder.",
            )
        return newest.path

    def _open_checkpoint(self, path: Path | None) -> checkpoint.Loaded | None:
        """Return the checkpoint, found to be whole; None where there is none of ours."""
        if path is None or huggingface.is_hf_folder(path):
            return None
        loaded = checkpoint.load(path, world=self._session.world)
        if not loaded.part_names:
            raise CheckpointError(
                f"Cannot go on from {path}: it holds the model alone.",
                why=f"{MANIFEST} names no other part: it was saved with save_only_model, so its "
                "optimizer, schedule and place in the data are not known.",
                fix="load the model from this folder, and begin a new training with it.",
            )
        standing = loaded.part("registered") if "registered" in loaded.part_names else {}
        if isinstance(standing, Mapping) and "progress" not in standing:
            raise CheckpointError(
                f"Cannot go on from {path}: no Trainer wrote it.",
                why=f"{loaded.manifest.parts.get('registered', MANIFEST)} holds no position of a "
                "Trainer's loop; Accelerator.save_state may have made it.",
                fix="load it where it was saved, or load its model and begin a new training.",
            )
        loaded.check("registered", partial(check_standing, callbacks=self.callback_handler))
        return loaded

    def _resume(self, path: Path, loaded: checkpoint.Loaded | None) -> None:
        """Put a saved run back; another library's as far as it goes."""
        run, own = self._run, self._own_ways(path)
        if loaded is None:
            run_state.restore_foreign(
                run, [], huggingface.read(path), tells_position=False, own=own
            )
            if (path / TRAINER_STATE_NAME).exists():
                self._take_state(TrainerState.load_from_json(path / TRAINER_STATE_NAME))
                self._seek(self.state.global_step)
        else:
            standing = Standing(self)
            run_state.restore(run, [standing], loaded, self._load_hooks(), own=own)
            arguments = changed.arguments_of(path / ARGUMENTS_NAME)
            position, loader = position_of(loaded, run.loaders[0]), run.loaders[0]
            loader.load_state_dict(changed.begun_with(position, loader, arguments))
            self.state.train_batch_size = self.args.train_batch_size
            if run.session.world.rank == 0:
                self._settled = changed.tell_changed(arguments, standing, self)
        if self.args.should_log:
            changed.tell_place(path, self._progress)
        if self.args.ignore_data_skip:
            self._progress.batch, self._progress.this_epoch = 0, None
            run.loaders[0].rewind()

    def _num_samples(self) -> int | None:
        """Return how many samples the training data has; None where it does not know."""
        try:
            return self._run.loaders[0].total_dataset_length
        except (TypeError, AttributeError, NotImplementedError):
            return None

    def _seek(self, step: int) -> None:
        """Stand where a run of so many steps stands: its order is a function of the epoch."""
        progress, micro = self._progress, self.args.gradient_accumulation_steps
        per_epoch = max(1, -(-progress.batches_per_epoch // micro))
        progress.step, progress.epoch = step, step // per_epoch
        progress.batch = (step % per_epoch) * micro
        self._run.session.cursor.updates = step
        self._run.loaders[0].skip_next(progress.batch)

    def _take_state(self, saved: TrainerState) -> None:
        """Take a saved state over, less what belongs to this run."""
        here = self.state
        for name in ("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps"):
            setattr(saved, name, getattr(here, name))
        for name in ("is_local_process_zero", "is_world_process_zero"):
            setattr(saved, name, getattr(here, name))
        best = saved.best_model_checkpoint
        if best is not None and not Path(best).is_dir():
            give_notice(f"The best checkpoint so far, {best}, is not there any more.", stacklevel=3)
            saved.best_model_checkpoint = None
        vars(here).update(vars(saved))
        self._load_callback_state()
        if not self.args.restore_callback_states_from_checkpoint:
            self.callback_handler.take_up(saved.stateful_callbacks)


def _leave_out_models(models: list[Any], weights: list[Any], folder: str) -> None:
    weights.clear()


@contextmanager
def disk_errors() -> Iterator[None]:
    """Raise as OSError what libraries in Rust (tokenizers, safetensors) tell of the disk."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        found = _RUST_OS_ERROR.search(str(error))
        if found is None:
            raise
        number = int(found[1] or found[2])
        raise OSError(number, os.strerror(number)) from error


def _put_in_place(source: Path, target: Path) -> None:
    for found in sorted(source.iterdir()):
        goal = target / found.name
        if found.is_dir() and goal.is_dir():
            shutil.rmtree(goal)
        os.replace(found, goal)
