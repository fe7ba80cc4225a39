"""What comes before the first step: checks, what the arguments ask of a model, the optimizer."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from anytrain.core.errors import BadInput, BadType
from anytrain.core.notices import give_notice
from anytrain.doors.trainer.preflight import rehearsed, was_checkpointed
from anytrain.doors.training_args import TrainingArguments
from anytrain.engine import objective, rng
from anytrain.engine.assemble import session as sessions
from anytrain.engine.assemble.session import Session, replacements
from anytrain.engine.optim import build, schedules
from anytrain.engine.prepared import model as models
from anytrain.engine.step.activations import Activations

if TYPE_CHECKING:
    from anytrain.doors.trainer.trainer import Trainer


def own_arguments(args: TrainingArguments | None) -> TrainingArguments:
    """Return the arguments, or those that stand where none are given; refuse another library's."""
    if args is None:
        return TrainingArguments(output_dir="tmp_trainer")
    if not isinstance(args, TrainingArguments):
        kind = type(args)
        raise BadType(
            f"Cannot take the {kind.__name__} of {kind.__module__}.",
            why="a Trainer reads settings that only anytrain's TrainingArguments have, checked.",
            fix="import TrainingArguments from where Trainer is imported from; it takes the same "
            "names.",
        )
    observer = sessions.observer()
    return rehearsed(args, observer) if observer.is_watching else args


def one_processing_class(processing_class: Any, tokenizer: Any) -> Any:
    """Return the tokenizer or processor, by whichever of its two names it was given."""
    if tokenizer is None:
        return processing_class
    if processing_class is not None and processing_class is not tokenizer:
        raise BadInput(
            "Cannot take tokenizer= and processing_class=.",
            why="they are two names of the same thing.",
            fix="pass processing_class= alone.",
        )
    give_notice("tokenizer= is called processing_class= now.", stacklevel=3)
    return tokenizer


class NoModel(BadInput, RuntimeError):
    """A Trainer was given nothing to train; HF raises a RuntimeError there."""


def one_model(
    model: nn.Module | None, model_init: Callable[..., nn.Module] | None
) -> Callable[..., nn.Module] | None:
    """Return model_init, once it is clear which of the two makes the model."""
    if (model is None) == (model_init is None):
        raise (NoModel if model is None else BadInput)(
            "A Trainer takes either a model or model_init.",
            why="none was given." if model is None else "both were given.",
            fix="pass model=, or model_init= for a new model at each training.",
        )
    if model is not None and not isinstance(model, nn.Module):
        raise BadType(
            f"Cannot train a {type(model).__name__}.",
            why="a model is a torch.nn.Module.",
            fix="pass the model itself; a function that makes one is model_init=.",
        )
    return model_init


class OfAnotherModel(BadInput, RuntimeError):
    """An optimizer that does not hold the parameters that will be trained."""


def check_optimizers(optimizers: tuple[Any, Any], kind: Any, model_init: Any) -> None:
    """Refuse optimizers that would train another model."""
    given = any(part is not None for part in optimizers)
    if given and model_init is not None:
        raise OfAnotherModel(
            "Cannot take optimizers= with model_init=.",
            why="each training makes a new model, whose parameters that optimizer does not hold.",
            fix="override create_optimizer, or pass optimizer_cls_and_kwargs=.",
        )
    if given and kind is not None:
        raise BadInput(
            "Cannot take optimizers= and optimizer_cls_and_kwargs=.",
            why="each says which optimizer to use.",
            fix="pass one of them.",
        )


def check_model(model: nn.Module) -> None:
    """Refuse a model that has no loss to train by."""
    kind = type(model)
    config = getattr(model, "config", None)
    bare = kind.__module__.startswith("transformers.") and kind.__name__.endswith("Model")
    takes = inspect.signature(kind.forward).parameters
    known = any("label" in name for name in takes) or "return_loss" in takes
    if bare and config is not None and not known:
        raise BadInput(
            f"Cannot train {kind.__name__}: it computes hidden states and no loss.",
            why="it is the body of a model, without a head.",
            fix="load it by an AutoModelFor... class, such as AutoModelForSequenceClassification.",
        )


def set_cache(model: nn.Module, args: TrainingArguments) -> None:
    """Let a model keep its attention cache only where that was asked for."""
    config = getattr(model, "config", None)
    if config is not None and not isinstance(config, Mapping):
        config.use_cache = args.use_cache


def place(model: nn.Module, session: Session) -> None:
    """Put the model on its device, unless its loader has spread it already."""
    if not models.holds_device_map(model) and not models.is_quantized(model):
        models.move(model, session.device)


def check_tf32(args: TrainingArguments, session: Session) -> None:
    """Refuse tf32 where there is none."""
    if args.tf32 and session.backend.name != "cuda":
        raise BadInput(
            f"Cannot use tf32 on {session.backend.name!r}.",
            why="it is a format of NVIDIA's matrix units (Ampere and newer).",
            fix="leave tf32 out, or pass bf16=True where the device computes in it.",
        )


@contextmanager
def settings(args: TrainingArguments, session: Session) -> Iterator[None]:
    """Give the block what the arguments ask of torch and what a run replaces; then undo it."""
    with replacements(session), ExitStack() as put_back:
        if args.tf32 is not None:
            before = torch.get_float32_matmul_precision()
            put_back.callback(torch.set_float32_matmul_precision, before)
            torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
        if args.full_determinism:
            warns = torch.is_deterministic_algorithms_warn_only_enabled()
            was_on = torch.are_deterministic_algorithms_enabled()
            put_back.callback(torch.use_deterministic_algorithms, was_on, warn_only=warns)
            torch.use_deterministic_algorithms(True)
        yield


def tell_nothing_done(step: int, max_steps: int, args: TrainingArguments) -> None:
    """Say that a training has not trained: its data ended, or it was at its end already."""
    if step < max_steps:
        give_notice(
            f"Nothing was trained: the data ended before the first batch, {max_steps - step} steps "
            "before the end of the training.",
            stacklevel=4,
        )
    elif args.should_log:
        longer = f"max_steps above {max_steps}"
        if args.max_steps <= 0:
            longer = f"num_train_epochs above {args.num_train_epochs:g}"
        sys.stderr.write(
            f"anytrain: nothing left to do: the run is at its end, step {step} of {max_steps}. "
            f"To train on, pass {longer}; to train anew, another output_dir, or no "
            "resume_from_checkpoint.\n"
        )


def smoothing(args: TrainingArguments, model: nn.Module) -> float:
    """Return by how much labels are softened: not at all where a sample has several."""
    asked = float(args.label_smoothing_factor)
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    if asked and problem == "multi_label_classification":
        give_notice(
            "Label smoothing is not compatible with multi-label classification, the model's "
            "problem_type, where each label is a yes or no of its own: label_smoothing_factor is "
            "left out.",
            stacklevel=4,
        )
        return 0.0
    return asked


def smoothed(outputs: Any, labels: Any, epsilon: float, model: nn.Module) -> torch.Tensor:
    """Return the loss against softened labels."""
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else outputs
    logits = logits[0] if isinstance(logits, (list, tuple)) else logits
    if logits is None or labels.is_floating_point():
        raise BadInput(
            "Cannot use label_smoothing_factor with this model.",
            why="it returned nothing under 'logits'."
            if logits is None
            else f"its labels are {str(labels.dtype).removeprefix('torch.')} values, and only "
            "classes can be softened.",
            fix="leave label_smoothing_factor out, or pass compute_loss_func.",
        )
    shifted = objective.shifts_labels(model)
    return objective.smoothed(logits, labels, epsilon, shifted=shifted)


def no_labels_to_soften(inputs: Any, label_names: list[str]) -> BadInput:
    """Return the refusal of a batch in which nothing, or more than one thing, is the labels."""
    held = ", ".join(map(str, inputs)) if isinstance(inputs, Mapping) else "one tensor"
    known = ", ".join(label_names) if label_names else "labels"
    return BadInput(
        "Cannot use label_smoothing_factor: the labels of a batch are not known.",
        why=f"exactly one of {known} is to hold them, and the batch has {held}.",
        fix="name them, as in label_names=['y'], or leave label_smoothing_factor out.",
    )


@contextmanager
def model_for_training(trainer: Trainer, trial: Any) -> Iterator[None]:
    """Make the model anew if it has a maker, and give the block what the arguments ask of it."""
    args = trainer.args
    with ExitStack() as stack:
        stack.enter_context(settings(args, trainer._session))
        if trainer.model_init is not None:
            rng.seed_everything(args.seed)
            trainer.model = trainer.call_model_init(trial)
            trainer.optimizer = trainer.lr_scheduler = None
            trainer._inspect_model()
        elif args.place_model_on_device is not False:
            place(trainer.model, trainer._session)
        if args.gradient_checkpointing:
            _checkpoint_activations(trainer.model, args)
        _share_special_tokens(trainer.model, trainer.processing_class)
        trainer._activations = None
        if args.activation_checkpointing == "fit":
            trainer._activations = _activations(trainer)
            stack.callback(trainer._activations.restore)
        if args.neftune_noise_alpha is not None:
            stack.enter_context(_noise(trainer.model, float(args.neftune_noise_alpha)))
        yield


def _checkpoint_activations(model: nn.Module, args: TrainingArguments) -> None:
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise BadInput(
            f"Cannot use gradient_checkpointing with {type(model).__name__}.",
            why="it has no gradient_checkpointing_enable(), which says where to cut.",
            fix="use torch.utils.checkpoint in its forward, and leave the argument out.",
        )
    options: Any = dict(args.gradient_checkpointing_kwargs or {})
    takes = inspect.signature(enable).parameters
    direct = {name: options.pop(name) for name in list(options) if name in takes}
    enable(gradient_checkpointing_kwargs=options or None, **direct)


def _activations(trainer: Trainer) -> Activations:
    model = trainer.model
    found = Activations(model, partial(was_checkpointed, trainer))
    if not found.num_blocks:
        raise BadInput(
            f"Cannot use activation_checkpointing with {type(model).__name__}.",
            why="it repeats no block: no ModuleList or Sequential holds three or more modules of "
            "one class with half of its parameters.",
            fix="use torch.utils.checkpoint in its forward, or pass auto_find_batch_size=True.",
        )
    return found


def _share_special_tokens(model: nn.Module, tokenizer: Any) -> None:
    """Let the model know the tokenizer's padding, first and last tokens."""
    for config in (getattr(model, "config", None), getattr(model, "generation_config", None)):
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            known = getattr(tokenizer, name, None)
            if config is not None and known is not None and hasattr(config, name):
                setattr(config, name, known)


@contextmanager
def _noise(model: nn.Module, alpha: float) -> Iterator[None]:
    """Add noise to the input embeddings while training (NEFTune)."""
    find: Any = getattr(model, "get_input_embeddings", None)
    if find is None:
        raise BadInput(
            f"Cannot add noise to the embeddings of {type(model).__name__}.",
            why="it has no get_input_embeddings().",
            fix="leave neftune_noise_alpha out.",
        )

    def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return output
        most = alpha / (output.shape[1] * output.shape[2]) ** 0.5
        return output + torch.zeros_like(output).uniform_(-most, most)

    handle = find().register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def smooth(
    epsilon: float,
    model_output: Any,
    labels: torch.Tensor,
    shift_labels: bool = False,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Return the mean over the counted labels, or with the step's items a share of their mean."""
    logits = model_output["logits"] if isinstance(model_output, Mapping) else model_output[0]
    loss = objective.smoothed(logits, labels, epsilon, shifted=shift_labels)
    if num_items_in_batch is None:
        return loss
    counted = labels[..., 1:] if shift_labels else labels
    return loss * (counted != objective.IGNORED).sum() / num_items_in_batch


class Optimizing:
    """What makes the optimizer and the schedule, where they were not given."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.made_scheduler = False
        """Whether the schedule was made here: then the next training makes another one."""

    def create_optimizer(self, model: nn.Module | None) -> Optimizer:
        """Make the Trainer's optimizer, unless there is one."""
        trainer = self._trainer
        if trainer.optimizer is None:
            trained = trainer.model if model is None else model
            decayed = trainer.get_decay_parameter_names(trained)
            groups = build.parameter_groups(trained, trainer.args.weight_decay, decayed)
            if not any(group["params"] for group in groups):
                raise BadInput(
                    "Cannot train: the model has no parameter that may change.",
                    why="every parameter has requires_grad=False, or there is none.",
                    fix="unfreeze what is to be trained.",
                )
            if trainer.optimizer_cls_and_kwargs is not None:
                kind, options = trainer.optimizer_cls_and_kwargs
            else:
                kind, options = trainer.get_optimizer_cls_and_kwargs(trainer.args, trained)
            trainer.optimizer = _made(kind, groups, dict(options))
        made: Optimizer = trainer.optimizer
        return made

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None) -> Any:
        """Make the Trainer's learning-rate schedule, unless there is one."""
        trainer = self._trainer
        if trainer.lr_scheduler is None:
            holder = trainer.optimizer if optimizer is None else optimizer
            trainer.lr_scheduler = schedules.build(
                str(trainer.args.lr_scheduler_type),
                getattr(holder, "optimizer", holder),
                num_warmup_steps=trainer.args.get_warmup_steps(num_training_steps),
                num_training_steps=num_training_steps,
                options=trainer.args.lr_scheduler_kwargs or {},
            )
            self.made_scheduler = True
        return trainer.lr_scheduler

    def known(self) -> Any:
        """Return the optimizer, or refuse to say anything of one that is not there."""
        if self._trainer.optimizer is None:
            raise BadInput(
                "There is no optimizer yet.",
                why="it is made when training begins.",
                fix="call create_optimizer() first, or train().",
            )
        return self._trainer.optimizer


def optimizer_class(args: TrainingArguments) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return the class that args.optim names, and what it is made with."""
    return build.optimizer_class(
        str(args.optim),
        learning_rate=args.learning_rate,
        beta1=args.adam_beta1,
        beta2=args.adam_beta2,
        epsilon=args.adam_epsilon,
        options=build.parse_options(args.optim_args),
        fuses=args.device.type in _get_fused_kernels_supported_devices(),
    )


def _made(kind: type[Optimizer], groups: Any, options: dict[str, Any]) -> Optimizer:
    """Make an optimizer; users may have put what it is to train among its options, as HF lets them.

    Some (LOMO and its like) train a model by its name.
    """
    for name in ("params", "model", "optimizer_dict"):
        groups = options.pop(name, groups)
    return kind(groups, **options)


def set_mode(optimizer: Any, *, is_training: bool) -> None:
    """Tell an optimizer whether its weights train or are judged now, if it wants to know.

    A schedule-free one keeps two sets of weights, and swaps them in the model.
    """
    told = getattr(optimizer, "train" if is_training else "eval", None)
    if callable(told):
        told()
