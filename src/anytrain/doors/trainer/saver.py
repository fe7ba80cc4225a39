"""Save a Trainer's runs: checkpoints, and the model alone.

The pieces that go by HF's names are called on the Trainer, where a subclass may override each:
`super()` then does anytrain's work, and without it the piece is the subclass's alone.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from anytrain.core.errors import WrongOrder
from anytrain.core.notices import give_notice
from anytrain.doors.trainer.earlier_runs import alone, clear_the_way
from anytrain.doors.trainer.outputs import (
    PREFIX_CHECKPOINT_DIR,
    TRAINER_STATE_NAME,
    write_text,
)
from anytrain.doors.trainer.resuming import ARGUMENTS_NAME, LoopState
from anytrain.engine import checkpoint
from anytrain.engine.assemble import run_state
from anytrain.engine.assemble.step_boundary import BetweenSteps
from anytrain.engine.checkpoint import files, huggingface
from anytrain.engine.checkpoint.manifest import MANIFEST
from anytrain.engine.checkpoint.model import export_model, host_weights

if TYPE_CHECKING:
    from anytrain.doors.trainer.trainer import Trainer

_RUST_OS_ERROR = re.compile(r"os error (\d+)|Os \{ code: (\d+)")
_OPTIMIZING = ("optimizer", "scheduler")
_HELD_ANYWAY = (
    "model*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
)


class Saver:
    """Checkpoints, and the model alone."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.own_folders: set[Path] = set()
        """Folders that hold checkpoints of this Trainer's runs."""
        self.settled: Mapping[str, Any] = {}
        """What a checkpoint has brought in the place of arguments that were given."""
        self.last_metrics: dict[str, Any] = {}
        """What the newest evaluation in training gave."""
        self.trained_before = False
        """Whether a training of this Trainer came to its end."""
        self._went_on_from: Path | None = None
        self._given: Path | None = None
        self._keeps_optimizers: bool | None = None
        """During a save: whether the optimizers go into the checkpoint; None outside."""

    # -- the model alone ----------------------------------------------------------------------

    def save_model(self, output_dir: str | None, *, pushes: bool) -> None:
        """Write the model so that from_pretrained loads it; each file is whole or absent."""
        trainer = self._trainer
        folder = Path(str(trainer.args.output_dir if output_dir is None else output_dir))
        try:
            if trainer.args.should_save:
                trainer._save(str(folder))
        finally:  # where it fails, the other ranks must not wait for ever
            trainer._session.world.barrier("saving the model")
        if trainer.args.push_to_hub and pushes:
            trainer._parts.hub.push_after_save()

    def write_model(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the model, the tokenizer and the arguments, on the process that saves."""
        trainer = self._trainer
        folder = Path(str(trainer.args.output_dir if output_dir is None else output_dir))
        files.make_folders(folder)
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as beside:
            if hasattr(trainer.model, "save_pretrained"):
                model: Any = trainer.model
                weights = host_weights(model) if state_dict is None else state_dict
                model.save_pretrained(beside, state_dict=weights)
            else:
                export_model(trainer.model, folder, max_shard_size="5GB", safe_serialization=True)
            self._save_beside(Path(beside))
            made = Path(beside)
            files.sync_files(made, files.names_in(made))  # whole on the disk before it has its name
            _put_in_place(Path(beside), folder)
        files.sync_folder(folder)

    def _save_beside(self, folder: Path) -> None:
        """Write what makes a model usable: its tokenizer, and how it was trained."""
        trainer = self._trainer
        tokenizer: Any = trainer.processing_class
        if tokenizer is None:
            tokenizer = getattr(trainer.data_collator, "tokenizer", None)
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(str(folder))
        told = trainer.args.to_json_string()
        if self.settled:  # what a run that goes on from here goes on with
            told = json.dumps({**trainer.args.to_dict(), **self.settled}, indent=2)
        write_text(folder / ARGUMENTS_NAME, told + "\n")

    # -- checkpoints --------------------------------------------------------------------------

    def begin(self) -> None:
        """Save and leave between two steps when a signal asks."""
        trainer = self._trainer
        session = trainer._run.session
        trainer._between, self.settled = BetweenSteps(), {}
        if trainer.args.save_on_signal and trainer.args.output_dir is not None:
            trainer._between.stop_on_signals(session, self._save_interrupted)
        session.cursor.stops = trainer._between

    def alone_in_folder(self) -> AbstractContextManager[None]:
        """Return what keeps the folder to this run while it trains."""
        trainer = self._trainer
        root = Path(trainer._get_output_dir(trainer._trial)).resolve()
        return alone(root, trainer._session.world, saves=self.saves_between())

    def saves_between(self) -> bool:
        """Whether this training saves by itself; one that is only watched does not."""
        return (
            self._trainer.args.save_strategy != "no"
            and not self._trainer._session.observer.is_watching
        )

    def begin_folder(self, resumed: Path | None) -> None:
        """Keep what an earlier run left in the folder apart, unless it is gone on from."""
        trainer = self._trainer
        root = Path(trainer._get_output_dir(trainer._trial)).resolve()
        self._went_on_from = resumed
        if resumed is not None and resumed.resolve().parent == root:
            self.own_folders.add(root)
        elif self.saves_between():
            self.own_folder(root)
        if trainer._session.world.rank == 0:  # which alone looks for the best
            trainer._parts.best.leave_branch(root)

    def own_folder(self, root: Path) -> None:
        """Make the folder this Trainer's own, the first time that a run of it saves there."""
        trainer = self._trainer
        if root.resolve() not in self.own_folders:
            limit = trainer.args.earlier_total_limit
            limit = None if limit is not None and limit < 0 else limit
            limit = 0 if trainer.args.overwrite_output_dir else limit
            clear_the_way(root, trainer._session.world, limit)
            self.own_folders.add(root.resolve())

    def end(self) -> None:
        """Wait for the last save, and give the signals back: no step is left to save after."""
        trainer = self._trainer
        trainer._run.session.cursor.stops = None
        try:
            with trainer._run.session.ledger.span("save"):
                trainer._between.finish()
        finally:
            trainer._between.end()

    def unsaved(self) -> tuple[str, str] | None:
        """Return since when nothing that was learnt is in a checkpoint, and why, if that is so."""
        failed = self._trainer._between.unsaved
        if failed is None or failed.kind == "nonfinite":  # such weights are nothing to save
            return None
        last = self._trainer._between.saved or self._went_on_from
        return "the beginning" if last is None else last.name, failed.why

    def tell_unsaved(self) -> None:
        """Say that the run's end is in no checkpoint, while its weights can still be saved."""
        found = self.unsaved()
        if found is None:
            return
        since, why = found
        self._trainer._parts.recorder.happened("unsaved", since=since, why=why)
        give_notice(
            f"The last save failed: what was learnt since {since} is in no checkpoint.\n"
            f"  why: {why}\n"
            "  fix: trainer.save_model(FOLDER), with a folder that can be written, saves the "
            "weights while this process is running.",
            stacklevel=2,
        )

    def save_checkpoint(self, trial: Any, *, wait: bool = False) -> None:
        """Write the whole run to checkpoint-<step>, behind the loop unless told to wait."""
        trainer = self._trainer
        state, store = trainer.state, self._store(trial)
        name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        trainer._between.finish()
        self.own_folder(store.root)
        best = state.best_model_checkpoint
        trainer._parts.best.settle(store.root, coming=name)
        trainer._parts.steps.read_tokens()
        trainer.store_flos()
        state.stateful_callbacks = trainer.callback_handler.exported()
        world = trainer._session.world
        self._given = _set_aside(store.root / name) if world.rank == 0 else None
        # A subclass may go on with the folder once this returns.
        wait = wait or trainer._is_own("_save_checkpoint")
        if wait or world.broadcast_object(self._given is not None) or not trainer.args.async_save:
            try:
                failed = trainer._between.note_outcome(store.save(name, self._take, world=world))
            finally:
                _put_back(self._given, store.root / name)
            if failed:
                trainer._parts.best.settle(store.root)
            return
        writer = trainer._between.writer
        if writer is None or writer.root != store.root:
            session = trainer._run.session
            ready = partial(session.backend.synchronize, session.device)
            writer = checkpoint.Writer(store, world=session.world, synchronize=ready)
        trainer._between.begin_save(writer, name, self._take)
        trainer._parts.best.hold_back(store.root / name, best)

    def _take(self, folder: Path) -> checkpoint.Snapshot:
        """Return the run as it is now; files that others read go into the folder."""
        trainer = self._trainer
        is_adapted = has_adapters(trainer.model)
        apart = is_adapted or self.has_own_model()
        hooks: list[run_state.SaveHook] = [_leave_out_models] if apart else []
        taken = run_state.take(trainer._run, [LoopState(trainer)], hooks, folder)
        # Files come last: a rank that cannot write one must not leave the others waiting above.
        with disk_errors():
            self._save_own_files(folder)
            _add(self._given, folder)
            taken = self._save_pieces(taken, folder)
            if trainer._session.world.rank == 0:
                if is_adapted:
                    save_adapters(trainer.model, str(folder))
                self._save_beside(folder)
                trainer.state.save_to_json(folder / TRAINER_STATE_NAME)
        metric = trainer._parts.best.metric_name()
        evaluated = self.last_metrics.get("step") == trainer.state.global_step
        value = self.last_metrics.get(metric) if metric is not None and evaluated else None
        metrics = {metric: float(value)} if metric and isinstance(value, (int, float)) else {}
        if trainer.args.save_only_model:
            return dataclasses.replace(taken, parts={}, rank_parts={}, metrics=metrics)
        return dataclasses.replace(taken, metrics=metrics)

    def _save_own_files(self, folder: Path) -> None:
        """Add what a user's own way to save writes, less what a checkpoint holds anyway."""
        if not self._saves_own_way():
            return
        held = () if self.has_own_model() else _HELD_ANYWAY
        with tempfile.TemporaryDirectory(prefix=".own-", dir=folder) as beside:
            self._trainer.save_model(beside, _internal_call=True)
            for found in list(Path(beside).iterdir()):
                if found.is_file() and any(fnmatch(found.name, name) for name in held):
                    found.unlink()
            _put_in_place(Path(beside), folder)

    def _store(self, trial: Any) -> checkpoint.Store:
        trainer = self._trainer
        root = Path(trainer._get_output_dir(trial)).expanduser().resolve()

        def known_best() -> str | None:
            best = trainer._parts.best.coming or trainer.state.best_model_checkpoint
            is_here = best is not None and Path(best).resolve().parent == root
            return Path(best).name if best is not None and is_here else None

        rule = checkpoint.Retention(
            keep_last=self._most_kept(), best_counts=True, known_best=known_best
        )
        return checkpoint.Store(root, retention=rule)

    def _most_kept(self) -> int | None:
        """Return how many checkpoints stay; None, as 0 and less in the arguments, keeps all."""
        limit = self._trainer.args.save_total_limit
        return None if limit is None or limit <= 0 else limit

    def _save_interrupted(self) -> str:
        """Save the run because a signal ends it; return a sentence about what was saved."""
        trainer = self._trainer
        step = trainer.state.global_step
        trainer._between.finish()
        trainer._save_checkpoint(trainer.model, trainer._trial, wait=True)
        path = Path(trainer._get_output_dir(trainer._trial)) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        saved, failed = trainer._between.saved, trainer._between.unsaved
        is_older = failed is not None and (saved is None or saved.name != path.name)
        if is_older or not path.exists():
            return f"the run could not be saved after step {step}; see the notice above."
        return (
            f"saved {path} after step {step}. "
            "Go on with resume_from_checkpoint=True (--resume_from_checkpoint True)."
        )

    # -- pieces that a subclass may take over ---------------------------------------------------

    def load_model(
        self, resume_from_checkpoint: str | os.PathLike[str], model: nn.Module | None = None
    ) -> None:
        """Put a checkpoint's weights into the model, before an optimizer is made for them."""
        target = self._trainer.model if model is None else model
        folder = Path(resume_from_checkpoint)
        saved = self._opened(folder)
        if has_adapters(target):
            load_adapters(target, str(folder))
        elif isinstance(saved, checkpoint.Loaded) and saved.num_models:
            saved.load_model(target, load=self._trainer._session.strategy.load)
        else:
            weights, load = huggingface.read_model(folder), self._trainer._session.strategy.load
            checkpoint.load_weights(target, weights, source=str(folder), load=load)

    def load_optimizers(self, checkpoint: str | os.PathLike[str] | None) -> None:
        """Put the optimizer and its schedule back, once both are made."""
        if checkpoint is not None:
            run_state.restore_optimizers(self._trainer._run, self._opened(Path(checkpoint)))

    def keep_optimizers(self) -> None:
        """Let the optimizer and its schedule go into the checkpoint that is being written."""
        if self._keeps_optimizers is None:
            raise WrongOrder(
                "Cannot save an optimizer outside a checkpoint.",
                why="its state is one part of a checkpoint, which is written whole.",
                fix="set trainer.control.should_save = True in a callback, or torch.save it.",
            )
        self._keeps_optimizers = True

    def _saves_own_way(self) -> bool:
        return self._trainer._is_own("save_model") or self._trainer._is_own("_save")

    def has_own_model(self) -> bool:
        """Whether a checkpoint's model is written and read by a user's code alone."""
        return self._saves_own_way() and self._trainer._is_own("_load_from_checkpoint")

    def load_own_model(self, path: Path | None) -> None:
        """Let a user's own code load the model, which may change it before it is prepared."""
        if path is not None and self._trainer._is_own("_load_from_checkpoint"):
            self._trainer._load_from_checkpoint(str(path))

    def load_weights(self, path: str) -> None:
        """Put the weights of a checkpoint of this run into the model."""
        if self.has_own_model():
            self._opened(Path(path))  # refused where it is damaged
            self._trainer._load_from_checkpoint(path)
        else:
            self.load_model(path)

    def own_ways(self, path: Path) -> run_state.OwnLoading:
        """Return what of a resumed run is left to a user's own code."""
        trainer = self._trainer
        load = partial(trainer._load_optimizer_and_scheduler, str(path))
        return run_state.OwnLoading(
            has_model=trainer._is_own("_load_from_checkpoint"),
            optimizers=load if trainer._is_own("_load_optimizer_and_scheduler") else None,
        )

    def _save_pieces(self, taken: checkpoint.Snapshot, folder: Path) -> checkpoint.Snapshot:
        """Let a user's own code write its pieces; leave out of ours what it has not asked for."""
        trainer = self._trainer
        if trainer.args.save_only_model or not trainer._is_own("_save_optimizer_and_scheduler"):
            return taken
        self._keeps_optimizers = False
        try:
            trainer._save_optimizer_and_scheduler(str(folder))
            keeps = self._keeps_optimizers
        finally:
            self._keeps_optimizers = None
        if keeps:
            return taken
        parts = {k: v for k, v in taken.parts.items() if k.split("_")[0] not in _OPTIMIZING}
        return dataclasses.replace(taken, parts=parts)

    def load_hooks(self) -> list[run_state.LoadHook]:
        """Return what loads models besides anytrain's own way."""
        own = self._trainer._is_own("_load_from_checkpoint") or has_adapters(self._trainer.model)
        return [self._load_itself] if own else []

    def _load_itself(self, models: list[Any], folder: str) -> None:
        self._trainer._load_from_checkpoint(folder)
        models.clear()

    def _opened(self, path: Path) -> checkpoint.Loaded | huggingface.HFCheckpoint:
        if huggingface.is_hf_folder(path):
            return huggingface.read(path)
        return checkpoint.load(path, world=self._trainer._session.world)


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


# Files that a subclass or a callback puts into a checkpoint's folder before it is saved: HF writes
# its checkpoint around them. Here a checkpoint appears whole, by one rename, so they are set aside
# and written with the rest.


def _set_aside(target: Path) -> Path | None:
    """Move what lies where a checkpoint will be out of its way; None where nothing does.

    A checkpoint, of anytrain or of another library, is no such thing.
    """
    if target.is_symlink() or not target.is_dir() or not any(target.iterdir()):
        return None
    if (target / MANIFEST).exists() or huggingface.is_hf_folder(target):
        return None
    aside = target.with_name(f".{target.name}.given")
    if aside.exists():
        shutil.rmtree(aside)
    return target.rename(aside)


def _add(aside: Path | None, folder: Path) -> None:
    """Copy what was set aside into the folder being written, where it holds no such file."""
    for entry in sorted(aside.iterdir()) if aside is not None else ():
        goal = folder / entry.name
        if goal.exists():
            continue
        if entry.is_dir():
            shutil.copytree(entry, goal)
        else:
            shutil.copy2(entry, goal)


def _put_back(aside: Path | None, target: Path) -> None:
    """Remove what was set aside once it is in the checkpoint; put it back where there is none."""
    if aside is None:
        return
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.rename(target)


# Adapters (PEFT, LoRA): what is trained beside a frozen model, saved and loaded alone.


def has_adapters(model: nn.Module) -> bool:
    """Whether the model is a frozen one with trained adapters."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def save_adapters(model: Any, folder: str) -> None:
    """Write the adapters alone."""
    model.save_pretrained(folder)


def load_adapters(model: Any, folder: str) -> None:
    """Read the adapters that `save` wrote."""
    from peft import load_peft_weights, set_peft_model_state_dict

    for name in model.peft_config:
        # PEFT's layout: the adapter "default" lies in the folder, another in one of its name.
        where = folder if name == "default" else str(Path(folder) / name)
        weights = load_peft_weights(where, device="cpu")
        set_peft_model_state_dict(model, weights, adapter_name=name)
