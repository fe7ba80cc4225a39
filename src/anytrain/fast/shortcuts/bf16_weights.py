"""Weights rounded to bfloat16 once a step, and layers that use them.

Autocast rounds each weight by itself, turns each weight's gradient back to float32, and rounds a
layer's input anew for each layer that reads it. The values are the same here; the launches are
fewer, and gradients stay in the bfloat16 that they were computed in. A norm, which autocast
computes in float32, gives its result in both precisions at once; a GELU is one kernel, and so is a
gated product; the gradient of an embedding is three, and the loss over a vocabulary reads its
logits as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from anytrain.core import patches
from anytrain.fast.kernels.short_attention import shared_masks
from anytrain.fast.kernels.step import ROW, Kernels, chunks_of, scratch_for
from anytrain.fast.shortcuts.adam import FusedAdam
from anytrain.fast.shortcuts.embeddings import can_look_up, is_embedding, look_up
from anytrain.fast.shortcuts.gated import gated, is_gated
from anytrain.fast.shortcuts.gelu import Form, form_of, gelu
from anytrain.fast.shortcuts.layers import HALF, Group, Tools
from anytrain.fast.shortcuts.lazy_tensor import (
    LazyTensor,
    can_be_read,
    promises,
    real,
    saving_hooks,
)
from anytrain.fast.shortcuts.loss import losses
from anytrain.fast.shortcuts.norms import Known, known_norms, normalize
from anytrain.fast.shortcuts.refusals import BrokenPromise, refusals
from anytrain.fast.shortcuts.rotary import rotary_modules, rotated


class RoundedWeights:
    """The working copies of a model's linear layers."""

    def __init__(
        self, kernels: Kernels, model: nn.Module, groups: list[Group], *, puts_off: bool = True
    ) -> None:
        self._kernels, self._groups = kernels, groups
        self._where = {p: (leaf, where) for g in groups for p, leaf, where in g.parts()}
        self._made_for = self._places()
        device = groups[0].weight.device
        counts = [parameter.numel() for parameter in self._where]
        self._chunks = chunks_of(counts, device)
        rows = torch.zeros(len(counts), ROW, dtype=torch.int64)
        for row, (parameter, (leaf, where)) in zip(rows, self._where.items(), strict=True):
            copy = leaf.detach()[where]
            row[0], row[1], row[5] = parameter.data_ptr(), copy.data_ptr(), parameter.numel()
        self._rows = rows.to(device)
        scratch = scratch_for(max(group.width for group in groups), device)
        self._tools = Tools(kernels, scratch, puts_off)
        self._model = model
        self.look_again()
        self._rounded: WeakIdKeyDictionary = WeakTensorKeyDictionary()
        """Of each tensor, for as long as it is there: longer would keep a checkpointed block's
        activations."""
        self._last: WeakIdKeyDictionary = WeakTensorKeyDictionary()
        """In a checkpointed block, of the last tensor alone: the block's input stays."""

    def look_again(self) -> None:
        """Find out what the model's modules compute: since the last look they may have changed."""
        modules = list(self._model.modules())
        self._norms = list(known_norms(self._model, self._kernels))
        self._rotary = rotary_modules(self._model)
        self._gated: list[Any] = [module for module in modules if is_gated(module)]
        self._tables: list[Any] = [module for module in modules if is_embedding(module)]
        found = ((module, form_of(module)) for module in modules)
        self._gelus = [(module, form) for module, form in found if form is not None]

    def _places(self) -> list[tuple[int, bool]]:
        return [(parameter.data_ptr(), parameter.requires_grad) for parameter in self._where]

    def is_stale(self) -> bool:
        """Whether a parameter has moved, or was frozen or freed, since the copies were made."""
        return self._places() != self._made_for

    @contextmanager
    def used(self) -> Iterator[None]:
        """Round all weights, and let the model's layers use them inside the block."""
        self._kernels.launch("halve", (len(self._chunks), 1), [self._rows, self._chunks])
        instead = [
            *((x, self._linear(g, n)) for g in self._groups for n, x in enumerate(g.layers)),
            *((norm.module, self._norm(norm)) for norm in self._norms),
            *((table, self._table(table)) for table in self._tables),
            *((module, self._gelu(module, form)) for module, form in self._gelus),
            *((module, self._gate(module)) for module in self._gated),
        ]
        instead = [pair for pair in instead if "forward" not in vars(pair[0])]  # that is a user's
        try:
            with (
                _forwards({module: _method(module, forward) for module, forward in instead}),
                losses(self._kernels),
                promises(),
                refusals(),
                shared_masks(),
                rotated(self._kernels, self._rotary),
            ):
                yield
        finally:
            self._rounded.clear()
            self._last.clear()
            for group in self._groups:
                group.forget()

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return a parameter's gradient, wherever the backward pass has left it.

        To be asked once a step: where it lies in both places, one is added to the other.
        """
        leaf, where = self._where.get(parameter, (None, None))  # type: ignore[call-overload]
        if leaf is None or leaf.grad is None:
            return parameter.grad
        found: torch.Tensor = leaf.grad[where]
        if parameter.grad is not None:  # the layer ran in both precisions
            return parameter.grad.add_(found)
        return found

    def knows(self, adam: FusedAdam) -> bool:
        """Whether all gradients that lie here belong to parameters that the update knows."""
        known = {id(parameter) for parameter, _ in adam.parameters}
        return all(
            leaf.grad is None or id(parameter) in known
            for parameter, (leaf, _) in self._where.items()
        )

    def clear(self) -> None:
        """Let go of the gradients."""
        for group in self._groups:
            group.weight.grad = None
            if group.bias is not None:
                group.bias.grad = None

    def _linear(self, group: Group, number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        layer = group.layers[number]
        plain = type(layer).forward
        rounded = _state(layer)

        def forward(inputs: torch.Tensor) -> torch.Tensor:
            if torch.is_autocast_enabled("cuda"):
                if _state(layer) != rounded:
                    raise BrokenPromise("a layer's weights are changed or replaced inside the step")
                return group.result(number, self._round(inputs), self._tools)
            result: torch.Tensor = plain(layer, inputs)  # the model wants full precision here
            return result

        return forward

    def _norm(self, norm: Known) -> Callable[[torch.Tensor], torch.Tensor]:
        plain = type(norm.module).forward

        def forward(inputs: torch.Tensor) -> torch.Tensor:
            is_ready = isinstance(inputs, LazyTensor) or can_be_read(inputs)
            is_ready = is_ready and inputs.shape[-1] == norm.kind.width
            if is_ready and inputs.dtype == torch.float32 and torch.is_autocast_enabled("cuda"):
                whole, rounded = normalize(inputs, norm, self._kernels)
                self._rounded[whole] = Rounding.made(whole, rounded)
                return whole
            result: torch.Tensor = plain(norm.module, inputs)
            return result

        return forward

    def _table(self, table: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        plain = type(table).forward

        def forward(numbers: torch.Tensor) -> torch.Tensor:
            if can_look_up(table, numbers):
                return look_up(table, numbers, self._kernels)
            result: torch.Tensor = plain(table, numbers)
            return result

        return forward

    def _gelu(self, module: Any, form: Form) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a GELU whose result is as precise as what it reads, if that is rounded."""
        plain = type(module).forward

        def forward(inputs: torch.Tensor) -> torch.Tensor:
            is_rounded = isinstance(inputs, torch.Tensor) and inputs.dtype == HALF
            if is_rounded and torch.is_autocast_enabled("cuda"):
                return gelu(inputs, form, self._tools)
            result: torch.Tensor = plain(module, inputs)
            return result

        return forward

    def _gate(self, module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        plain = type(module).forward

        def forward(inputs: torch.Tensor) -> torch.Tensor:
            if torch.is_autocast_enabled("cuda"):
                return gated(module, inputs, self._kernels)
            result: torch.Tensor = plain(module, inputs)
            return result

        return forward

    def _round(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the input in bfloat16; layers that read the same one share it."""
        if inputs.dtype == HALF:
            return inputs
        inputs = real(inputs)
        kept = self._rounded.pop(inputs, None) or self._last.get(inputs)
        found = inputs.to(HALF) if kept is None or not kept.is_of(inputs) else kept.rounded
        if _is_made_again():
            self._last.clear()
            self._last[inputs] = Rounding.made(inputs, found)
        else:
            self._rounded[inputs] = Rounding.made(inputs, found)
        return found


class Rounding(NamedTuple):
    """What was rounded of a version of a tensor."""

    rounded: torch.Tensor
    version: int
    leads_to: Any
    """The tensor's place in the graph of gradients."""

    @staticmethod
    def made(whole: torch.Tensor, rounded: torch.Tensor) -> Rounding:
        """Return what was rounded of a tensor as it is now."""
        return Rounding(rounded, whole._version, whole.grad_fn)

    def is_of(self, whole: torch.Tensor) -> bool:
        """Whether the tensor is as it was, and gets its gradient if it wants one.

        What a block makes while no gradients are computed may get one afterwards: checkpointing
        by hand gives it to the block's results.
        """
        is_same = self.version == whole._version and self.leads_to is whole.grad_fn
        leads_back = self.rounded.requires_grad == whole.requires_grad
        return is_same and (leads_back or not torch.is_grad_enabled())


def _state(layer: Any) -> list[tuple[int, int, int, bool]]:
    """Return what tells if a layer's parameters are those that were rounded, as they were then."""
    held = [p for p in (layer.weight, layer.bias) if p is not None]
    return [(id(p), p.data_ptr(), p._version, p.requires_grad) for p in held]


@contextmanager
def _forwards(instead: dict[Any, Any]) -> Iterator[None]:
    """Let modules compute by these methods in the block."""
    with patches.counted("layers"):
        for module, forward in instead.items():
            vars(module)["forward"] = forward
        try:
            yield
        finally:
            for module in instead:
                del vars(module)["forward"]


def _method(module: Any, forward: Callable[..., torch.Tensor]) -> Any:
    """Return the module's own forward: not a copy's of it, and not for what is given by name."""
    plain = type(module).forward

    def called(own: Any, *given: Any, **more: Any) -> Any:
        is_usual = own is module and len(given) == 1 and not more
        return forward(*given) if is_usual else plain(own, *given, **more)

    return MethodType(called, module)


def _is_made_again() -> bool:
    """Whether a checkpointed block may run, whose input stays: nothing else of it may.

    Other parts without gradients are taken for one, too; they only round once more.
    """
    return saving_hooks() is not None or not torch.is_grad_enabled()
