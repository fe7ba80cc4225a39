"""`Trainer`: our loop, your model and data.

What users call is here, and hands over to the part that does it; what a subclass may override is in
override_points.py. What happens in a step is in engine/loop.py and engine/step/step.py.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

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
    TrainerControl,
    TrainerState,
)
from anytrain.doors.described import NOWHERE, Described, sheet
from anytrain.doors.trainer import preparing
from anytrain.doors.trainer.best import Best
from anytrain.doors.trainer.bucket_lengths import BucketLengths
from anytrain.doors.trainer.evaluator import Evaluator
from anytrain.doors.trainer.hub import Hub
from anytrain.doors.trainer.loaders import Loaders, check_eval_sets, default_collator
from anytrain.doors.trainer.model_card import CardFacts
from anytrain.doors.trainer.outputs import (
    TRAINER_STATE_NAME,
    BestRun,
    HPSearchBackend,
    PredictionOutput,
    TrainOutput,
    default_compute_objective,
    has_length,
    metrics_format,
    print_metrics,
    write_metrics,
)
from anytrain.doors.trainer.override_points import OverridePoints
from anytrain.doors.trainer.preflight import preflight, shorten
from anytrain.doors.trainer.preparing import Optimizing
from anytrain.doors.trainer.recorder import RunRecorder, StageMemory
from anytrain.doors.trainer.resuming import Resuming
from anytrain.doors.trainer.saver import Saver
from anytrain.doors.trainer.search import Search, Space
from anytrain.doors.trainer.shapes import Shapes
from anytrain.doors.trainer.steps import Steps
from anytrain.doors.trainer.training import Training, check_end
from anytrain.doors.training_args import TrainingArguments, session as sessions
from anytrain.doors.training_args.session import run_options
from anytrain.engine import objective, rng
from anytrain.engine.assemble import current
from anytrain.engine.assemble.run import Run
from anytrain.engine.assemble.step_boundary import BetweenSteps
from anytrain.engine.data.columns import base_model, can_return_loss, label_names
from anytrain.engine.loop import Progress
from anytrain.engine.prepared.walk import Cursor
from anytrain.engine.recording.meter import Meter
from anytrain.engine.recording.trackers import Trackers
from anytrain.engine.step.activations import Activations
from anytrain.engine.step.step import Step
from anytrain.insight.preflight.report import Report

if TYPE_CHECKING:
    from concurrent.futures import Future

    from huggingface_hub import CommitInfo


class TrainerParts:
    """What a Trainer is put together from; each part holds its own state."""

    def __init__(self, trainer: Trainer) -> None:
        self.loaders = Loaders(trainer)
        self.lengths = BucketLengths(trainer)
        self.shapes = Shapes(trainer)
        self.optimizing = Optimizing(trainer)
        self.steps = Steps(trainer)
        self.training = Training(trainer)
        self.evaluator = Evaluator(trainer)
        self.recorder = RunRecorder(trainer)
        self.saver = Saver(trainer)
        self.resuming = Resuming(trainer)
        self.best = Best(trainer)
        self.hub = Hub(trainer)
        self.search = Search(trainer)

    def given_to(self, trainer: Trainer) -> TrainerParts:
        """Return the same parts, in the state they are in, for a copy of their Trainer."""
        made = copy.copy(self)
        for name, part in vars(self).items():
            of_copy = copy.copy(part)
            of_copy._trainer = trainer
            setattr(made, name, of_copy)
        return made


class Trainer(Described, OverridePoints, NamedArguments):
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

    hub_model_id: str | None = None
    push_in_progress: Future[Any] | None = None
    """The newest push behind the loop."""
    hp_space: Space | None = None
    compute_objective: Callable[[dict[str, float]], Any] = staticmethod(default_compute_objective)
    objective: Any = None
    model_preparation_time: float
    """How long the model took to prepare where it was not trained before; else not there."""
    current_gradient_accumulation_steps: int
    """The batches of the present update; subclasses read it in compute_loss."""
    _activations: Activations | None = None
    _asked: Any = None
    """What the session was opened by."""
    _trial: Any = None
    _total_loss_scalar = 0.0
    """The losses that were logged by a subclass's own code, added up."""
    _ignored_in_eval: list[str] | None = None
    _progress: Progress
    _meter: Meter
    _between: BetweenSteps
    _engine_step: Step

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
        rng.seed_everything(self.args.seed)
        self.processing_class = preparing.one_processing_class(processing_class, tokenizer)
        self.model_init = preparing.one_model(model, model_init)
        preparing.check_optimizers(optimizers, optimizer_cls_and_kwargs, model_init)
        check_eval_sets(self, eval_dataset)
        check_end(self.args, has_end=train_dataset is None or has_length(train_dataset))
        self._follow_arguments()
        preparing.check_tf32(self.args, self._session)
        self._new_run()
        self._parts = TrainerParts(self)
        self._memory = StageMemory(self._session, off=self.args.skip_memory_metrics)
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
        self.is_in_train = False
        self.current_flos = 0.0
        self._began, self._globalstep_last_logged = time.time(), 0
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
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
        self._parts.recorder.tell("init_end")
        current.take(self._session)

    def __copy__(self) -> Self:
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        made._parts = self._parts.given_to(made)
        return made

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
        base = base_model(self.model)
        self._signature_columns = None
        self.label_names = self.args.label_names or label_names(base)
        self.can_return_loss = can_return_loss(base)
        self._shifts = objective.shifts_labels(base)
        self._smoothing = preparing.smoothing(self.args, base)
        if self.train_dataset is not None and not self._parts.steps.has_own_loss():
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
            shorten(self, observer)
            resume_from_checkpoint = trial = None  # it has a folder of its own
        self._refuse_idle()
        self._parts.best.check_metric()
        self._memory.start()
        self._hp_search_setup(trial)
        self._follow_arguments()
        self._ignored_in_eval = ignore_keys_for_eval
        with self._alone_in_folder():
            where = self._parts.resuming.find(resume_from_checkpoint)
            self.is_in_train = True
            self._new_run()
            self._parts.saver.begin()
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
                self._parts.saver.trained_before = True
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
        self._parts.recorder.leave()
        self._parts.saver.end()

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
        loader = self._parts.loaders.prepared(self.get_train_dataloader())
        saved = self._parts.resuming.open(where)
        self._parts.saver.load_own_model(where)
        self._parts.training.set_length(loader, trial, saved)
        self._parts.training.assemble(loader)
        if where is not None:
            self._parts.resuming.resume(where, saved)
        self._parts.saver.begin_folder(where)
        with self._parts.recorder.timed():
            return self._parts.training.fit()

    def _follow_arguments(self) -> None:
        """Open a session, and another one once the arguments ask for it: bf16, for example."""
        asked, before = sessions.asked(self.args), self._asked
        if asked == before:
            return
        if before is not None:
            self.args.check()  # what was assigned since then, nobody has looked at yet
        self._session, self._asked = sessions.open_session(self.args), asked
        if before is not None:
            current.take(self._session)

    # -- evaluating and predicting ------------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Return the loss and the metrics on a data set, each of a dict's, or the Trainer's.

        Args:
            eval_dataset: A data set, the name of one in the Trainer's dict of data sets,
                or a dict of several. None: the Trainer's own.
            ignore_keys: What of a model's output to leave out of the predictions, by name.
                None: what its config names in keys_to_ignore_at_inference, else
                past_key_values.
            metric_key_prefix: What the names of metrics begin with: "eval" gives
                eval_loss.
        """
        return self._parts.evaluator.evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
    ) -> PredictionOutput:
        """Return the predictions on a data set, with its labels and metrics where it has labels.

        Args:
            test_dataset: The samples to predict. Without labels there are predictions and
                no metrics.
            ignore_keys: What of a model's output to leave out of the predictions, by name.
                None: what its config names in keys_to_ignore_at_inference, else
                past_key_values.
            metric_key_prefix: What the names of metrics begin with: "test" gives
                test_loss.
        """
        return self._parts.evaluator.predict(test_dataset, ignore_keys, metric_key_prefix)

    def preflight(
        self,
        targets: str | Sequence[str] = (),
        *,
        num_processes: int | None = None,
        quick: bool = False,
        thorough: bool = False,
    ) -> Report:
        """Return what awaits this training on targets such as "mps:16GB"; without any, here.

        Two steps and one batch of evaluation are traced in a copy of this process: nothing is
        trained, and the Trainer stays as it is. All that is written is what was foretold of the
        memory: preflight.json in `output_dir`, for the day on which it turns out otherwise. Print
        the report, or ask it for `as_json()` or `as_html()`. A quick one does not look for the
        largest batch, a thorough one looks for it with bf16 and activation checkpointing, too.
        `num_processes` says how many will train together; without it, as many as do now.

        Args:
            targets: Devices and their memory, such as "mps:16GB" or ["cuda:24GB",
                "tpu:v5e"]. None: this machine's device.
            num_processes: How many processes will train together. None: as many as now.
            quick: Skip the search for the largest batch.
            thorough: Search for the largest batch with bf16 and activation checkpointing
                too.
        """
        return preflight(self, targets, num_processes, quick=quick, thorough=thorough)

    def hyperparameter_search(
        self,
        hp_space: Space | None = None,
        compute_objective: Callable[[dict[str, float]], Any] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: str | HPSearchBackend | None = None,
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> BestRun | list[BestRun]:
        """Train `n_trials` models with settings that optuna suggests; return the best trial.

        With several directions, return every trial that no other beats in all of them. The
        arguments are as they were once the search is over. A line says where each trial's folder
        is; `anytrain report` of the folder that they are in compares them. `kwargs` go to optuna's
        `create_study` (sampler, pruner, storage) and `Study.optimize` (timeout, catch).

        Args:
            hp_space: `f(trial)` that returns settings by the names of TrainingArguments.
                None: learning rate, epochs, seed and batch size in HF's ranges.
            compute_objective: `f(metrics)` that returns the number to compare trials by,
                or a list of them. None: the sum of your metrics, or the evaluation's loss
                where there are none.
            n_trials: How many models to train.
            direction: "minimize" or "maximize", or a list with one for each objective.
            backend: "optuna", the only one here, or None.
            hp_name: `f(trial)` that returns the trial's name, which its folder has too.
                None: run-0, run-1...
            **kwargs: What goes to optuna.
        """
        return self._parts.search.run(
            hp_space, compute_objective, n_trials, direction, backend, hp_name, **kwargs
        )

    # -- optimizer and ranks ------------------------------------------------------------------

    def get_num_trainable_parameters(self) -> int:
        """Return how many numbers training may change."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def get_optimizer_group(self, param: str | torch.nn.Parameter | None = None) -> Any:
        """Return the group that holds a parameter, or all groups.

        Args:
            param: A parameter, or its name. None: the parameters of every group.
        """
        groups = self._parts.optimizing.known().param_groups
        if param is None:
            return [group["params"] for group in groups]
        if isinstance(param, str):
            param = dict(self.model.named_parameters())[param]
        return next((g for g in groups if any(param is held for held in g["params"])), None)

    def is_world_process_zero(self) -> bool:
        """Whether this process is the one that writes for all."""
        return self._session.world.rank == 0

    def is_local_process_zero(self) -> bool:
        """Whether this process is the first one of its machine."""
        return self._session.world.local_rank == 0

    # -- results and the hub ------------------------------------------------------------------

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
        if self.is_world_process_zero():
            print_metrics(split, metrics)

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write <split>_results.json and, when `combined`, add to all_results.json.

        Args:
            split: What they are of; it begins the file's name.
            metrics: Numbers by name.
            combined: Whether to add them to all_results.json too.
        """
        if self.is_world_process_zero():
            folder = Path(str(self.args.output_dir))
            write_metrics(folder, split, metrics, combined=combined)

    def save_state(self) -> None:
        """Write trainer_state.json into the output folder."""
        if self.is_world_process_zero():
            target = Path(str(self.args.output_dir)) / TRAINER_STATE_NAME
            target.parent.mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(str(target))

    def init_hf_repo(self, token: str | None = None) -> None:
        """Make the repository, or find out now why that cannot be.

        Args:
            token: The hub's token. None: args.hub_token, else the one that `hf auth login`
                has kept.
        """
        self._parts.hub.open(token)

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write README.md into the output folder: header, settings, results and versions.

        Args:
            language: Language of the data, as the hub writes it: en.
            license: License of the model, as the hub writes it: apache-2.0.
            tags: Tags of the model's page.
            model_name: Title of the card. None: the name of the output folder.
            finetuned_from: The model that training began with. None: as the model's config
                says.
            tasks: Tasks, as the hub names them: text-classification.
            dataset_tags: The data sets' names on the hub.
            dataset: The data sets' names for readers.
            dataset_args: Their configurations or splits.
        """
        facts = CardFacts(
            language,
            license,
            tags,
            model_name,
            finetuned_from,
            tasks,
            dataset_tags,
            dataset,
            dataset_args,
        )
        self._parts.hub.write_card(facts)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> CommitInfo | Future[CommitInfo] | None:
        """Save the model, write its card, and push the output folder without checkpoints.

        Return what the hub answered, a future of it where `blocking` is False, and None on
        every process but the main one. `kwargs` go to `create_model_card`.

        Args:
            commit_message: Message of the commit.
            blocking: Whether to wait until everything is uploaded.
            token: The hub's token. None: args.hub_token, else the one that `hf auth login`
                has kept.
            revision: The branch to push to. None: args.hub_revision, else the main one.
            **kwargs: What goes to `create_model_card`.
        """
        return self._parts.hub.push(commit_message, blocking, token, revision, **kwargs)

    @property
    def control(self) -> TrainerControl:
        """The flags that callbacks set."""
        return self.callback_handler.control

    @control.setter
    def control(self, control: TrainerControl) -> None:
        self.callback_handler.control = control

    @property
    def _trackers(self) -> Trackers | None:
        return self._parts.recorder.trackers

    def end(self) -> None:
        """Close what records the run, and leave the process group."""
        self._parts.recorder.close()
        self._session.world.close()
        current.clear()
