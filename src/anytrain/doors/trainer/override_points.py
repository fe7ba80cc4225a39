"""What a subclass of `Trainer` may override, by the names that HF's Trainer has.

This is the seam between `Trainer` and its parts. What users call is in trainer.py; what they may
override is here, and each part calls it on the Trainer, so that an override counts everywhere and
`super()` does anytrain's work. A subclass that overrides what anytrain's loop never calls is told
so at once, for its code would do nothing; what is asked of a Trainer is answered truthfully.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Sampler, SequentialSampler

from anytrain.core.errors import BadInput, BadType
from anytrain.doors.accelerator import Accelerator
from anytrain.doors.callbacks import Callbacks, TrainerState
from anytrain.doors.trainer import preparing
from anytrain.doors.trainer.outputs import EvalLoopOutput, HPSearchBackend, has_length
from anytrain.doors.trainer.overrides import (
    LOOP,
    NEVER_CALLED,
    goes_on,
    inside,
    refuse,
    tell_replaced,
)
from anytrain.doors.training_args import TrainingArguments
from anytrain.engine import objective
from anytrain.engine.assemble.run import Run
from anytrain.engine.assemble.session import Session
from anytrain.engine.data.buckets import Numbers
from anytrain.engine.data.columns import base_model, kept_columns
from anytrain.engine.optim import build
from anytrain.engine.prepared.model import holds_device_map
from anytrain.engine.step.step import let_train
from anytrain.engine.tree import map_tensors

if TYPE_CHECKING:
    from anytrain.doors.trainer.trainer import TrainerParts


class OverridePoints:
    """What a subclass of `Trainer` may override, and what HF's Trainer answers of itself.

    TrainerParts of a Trainer call these on the Trainer, so that an override counts everywhere.
    """

    args: TrainingArguments
    model: nn.Module
    state: TrainerState
    accelerator: Accelerator
    callback_handler: Callbacks
    processing_class: Any
    train_dataset: Any
    label_names: list[str]
    compute_loss_func: Callable[..., Any] | None
    hp_search_backend: HPSearchBackend | None = None
    hp_name: Callable[[Any], str] | None = None
    current_flos: float
    loss_is_scaled_for_ga: bool | None = None
    """Whether an overridden compute_loss returns its share of the step's mean; None finds out."""
    deepspeed = None
    is_deepspeed_enabled = False
    is_distributed_loading_by_transformers = False
    is_fsdp_enabled = False
    is_fsdp_xla_enabled = False
    is_fsdp_xla_v1_enabled = False
    is_fsdp_xla_v2_enabled = False
    _accepts_loss_kwargs: bool | None = None
    _as_made: Mapping[str, Any]
    """What anytrain's own class came with, whatever is put in its place later."""
    _parts: TrainerParts
    _run: Run
    _session: Session
    _shifts: bool
    _signature_columns: list[str] | None
    _smoothing: float

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a subclass whose code would never run."""
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("anytrain."):
            kinds = reversed(cls.__mro__)
            cls._as_made = {name: value for kind in kinds for name, value in vars(kind).items()}
            return
        users = [kind for kind in cls.__mro__ if not issubclass(kind, OverridePoints)]
        idle = NEVER_CALLED.intersection(vars(cls)) | {
            name for kind in users for name in NEVER_CALLED.intersection(vars(kind))
        }
        refuse(cls.__name__, idle - {LOOP} if goes_on(vars(cls).get(LOOP)) else idle)

    def _refuse_idle(self) -> None:
        """Refuse to train where code was put on a Trainer or its class that would never run."""
        kind = type(self)
        put = {n for n in NEVER_CALLED if getattr(kind, n, None) is not self._as_made.get(n)}
        refuse(f"This {kind.__name__}", (put | NEVER_CALLED.intersection(vars(self))) - {LOOP})
        tell_replaced()

    def _is_own(self, name: str) -> bool:
        """Whether a method is a subclass's, or was put on this very Trainer or its class."""
        return getattr(getattr(self, name), "__func__", None) is not self._as_made[name]

    # -- the step: written out here, for a step passes through no more than it must ------------

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Run one micro-batch forward and backward; return its share of the step's loss.

        Args:
            model: The model as it is trained, wrapped where there are several processes.
            inputs: The micro-batch, as the collator made it.
            num_items_in_batch: The items of the whole step, which its loss is the mean
                over. None: those of the step that is going on.
        """
        let_train(model)
        if num_items_in_batch is None:
            num_items_in_batch = self._parts.steps.items_now
        inputs = self._prepare_inputs(inputs)
        own: torch.Tensor | int = 1
        if num_items_in_batch is not None:
            own = objective.num_items(inputs, shifted=self._shifts)
        counted = self._parts.steps.counted
        if counted is not None and num_items_in_batch is not None:
            counted.take(own, num_items_in_batch)
        with self.compute_loss_context_manager():
            items: dict[str, Any] = {"num_items_in_batch": num_items_in_batch}
            known = objective.takes(self.compute_loss, *items)  # not to older scripts' own
            loss = self.compute_loss(model, inputs, **(items if known else {}))
        if not isinstance(loss, torch.Tensor):
            raise BadType(
                f"compute_loss returned a {type(loss).__name__}, not a tensor.",
                why="a loss is a tensor with one value.",
                fix="return the loss alone, unless return_outputs is True.",
            )
        loss = loss.mean() if loss.ndim else loss
        if num_items_in_batch is not None and not self._parts.steps.is_scaled():
            loss = objective.weighed(loss, own, num_items_in_batch, self._session.world.size)
        if num_items_in_batch is None:
            loss = objective.some(loss, inputs, shifted=self._shifts)
        scale = self._session.precision.scale
        (loss if scale is None else scale(loss)).backward()
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            self._session.backend.release()
        return loss.detach()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return a micro-batch's loss: its mean, or given the step's items its share of theirs.

        Args:
            model: The model as it is trained.
            inputs: The micro-batch, on the device.
            return_outputs: Whether to return (loss, outputs), as an evaluation wants it.
            num_items_in_batch: The items of the whole step, over all micro-batches and
                processes. None: the mean over this micro-batch.
        """
        own: torch.Tensor | int = 1
        if num_items_in_batch is not None:
            own = objective.num_items(inputs, shifted=self._shifts)
        custom, labels = self.compute_loss_func, None
        if custom is not None or self._smoothing > 0:
            inputs, labels = self._parts.steps.labels_apart(inputs)
            if custom is None and labels is None:
                raise preparing.no_labels_to_soften(inputs, self.label_names)
        outputs = objective.call(model, inputs)
        scaled = False
        if custom is not None:
            loss = custom(outputs, labels, num_items_in_batch=num_items_in_batch)
            scaled = objective.reads(custom, "num_items_in_batch")
        elif labels is not None:
            loss = preparing.smoothed(outputs, labels, self._smoothing, base_model(self.model))
        else:
            left_out = partial(self._parts.loaders.columns_left_out, is_training=model.training)
            loss = objective.loss_of(outputs, inputs, left_out)
        if num_items_in_batch is not None:
            items, size = num_items_in_batch, self._session.world.size
            loss = loss * size if scaled else objective.weighed(loss, own, items, size)
        return (loss, outputs) if return_outputs else loss

    def compute_loss_context_manager(self) -> contextlib.AbstractContextManager[Any]:
        """Return what the loss is computed in; the model enters its precision by itself."""
        return self.autocast_smart_context_manager()

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> contextlib.AbstractContextManager[Any]:
        """Return nothing to enter: the model's forward enters its precision by itself.

        Args:
            cache_enabled: Taken as HF has it; there is nothing to keep.
        """
        return contextlib.nullcontext()

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Return a batch on the device, where the loader has put it already."""
        session = self._run.session
        if isinstance(inputs, Mapping) and not inputs:
            known = ", ".join(self._signature_columns or [])
            raise BadInput(
                "The batch is empty: the model would get nothing.",
                why=f"no column of the data set is one that the model takes ({known}).",
                fix="rename the columns, or pass remove_unused_columns=False.",
            )
        own = self._prepare_input
        if getattr(own, "__func__", None) is not self._as_made["_prepare_input"]:
            return own(inputs)
        device = session.device
        if type(inputs) is dict and all(
            isinstance(value, torch.Tensor) and value.device == device for value in inputs.values()
        ):
            return dict(inputs)  # a copy: losses take labels out
        return map_tensors(
            lambda tensor: (
                tensor if tensor.device == device else session.backend.place(tensor, device, False)
            ),
            inputs,
        )

    def _prepare_input(self, data: Any) -> Any:
        """Return a part of a batch on the device; only called where it is overridden."""
        if isinstance(data, Mapping):
            return type(data)({name: self._prepare_input(part) for name, part in data.items()})  # type: ignore[call-arg]  # as HF makes it
        if isinstance(data, (list, tuple)):
            return type(data)(self._prepare_input(part) for part in data)
        session = self._run.session
        if not isinstance(data, torch.Tensor) or data.device == session.device:
            return data
        return session.backend.place(data, session.device, False)

    # -- evaluation ---------------------------------------------------------------------------

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Return one batch's loss, logits and labels; each is None where there is none.

        Args:
            model: The model, in evaluation mode.
            inputs: The batch.
            prediction_loss_only: Whether to return the loss alone.
            ignore_keys: What of a model's output to leave out of the predictions, by name.
                None: what its config names in keys_to_ignore_at_inference, else
                past_key_values.
        """
        return self._parts.evaluator.prediction_step(
            model, inputs, prediction_loss_only, ignore_keys
        )

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Predict every sample of a loader once; return predictions, labels and metrics.

        Args:
            dataloader: The loader to walk; it is prepared for this run where that was not
                done.
            description: What it is for, "Evaluation" or "Prediction"; the latter keeps all
                predictions.
            prediction_loss_only: Whether to compute the loss and keep nothing else. None:
                args.prediction_loss_only.
            ignore_keys: What of a model's output to leave out of the predictions, by name.
                None: what its config names in keys_to_ignore_at_inference, else
                past_key_values.
            metric_key_prefix: What the names of metrics begin with: "eval" gives
                eval_loss.
        """
        return self._parts.evaluator.evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate in the middle of training, and let the schedule and the search know."""
        return self._parts.training.evaluate(trial, ignore_keys_for_eval, skip_scheduler)

    # -- data ---------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the loader that training walks; override it to train on another."""
        return self._parts.loaders.train_loader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return the loader of an evaluation: of the data set given, or named, or the Trainer's.

        Args:
            eval_dataset: A data set, or the name of one in the Trainer's dict of data
                sets. None: the Trainer's own.
        """
        return self._parts.loaders.eval_loader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return the loader of a prediction.

        Args:
            test_dataset: The samples to predict.
        """
        return self._parts.loaders.test_loader(test_dataset)

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Return how many samples a loader has, as well as can be told.

        Args:
            dataloader: The loader. Where its data set has no length, batches are counted
                as full.
        """
        return self._parts.loaders.num_examples(dataloader)

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Sampler[Any] | None] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader[Any]:
        """Return the loader of a data set, as training or an evaluation walks it."""
        return self._parts.loaders.make(
            dataset, description, batch_size, sampler_fn, is_training, dataloader_key
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[Any] | None:
        """Return the order of training: by train_sampling_strategy."""
        return self._parts.loaders.train_sampler(train_dataset)

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler[Any] | None:
        return SequentialSampler(eval_dataset) if has_length(eval_dataset) else None

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = kept_columns(self.model, self.label_names)

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        return self._parts.loaders.without_unused_columns(dataset, description)

    def _get_collator_with_removed_columns(
        self, data_collator: Callable[[list[Any]], Any], description: str | None = None
    ) -> Callable[[list[Any]], Any]:
        return self._parts.loaders.collator_without_unused_columns(data_collator, description)

    @property
    def _train_batch_size(self) -> int:
        """The samples of a micro-batch; subclasses that make their own loader read it."""
        return self.args.train_batch_size

    @property
    def _eval_dataloaders(self) -> dict[str, Any]:
        """The loaders that were kept; subclasses that make their own ask here for one."""
        return self._parts.loaders.kept

    @_eval_dataloaders.setter
    def _eval_dataloaders(self, kept: dict[str, Any]) -> None:
        self._parts.loaders.kept = kept

    def _obstacle(self) -> str | None:
        return self._parts.steps.obstacle()

    def _small_because(self, dataset: Any, *, is_training: bool) -> str | None:
        return self._parts.shapes.small_because(dataset, is_training=is_training)

    def _lengths_of(self, dataset: Any) -> Numbers:
        return self._parts.lengths.measured(dataset)

    # -- optimizer and schedule ---------------------------------------------------------------

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make the optimizer and the schedule.

        Args:
            num_training_steps: Optimizer steps of the whole training.
        """
        self.create_optimizer()
        self.create_scheduler(num_training_steps)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Make the optimizer, unless there is one; weight decay spares norms and biases.

        Args:
            model: Whose parameters to train. None: the Trainer's model.
        """
        return self._parts.optimizing.create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> Any:
        """Make the learning-rate schedule, unless there is one.

        Args:
            num_training_steps: Optimizer steps of the whole training, the warm-up
                included.
            optimizer: Whose learning rate it moves. None: the Trainer's optimizer.
        """
        return self._parts.optimizing.create_scheduler(num_training_steps, optimizer)

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: nn.Module | None = None
    ) -> tuple[type[Optimizer], dict[str, Any]]:
        """Return the class that args.optim names, and what it is made with.

        Args:
            args: The settings to read optim, optim_args, the learning rate and Adam's
                numbers from.
            model: Taken as HF has it; no optimizer here asks for it.
        """
        return preparing.optimizer_class(args)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the parameters that weight decay applies to.

        Args:
            model: The model whose biases and norms are left out.
        """
        return build.decay_names(model)

    def get_learning_rates(self) -> list[float]:
        """Return the learning rate of each group; reads the device."""
        return [float(group["lr"]) for group in self._parts.optimizing.known().param_groups]

    def _get_learning_rate(self) -> float:
        return self.get_learning_rates()[0]

    # -- logs and counts ----------------------------------------------------------------------

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Write values down everywhere: history, journal, trackers, callbacks.

        Args:
            logs: Numbers by name; the epoch is added.
            start_time: When the training began, for tokens a second where tokens are
                counted.
        """
        self._parts.recorder.log(logs, start_time)

    def floating_point_ops(self, inputs: Any) -> float:
        """Return the operations of one batch: six a token and parameter, where both are known.

        Args:
            inputs: The batch.
        """
        name = getattr(self.model, "main_input_name", "input_ids")
        main = inputs.get(name) if isinstance(inputs, Mapping) else None
        count: Any = getattr(self.model, "num_parameters", None)
        if not isinstance(main, torch.Tensor) or not callable(count):
            return 0.0
        return 6.0 * main.numel() * int(count(exclude_embeddings=True))

    def store_flos(self) -> None:
        """Add the operations since the last time to the state."""
        self.state.total_flos += sum(self._session.world.gather_object(self.current_flos))
        self.current_flos = 0.0

    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor | None = None,
        grad_norm: torch.Tensor | float | None = None,
        model: nn.Module | None = None,
        trial: Any = None,
        epoch: float | None = None,
        ignore_keys_for_eval: list[str] | None = None,
        start_time: float | None = None,
        learning_rate: float | None = None,
    ) -> None:
        """Log, evaluate and save, as callbacks ask; the values are for those who override it."""
        self._parts.training.serve()

    def _nested_gather(self, tensors: Any, name: str | None = None) -> Any:
        """Return the values of all ranks, one behind the other."""
        return self.accelerator.gather(tensors)

    # -- saving, resuming, the best -----------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model so that from_pretrained loads it; each file is whole or absent.

        Args:
            output_dir: The folder. None: args.output_dir.
            _internal_call: Whether the Trainer itself is saving; then nothing is pushed to
                the hub.
        """
        self._parts.saver.save_model(output_dir, pushes=not _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the model, the tokenizer and the arguments, on the process that saves."""
        self._parts.saver.write_model(output_dir, state_dict)

    def _save_checkpoint(self, model: nn.Module, trial: Any, *, wait: bool = False) -> None:
        """Write the whole run to checkpoint-<step>, behind the loop unless told to wait."""
        self._parts.saver.save_checkpoint(trial, wait=wait)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str | os.PathLike[str], model: nn.Module | None = None
    ) -> None:
        """Put a checkpoint's weights into the model, before an optimizer is made for them."""
        self._parts.saver.load_model(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | os.PathLike[str] | None) -> None:
        """Put the optimizer and its schedule back, once both are made."""
        self._parts.saver.load_optimizers(checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Let the optimizer and its schedule go into the checkpoint that is being written."""
        self._parts.saver.keep_optimizers()

    def _load_callback_state(self) -> None:
        """Make the callbacks again as the state has them, where the arguments ask for it."""
        if self.args.restore_callback_states_from_checkpoint:
            self.callback_handler.restore(self.state.stateful_callbacks)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Whether this evaluation is the best so far, by metric_for_best_model."""
        return self._parts.best.is_new(metrics)

    def _load_best_model(self) -> None:
        """Put the best checkpoint's weights into the model, as load_best_model_at_end asks."""
        self._parts.best.load()

    def _alone_in_folder(self) -> contextlib.AbstractContextManager[None]:
        """Return what keeps the folder to this run while it trains."""
        return self._parts.saver.alone_in_folder()

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a checkpoint's model behind the loop, as hub_strategy says."""
        self._parts.hub.push_checkpoint(checkpoint_folder)

    def _finish_current_push(self) -> None:
        """Wait for what is pushed behind the loop, and tell if it failed."""
        self._parts.hub.finish()

    # -- a search -----------------------------------------------------------------------------

    def _hp_search_setup(self, trial: Any) -> None:
        """Put a trial's values into the arguments; outside a search, do nothing."""
        self._parts.search.set_up(trial)

    def _report_to_hp_search(self, trial: Any, step: int, metrics: Mapping[str, float]) -> None:
        """Tell optuna how a trial stands; leave it, on every rank, if optuna gives it up."""
        self._parts.search.report(trial, step, metrics)

    def _get_output_dir(self, trial: Any) -> str:
        """Return the folder of a run: the output folder, or a trial's folder inside it."""
        root = str(self.args.output_dir)
        if self.hp_search_backend is None or trial is None:
            return root
        name = self.hp_name(trial) if self.hp_name is not None else f"run-{trial.number}"
        return str(Path(root) / name)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Return a fresh model from `model_init`, which may take the trial.

        Args:
            trial: The trial, handed on where `model_init` takes one.
        """
        return self._parts.search.make_model(trial)

    # -- what HF's Trainer says of itself ------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """What older scripts call `processing_class`."""
        return self.processing_class

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self.processing_class = tokenizer

    @property
    def gather_function(self) -> Callable[[Any], Any]:
        """What joins predictions of all ranks, each sample once."""
        return self.accelerator.gather_for_metrics

    @property
    def is_model_parallel(self) -> bool:
        """Whether the model's loader has spread it over several devices."""
        return holds_device_map(self.model)

    @property
    def label_smoother(self) -> Callable[..., torch.Tensor] | None:
        """The loss against softened labels, None where labels are not softened."""
        return partial(preparing.smooth, self._smoothing) if self._smoothing else None

    @property
    def neftune_noise_alpha(self) -> float | None:
        """How much noise the embeddings get while training."""
        return self.args.neftune_noise_alpha

    @property
    def place_model_on_device(self) -> bool:
        """Whether the Trainer moves the model to its device."""
        return self.args.place_model_on_device is not False

    @property
    def model_accepts_loss_kwargs(self) -> bool:
        """Whether the model's forward takes more than it names.

        HF scales a loss by it. Here a loss is the mean over the step's items for any model, and
        setting this changes nothing.
        """
        if self._accepts_loss_kwargs is not None:
            return self._accepts_loss_kwargs
        parameters = inspect.signature(self.model.forward).parameters.values()
        return any(p.kind is p.VAR_KEYWORD for p in parameters)

    @model_accepts_loss_kwargs.setter
    def model_accepts_loss_kwargs(self, accepts: bool) -> None:
        self._accepts_loss_kwargs = accepts

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the samples of one optimizer step, over all processes.

        Args:
            args: The settings to count by.
        """
        in_one = args.train_batch_size * args.gradient_accumulation_steps
        return int(in_one * self._session.world.size)

    def get_sp_size(self) -> int:
        """Return 1: sequences are not split over processes."""
        return 1

    def get_cp_size(self) -> int:
        """Return 1: the context is not split over processes."""
        return 1

    def get_tp_size(self) -> int:
        """Return 1: tensors are not split over processes."""
        return 1

    def create_accelerator_and_postprocess(self) -> None:
        """Refuse: `trainer.accelerator` is there from the start."""
        raise inside("create_accelerator_and_postprocess", "use trainer.accelerator.")

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> None:
        """Refuse: a step's micro-batches are grouped by the feed.

        Args:
            epoch_iterator: Not used.
            num_batches: Not used.
            device: Not used.
        """
        raise inside("get_batch_samples", "walk trainer.get_train_dataloader().")

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any
    ) -> tuple[int, int, int, float, int, int, int]:
        """Return how long a training with this loader is.

        That is its epochs, steps per epoch, samples of an epoch and of the whole training, samples
        of a step, batches of an epoch, and steps.

        Args:
            args: The settings to count by.
            dataloader: The training loader.
        """
        return self._parts.training.initial_values(args, dataloader)
