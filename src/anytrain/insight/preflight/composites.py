"""What torch computes in another way on the claimed device than on the one that C++ sees.

A few functions ask for the device before they choose their kernels. Attention and dropout are
the two whose choice changes memory and the list of operations; here they choose as the claimed
device would, for tensors without data alone.
"""

from __future__ import annotations

from typing import Any

import torch

from anytrain.insight.preflight.tables import kept_whole

_HALVES = (torch.float16, torch.bfloat16)


def install(kind: str) -> torch.library.Library:
    """Let attention and dropout without data choose as `kind` does; as long as this is kept."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("ctc_loss.Tensor", _ctc_loss, "AutogradMeta")
    if kind == "cuda":
        library.impl("scaled_dot_product_attention", attention_on_cuda, "AutogradMeta")
        library.impl("dropout", _dropout, "AutogradMeta")
    if kind == "mps":
        kept_whole.install(library, "AutogradMeta")
    return library


def _ctc_loss(  # noqa: PLR0913  torch's own
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Read the lengths on the host, as every device but one without data does."""
    lengths = input_lengths.cpu().tolist(), target_lengths.cpu().tolist()
    loss: torch.Tensor = torch.ops.aten.ctc_loss.IntList(
        log_probs, targets, *lengths, blank, reduction, zero_infinity
    )
    return loss


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Drop as CUDA does: in one kernel, which keeps a mask of bytes."""
    if not train or p == 0:
        return x
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype, device=x.device)
    return torch.native_dropout(x, p, train)[0]


def attention_on_cuda(  # noqa: PLR0913  torch's own
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attend as CUDA chooses: flash for halves without a mask, else the memory-efficient kernel."""
    aten: Any = torch.ops.aten
    heads = query.size(-3) if query.dim() == 4 else 0
    if enable_gqa and heads:
        key = key.repeat_interleave(heads // key.size(-3), -3)
        value = value.repeat_interleave(heads // value.size(-3), -3)
    plain = query.dim() == 4 and query.size(-1) == value.size(-1)
    if not plain or query.dtype not in (*_HALVES, torch.float32):
        math = aten._scaled_dot_product_attention_math
        out = math(query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale)
        return _first(out)
    if attn_mask is None and query.dtype in _HALVES and query.size(-1) <= 256:
        flash = aten._scaled_dot_product_flash_attention
        return _first(flash(query, key, value, dropout_p, is_causal, False, scale=scale))
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            zero = torch.zeros((), dtype=query.dtype, device=query.device)
            attn_mask = torch.where(attn_mask, zero, float("-inf")).to(query.dtype)
        attn_mask = attn_mask.expand(*query.shape[:-1], key.size(-2))
    needs = any(t.requires_grad for t in (query, key, value)) and torch.is_grad_enabled()
    efficient = aten._scaled_dot_product_efficient_attention
    out = efficient(query, key, value, attn_mask, needs, dropout_p, is_causal, scale=scale)
    return _first(out)


def _first(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return outputs[0]
