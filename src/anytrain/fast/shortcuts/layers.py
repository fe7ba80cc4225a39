"""Linear layers in as few launches as their work needs, for bfloat16 training.

Linear layers that read the same input are one multiplication. Their weights lie one behind the
other, rounded; the gradients of the weights come out in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from anytrain.fast.kernels.step import Kernels, column_sums
from anytrain.fast.shortcuts.lazy_tensor import ALIGNED, Head, can_be_read, result, saving_hooks
from anytrain.fast.shortcuts.refusals import BrokenPromise, once

HALF = torch.bfloat16
_WIDE = 1024
_EVEN = 64
"""Multiplications of a width that is a multiple of this have the fast kernels."""
_VOCABULARY = 16384
"""A layer this wide may be a head whose logits go into a loss."""


class Tools(NamedTuple):
    """What layers compute with."""

    kernels: Kernels
    scratch: tuple[torch.Tensor, torch.Tensor]
    """For sums of columns."""
    puts_off: bool = True
    """Whether what layers make may be a `later.Result`."""


class Group:
    """Linear layers that read one input, with their rounded weights; most often only one.

    A wide layer of an odd width, as a head over a vocabulary is, gets rows of zeros at its end.
    """

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.is_turned = _is_turned(layers[0])
        self.widths = [width_of(layer) for layer in layers]
        self.width = sum(self.widths)
        if self.width >= _WIDE and self.width % 8 and not self.is_turned:
            self.width += -self.width % _EVEN
        first = layers[0]
        shape = first.weight.shape if self.is_turned else (self.width, first.weight.shape[1])
        self.weight = _leaf(shape, first.weight)
        self.bias = None if first.bias is None else _leaf((self.width,), first.bias)
        self._read: tuple[Any, ...] | None = None
        """The input that results are kept of, its version, and if and how they lead back to it."""
        self._results: dict[int, torch.Tensor] = {}
        """Those that nobody has asked for yet."""

    def parts(self) -> Iterator[tuple[nn.Parameter, torch.Tensor, slice]]:
        """Yield each layer's parameters, with the leaf that holds them and where in it."""
        begin = 0
        for layer, width in zip(self.layers, self.widths, strict=True):
            where = slice(None) if self.is_turned else slice(begin, begin + width)
            yield layer.weight, self.weight, where
            if self.bias is not None:
                yield layer.bias, self.bias, slice(begin, begin + width)
            begin += width

    def result(self, number: int, inputs: torch.Tensor, tools: Tools) -> torch.Tensor:
        """Return what one of the layers makes of an input; the others' results wait for them.

        None is kept longer: a block that is checkpointed would keep its activations after all.
        """
        ways = inputs.requires_grad, torch.is_grad_enabled(), saving_hooks()
        read = inputs, inputs._version, *ways
        if self._read is None or self._read[0] is not inputs or self._read[1:] != read[1:]:
            self.forget()
        if number not in self._results:
            how = tools, self.is_turned, sum(self.widths)
            seen, whole = _linear(inputs, self.weight, self.bias, how)
            if len(self.widths) > 1:
                self._results = dict(enumerate(_split(seen, self.widths)))
            else:
                self._results = {0: _result(seen, whole) if tools.puts_off else seen}
            self._read = read
        asked = self._results.pop(number)
        if not self._results:
            self.forget()
        return asked

    def forget(self) -> None:
        """Let go of the last input and results."""
        self._read = None
        self._results = {}


def _result(seen: torch.Tensor, whole: torch.Tensor | None) -> torch.Tensor:
    """Return what a layer has made, so that it is known for that; a head's for the head's.

    Without gradients it is no head's: checkpointing by hand gives the result a gradient afterwards,
    but not what it was made from.
    """
    head = Head(seen, seen._version, seen if whole is None else whole)
    is_head = seen.shape[-1] >= _VOCABULARY and torch.is_grad_enabled()
    made: torch.Tensor = result(seen, head=head if is_head else None)
    return made


def _leaf(shape: Any, like: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(shape, dtype=HALF, device=like.device)
    return made.requires_grad_(like.requires_grad)


class Sightings:
    """Which linear layers read the same input, one right after the other."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [module for module in model.modules() if is_linear(module)]
        self._runs: list[list[Any]] = []
        self._input: weakref.ref[torch.Tensor] | None = None
        """What was read last; to hold it would hold a checkpointed block's activations."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at the layers' inputs inside the block."""
        self._runs = []
        handles = [layer.register_forward_pre_hook(self._see) for layer in self._layers]
        try:
            yield
        finally:
            self._input = None
            for handle in handles:
                handle.remove()

    def _see(self, layer: Any, inputs: tuple[Any, ...]) -> None:
        read = inputs[0] if inputs else None
        if read is not None and self._input is not None and self._input() is read:
            self._runs[-1].append(layer)
        else:
            self._input = None if read is None else weakref.ref(read)
            self._runs.append([layer])

    def groups(self, *, joined: bool = True) -> list[Group]:
        """Return all layers in groups; those whose parameters are not theirs alone are left out."""
        held = [p for layer in self._layers for p in _held(layer)]
        own = [
            layer
            for layer in self._layers
            if all(sum(p is other for other in held) == 1 for p in _held(layer))
        ]
        calls = [layer for run in self._runs for layer in run]
        together = [
            run
            for run in self._runs
            if len(run) > 1
            and joined
            and all(sum(layer is other for other in calls) == 1 for layer in run)
            and all(any(layer is other for other in own) for layer in run)
            and _can_join(run)
        ]
        taken = [layer for run in together for layer in run]
        alone = [[x] for x in own if not any(x is other for other in taken)]
        return [Group(run) for run in (*together, *alone)]


def _held(layer: Any) -> list[Any]:
    return [parameter for parameter in (layer.weight, layer.bias) if parameter is not None]


def _can_join(layers: list[Any]) -> bool:
    """Whether the layers' weights may lie one behind the other."""
    kinds = {
        (layer.weight.shape[1], layer.bias is None, tuple(p.requires_grad for p in _held(layer)))
        for layer in layers
    }
    even = all(width_of(layer) % 8 == 0 for layer in layers)
    return len(kinds) == 1 and even and not any(_is_turned(layer) for layer in layers)


def _is_turned(layer: nn.Module) -> bool:
    """Whether it keeps its weight the other way round, as transformers' Conv1D does."""
    return not isinstance(layer, nn.Linear)


def width_of(layer: Any) -> int:
    """Return how many values a linear layer makes."""
    return int(layer.weight.shape[1 if _is_turned(layer) else 0])


def is_linear(module: Any) -> bool:
    """Whether it is a linear layer whose forward is the usual one."""
    kind = type(module)
    known = kind.forward is nn.Linear.forward or (
        kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    )
    return known and "forward" not in vars(module) and are_plain(_held(module))


def are_plain(parameters: list[Any]) -> bool:
    """Whether the kernels can read all of them."""
    return all(
        isinstance(p, nn.Parameter)
        and p.dtype == torch.float32
        and p.is_cuda
        and p.is_contiguous()
        and p.data_ptr() % ALIGNED == 0
        for p in parameters
    )


class _Linear(torch.autograd.Function):
    """A linear layer in bfloat16 whose bias gradient is one launch.

    Columns behind the width that is asked for are zeros' own, and nobody sees them but a loss that
    takes the second result; without such columns that is None.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Any, weight: Any, bias: Any, how: Any) -> Any:
        ctx.save_for_backward(inputs.detach(), weight)  # a result knows more than is wanted then
        ctx.how = how
        ctx.set_materialize_grads(False)
        made = functional.linear(inputs, weight.t() if how[1] else weight, bias)
        return _narrowed(made, how[2]), None if made.shape[-1] == how[2] else made

    @staticmethod
    @once
    def backward(ctx: Any, *given: Any) -> Any:
        inputs, weight = ctx.saved_tensors
        tools, turned, _ = ctx.how
        if all(each is None for each in given):
            return (None,) * 4
        gradient = _gathered(given, weight.shape[1 if turned else 0])
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        of_inputs = of_weight = of_bias = None
        if needs_inputs:
            of_inputs = gradient @ (weight.t() if turned else weight)
            of_inputs = of_inputs.view(inputs.shape)
        if needs_weight:
            rows = inputs.reshape(-1, inputs.shape[-1])
            of_weight = rows.t() @ gradient if turned else gradient.t() @ rows
        if needs_bias:
            known = _known_sums(given)
            of_bias = _sum_rows(gradient, tools) if known is None else known
        return of_inputs, of_weight, of_bias, None


class _Split(torch.autograd.Function):
    """The results of layers that are one multiplication, which has one gradient for all."""

    @staticmethod
    def forward(ctx: Any, whole: Any, widths: list[int]) -> Any:
        ctx.set_materialize_grads(False)
        return whole.split(widths, -1)

    @staticmethod
    @once
    def backward(ctx: Any, *given: Any) -> Any:
        if all(each is None for each in given):
            return None, None
        if any(each is None for each in given):  # no gradient is not zero: an update would be made
            raise BrokenPromise("one of several layers that read the same tensor gets no gradient")
        whole = _whole(given)
        return torch.cat(given, -1) if whole is None else whole, None


def _whole(parts: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    """Return the tensor whose columns these are, if they lie one behind the other."""
    first, width = parts[0], sum(part.shape[-1] for part in parts)
    place = first.data_ptr()
    for part in parts:
        is_next = part.data_ptr() == place and part.stride() == first.stride()
        if not is_next or part.untyped_storage()._cdata != first.untyped_storage()._cdata:
            return None
        place += part.shape[-1] * part.element_size()
    is_dense = first.dim() > 1 and first.stride()[-2:] == (width, 1)
    return first.as_strided((*first.shape[:-1], width), first.stride()) if is_dense else None


def _gathered(given: tuple[torch.Tensor | None, ...], width: int) -> torch.Tensor:
    """Return the gradient of all columns, from those of the two results."""
    seen, whole = (None if g is None else g.reshape(-1, g.shape[-1]) for g in given)
    if seen is None:
        assert whole is not None
        return whole
    widened = _widened(seen, width)
    return widened if whole is None else widened + whole


def _narrowed(made: torch.Tensor, width: int) -> torch.Tensor:
    """Return the first columns where they lie; no view to autograd, which would refuse writes."""
    shape = (*made.shape[:-1], width)
    return made.new_empty(0).set_(made.untyped_storage(), 0, shape, made.stride())


def _widened(gradient: torch.Tensor, width: int) -> torch.Tensor:
    """Return the gradient with columns of zeros for those that nobody saw."""
    seen = gradient.shape[1]
    if seen == width:
        return gradient.contiguous()
    made = gradient.new_empty(len(gradient), width)
    made[:, :seen] = gradient
    made[:, seen:] = 0
    return made


def with_sums(gradient: Any, sums: Any) -> Any:
    """Return a gradient that knows the sum of its rows, until something is written to it."""
    gradient.known_sums = gradient._version, sums
    return gradient


def _known_sums(given: tuple[Any, ...]) -> torch.Tensor | None:
    """Return the sum of a gradient's rows if whoever has made the gradient knew it."""
    seen, whole = given
    version, sums = getattr(seen, "known_sums", (None, None))
    return sums if whole is None and sums is not None and version == seen._version else None


def can_sum(matrix: torch.Tensor) -> bool:
    """Whether the kernels can add up its rows."""
    return matrix.shape[-1] % 8 == 0 and can_be_read(matrix)


def _sum_rows(matrix: torch.Tensor, tools: Tools) -> torch.Tensor:
    if not can_sum(matrix):
        return matrix.sum(0)
    return column_sums(tools.kernels, matrix, tools.scratch)


_linear: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = _Linear.apply
_split: Callable[..., tuple[torch.Tensor, ...]] = _Split.apply
