"""The part of `Trainer` that computes a micro-batch's loss, and its gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anytrain.core.errors import BadType
from anytrain.doors.trainer import preparing, signatures
from anytrain.doors.trainer.adapters import inner as inner_model
from anytrain.doors.trainer.reports import Reports
from anytrain.engine import objective
from anytrain.engine.assemble.loaders import Recount
from anytrain.engine.prepared.model import meets_other_ranks
from anytrain.engine.step.step import Micro, let_train

_MAKING = ("training_step", "_prepare_inputs", "_prepare_input")
"""What may be overridden to train on another batch than the loader's."""
_ON_BATCHES = (*_MAKING, "compute_loss", "prediction_step")


class Losses(Reports):
    """The loss, and what may be overridden about it."""

    model: nn.Module
    label_names: list[str]
    compute_loss_func: Callable[..., Any] | None
    _smoothing: float
    _shifts: bool
    _columns_left_out: Callable[..., list[str]]
    _prepare_inputs: Callable[[Any], Any]
    _prepare_input: Callable[[Any], Any]
    _is_own: Callable[[str], bool]
    loss_is_scaled_for_ga: bool | None = None
    """Whether an overridden compute_loss returns its share of the step's mean; None finds out."""

    _items_now: torch.Tensor | int | None = None
    """The step's items, while a training_step runs that takes none."""
    _counted: Recount | None = None
    """What counts a step's items as they come, where code of the user's may make other batches."""

    def _micro(self) -> Micro:
        """Return what trains on a micro-batch: training_step, in the form it has."""
        knows = objective.takes(self.training_step, "num_items_in_batch")
        return self.training_step if knows else self._train_micro

    def _train_micro(
        self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | int | None
    ) -> torch.Tensor:
        """Run an older training_step: it takes no items, and finds the step's by itself."""
        self._items_now = num_items_in_batch
        try:
            loss: torch.Tensor = signatures.call(
                self.training_step, model, inputs, num_items_in_batch
            )
            return loss
        finally:
            self._items_now = None

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
            num_items_in_batch = self._items_now
        inputs = self._prepare_inputs(inputs)
        own = self._own_items(inputs) if num_items_in_batch is not None else 1
        if self._counted is not None and num_items_in_batch is not None:
            self._counted.take(own, num_items_in_batch)
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
        if num_items_in_batch is not None and not self._is_scaled():
            loss = objective.weighed(loss, own, num_items_in_batch, self._session.world.size)
        if num_items_in_batch is None:
            loss = objective.some(loss, inputs, shifted=self._shifts)
        scale = self._session.precision.scale
        (loss if scale is None else scale(loss)).backward()
        self._release_cache()
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
        own = self._own_items(inputs) if num_items_in_batch is not None else 1
        custom, labels = self.compute_loss_func, None
        if custom is not None or self._smoothing > 0:
            inputs, labels = self._labels_apart(inputs)
            if custom is None and labels is None:
                raise preparing.no_labels_to_soften(inputs, self.label_names)
        outputs = objective.call(model, inputs)
        scaled = False
        if custom is not None:
            loss = custom(outputs, labels, num_items_in_batch=num_items_in_batch)
            scaled = objective.reads(custom, "num_items_in_batch")
        elif labels is not None:
            loss = preparing.smoothed(outputs, labels, self._smoothing, inner_model(self.model))
        else:
            left_out = partial(self._columns_left_out, is_training=model.training)
            loss = objective.loss_of(outputs, inputs, left_out)
        if num_items_in_batch is not None:
            items, size = num_items_in_batch, self._session.world.size
            loss = loss * size if scaled else objective.weighed(loss, own, items, size)
        return (loss, outputs) if return_outputs else loss

    def _labels_of(self, inputs: Any) -> Any:
        """Return a batch's labels: those of label_names, or the last of a tuple; else None."""
        if isinstance(inputs, Mapping):
            found = tuple(inputs.get(name) for name in self.label_names or ["labels"])
            if any(labels is None for labels in found):
                return None
            return found[0] if len(found) == 1 else found
        return inputs[-1] if _is_row(inputs) else None

    def _labels_apart(self, inputs: Any) -> tuple[Any, Any]:
        """Return a batch without its labels, and these; None where it is unclear which they are."""
        if _is_row(inputs):
            return inputs[:-1], inputs[-1]
        if not isinstance(inputs, Mapping):
            return inputs, None
        known = ["labels"] if "labels" in inputs else [n for n in self.label_names if n in inputs]
        if len(known) != 1:
            return inputs, None
        left = dict(inputs)
        return left, left.pop(known[0])

    def _obstacle(self) -> str | None:
        """Name what was asked for that a recorded step cannot do; None where nothing was."""
        own = type(self).training_step
        if own is not Losses.training_step:
            return f"your training_step ({_written_at(own)}) is called at every step"
        if self.args.torch_empty_cache_steps is not None:
            return "torch_empty_cache_steps asks for something between two ops"
        if self._counted is not None:
            return "your _prepare_inputs may return another batch: it is counted at every step"
        return None

    def _own_functions(self) -> tuple[Callable[..., Any], ...]:
        """Return what users may have written of a step: it must do nothing but compute."""
        mine: list[Callable[..., Any]] = [self.compute_loss, self._prepare_inputs]
        mine += [self._prepare_input] if self._is_own("_prepare_input") else []
        mine.append(self.compute_loss_context_manager)
        return (*mine, *([] if self.compute_loss_func is None else [self.compute_loss_func]))

    def _has_own_loss(self) -> bool:
        """Whether the loss is another one than what the model returns."""
        own = type(self).compute_loss is not Losses.compute_loss
        return own or self.compute_loss_func is not None or self._smoothing > 0

    def _makes_batches(self) -> bool:
        """Whether code of the user's may train on another batch than the loader gave."""
        return any(map(self._is_own, _MAKING))

    def _looks_for_unused(self) -> bool:
        """Whether the first steps tell if parameters go unused, so that DDP need not search.

        Not where one backward may not be one step's: DDP then searches, as it does in HF.
        """
        args, session = self.args, self._session
        is_open = args.ddp_find_unused_parameters is None and not args.gradient_checkpointing
        is_cut = args.auto_find_batch_size or args.activation_checkpointing == "fit"
        shares_often = session.cursor.accumulation.sync_each_batch or args.ddp_static_graph
        is_compiled = session.plan.step.value == "compiled" or session.device.type == "xla"
        own = self._is_own("training_step")
        return is_open and not (is_cut or shares_often or is_compiled or own)

    def _keeps_repeats(self) -> bool:
        """Whether code of the user's computes the loss: it may gather what all ranks compute."""
        own = self.compute_loss_func is not None or any(map(self._is_own, _ON_BATCHES))
        return own or meets_other_ranks(inner_model(self.model))

    def _own_items(self, inputs: Any) -> torch.Tensor | int:
        return objective.num_items(inputs, shifted=self._shifts)

    def _is_scaled(self) -> bool:
        """Whether compute_loss has made use of the step's items."""
        if self.loss_is_scaled_for_ga is not None:
            return self.loss_is_scaled_for_ga
        return objective.reads(self.compute_loss, "num_items_in_batch")

    def _reads_items(self) -> bool:
        """Whether somebody's own loss wants to know the items also where they change nothing."""
        custom = self.compute_loss_func
        if custom is not None:
            return objective.reads(custom, "num_items_in_batch")
        return type(self).compute_loss is not Losses.compute_loss and self._is_scaled()

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

    def _release_cache(self) -> None:
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            self._session.backend.release()


def _written_at(function: Callable[..., Any]) -> str:
    """Return the file and line where a function is written."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None:
        return getattr(function, "__qualname__", repr(function))
    return f"{Path(code.co_filename).name} line {code.co_firstlineno}"


def _is_row(inputs: Any) -> bool:
    """Whether a batch is a row of tensors that has a last one besides the first."""
    return isinstance(inputs, (list, tuple)) and len(inputs) > 1
