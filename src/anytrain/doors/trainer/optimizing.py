"""Make a Trainer's optimizer and its schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from anytrain.core.errors import BadInput
from anytrain.doors.training_args import TrainingArguments
from anytrain.engine.optim import build, schedules

if TYPE_CHECKING:
    from anytrain.doors.trainer.trainer import Trainer


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
