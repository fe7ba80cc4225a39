"""Members of HF's `Trainer` that belong to the inside of its loop, or to engines not here.

Questions are answered truthfully; requests are refused; and a subclass that overrides what
anytrain's loop never calls is told so at once, for its code would do nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Set as AbstractSet
from functools import partial
from typing import Any

import torch
from torch import nn

from anytrain.core.errors import Unsupported
from anytrain.core.notices import give_notice
from anytrain.doors.accelerator import Accelerator
from anytrain.doors.trainer import num_steps
from anytrain.doors.trainer.outputs import has_length
from anytrain.doors.trainer.reports import Reports
from anytrain.doors.training_args import TrainingArguments
from anytrain.engine import objective
from anytrain.engine.prepared.model import holds_device_map

_NAMES = (
    "_build_accelerator_args _clip_grad_norm _finalize_training _get_grad_norm "
    "_get_num_items_in_batch _has_mixed_mesh_grads _init_training_state _inner_training_loop "
    "_issue_warnings_after_load _load_rng_state _load_scaler "
    "_mixed_mesh_grad_norm _move_model_to_device _prepare_context_parallel_inputs "
    "_prepare_for_training _run_epoch _save_rng_state "
    "_save_scaler _sync_replicated_trainable_parameters _track_num_input_tokens "
    "_tune_save_checkpoint _update_auto_batch_size _validate_args _wrap_model "
    "create_accelerator_and_postprocess get_batch_samples get_cp_size get_sp_size "
    "get_total_train_batch_size get_tp_size set_initial_training_values"
)
NEVER_CALLED = frozenset(_NAMES.split())
_LOOP = "_inner_training_loop"
"""It is called, but a copy of HF's in its place would not find what it works with."""
_INSTEAD = (
    "override training_step, compute_loss, create_optimizer, get_train_dataloader, "
    "prediction_step, evaluation_loop, log or save_model, or write a callback."
)


REPLACED: dict[str, Any] = {}
"""What a script has put in the place of a function of HF's modules, with what stood there."""


class UnlikeTransformers(Reports):
    """Truthful answers about what is not there."""

    model: nn.Module
    accelerator: Accelerator
    processing_class: Any
    deepspeed = None
    is_deepspeed_enabled = False
    is_distributed_loading_by_transformers = False
    is_fsdp_enabled = False
    is_fsdp_xla_enabled = False
    is_fsdp_xla_v1_enabled = False
    is_fsdp_xla_v2_enabled = False
    _accepts_loss_kwargs: bool | None = None
    _smoothing: float
    num_examples: Callable[[Any], int]

    _as_made: Mapping[str, Any]
    """What anytrain's own class came with, whatever is put in its place later."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a subclass whose code would never run."""
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("anytrain."):
            kinds = reversed(cls.__mro__)
            cls._as_made = {name: value for kind in kinds for name, value in vars(kind).items()}
            return
        users = [kind for kind in cls.__mro__ if not issubclass(kind, UnlikeTransformers)]
        idle = NEVER_CALLED.intersection(vars(cls)) | {
            name for kind in users for name in NEVER_CALLED.intersection(vars(kind))
        }
        _refuse(cls.__name__, idle - {_LOOP} if _calls_super(vars(cls).get(_LOOP)) else idle)

    def _refuse_idle(self) -> None:
        """Refuse to train where code was put on a Trainer or its class that would never run."""
        kind = type(self)
        put = {n for n in NEVER_CALLED if getattr(kind, n, None) is not self._as_made.get(n)}
        _refuse(f"This {kind.__name__}", (put | NEVER_CALLED.intersection(vars(self))) - {_LOOP})
        for name in REPLACED:
            give_notice(
                f"{name} was replaced, to no effect: anytrain's Trainer does not look its "
                f"functions up there. Instead, {_INSTEAD}",
                stacklevel=3,
            )

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
        return partial(_smooth, self._smoothing) if self._smoothing else None

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
        raise _inside("create_accelerator_and_postprocess", "use trainer.accelerator.")

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> None:
        """Refuse: a step's micro-batches are grouped by the feed.

        Args:
            epoch_iterator: Not used.
            num_batches: Not used.
            device: Not used.
        """
        raise _inside("get_batch_samples", "walk trainer.get_train_dataloader().")

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
        num_batches = len(dataloader) if has_length(dataloader) else None
        planned = num_steps.plan(args, num_batches, args.train_batch_size)
        in_step, in_all = self.get_total_train_batch_size(args), planned.max_steps
        per_epoch, per_training = in_all, float(in_step * in_all)
        examples = in_step * in_all
        if num_batches is not None:
            per_epoch = -(-num_batches // args.gradient_accumulation_steps)
            examples = self.num_examples(dataloader)
            if args.max_steps <= 0:
                per_training = examples * args.num_train_epochs
        batches = planned.batches_per_epoch
        return planned.num_epochs, per_epoch, examples, per_training, in_step, batches, in_all


def _refuse(who: str, idle: AbstractSet[str]) -> None:
    if idle:
        raise Unsupported(
            f"{who} overrides {', '.join(sorted(idle))}, to no effect.",
            why="that is the inside of HF's loop; anytrain's loop never calls it.",
            fix=_INSTEAD,
        )


def _calls_super(method: Any) -> bool:
    """Whether a method goes on with the loop that it overrides."""
    code = getattr(inspect.unwrap(method) if callable(method) else None, "__code__", None)
    if code is None or _LOOP not in code.co_names:
        return False
    return "__class__" in code.co_freevars or "super" in code.co_names


def _inside(name: str, fix: str) -> Unsupported:
    return Unsupported(
        f"anytrain's Trainer has no {name}.", why="it is the inside of HF's loop.", fix=fix
    )


def _smooth(
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
