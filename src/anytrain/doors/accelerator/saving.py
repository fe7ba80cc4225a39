"""The part of `Accelerator` that writes and reads files."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from anytrain.core import environment, records
from anytrain.core.errors import BadInput, BadType, CheckpointError, NotFinite
from anytrain.core.notices import give_notice
from anytrain.doors.accelerator.options import DataLoaderConfiguration, ProjectConfiguration
from anytrain.engine import checkpoint
from anytrain.engine.assemble import run_state, session as sessions
from anytrain.engine.assemble.run import Run, num_skipped
from anytrain.engine.assemble.step_boundary import BetweenSteps
from anytrain.engine.checkpoint import huggingface
from anytrain.engine.checkpoint.huggingface import is_hf_folder
from anytrain.engine.checkpoint.model import export_model, export_object
from anytrain.engine.recording import origin
from anytrain.engine.recording.loss_curve import LossCurve
from anytrain.engine.recording.record import Record

Place = str | os.PathLike[str]
_FIRST_OVERFLOWS = 32
"""Updates in which fp16's loss scale may come down from where it starts to where it fits."""


class Saving:
    """Checkpoints, exported models, and what is registered with them."""

    project_configuration: ProjectConfiguration
    _run: Run
    dataloader_config: DataLoaderConfiguration
    _between: BetweenSteps
    _record: Record | None
    _looked_back: bool
    """Whether the script has asked for a checkpoint to go on from."""
    _restored: int | None
    """The updates of the checkpoint that was loaded; None where none was."""
    _has_curve: bool
    """Whether losses that nobody logged were written."""
    _told_alone: bool
    """Whether it was said that the main process saves alone."""
    _project: tuple[str | None, dict[str, Any]]
    """The name and the settings that `init_trackers` was given."""
    _registered: list[Any]
    _save_hooks: OrderedDict[int, Callable[..., None]]
    _load_hooks: OrderedDict[int, Callable[..., None]]

    def save_state(
        self,
        output_dir: Place | None = None,
        safe_serialization: bool = True,
        blocking: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Write the whole run to a folder that is whole or absent; return its path.

        With `blocking=False` the loop stops only while tensors are copied to the host; the rest
        is written behind it, one save at a time, and `end_training` or the exit waits for it.

        Where there is no room, or a weight is not finite, a notice says so, the previous
        checkpoint stays, and training goes on. The main process's folder counts for all. Where
        only the main process calls this, it saves by itself, and other ranks' random numbers are
        not in the checkpoint.

        Args:
            output_dir: The checkpoint's folder. None: the next number in
                project_dir/checkpoints, with automatic_checkpoint_naming.
            safe_serialization: Taken as HF has it: checkpoints are safetensors and JSON in
                either case.
            blocking: Whether to return only once the checkpoint is whole on the disk.
            **save_model_func_kwargs: Refused by name: no checkpoint is written by a
                function that would read them.
        """
        _refuse_unknown("save_state", save_model_func_kwargs)
        if self._run.session.observer.skips_save():
            return str(output_dir or "")
        found = self._run.session
        absent = found.world.muster("save_state()")
        if absent is not None:
            return self._save_alone(output_dir, absent)
        world, config = found.world, self.project_configuration
        output_dir, config.iteration = world.broadcast_object(
            (None if output_dir is None else os.fspath(output_dir), config.iteration)
        )
        store, name = self._store_for(output_dir, saving=True)
        with found.ledger.span("wait"):
            found.backend.synchronize(found.device)
        with found.ledger.span("save"):
            self.finish_saving()
            if blocking:
                outcome = store.save(name, self._take, world=world)
                if self._between.note_outcome(outcome):
                    return os.fspath(store.root / name)
            else:
                self._between.begin_save(self._writer_for(store), name, self._take)
                found.cursor.stops = self._between
        config.iteration += 1
        return os.fspath(store.root / name)

    def _save_alone(self, output_dir: Place | None, absent: str) -> str:
        """Save on the main process, which is the only one that was asked to."""
        found = self._run.session
        if found.world.rank != 0:
            return str(output_dir or "")
        if not self._told_alone:
            self._told_alone = True
            give_notice(
                f"save_state() was called on the main process alone ({absent}). It saves by "
                "itself; the other ranks' random numbers (dropout) are drawn anew after a resume. "
                "Call it on every process for an exact one.",
                stacklevel=3,
            )
        store, name = self._store_for(output_dir, saving=True)
        with found.ledger.span("save"):
            self.finish_saving()
            if not self._between.note_outcome(store.save(name, self._take)):
                self.project_configuration.iteration += 1
        return os.fspath(store.root / name)

    def _take(self, folder: Path) -> checkpoint.Snapshot:
        return run_state.take(self._run, self._registered, list(self._save_hooks.values()), folder)

    def finish_saving(self) -> None:
        """Wait until a save behind the loop is committed, and tell if it failed."""
        self._between.finish()

    def _refuse_idle(self, *, is_over: bool) -> None:
        """Fail where not one update of this run happened: at its end, or so many into it.

        In between, only what the host has decided itself is read: nobody waits for a device.
        """
        found, optimizers = self._run.session, self._run.optimizers
        num_updates = found.cursor.updates - (self._restored or 0)
        few = _FIRST_OVERFLOWS if found.precision.scale is not None else 0
        if num_updates <= few:
            return
        if not is_over and any(each.guard.decides_on_device for each in optimizers):
            return
        if num_updates <= num_skipped(optimizers):
            raise NotFinite(
                f"Nothing was learnt: all {num_updates} updates of this run were skipped.",
                why="the gradient of each held a NaN or an infinity, and such an update changes "
                "nothing.",
                fix="look at the loss and at the data, lower the learning rate, or clip the "
                "gradients.",
            )

    def _writer_for(self, store: checkpoint.Store) -> checkpoint.Writer:
        """Return the writer for a folder; the next save reuses the memory of the last."""
        writer = self._between.writer
        if writer is None or writer.root != store.root:
            found = self._run.session
            wait = partial(found.backend.synchronize, found.device)
            writer = checkpoint.Writer(store, world=found.world, synchronize=wait)
        return writer

    def load_state(
        self,
        input_dir: Place | None = None,
        load_kwargs: dict[str, Any] | None = None,
        strict: bool = True,
        map_location: str | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Put a saved run back; without a folder, the newest whole checkpoint of the project.

        "auto" is the newest whole one too, and does nothing where there is none.
        Tensors go where the objects they belong to are, so `map_location` has nothing to decide;
        nothing is unpickled, so neither have `load_kwargs`, which HF hands to torch.load.
        With `strict=False` a model may miss weights or find ones it has no place for.

        Args:
            input_dir: The checkpoint's folder; "auto" as above. None: the newest whole one
                of the project.
            load_kwargs: Taken as HF has it; there is nothing for it to do.
            strict: Whether a model's names must match.
            map_location: Taken as HF has it; there is nothing for it to do.
            **load_model_func_kwargs: Refused by name, as in save_state.
        """
        _refuse_unknown("load_state", load_model_func_kwargs)
        if str(input_dir).lower() != "auto":
            self._load(input_dir, strict, map_location)
        elif not self._load_newest(strict, map_location):
            return
        for loader in self._run.loaders:
            loader.end_restored_epoch()  # as scripts that count epochs themselves expect

    def _load(
        self,
        input_dir: Place | None = None,
        strict: bool = True,
        map_location: str | None = None,
    ) -> None:
        self._looked_back = True
        if self._run.session.observer.is_watching:  # what a step does hangs on no weight
            return
        if map_location not in (None, "cpu", "on_device"):
            raise BadType(
                f"Cannot load to map_location={map_location!r}.",
                why="it is 'cpu' or 'on_device'; tensors follow their objects in any case.",
                fix="leave it out.",
            )
        world, input_dir = self._run.session.world, self._main_says(input_dir)
        if input_dir is None:
            store, _ = self._store_for(None, saving=False)
            newest = store.newest_whole(world=world)
            _tell_damage(newest)
            if newest.path is None:
                raise CheckpointError(
                    f"There is no whole checkpoint in {store.root}.",
                    why="nothing was saved there yet, or all of it is damaged.",
                    fix="pass the folder to load_state(), or start afresh.",
                )
            loaded = store.load(newest, world=world)
            self._count_on_from(newest.path)
        elif is_hf_folder(Path(input_dir)):
            run_state.restore_hf(self._run, self._registered, huggingface.read(input_dir))
            self._restored = self._run.session.cursor.updates
            return
        else:
            loaded = checkpoint.load(input_dir, world=world)
            self._count_on_from(Path(input_dir))
        hooks = list(self._load_hooks.values())
        run_state.restore(self._run, self._registered, loaded, hooks, strict=strict)
        self._restored = self._run.session.cursor.updates
        if self._run.session.end_step is not None:
            self._run.session.end_step()  # what was restored is an input of the next step's graph

    @property
    def should_save_model(self) -> bool:
        """Whether this process is the one of its machine to write a file."""
        return self._run.session.world.local_rank == 0

    def resume(self, resume_from_checkpoint: Place | bool | None = None) -> bool:
        """Load the project's newest whole checkpoint; return whether there was one.

        It may have a number, or a name that `save_state()` was given right in the project folder.
        A folder is loaded instead of it, True asks for one that is there, and False is no. Left
        out, ANYTRAIN_RESUME_FROM_CHECKPOINT says so (`anytrain launch --resume_from_checkpoint`).

        Args:
            resume_from_checkpoint: A folder; "auto" or None: the newest where there is
                one; True: the newest, which must be there; False: nothing is loaded.
        """
        self._looked_back = True
        asked = environment.resume_from(resume_from_checkpoint)
        word = "auto" if asked is None else str(asked).lower()
        if word == "false":
            return False
        if word in ("auto", "true", "latest"):
            found = self._load_newest(must_be_there=word != "auto")
        else:
            self._load(asked)
            found = Path(str(asked))
        session = self._run.session
        if found is not None and session.world.rank == 0 and not session.observer.is_watching:
            step = session.cursor.updates
            sys.stderr.write(f"anytrain: goes on from {found} at step {step}\n")
            sys.stderr.flush()
        return found is not None

    def _load_newest(
        self,
        strict: bool = True,
        map_location: str | None = None,
        *,
        must_be_there: bool = False,
    ) -> Path | None:
        """Load the newest whole checkpoint of the project; return where it is."""
        store, _ = self._store_for(None, saving=False)
        world = self._run.session.world
        numbered = store.newest_whole(world=world)
        named = checkpoint.Store(store.root.parent).newest_whole(world=world)
        if named.created_ns > numbered.created_ns:
            self._load(named.path, strict, map_location)
            return named.path
        if numbered.path is None and not must_be_there:
            self._looked_back = True
            _tell_damage(numbered)
        else:
            self._load(None, strict, map_location)
        if numbered.passed_over and self.project_configuration.automatic_checkpoint_naming:
            self._take_free_number()  # what is damaged stays, and is not written over
        return numbered.path

    def _begin_saving(self) -> None:
        """Save and leave between two steps when a signal asks, where there is a place to save."""
        self._registered = []
        self._save_hooks, self._load_hooks = OrderedDict(), OrderedDict()
        self._between = BetweenSteps()
        self._record, self._restored, self._project = None, None, (None, {})
        self._looked_back = self._told_alone = self._has_curve = False
        found = self._run.session
        if self.project_configuration.project_dir is not None and not found.observer.is_watching:
            self._between.stop_on_signals(found, self._save_interrupted)
            self._between.timesheet = sessions.timesheet(
                found,
                self.project_configuration.project_dir,
                begin=lambda: {"step": self._restored or 0},
                standing=lambda: {"step": found.cursor.updates},
            )
            self._record = self._between.record = Record(
                self.project_configuration.project_dir,
                is_main=found.world.rank == 0,
                step=lambda: found.cursor.updates,
            )
            curve = LossCurve(self._record, found.world, found.cursor, self._begin_curve)
            self._run.losses = self._between.losses = curve
            self._between.opening = self._begin_start
            found.cursor.stops = self._between

    def _begin_start(self) -> None:
        """Write down that a run starts, and what is known of it."""
        if self._record is None or self._run.session.observer.is_watching:
            return
        if environment.resume_from(None) and not self._looked_back:
            give_notice(
                "The run was told to go on from a checkpoint, and begins anew: the script does not "
                "call resume() after prepare().",
                stacklevel=2,
            )
        if self._run.optimizers and self._run.session.world.rank == 0:
            self._between.claim(Path(self.project_configuration.project_dir or "").absolute())
        self._run.forecast_memory()
        self._record.begin(self._start_facts, self._project[0], step=None)
        atexit.register(_end, weakref.ref(self._between))

    def _begin_curve(self) -> None:
        """Begin the history of the losses that nobody logs, once."""
        record, before = self._record, self._restored
        if record is None or self._has_curve:
            return
        self._has_curve = True
        if before is not None:
            record.journal.go_on(before, of=records.BACKWARD)
        elif not record.journal.has_begun:
            record.journal.begin(0)
        record.count_from(before or 0)

    def _start_facts(self) -> dict[str, Any]:
        run = self._run
        sets = {  # the first loader that was prepared is the training's, as everybody writes it
            f"loader {number}" if number else "train": getattr(loader, "dataset", None)
            for number, loader in enumerate(run.loaders)
        }
        model = run.models[0] if run.models else None
        if model is not None:
            model = run.unwrap(model, keep_forward=True, keep_compiled=False)
        own = {
            "mixed_precision": run.session.plan.precision.value,
            "gradient_accumulation_steps": run.session.cursor.accumulation.num_steps,
            "dataloader_config": asdict(self.dataloader_config),
        }
        facts = sessions.start_facts(run.session, model, sets)
        return {**facts, "arguments": origin.settings({**own, **self._project[1]})}

    def _save_interrupted(self) -> str:
        """Save the run because a signal ends it; return a sentence about what was saved."""
        cursor = self._run.session.cursor
        named = self.project_configuration.automatic_checkpoint_naming
        folder = f"{self.project_configuration.project_dir}/checkpoints/step-{cursor.updates:09}"
        self.finish_saving()
        if named:
            self._take_free_number()
        before = self.project_configuration.iteration
        path = self.save_state(None if named else folder)
        if self.project_configuration.iteration == before:
            return f"the run could not be saved after step {cursor.updates}; see the notice above."
        how = (
            "Start the same command to go on."
            if self._looked_back
            else "To go on from there, the script must call resume() after prepare(): it did not."
        )
        return f"saved {path} after step {cursor.updates}. {how}"

    def _take_free_number(self) -> None:
        """Number the next checkpoint so that it meets none that is there already."""
        config = self.project_configuration
        root = Path(config.project_dir or "") / "checkpoints"
        free = config.iteration
        while (root / f"checkpoint_{free}").exists():
            free += 1
        config.iteration = self._run.session.world.broadcast_object(free)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and restore these too: anything with state_dict() and load_state_dict().

        Args:
            *objects: The objects, in the same order in each start.
        """
        run_state.check_registered(objects)
        self._registered.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` before each save.

        Args:
            hook: The function. `weights` holds each model's state dict, in the order of
                `models`; what it takes out of that list it saves itself.
        """
        handle = RemovableHandle(self._save_hooks)
        self._save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, input_dir)` before each load.

        Args:
            hook: The function. A model that it takes out of `models` it loads itself.
        """
        handle = RemovableHandle(self._load_hooks)
        self._load_hooks[handle.id] = hook
        return handle

    def save_model(
        self,
        model: nn.Module,
        save_directory: Place,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the model's weights alone, in shards, from the main process.

        Args:
            model: The model, prepared or not.
            save_directory: The folder.
            max_shard_size: The largest size of one file: bytes, or text such as "5GB".
            safe_serialization: Whether to write safetensors; False writes torch's pickles.
        """
        if Path(save_directory).is_file():
            raise BadInput(
                f"Cannot save a model to {os.fspath(save_directory)}.",
                why="it is a file, and a model is saved to a folder.",
                fix="pass a folder.",
            )
        if self._run.session.observer.skips_save():
            return
        if self._run.session.world.rank == 0:
            export_model(
                self._run.unwrap(model, keep_forward=True, keep_compiled=False),
                Path(save_directory),
                max_shard_size=max_shard_size,
                safe_serialization=safe_serialization,
            )

    def save(self, obj: Any, f: Place, safe_serialization: bool = False) -> None:
        """Write an object from the main process (from each machine's, if so configured).

        Args:
            obj: Anything that torch.save takes.
            f: The file.
            safe_serialization: Whether to write safetensors; `obj` is then a dict of
                tensors.
        """
        if self._run.session.observer.skips_save():
            return
        world = self._run.session.world
        each = self.project_configuration.save_on_each_node
        if (world.local_rank if each else world.rank) == 0:
            export_object(obj, Path(f), safe_serialization=safe_serialization)

    def _count_on_from(self, path: Path) -> None:
        """Number the next checkpoint after the one that was loaded."""
        number = path.name.rpartition("_")[2]
        if path.name.startswith("checkpoint_") and number.isdigit():
            config = self.project_configuration
            config.iteration = max(config.iteration, int(number) + 1)

    def _main_says(self, folder: Place | None) -> str | None:
        """Return the main process's folder: a time or a random name in it differs by rank."""
        own = None if folder is None else os.fspath(folder)
        return self._run.session.world.broadcast_object(own)

    def _store_for(self, folder: Place | None, *, saving: bool) -> tuple[checkpoint.Store, str]:
        """Return the store and the name that a folder means; automatic names count up."""
        config = self.project_configuration
        if config.automatic_checkpoint_naming or folder is None:
            if config.project_dir is None:
                raise BadInput(
                    "Cannot tell where checkpoints are.",
                    why="no folder was passed, and the Accelerator has no project_dir.",
                    fix="pass a folder, or Accelerator(project_dir=..., project_config="
                    "ProjectConfiguration(automatic_checkpoint_naming=True)).",
                )
            root = Path(config.project_dir) / "checkpoints"
            keep = checkpoint.Retention(keep_last=config.total_limit)
            name = f"checkpoint_{config.iteration}"
            if saving and (root / name).exists():
                raise BadInput(
                    f"Checkpoint {root / name} exists already.",
                    why="another run's checkpoints are in this project folder, or this one was "
                    "resumed without setting the iteration.",
                    fix="call resume() after prepare() to go on with that run; to begin anew, pass "
                    "ProjectConfiguration(iteration=N) with the next free number, or another "
                    "project_dir.",
                )
            return checkpoint.Store(root, retention=keep), name
        path = Path(folder)
        return checkpoint.Store(path.parent), path.name


def _tell_damage(found: checkpoint.Newest) -> None:
    for damage in found.passed_over:
        give_notice(f"Passed over a damaged checkpoint: {damage}", stacklevel=4)


def _end(between: weakref.ref[BetweenSteps]) -> None:
    found = between()
    if found is not None:
        found.close()
        found.let_go()


def _refuse_unknown(call: str, options: dict[str, Any]) -> None:
    """Refuse options that would have no effect, instead of dropping them without a word."""
    if options:
        names = ", ".join(sorted(options))
        raise BadType(
            f"{call}() does not know {names}.",
            why="a checkpoint has one layout here, and there is nothing for them to change.",
            fix=f"call {call}() without {names}.",
        )
