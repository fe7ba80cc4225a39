"""Go on from a checkpoint: which one, what of it is put back, and what is told of it.

What a run is told to do otherwise than the run whose checkpoint it goes on from is said.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytrain.core import environment
from anytrain.core.documents import as_file
from anytrain.core.errors import CheckpointError, NoCheckpoint
from anytrain.core.notices import give_notice
from anytrain.doors.callbacks import Callbacks, TrainerState
from anytrain.doors.callbacks.callback import FIELDS
from anytrain.doors.trainer.outputs import TRAINER_STATE_NAME, last_checkpoint
from anytrain.engine import checkpoint
from anytrain.engine.assemble import run_state
from anytrain.engine.assemble.checkpoint_checks import check_loader
from anytrain.engine.checkpoint import Loaded, huggingface
from anytrain.engine.checkpoint.manifest import MANIFEST
from anytrain.engine.checkpoint.schema import (
    MOST,
    Maybe,
    Misfit,
    Named,
    Number,
    Row,
    Whole,
    check,
    within,
)
from anytrain.engine.checkpoint.state_schema import Tensors, like
from anytrain.engine.loop import Progress

if TYPE_CHECKING:
    from anytrain.doors.trainer.trainer import Trainer

ARGUMENTS_NAME = "training_args.json"
_SETTLED = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
"""What an optimizer's saved state holds."""
_LOOP_STATE = {
    "progress": {
        "step": Whole(),
        "epoch": Whole(),
        "batch": Whole(),
        "batches_per_epoch": Whole(1),
        "samples_per_batch": Whole(1),
        "num_micro": Whole(1),
        "this_epoch?": Maybe(Whole()),
        "surplus?": Maybe(Whole(-MOST)),
    },
    "state": FIELDS,
    "meter": {
        "num_steps": Whole(),
        "losses": Tensors(),
        "bad": Tensors(shape=(2,)),
        "rate": Number(),
    },
    "loss_so_far": Row(Number(finite=False), Whole()),
    "num_samples?": Maybe(Whole()),
}
"""What a checkpoint holds of the loop."""


class LoopState:
    """What a checkpoint holds of the loop: its position, its history, its callbacks' states."""

    def __init__(self, trainer: Trainer) -> None:
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
            "loss_so_far": own._parts.training.loss_so_far,
            "num_samples": own._parts.resuming.num_samples(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Put the loop back where it was."""
        own = self._trainer
        own._meter.load_state_dict(saved["meter"], own._session.world)
        own._parts.training.loss_so_far = tuple(saved["loss_so_far"])
        own._parts.resuming.take_state(TrainerState(**saved["state"]))
        self.num_samples, self.state = saved.get("num_samples"), saved["state"]
        self.is_laid_out_anew = not own._progress.is_laid_out_like(saved["progress"])


class Resuming:
    """What puts a saved run back into a Trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def find(self, asked: str | os.PathLike[str] | bool | None) -> Path | None:
        """Return the checkpoint to go on from: the one named, or with True the newest whole.

        With "auto" it is the newest whole one where there is one. What train() is not told is
        taken from the arguments, else from the environment, for the Trainer's first training.
        """
        trainer = self._trainer
        is_first = not trainer._parts.saver.trained_before and trainer._trial is None
        if asked is None and is_first and not trainer._session.observer.is_watching:
            asked = environment.resume_from(trainer.args.resume_from_checkpoint)
        if asked is None or asked is False:
            return None
        if asked is not True and str(asked).lower() not in ("true", "latest", "auto"):
            return Path(asked)
        root = Path(str(trainer.args.output_dir)).expanduser().absolute()
        world = trainer._session.world
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

    def open(self, path: Path | None) -> checkpoint.Loaded | None:
        """Return the checkpoint, found to be whole; None where there is none of ours."""
        if path is None or huggingface.is_hf_folder(path):
            return None
        loaded = checkpoint.load(path, world=self._trainer._session.world)
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
        loaded.check(
            "registered", partial(_check_loop_state, callbacks=self._trainer.callback_handler)
        )
        return loaded

    def resume(self, path: Path, loaded: checkpoint.Loaded | None) -> None:
        """Put a saved run back; another library's as far as it goes."""
        trainer = self._trainer
        run, own = trainer._run, trainer._parts.saver.own_ways(path)
        if loaded is None:
            run_state.restore_hf(run, [], huggingface.read(path), tells_position=False, own=own)
            if (path / TRAINER_STATE_NAME).exists():
                self.take_state(TrainerState.load_from_json(path / TRAINER_STATE_NAME))
                self._seek(trainer.state.global_step)
        else:
            standing = LoopState(trainer)
            run_state.restore(run, [standing], loaded, trainer._parts.saver.load_hooks(), own=own)
            arguments = _arguments_of(path / ARGUMENTS_NAME)
            position, loader = position_of(loaded, run.loaders[0]), run.loaders[0]
            loader.load_state_dict(_begun_with(position, loader, arguments))
            trainer.state.train_batch_size = trainer.args.train_batch_size
            if run.session.world.rank == 0:
                trainer._parts.saver.settled = _tell_changed(arguments, standing, trainer)
        if trainer.args.should_log:
            _tell_place(path, trainer._progress)
        if trainer.args.ignore_data_skip:
            trainer._progress.batch, trainer._progress.this_epoch = 0, None
            run.loaders[0].rewind()

    def num_samples(self) -> int | None:
        """Return how many samples the training data has; None where it does not know."""
        try:
            return self._trainer._run.loaders[0].total_dataset_length
        except (TypeError, AttributeError, NotImplementedError):
            return None

    def _seek(self, step: int) -> None:
        """Stand where a run of so many steps stands: its order is a function of the epoch."""
        trainer = self._trainer
        progress, micro = trainer._progress, trainer.args.gradient_accumulation_steps
        per_epoch = max(1, -(-progress.batches_per_epoch // micro))
        progress.step, progress.epoch = step, step // per_epoch
        progress.batch = (step % per_epoch) * micro
        trainer._run.session.cursor.updates = step
        trainer._run.loaders[0].skip_next(progress.batch)

    def take_state(self, saved: TrainerState) -> None:
        """Take a saved state over, less what belongs to this run."""
        trainer = self._trainer
        here = trainer.state
        for name in ("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps"):
            setattr(saved, name, getattr(here, name))
        for name in ("is_local_process_zero", "is_world_process_zero"):
            setattr(saved, name, getattr(here, name))
        best = saved.best_model_checkpoint
        if best is not None and not Path(best).is_dir():
            give_notice(f"The best checkpoint so far, {best}, is not there any more.", stacklevel=3)
            saved.best_model_checkpoint = None
        vars(here).update(vars(saved))
        trainer._load_callback_state()
        if not trainer.args.restore_callback_states_from_checkpoint:
            trainer.callback_handler.take_up(saved.stateful_callbacks)


def _check_loop_state(saved: Any, callbacks: Callbacks) -> None:
    """Raise Misfit where the place in the loop, or a callback's state, has no meaning."""
    check(saved, _LOOP_STATE)
    if saved["meter"]["losses"].dim() != 1 or not len(saved["meter"]["losses"]):
        raise Misfit("meter.losses must hold one loss for each rank")
    unknown = set(saved["state"]) - {field.name for field in dataclasses.fields(TrainerState)}
    if unknown:
        raise Misfit(f"{within('state', min(unknown, key=str))} is nothing that a state holds")
    where = "state.stateful_callbacks"
    for callback in callbacks.stateful():
        name, own = type(callback).__name__, callback.state()
        found = (saved["state"].get("stateful_callbacks") or {}).get(name, [])
        for state in found if isinstance(found, list) else [found]:
            place = within(where, name)
            check(state, {f"{part}?": like(value) for part, value in own.items()}, place)
            for each in state.get("attributes", {}):
                if callable(getattr(type(callback), each, None)):
                    raise Misfit(f"{within(place, each)} is no attribute that it saves")


def position_of(saved: Loaded, loader: Any) -> dict[str, Any]:
    """Return a saved run's position in its data; that of 0.1, in batches, counted in samples.

    It is one that the loader can take.
    """
    check_loader(loader, saved)
    position: dict[str, Any] = saved.part("loader")
    if "samples" in position:
        return position
    progress = saved.part("registered")["progress"]
    size = progress["samples_per_batch"] // int(saved.meta.get("processes", saved.world_size))
    ended = progress["batch"] >= progress["batches_per_epoch"] and position["stream"] is None
    return {**position, "samples": position["done"] * size, "ended": ended}


def _arguments_of(path: Path) -> Mapping[str, Any]:
    """Return the arguments that a run wrote beside its checkpoint; empty where none can be read.

    They may be another library's, or those that a subclass writes.
    """
    try:
        saved = json.loads(as_file(path).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return saved if isinstance(saved, dict) else {}


def _begun_with(position: dict[str, Any], loader: Any, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a position with the seed of its epoch's order, where a former version left it out."""
    seed = _order_seed(saved.get("seed"), saved.get("data_seed"))
    if position.get("layout") is None and tuple(loader.layout_names) == ("seed",):
        return position if type(seed) is not int else {**position, "layout": {"seed": seed}}
    return position


def _tell_place(path: Path, progress: Progress) -> None:
    """Say where the run goes on from, on a line of its own."""
    if progress.step < progress.max_steps:  # else it is said that nothing is left to do
        where = f"at step {progress.step} of {progress.max_steps}"
        sys.stderr.write(f"anytrain: goes on from {path} {where}\n")
        sys.stderr.flush()


def _tell_changed(
    saved: Mapping[str, Any], standing: LoopState, trainer: Trainer
) -> dict[str, Any]:
    """Give notice of all that is not as it was: `saved` holds the former arguments.

    Return what is used in the place of what was given, by name.
    """
    args, progress, state = trainer.args, trainer._progress, standing.state
    used = _tell_settled(saved, args)
    _tell_seeds(saved, args, trainer._run.loaders[0], progress)
    num_samples = trainer._parts.resuming.num_samples()
    is_told = standing.is_laid_out_anew
    if standing.num_samples not in (None, num_samples) and num_samples is not None:
        _tell_other_data(standing.num_samples or 0, num_samples, progress)
        is_told = True
    if not is_told:
        _tell_other_end(state.get("max_steps"), progress)
    for kind in ("eval", "save"):
        _tell_interval(kind, saved, state, trainer)
    return used


def _tell_settled(saved: Mapping[str, Any], given: Any) -> dict[str, Any]:
    kept = {name: saved[name] for name in _SETTLED if name in saved}
    try:
        check(kept, Named(Number()))
    except Misfit:
        return {}
    used = {name: value for name, value in kept.items() if value != getattr(given, name)}
    changed = [
        f"{name} {value:g} (given: {getattr(given, name):g})" for name, value in used.items()
    ]
    if changed:
        _tell(
            f"The run goes on with its checkpoint's {', '.join(changed)}: an optimizer's settings "
            "are part of its state. To train on with others, begin a new run from the saved model."
        )
    schedule = saved.get("lr_scheduler_type")
    now = getattr(given.lr_scheduler_type, "value", given.lr_scheduler_type)
    if schedule not in (None, now):
        _tell(
            f"The checkpoint's lr_scheduler_type is {schedule}, this run's is {now}: the learning "
            f"rate goes on where {now} is at this step, which is not where {schedule} left it."
        )
    return used


def _tell_seeds(saved: Mapping[str, Any], given: Any, loader: Any, progress: Progress) -> None:
    changed = [
        f"{name} {saved[name]} (given: {getattr(given, name)})"
        for name in ("seed", "data_seed")
        if name in saved and saved[name] != getattr(given, name)
    ]
    if not changed:
        return
    text = f"The run goes on with the randomness of its checkpoint, of {', '.join(changed)}."
    now = _order_seed(given.seed, given.data_seed)
    was = _order_seed(saved.get("seed"), saved.get("data_seed"))
    if "seed" in loader.layout_names and was != now:
        whole = progress.this_epoch or progress.batches_per_epoch
        in_midst = 0 < progress.batch < whole and not given.ignore_data_skip
        here = "This epoch ends in the order that it began with; " if in_midst else ""
        text += f" {here}{'later' if in_midst else 'Later'} ones are in the order of {now}."
    _tell(text)


def _order_seed(seed: Any, data_seed: Any) -> Any:
    return seed if data_seed is None else data_seed


def _tell_other_data(was: int, now: int, progress: Progress) -> None:
    step, in_all = progress.step, progress.max_steps
    left = (
        f"the training and its schedule end at step {in_all}"
        if step < in_all
        else f"nothing is left to train: the end would be step {in_all}"
    )
    _tell(
        f"The saved run had {was} training samples, this one has {now}: it goes on "
        f"{_place(progress)}. It is at step {step}, and {left}."
    )


def _place(progress: Progress) -> str:
    if progress.batch >= progress.batches_per_epoch:
        return f"after epoch {progress.epoch + 1}"
    return (
        f"after batch {progress.batch} of the {progress.batches_per_epoch} of epoch "
        f"{progress.epoch + 1}, in another order: samples may come again in this epoch, and "
        "others not at all"
    )


def _tell_other_end(was: Any, progress: Progress) -> None:
    now = progress.max_steps
    if was not in (None, now) and progress.step < now:
        _tell(
            f"The saved run was to end at step {was}, this one ends at step {now}: the learning "
            f"rate goes on where a schedule of {now} steps is at this step."
        )


def _tell_interval(
    kind: str, saved: Mapping[str, Any], state: Mapping[str, Any], trainer: Trainer
) -> None:
    name = f"{kind}_steps"
    both = (saved.get(f"{kind}_strategy"), getattr(trainer.args, f"{kind}_strategy"))
    was, now = state.get(name), getattr(trainer.state, name)
    if all(str(each) == "steps" for each in both) and was not in (None, now):
        _tell(f"The saved run had {name} {was}, this one has {now}, which counts from here on.")


def _tell(text: str) -> None:
    give_notice(text, stacklevel=7)
