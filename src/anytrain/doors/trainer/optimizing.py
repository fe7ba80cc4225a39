"""The part of `Trainer` that makes the optimizer and the schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from anytrain.core.errors import BadInput
from anytrain.doors.trainer.reports import Reports
from anytrain.doors.training_args import TrainingArguments
from anytrain.engine.assemble.run import Run
from anytrain.engine.optim import build, schedules


class Optimizing(Reports):
    """Optimizer and schedule, and what may be overridden about them."""

    model: nn.Module
    optimizer: Any
    lr_scheduler: Any
    optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None
    _run: Run
    _made_scheduler: bool

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
        if self.optimizer is None:
            trained = self.model if model is None else model
            groups = build.parameter_groups(
                trained, self.args.weight_decay, self.get_decay_parameter_names(trained)
            )
            if not any(group["params"] for group in groups):
                raise BadInput(
                    "Cannot train: the model has no parameter that may change.",
                    why="every parameter has requires_grad=False, or there is none.",
                    fix="unfreeze what is to be trained.",
                )
            if self.optimizer_cls_and_kwargs is not None:
                kind, options = self.optimizer_cls_and_kwargs
            else:
                kind, options = self.get_optimizer_cls_and_kwargs(self.args, trained)
            self.optimizer = _made(kind, groups, dict(options))
        made: Optimizer = self.optimizer
        return made

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> Any:
        """Make the learning-rate schedule, unless there is one.

        Args:
            num_training_steps: Optimizer steps of the whole training, the warm-up
                included.
            optimizer: Whose learning rate it moves. None: the Trainer's optimizer.
        """
        if self.lr_scheduler is None:
            holder = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = schedules.build(
                str(self.args.lr_scheduler_type),
                getattr(holder, "optimizer", holder),
                num_warmup_steps=self.args.get_warmup_steps(num_training_steps),
                num_training_steps=num_training_steps,
                options=self.args.lr_scheduler_kwargs or {},
            )
            self._made_scheduler = True
        return self.lr_scheduler

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
        return build.optimizer_class(
            str(args.optim),
            learning_rate=args.learning_rate,
            beta1=args.adam_beta1,
            beta2=args.adam_beta2,
            epsilon=args.adam_epsilon,
            options=build.parse_options(args.optim_args),
            fuses=args.device.type in _get_fused_kernels_supported_devices(),
        )

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the parameters that weight decay applies to.

        Args:
            model: The model whose biases and norms are left out.
        """
        return build.decay_names(model)

    def get_num_trainable_parameters(self) -> int:
        """Return how many numbers training may change."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """Return the learning rate of each group; reads the device."""
        return [float(group["lr"]) for group in self._known_optimizer().param_groups]

    def get_optimizer_group(self, param: str | torch.nn.Parameter | None = None) -> Any:
        """Return the group that holds a parameter, or all groups.

        Args:
            param: A parameter, or its name. None: the parameters of every group.
        """
        groups = self._known_optimizer().param_groups
        if param is None:
            return [group["params"] for group in groups]
        if isinstance(param, str):
            param = dict(self.model.named_parameters())[param]
        return next((g for g in groups if any(param is held for held in g["params"])), None)

    def _get_learning_rate(self) -> float:
        return self.get_learning_rates()[0]

    def _known_optimizer(self) -> Any:
        if self.optimizer is None:
            raise BadInput(
                "There is no optimizer yet.",
                why="it is made when training begins.",
                fix="call create_optimizer() first, or train().",
            )
        return self.optimizer


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
