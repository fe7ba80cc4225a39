"""`Trainer`: our loop, your model and data.

What each part does is in the file of its name; what happens in a step is in engine/loop.py and
engine/step/step.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anytrain.core.nearest import NamedArguments
from anytrain.core.text import Sheet, amount
from anytrain.doors.accelerator import Accelerator
from anytrain.doors.callbacks import (
    Callbacks,
    DefaultFlowCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerState,
)
from anytrain.doors.described import NOWHERE, Described, sheet
from anytrain.doors.trainer import num_steps, preparing, rehearsal, timing
from anytrain.doors.trainer.adapters import inner as inner_model
from anytrain.doors.trainer.best import CheckpointMetricMissing
from anytrain.doors.trainer.data import check_eval_sets, default_collator
from anytrain.doors.trainer.evaluating import Evaluating
from anytrain.doors.trainer.hub import Hub
from anytrain.doors.trainer.inputs import Inputs
from anytrain.doors.trainer.job import TrainerJob
from anytrain.doors.trainer.losses import Losses
from anytrain.doors.trainer.memory import MemoryUse
from anytrain.doors.trainer.nonfinite import NonFinite
from anytrain.doors.trainer.optimizing import Optimizing, set_mode
from anytrain.doors.trainer.outputs import TrainOutput, has_length, speed_metrics
from anytrain.doors.trainer.preflight import Foretelling
from anytrain.doors.trainer.recording import Recording
from anytrain.doors.trainer.refused import UnlikeTransformers
from anytrain.doors.trainer.resumed import position_of
from anytrain.doors.trainer.serving import Serving
from anytrain.doors.training_args import TrainingArguments
from anytrain.doors.training_args.session import run_options
from anytrain.engine import objective
from anytrain.engine.assemble import current
from anytrain.engine.assemble.loaders import Recount, build_feed, count_items
from anytrain.engine.assemble.run import Run
from anytrain.engine.assemble.steps import StepOptions, build_step
from anytrain.engine.checkpoint import Loaded
from anytrain.engine.data.columns import can_return_loss, label_names
from anytrain.engine.loop import fit
from anytrain.engine.optim.schedules import follows_metric
from anytrain.engine.prepared.walk import Cursor
from anytrain.engine.recording.meter import Meter, Reading
from anytrain.engine.step.activations import Activations


class Trainer(
    Described,
    Losses,
    Serving,
    Recording,
    Optimizing,
    NonFinite,
    Hub,
    Evaluating,
    Foretelling,
    UnlikeTransformers,
    NamedArguments,
):
    """Train, evaluate and predict with a model, on whatever device and processes there are.

    Args:
        model: Any `nn.Module` that returns a loss when it is given labels: a mapping or object
            with `loss`, or a tuple whose first entry is the loss. With `compute_loss_func` it
            need not. Either this or `model_init`.
        args: The settings of the run. None: the defaults, in tmp_trainer.
        data_collator: Makes a batch of a list of samples. None: `processing_class` pads them
            where it can, and otherwise tensors of equal shapes are stacked.
        train_dataset: What `train` goes through: anything with a length and items, a stream
            (IterableDataset), or a `datasets` table. Samples are mappings by the names that
            forward takes. None where the Trainer only evaluates.
        eval_dataset: What `evaluate` goes through, or a dict of several, whose names become
            part of the metrics' names: eval_NAME_loss.
        processing_class: A tokenizer, image processor, feature extractor or processor: pads
            batches, and is saved with the model and with each checkpoint.
        model_init: A function that returns a new model, called at the beginning and again by
            each `train`; it may take one argument, the trial of a search. Needed by
            `hyperparameter_search`.
        compute_loss_func: Computes the loss from outputs and labels: `f(outputs, labels,
            num_items_in_batch=n)`. `num_items_in_batch` counts the labels of the whole step,
            over all micro-batches and processes: a sum divided by it is the exact mean.
        compute_metrics: A function of an EvalPrediction that returns a dict of numbers, or one
            of anytrain's metrics, such as Accuracy(), which keep no predictions. None: the
            loss alone.
        callbacks: TrainerCallbacks, or their classes, called in this order, after the default
            one.
        optimizers: An optimizer made from this model's parameters, and its schedule. Where one
            is None it is made from `args`.
        optimizer_cls_and_kwargs: A class of optimizer and its arguments, in place of
            `args.optim`. The Trainer makes it, with groups for weight decay; so it goes with
            `model_init`.
        preprocess_logits_for_metrics: `f(logits, labels)`, called on each batch of an
            evaluation, on the device; what it returns is kept instead of the logits. An argmax
            there saves memory.
        tokenizer: The former name of `processing_class`.
    """

    _activations: Activations | None = None

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        tokenizer: Any = None,
    ) -> None:
        self.args = preparing.own_arguments(args)
        preparing.seed(self.args)
        self.processing_class = preparing.one_processing_class(processing_class, tokenizer)
        self.model_init = preparing.one_model(model, model_init)
        preparing.check_optimizers(optimizers, optimizer_cls_and_kwargs, model_init)
        check_eval_sets(self, eval_dataset)
        num_steps.check_end(self.args, has_end=train_dataset is None or has_length(train_dataset))
        self._follow_arguments()
        preparing.check_tf32(self.args, self._session)
        self._new_run()
        self._memory = MemoryUse(self._session, off=self.args.skip_memory_metrics)
        self._trial = self._record = self._trackers = self._tokens = None
        self.model = self.call_model_init() if model is None else model
        self.model_wrapped = self.model
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.compute_loss_func = compute_loss_func
        self._inspect_model()
        self.data_collator = data_collator or default_collator(self.processing_class)
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self._made_scheduler = False
        self.is_in_train = False
        self.current_flos, self._flos_of = 0.0, {}
        self._began, self._tokens_before, self._globalstep_last_logged = time.time(), 0, 0
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self._kept_loaders, self._last_metrics, self._own_folders = {}, {}, set()
        self._trained_before = False
        self.callback_handler = Callbacks(
            [DefaultFlowCallback, *(callbacks or [])],
            self.model,
            self.processing_class,
            self.optimizer,
            self.lr_scheduler,
        )
        self.add_callback(PrinterCallback if self.args.disable_tqdm else ProgressCallback)
        self.state = TrainerState(
            is_local_process_zero=self.is_local_process_zero(),
            is_world_process_zero=self.is_world_process_zero(),
            stateful_callbacks=self.callback_handler.exported(),
        )
        if self.args.push_to_hub:
            self.init_hf_repo()
        if self.args.should_save and self.args.output_dir is not None:
            os.makedirs(self.args.output_dir, exist_ok=True)
        self._memory.built()
        self._tell("init_end")
        current.take(self._session)

    def _sheet(self) -> Sheet:
        args, state, data = self.args, self.state, self.train_dataset
        number = f"{amount(len(data), 'row')}, " if isinstance(data, Sized) else ""
        size = f"batches of {args.train_batch_size} a process"
        of = f" of {state.max_steps:,}" if state.max_steps > 0 else " so far"
        rows = [
            ("data", "none to train on" if data is None else number + size),
            ("updates", f"{state.global_step:,}{of}"),
        ]
        title, why = type(self).__name__, "in .accelerator.plan"
        return sheet(title, self._session, [self.model], rows, args.output_dir or NOWHERE, why)

    def _new_run(self) -> None:
        """Begin with nothing prepared: each training is a run of its own."""
        self._session.cursor = Cursor(self._session.cursor.accumulation)
        options = replace(run_options(self.args), schedules_count_updates=True)
        self._run = Run(self._session, options)
        self.accelerator = Accelerator.over(self._run)

    def _inspect_model(self) -> None:
        """Find out what the model takes, and put it where it runs."""
        base = inner_model(self.model)
        self._signature_columns = None
        self.label_names = self.args.label_names or label_names(base)
        self.can_return_loss = can_return_loss(base)
        self._shifts = objective.shifts_labels(base)
        self._smoothing = preparing.smoothing(self.args, base)
        if self.train_dataset is not None and not self._has_own_loss():
            preparing.check_model(self.model)
        preparing.set_cache(self.model, self.args)
        if self.args.place_model_on_device is not False:
            preparing.place(self.model, self._session)

    # -- callbacks ----------------------------------------------------------------------------

    def add_callback(self, callback: Any) -> None:
        """Add a callback: an object, or a class that needs no arguments.

        Args:
            callback: The callback, or its class.
        """
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Take a callback out, by its class or itself; return it.

        Args:
            callback: The callback, or its class: then the first one of that class.
        """
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Take a callback out, by its class or itself.

        Args:
            callback: The callback, or its class: then the first one of that class.
        """
        self.callback_handler.remove_callback(callback)

    # -- training -----------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike[str] | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train; with resume_from_checkpoint go on from a folder, or with True from the newest.

        "auto" goes on from the newest where there is one. Left out, the first training asks
        args.resume_from_checkpoint, then ANYTRAIN_RESUME_FROM_CHECKPOINT. False is no.

        A new run moves checkpoints that another Trainer left in output_dir to
        output_dir/earlier-1 (with overwrite_output_dir: removes them). A second train() of the
        same Trainer leaves its own where they are, and replaces those of the same step.

        Args:
            resume_from_checkpoint: A checkpoint's folder; True for the newest whole one of
                output_dir, which must be there; "auto" for the newest where there is one.
                None: as said above. False: begin afresh.
            trial: A trial of `hyperparameter_search`, which passes it by itself.
            ignore_keys_for_eval: What of a model's output the evaluations between leave
                out of the predictions, by name.
        """
        observer = self._session.observer
        is_rehearsal = observer.begin()
        if is_rehearsal:
            rehearsal.shorten(self, observer)
            resume_from_checkpoint = trial = None  # it has a folder of its own
        self._refuse_idle()
        self._memory.start()
        self._hp_search_setup(trial)
        self._follow_arguments()
        self._ignored_in_eval = ignore_keys_for_eval
        with self._alone_in_folder():
            where = self._find_checkpoint(resume_from_checkpoint)
            self.is_in_train = True
            self._new_run()
            self._begin_saving()
            vars(self).pop("_engine_step", None)
            try:
                with preparing.model_for_training(self, trial):
                    output = self._inner_training_loop(
                        batch_size=self._train_batch_size,
                        args=self.args,
                        resume_from_checkpoint=None if where is None else str(where),
                        trial=trial,
                        ignore_keys_for_eval=ignore_keys_for_eval,
                    )
                self._trained_before = True
                if is_rehearsal:  # it was shorter than a rehearsal
                    observer.leave()
                return output
            finally:
                self._end_training()

    def _end_training(self) -> None:
        """Close what a training has opened, however it ended."""
        self.is_in_train = False
        if "_engine_step" in vars(self):
            self._engine_step.release()
        self.callback_handler.close()
        self._leave_records()
        self._end_saving()

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train, once it is clear where from; a subclass may do something before and after."""
        where = None if resume_from_checkpoint is None else Path(resume_from_checkpoint)
        loader = self._prepared(self.get_train_dataloader())
        saved = self._open_checkpoint(where)
        self._load_own_model(where)
        self._set_length(loader, trial, saved)
        self._assemble(loader)
        if where is not None:
            self._resume(where, saved)
        self._begin_folder(where)
        with timing.recorded(self):
            return self._fit()

    def _set_length(self, loader: Any, trial: Any, saved: Loaded | None) -> None:
        """Work out how long the training is, and begin its state."""
        args = self.args
        num_batches = len(loader) if has_length(loader) else None
        samples = args.train_batch_size * self._session.world.size
        where = place = None
        if saved is not None:
            where = saved.part("registered")["progress"]
            place = loader.place_of(position_of(saved, loader))
        self._progress = num_steps.plan(args, num_batches, samples, where, place)
        max_steps, num_epochs = self._progress.max_steps, self._progress.num_epochs
        self._meter = Meter(self._session.device)
        self._loss_so_far, self._total_loss_scalar = (0.0, 0), 0.0
        self.state = TrainerState(stateful_callbacks=self.callback_handler.exported())
        self.state.is_hyper_param_search = trial is not None
        self.state.train_batch_size = args.train_batch_size
        self.state.compute_steps(args, max_steps)
        self.state.init_training_references(self, max_steps, num_epochs, trial)
        self._num_examples = self.num_examples(loader) if num_batches else 0

    def _assemble(self, loader: Any) -> None:
        """Prepare loader, model, optimizer and schedule, and make the step."""
        run, args = self._run, self.args
        self.model.zero_grad()  # whatever an earlier attempt has left behind
        loader = run.loader(loader)
        if self._made_scheduler:
            self.lr_scheduler, self._made_scheduler = None, False
        if self.optimizer is None or self.lr_scheduler is None:
            self.create_optimizer_and_scheduler(self._progress.max_steps)
        looks = self._looks_for_unused()
        self.model_wrapped = run.model(self.model, looks_for_unused=looks)
        self.optimizer = run.optimizer(self.optimizer)
        if not follows_metric(self.lr_scheduler):
            self.lr_scheduler = run.scheduler(self.lr_scheduler)
        run.close(self.model_wrapped, self.optimizer, self.lr_scheduler, loader)
        handler = self.callback_handler
        handler.model, handler.optimizer = self.model, self.optimizer
        handler.lr_scheduler, handler.train_dataloader = self.lr_scheduler, loader
        count = count_items(self._session, inner_model(self.model))
        is_one = self._session.world.size * args.gradient_accumulation_steps == 1
        alone = is_one and not self._reads_items()
        self._feed = build_feed(
            self._session,
            loader,
            args.gradient_accumulation_steps,
            lambda micro: None if alone else count(micro),
            keeps_repeats=self._keeps_repeats(),
        )
        makes_others = self._makes_batches() and (not alone or args.auto_find_batch_size)
        self._counted = Recount(self._session, self.model) if makes_others else None
        self._engine_step = build_step(
            run,
            self.model_wrapped,
            self._micro(),
            StepOptions(
                args.max_grad_norm,
                args.on_nonfinite != "skip",
                args.auto_find_batch_size,
                self._own_functions(),
                self._meter.sum_up,
                self._obstacle(),
                self._activations,
                lambda: self._progress.max_steps - self._progress.step,
                looks,
                self._counted,
            ),
            count=count,
            tell=self._tell if handler.looks_inside() else None,
            split=self._was_split,
        )

    def _fit(self) -> TrainOutput:
        """Walk the loop and return how it went."""
        state, first = self.state, self.state.global_step
        self._tokens_before = state.num_input_tokens_seen
        self._began = time.time()
        self._begin_records()
        self.model_wrapped.train()
        set_mode(self.optimizer, is_training=True)
        self._tell("train_begin", facts=self._facts)
        if self.args.eval_on_start and not self._session.observer.is_watching:
            self._evaluate(self._trial, self._ignored_in_eval, skip_scheduler=True)
        inputs, ledger = Inputs(self, model=self.model_wrapped), self._session.ledger
        step = self._remembering(inputs.checked_first(self._engine_step))
        cut = self._session.end_step
        if cut is not None and first:
            cut()  # what was restored is an input now: the next step is the run's usual graph
        with inputs.explained():
            fit(TrainerJob(self), self._feed, step, self._meter, self._progress, ledger, cut)
            self._end_saving()
            self._tell_unsaved()
            reading = self._meter.read(self._session.world)
        self._take_loss(reading)
        self._answer_bad_steps(reading)
        total, num_steps = self._loss_so_far
        done = state.global_step - first
        self._refuse_idle_skipping(done)
        if not done:
            preparing.tell_nothing_done(state.global_step, state.max_steps, self.args)
        share = done / max(state.max_steps, 1)
        epochs = self.args.num_train_epochs if self.args.max_steps <= 0 else 0
        samples = self._num_examples * epochs or state.max_steps * self._samples_per_step()
        metrics = speed_metrics(
            "train", self._began, num_samples=round(samples * share), num_steps=done
        )
        self.store_flos()
        metrics["total_flos"] = state.total_flos
        metrics["train_loss"] = train_loss = total / max(num_steps, 1)
        self._memory.stop("train", metrics)
        self.log(metrics)
        self._end_with_best()
        self._tell("train_end")
        self._finish_current_push()
        return TrainOutput(state.global_step, train_loss, metrics)

    def _take_loss(self, reading: Reading | None) -> None:
        """Add what was read to the mean over the whole training."""
        if reading is not None and reading.num_steps > reading.num_bad:
            total, steps = self._loss_so_far
            num = reading.num_steps - reading.num_bad
            self._loss_so_far = (total + reading.loss * num, steps + num)

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate in the middle of training, and let the schedule and the search know."""
        metrics = self.evaluate(ignore_keys=ignore_keys_for_eval)
        self._last_metrics = metrics
        self._report_to_hp_search(trial, self.state.global_step, metrics)
        if follows_metric(self.lr_scheduler) and not skip_scheduler:
            name = self._best_metric_name() or "eval_loss"
            if name not in metrics:
                raise CheckpointMetricMissing(name, list(metrics), "let the schedule follow")
            self.lr_scheduler.step(metrics[name])
        return metrics

    def end(self) -> None:
        """Close what records the run, and leave the process group."""
        self._close_records()
        self._session.world.close()
        current.clear()
