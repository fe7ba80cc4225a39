"""Rotary positions by one kernel each way, in place of a dozen passes in float32.

Models of transformers call a function of their module's for it, which is replaced while a step is
recorded. It gives what it gave: queries and keys in float32, as the angles are. (To autograd they
are views: where somebody writes to them, the step is recorded without shortcuts.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn

from anytrain.core import patches
from anytrain.fast.kernels.elementwise import can_rotate, rotate, rotate_backward
from anytrain.fast.kernels.step import Kernels
from anytrain.fast.shortcuts.refusals import once
from anytrain.fast.shortcuts.trials import are_near, at, attempted

_NAME = "apply_rotary_pos_emb"
Pair = tuple[torch.Tensor, torch.Tensor]


def rotary_modules(model: nn.Module) -> list[Any]:
    """Return the Python modules whose function turns queries and keys for this model."""
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    found = [sys.modules[name] for name in names if name in sys.modules]
    return [module for module in found if _turns(vars(module).get(_NAME))]


def _turns(function: Any) -> bool:
    """Whether a function is the usual one, by what it computes."""
    return isinstance(function, FunctionType) and bool(attempted(lambda: _is_usual(function)))


def _is_usual(function: Callable[..., Pair]) -> bool:
    how: Any = {"generator": torch.Generator("cpu").manual_seed(0), "dtype": torch.float32}
    queries, keys = (torch.randn(2, heads, 5, 16, device="cpu", **how) for heads in (3, 1))
    angles = [torch.randn(2, 5, 16, device="cpu", **how) for _ in range(2)]

    def found(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        turned, keys_turned = function(queries, keys, *angles)
        return torch.cat([turned.flatten(), keys_turned.flatten()])

    def expected(*given: torch.Tensor) -> torch.Tensor:
        cosines, sines = (angle[:, None] for angle in angles)
        turned = [x * cosines + _half_turned(x) * sines for x in given]
        return torch.cat([each.flatten() for each in turned])

    halves = [tensor.bfloat16() for tensor in (queries, keys)]
    whole = all(turned.dtype == torch.float32 for turned in function(*halves, *angles))
    return whole and are_near(at(found, queries, keys), at(expected, queries, keys))


def _half_turned(values: torch.Tensor) -> torch.Tensor:
    first, second = values.chunk(2, -1)
    return torch.cat([-second, first], -1)


@contextmanager
def rotated(kernels: Kernels, modules: list[Any]) -> Iterator[None]:
    """Let these modules turn queries and keys by our kernels in the block."""
    with ExitStack() as put_back:
        for module in modules:
            turned = _instead(vars(module)[_NAME], kernels)
            put_back.enter_context(patches.replaced("rotary positions", module, **{_NAME: turned}))
        yield


def _instead(own: Callable[..., Pair], kernels: Kernels) -> Callable[..., Pair]:
    def apply(*given: Any, **more: Any) -> Pair:
        if more or len(given) != 4 or not _fit(*given):
            return own(*given, **more)
        queries, keys, *angles = given
        return _rotate(queries, *angles, kernels), _rotate(keys, *angles, kernels)

    return apply


def _fit(queries: Any, keys: Any, cosines: Any, sines: Any) -> bool:
    """Whether the kernels know such a case."""
    given = (queries, keys, cosines, sines)
    if not all(type(tensor) is torch.Tensor for tensor in given):
        return False
    if any(angle.dtype != torch.float32 or angle.requires_grad for angle in (cosines, sines)):
        return False
    if cosines.dim() != 3 or sines.shape != cosines.shape or sines.stride() != cosines.stride():
        return False
    return all(map(can_rotate, (cosines, sines))) and all(
        x.dtype == torch.bfloat16
        and x.dim() == 4
        and cosines.shape in ((len(x), *x.shape[2:]), (1, *x.shape[2:]))
        and can_rotate(x)
        for x in (queries, keys)
    )


class _Rotate(torch.autograd.Function):
    """Rows turned by angles."""

    @staticmethod
    def forward(ctx: Any, inputs: Any, cosines: Any, sines: Any, kernels: Kernels) -> Any:
        ctx.save_for_backward(cosines, sines)
        ctx.kernels = kernels
        ctx.set_materialize_grads(False)
        return rotate(kernels, inputs, cosines, sines)

    @staticmethod
    @once
    def backward(ctx: Any, *given: Any) -> Any:
        if given[0] is None:
            return (None,) * 4
        sent = given[0] if can_rotate(given[0]) else given[0].contiguous()
        return rotate_backward(ctx.kernels, sent, *ctx.saved_tensors), None, None, None


_rotate: Callable[..., torch.Tensor] = _Rotate.apply
