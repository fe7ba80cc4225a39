"""Two torch modes: the same random numbers on every device, and results rounded to a format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from anytrain.engine.tree import map_tensors

_DROPS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.dropout_,
    torch.alpha_dropout,
    torch.alpha_dropout_,
    torch.feature_dropout,
    torch.feature_alpha_dropout,
}
# Where the probability is one of many arguments, by the name and place it has.
_DROPS_INSIDE: dict[Any, tuple[str, int]] = {
    F.scaled_dot_product_attention: ("dropout_p", 4),
    F.multi_head_attention_forward: ("dropout_p", 10),
}
_MAKE = {torch.rand, torch.randn, torch.randint, torch.randperm}
_LIKE = {torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli, torch.multinomial}
_FILL = {
    torch.Tensor.uniform_,
    torch.Tensor.normal_,
    torch.Tensor.bernoulli_,
    torch.Tensor.random_,
    torch.Tensor.exponential_,
    torch.Tensor.geometric_,
    torch.Tensor.cauchy_,
    torch.Tensor.log_normal_,
}
Round = Callable[[torch.Tensor], torch.Tensor]
_TF32_DROPPED = 13
"""float32 has 23 bits behind the point, TF32 has 10."""
UNITS = {"tf32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The largest share by which rounding changes a value."""


class SameDraws(TorchFunctionMode):
    """Draw from the CPU's generator, seeded when the mode begins; drop nothing.

    Generators of different devices give different numbers from the same seed: what is drawn comes
    from one generator of the CPU and is copied. Dropout is left out, in modules, in functions and
    in attention.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._state = torch.Generator().manual_seed(seed).get_state()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPS:
            return args[0] if args else kwargs["input"]
        if func in _DROPS_INSIDE:
            args, kwargs = _without_dropout(args, kwargs, *_DROPS_INSIDE[func])
        elif func in _MAKE or (func is torch.normal and not isinstance(args[0], torch.Tensor)):
            return self._made(func, args, kwargs)
        elif func in _LIKE or func is torch.normal:
            return self._like(func, args, kwargs)
        elif func in _FILL:
            return self._filled(func, args, kwargs)
        return func(*args, **kwargs)

    def _made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = kwargs.pop("device", None) or torch.get_default_device()
        return self._drawn(func, args, {**kwargs, "device": "cpu"}).to(device)

    def _like(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given: torch.Tensor = args[0] if args else kwargs["input"]
        device = kwargs.pop("device", None) or given.device
        return self._drawn(func, args, kwargs).to(device)

    def _filled(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        empty = torch.empty_like(tensor, device="cpu", requires_grad=False)
        return tensor.copy_(self._drawn(func, (empty, *args[1:]), kwargs))

    def _drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call on the CPU, with the CPU's generator where this mode's has got to."""
        kwargs.pop("generator", None)  # of the device's, which the other side doesn't have
        args, kwargs = map_tensors(torch.Tensor.cpu, (args, kwargs))
        before = torch.get_rng_state()
        torch.set_rng_state(self._state)
        try:
            return func(*args, **kwargs)
        finally:
            self._state = torch.get_rng_state()
            torch.set_rng_state(before)


def _without_dropout(
    args: tuple[Any, ...], kwargs: dict[str, Any], name: str, place: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if len(args) > place:
        return (*args[:place], 0.0, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: 0.0}


def _narrowed(dtype: torch.dtype) -> Round:
    most = torch.finfo(dtype).max

    def narrow(tensor: torch.Tensor) -> torch.Tensor:
        # Masks hold float32's least value, which would round to an infinity.
        return tensor.clamp(-most, most).to(dtype).to(tensor.dtype)

    return narrow


def _tf32(tensor: torch.Tensor) -> torch.Tensor:
    half = 1 << (_TF32_DROPPED - 1)
    bits = (tensor.contiguous().view(torch.int32) + half) & -(1 << _TF32_DROPPED)
    return torch.where(tensor.isfinite(), bits.view(torch.float32), tensor)


_ROUNDS: dict[str, Round] = {
    "tf32": _tf32,
    "float16": _narrowed(torch.float16),
    "bfloat16": _narrowed(torch.bfloat16),
}


# -- rounding -------------------------------------------------------------------------------------


class Rounded(TorchDispatchMode):
    """Round what every operation makes, forward and backward, to a format by its name.

    Products and sums are added up in float32, as the units of GPUs and TPUs do it, and every
    operation's result is rounded, also where autocast would leave it whole. No kernel of the
    narrow format runs, so none that is wrong can hide in it.
    """

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types there
        self._round = _ROUNDS[name]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        found = out if isinstance(out, (tuple, list)) else (out,)
        for made, told in zip(found, func._schema.returns, strict=False):
            is_view = told.alias_info is not None and not told.alias_info.is_write
            for tensor in made if isinstance(made, (tuple, list)) else (made,):
                if not is_view:
                    self.narrow(tensor)
        return out

    def narrow(self, tensor: Any) -> None:
        """Round a tensor where it lies; what is no float32 stays."""
        if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float32 and tensor.numel():
            with torch.no_grad():
                tensor.copy_(self._round(tensor))
