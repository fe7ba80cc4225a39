"""Autocast for a device that is only claimed.

torch casts in C++ by the device that it sees, which is another one here. The lists are those of
torch's documentation, "Autocast Op Reference"; `Autocast.cast` is asked before each function.
"""

from __future__ import annotations

from typing import Any

import torch

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
            return self._narrowed(args), {key: self._narrowed(v) for key, v in kwargs.items()}
        if how == "widest" and not _holds_wide((args, tuple(kwargs.values()))):
            return args, kwargs
        return _widened(args), {key: _widened(value) for key, value in kwargs.items()}

    def _narrowed(self, tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            return self._narrow(tree)
        if isinstance(tree, (list, tuple)):
            return type(tree)(self._narrowed(item) for item in tree)
        return tree

    def _narrow(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = torch.get_autocast_dtype(self._type)
        if not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64):
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad and torch.is_autocast_cache_enabled()):
            return tensor.to(dtype)
        if id(tensor) not in self._weights:
            self._weights[id(tensor)] = tensor, tensor.to(dtype)
        return self._weights[id(tensor)][1]


def _widened(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.float() if tree.dtype in (torch.float16, torch.bfloat16) else tree
    if isinstance(tree, (list, tuple)):
        return type(tree)(_widened(item) for item in tree)
    return tree


def _holds_wide(tree: Any) -> bool:
    if isinstance(tree, torch.Tensor):
        return tree.dtype is torch.float32
    return isinstance(tree, (list, tuple)) and any(_holds_wide(item) for item in tree)
