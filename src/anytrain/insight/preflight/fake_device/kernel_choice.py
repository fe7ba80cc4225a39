"""Choose kernels and dtypes as torch would on the claimed device.

torch chooses in C++, by the device that it sees, which is another one here. Attention and dropout
are the two whose choice changes memory and the list of operations; mps takes some operations whole
that others take apart; and autocast casts by the lists of torch's documentation, "Autocast Op
Reference".
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch

from anytrain.insight.preflight.fake_device.device import flat, map_tensors

_HALVES = (torch.float16, torch.bfloat16)
_NONE = (None, None)
_inside: ContextVar[tuple[Any, Any]] = ContextVar("inside", default=_NONE)
"""The part that is called now, and the whole operation that calls it."""
_LOWER = """__matmul__ __rmatmul__ addbmm addmm addmv addr baddbmm bmm chain_matmul multi_dot
conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc convolution
_convolution einsum gru gru_cell linear lstm lstm_cell matmul mm mv prelu rnn_tanh rnn_relu
rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention linalg_vecdot linalg_multi_dot vecdot"""
_FULL = """__pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cosh
cosine_embedding_loss cdist cosine_similarity cumprod cumsum dist erfinv exp expm1 group_norm
hinge_embedding_loss kl_div l1_loss layer_norm log log10 log_softmax log1p log2 margin_ranking_loss
mse_loss multilabel_margin_loss multi_margin_loss nll_loss nll_loss2d nll_loss_nd norm normalize
pdist poisson_nll_loss pow prod reciprocal renorm rms_norm rsqrt sinh smooth_l1_loss
soft_margin_loss softmax softmin softplus sum tan triplet_margin_loss logsumexp huber_loss
cross_entropy_loss"""
_WIDEST = """addcdiv addcmul atan2 bilinear cross dot grid_sample grid_sampler index_put scatter_add
tensordot vdot"""
_OPS = {
    **dict.fromkeys(_LOWER.split(), "lower"),
    **dict.fromkeys(_FULL.split(), "full"),
    **dict.fromkeys(_WIDEST.split(), "widest"),
}
_TAKES_DTYPE = frozenset({"softmax", "log_softmax", "cumsum", "cumprod", "prod", "sum", "norm"})


def install_kernel_choice(kind: str) -> torch.library.Library:
    """Let attention and dropout without data choose as `kind` does; as long as this is kept."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("ctc_loss.Tensor", _ctc_loss, "AutogradMeta")
    if kind == "cuda":
        library.impl("scaled_dot_product_attention", attention_on_cuda, "AutogradMeta")
        library.impl("dropout", _dropout, "AutogradMeta")
    if kind == "mps":
        keep_svd_whole(library, "AutogradMeta")
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


# -- what mps keeps whole -------------------------------------------------------------------------


def keep_svd_whole(library: torch.library.Library, key: str) -> None:
    """Notice calls of linalg_svd, for tensors of one dispatch key; compute them as before.

    It decomposes into `_linalg_svd` before a tracer on another device can see it. On mps, some
    versions of torch have it registered as a whole (it is sent to the CPU), while svdvals, cond,
    the nuclear norm and matrix_rank go to `_linalg_svd` directly, which is missing.
    """
    library.impl("linalg_svd", _linalg_svd, key)


def operation_on_mps(leaf: Any) -> Any:
    """Return the operation that mps would be given in place of a decomposed one."""
    part, whole = _inside.get()
    return whole if part is leaf else leaf


def _linalg_svd(a: Any, full_matrices: bool = True, *, driver: str | None = None) -> Any:
    aten = torch.ops.aten
    before = _inside.set((aten._linalg_svd.default, aten.linalg_svd.default))
    try:
        return aten._linalg_svd(a, full_matrices, True, driver=driver)
    finally:
        _inside.reset(before)


# -- autocast -------------------------------------------------------------------------------------


class Autocast:
    """What torch's autocast would do to the arguments of a function on one kind of device."""

    def __init__(self, device_type: str) -> None:
        self._type = device_type
        self._weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Weights that were narrowed in this region, as torch's own cache keeps them."""

    @property
    def is_on(self) -> bool:
        """Whether a region of autocast is open; outside of one nothing is kept."""
        if torch.is_autocast_enabled(self._type):
            return True
        self._weights.clear()
        return False

    def cast(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the arguments as autocast hands them on."""
        name = getattr(func, "__name__", "")
        how = _OPS.get(name)
        if how is None:
            return args, kwargs
        if how == "full" and name in _TAKES_DTYPE and kwargs.get("dtype") is not None:
            return args, kwargs
        if how == "lower":
            return map_tensors(self._narrow, args), map_tensors(self._narrow, kwargs)
        given = flat(tuple(kwargs.values()), flat(args, []))
        if how == "widest" and not any(tensor.dtype is torch.float32 for tensor in given):
            return args, kwargs
        return map_tensors(_widen, args), map_tensors(_widen, kwargs)

    def _narrow(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = torch.get_autocast_dtype(self._type)
        if not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64):
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad and torch.is_autocast_cache_enabled()):
            return tensor.to(dtype)
        if id(tensor) not in self._weights:
            self._weights[id(tensor)] = tensor, tensor.to(dtype)
        return self._weights[id(tensor)][1]


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALVES else tensor
