"""Torch in the place of our CUDA kernels, so that a CPU shows what is made of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from anytrain.fast.kernels import elementwise
from anytrain.fast.kernels.step import Norm, Normed, NormGradients, Sent
from anytrain.fast.shortcuts import embeddings, gated, gelu, layers, loss, norms, rotary
from anytrain.fast.shortcuts.bf16_weights import RoundedWeights
from anytrain.fast.shortcuts.layers import Sightings


class Plain:
    """Kernels that know every norm."""

    def knows_norm(self, norm: Norm) -> bool:
        return True

    def launch(self, name: str, grid: Any, args: Any) -> None:
        assert name == "halve"


def norm_forward(
    kernels: Any, inputs: Any, weight: Any, bias: Any, epsilon: float, addend: Any = None
) -> Normed:
    """Normalize an input, or a sum."""
    read = inputs if addend is None else addend + inputs
    shape = list(weight.shape)
    if bias is None:
        scales = (read.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
        result = read * scales * weight
        return Normed(read, result, result.bfloat16(), None, scales)
    result, means, scales = torch.native_layer_norm(read, shape, weight, bias, epsilon)
    return Normed(read, result, result.bfloat16(), means, scales)


def norm_backward(
    kernels: Any,
    saved: Any,
    sent: Sent,
    *,
    has_addend: bool = False,
    mask: Any = None,
    factor: float = 1.0,
) -> NormGradients:
    """Return a layer norm's gradients."""
    inputs, weight, means, scales = saved
    given = sum((g.float() for g in sent[:2] if g is not None), torch.zeros_like(inputs))
    if means is None:
        of_inputs, of_weight = _rms_backward(given, inputs, weight, scales)
        of_bias = None
    else:
        of_inputs, of_weight, of_bias = torch.ops.aten.native_layer_norm_backward(
            given, inputs, list(weight.shape), means, scales, weight, weight, [True, True, True]
        )
    if sent.of_sum is not None:
        of_inputs = of_inputs + sent.of_sum
    if not has_addend:
        return NormGradients(of_inputs, of_weight, of_bias, None, None)
    of_half = of_inputs.bfloat16()
    if mask is not None:
        of_half = of_half * mask * factor
    sums = of_half.reshape(-1, of_half.shape[-1]).sum(0)
    return NormGradients(of_inputs, of_weight, of_bias, of_half, sums)


def _rms_backward(given: Any, inputs: Any, weight: Any, scales: Any) -> tuple[Any, Any]:
    even, weighted = inputs * scales, given * weight
    of_inputs = scales * (weighted - even * (weighted * even).mean(-1, keepdim=True))
    return of_inputs, (given * even).reshape(-1, len(weight)).sum(0)


def gate(kernels: Any, opens: Any, values: Any) -> Any:
    """Return the SiLU of one times the other."""
    return functional.silu(opens) * values


def gate_backward(kernels: Any, opens: Any, values: Any, sent: Any) -> Any:
    """Return the gradients of both."""
    of_opens = torch.ops.aten.silu_backward(sent * values, opens)
    return of_opens, sent * functional.silu(opens)


def rotate(kernels: Any, inputs: Any, cosines: Any, sines: Any) -> Any:
    """Return rows turned by angles."""
    first, second = inputs.chunk(2, -1)
    return inputs * cosines[:, None] + torch.cat([-second, first], -1) * sines[:, None]


def rotate_backward(kernels: Any, sent: Any, cosines: Any, sines: Any) -> Any:
    """Return the gradient of what was turned."""
    first, second = (sent * sines[:, None]).chunk(2, -1)
    return (sent * cosines[:, None] + torch.cat([second, -first], -1)).bfloat16()


def gelu_backward(kernels: Any, read: Any, sent: Any, scratch: Any, *, by_tanh: bool) -> Any:
    """Return a GELU's gradient, and the sum of its rows."""
    form = "tanh" if by_tanh else "none"
    made = torch.ops.aten.gelu_backward(sent, read, approximate=form)
    return made, made.sum(0)


def loss_forward(kernels: Any, logits: Any, width: int, targets: Any, ignored: int) -> Any:
    """Return each row's cross-entropy, and the logarithm that goes with it."""
    values = logits[:, :width].float()
    logs = values.log_softmax(1)
    losses = functional.nll_loss(logs, targets, reduction="none", ignore_index=ignored)
    return losses, values.logsumexp(1)


def loss_backward(kernels: Any, saved: Any, width: int, ignored: int, given: Any) -> Any:
    """Return the logits' gradient."""
    logits, targets, logs = saved
    made = torch.zeros_like(logits)
    slopes = (logits[:, :width].float() - logs[:, None]).exp()
    kept = targets != ignored
    slopes[kept, targets[kept]] -= 1
    made[:, :width] = slopes * (given * kept)[:, None]
    return made


def rows_added(kernels: Any, numbers: Any, sent: Any, height: int, left_out: int) -> Any:
    """Return a table's gradient."""
    return torch.ops.aten.embedding_dense_backward(sent, numbers, height, left_out, False)


def put_in(patch: pytest.MonkeyPatch) -> None:
    """Put torch in the kernels' place."""
    patch.setattr(norms, "norm_forward", norm_forward)
    patch.setattr(norms, "norm_backward", norm_backward)
    patch.setattr(gelu, "gelu_backward", gelu_backward)
    patch.setattr(gated, "gate", gate)
    patch.setattr(gated, "gate_backward", gate_backward)
    patch.setattr(elementwise, "_is_there", lambda tensor: tensor.numel() > 0)
    patch.setattr(rotary, "rotate", rotate)
    patch.setattr(rotary, "rotate_backward", rotate_backward)
    patch.setattr(loss, "loss_forward", loss_forward)
    patch.setattr(loss, "loss_backward", loss_backward)
    patch.setattr(embeddings, "rows_added", rows_added)
    patch.setattr(layers, "_sum_rows", lambda matrix, tools: matrix.sum(0))
    for module in (embeddings, norms, layers):
        patch.setattr(module, "are_plain", lambda parameters: True)
    patch.setattr(functional, "dropout", dropout)
    own = torch.is_autocast_enabled
    patch.setattr(torch, "is_autocast_enabled", lambda of="cpu": own("cpu"))


_dropout = functional.dropout


def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Drop out by the operation that torch uses on a GPU; a CPU's rounds in another way."""
    if x.dtype == torch.bfloat16 and training and not inplace and 0 < p < 1:
        return torch.native_dropout(x, p, training)[0]
    return _dropout(x, p, training, inplace)


@contextmanager
def rounded(
    model: nn.Module,
    sightings: Sightings | None = None,
    *,
    puts_off: bool = True,
    joined: bool = True,
    autocast: bool = False,
) -> Iterator[RoundedWeights]:
    """Let the model's layers work on rounded weights in the block, where autocast is on.

    It is all over the block with `autocast`; else the block says where.
    """
    plain: Any = Plain()
    groups = (sightings or _no_sightings(model)).groups(joined=joined)
    halves = RoundedWeights(plain, model, groups, puts_off=puts_off)
    with torch.no_grad():
        for parameter, (leaf, where) in halves._where.items():
            leaf[where].copy_(parameter)
    with halves.used(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        yield halves


def _no_sightings(model: nn.Module) -> Sightings:
    found = Sightings(model)
    with found.watched():
        return found
