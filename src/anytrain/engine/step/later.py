"""Values of a recorded step that are put off until it is known what they are for.

A layer's result that is dropped out, added to what went around the layer and normalized is one pass
over memory if it is known to be all that; and the float32 copy of a head's logits is often read by
nobody. So both are promised first. Whatever a promise is not known to serve gets the values that
torch would have computed, by the operations that torch would have used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils import _pytree

Make = Callable[[], torch.Tensor]
_T = torch.Tensor
_FACTS = {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad")
} | {_T.size, _T.dim, _T.numel, _T.is_floating_point, _T.__hash__}
"""What can be asked of a promise without keeping it."""
_SUMS = {torch.add, _T.add, _T.__add__, _T.__radd__}
_VIEWS = {_T.view, _T.reshape, torch.reshape}


class BrokenPromise(Exception):
    """What a promise was to be made of has been written over."""


class Dropped(NamedTuple):
    """What a dropout has read, which of it was kept, and by how much that was scaled."""

    inputs: torch.Tensor
    mask: torch.Tensor
    scale: float


class Head(NamedTuple):
    """What a head over a vocabulary has made."""

    seen: torch.Tensor
    """As the model got it."""
    version: int
    """Another one, once something was written to it."""
    whole: torch.Tensor
    """The same with the columns that nobody sees, which may be none."""


class Result(torch.Tensor):
    """What a layer, or a dropout behind it, has made in bfloat16; its values are there."""

    dropped: Dropped | None = None
    head: Head | None = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Do what is asked, now or later."""
        return _called(func, types, args, kwargs or {})


def result(made: torch.Tensor, *, dropped: Dropped | None = None, head: Head | None = None) -> Any:
    """Return the same values as a layer's result, of which sums and copies are put off."""
    found = made.as_subclass(Result)
    found.dropped, found.head = dropped, head
    return found


@dataclass(slots=True)
class Promise:
    """How the values of a tensor are made once they are wanted."""

    make: Make
    parts: tuple[torch.Tensor, ...]
    """What they are the sum of."""
    head: Head | None = None
    versions: tuple[int, ...] = ()
    hooks: Any = None
    """What saved tensors went through when it was given: a checkpointed block runs twice, and
    must do the same both times."""
    made: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.versions = tuple(part._version for part in self.parts)
        self.hooks = _hooks()

    def keep(self) -> torch.Tensor:
        """Return the values, which are computed now if they were not before."""
        if self.made is None:
            self.check()
            with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
                self.settle(self.make())
        assert self.made is not None
        return self.made

    def settle(self, made: torch.Tensor) -> None:
        """Take these values for it."""
        self.made, self.parts, self.make = made, (), _settled
        self.versions = (made._version,)

    def check(self) -> None:
        """Raise where the values can no longer be made."""
        if self.versions != tuple(part._version for part in self.parts):
            raise BrokenPromise("a layer's result is written over after it was added to another")

    @property
    def is_as_made(self) -> bool:
        """Whether nobody has written to the values since they were made."""
        return self.made is None or self.versions == (self.made._version,)


def _settled() -> torch.Tensor:
    raise AssertionError("a promise is kept once")


def _hooks() -> Any:
    """Return what saved tensors go through here, to compare; another each time if unknown."""
    find = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return object() if find is None else find(False)


class Later(torch.Tensor):
    """A float32 tensor whose values are made when something reads them."""

    promise: Promise

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Do what is asked, now or later."""
        return _called(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Do what is asked by code that is not Python; gradients go their way without it."""
        read = _pytree.tree_map_only(Later, _values, (args, kwargs or {}))
        return func(*read[0], **read[1])


def _values(later: Later) -> torch.Tensor:
    return later.promise.keep().detach()


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose values are there."""
    return tensor.promise.keep() if isinstance(tensor, Later) else tensor


class _Promised(torch.autograd.Function):
    """Where gradients go that come to a sum before its values are there."""

    @staticmethod
    def forward(ctx: Any, *parts: Any) -> Any:
        ctx.dtypes = [part.dtype for part in parts]
        first = parts[0]
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(Later, first.shape, dtype=torch.float32, device=first.device)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        return tuple(given[0].to(dtype) for dtype in ctx.dtypes)


def promised(make: Make, *parts: torch.Tensor, head: Head | None = None) -> Any:
    """Return the float32 sum of the parts, which `make` computes when it is wanted."""
    apply: Callable[..., Any] = _Promised.apply
    with torch._C.DisableTorchFunctionSubclass():
        found = apply(*parts)
    found.promise = Promise(make, parts, head)
    return found


def promised_sum(tensor: torch.Tensor) -> Promise | None:
    """Return the promise of a sum of two that may be kept together with what comes next."""
    promise = tensor.promise if isinstance(tensor, Later) else None
    if promise is None or len(promise.parts) != 2:
        return None
    if promise.hooks != _hooks() or not torch.is_grad_enabled():
        return None
    promise.check()
    return promise


def head_of(logits: torch.Tensor) -> Head | None:
    """Return the head that these logits are the untouched result of; None where there is none."""
    if isinstance(logits, Later):
        head = logits.promise.head if logits.promise.is_as_made else None
    else:
        head = logits.head if isinstance(logits, Result) else None
    return head if head is not None and head.seen._version == head.version else None


@contextmanager
def dropouts() -> Iterator[None]:
    """Let dropouts in the block remember what they did to a layer's result."""
    own = functional.dropout

    def dropout(
        input: Any,  # noqa: A002
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Any:
        can = isinstance(input, Result) and training and not inplace and 0 < p < 1
        if not can or not torch.is_grad_enabled():
            return own(input, p, training, inplace)
        with torch._C.DisableTorchFunctionSubclass():
            made, mask = torch.native_dropout(input, p, True)
        return result(made, dropped=Dropped(input, mask, 1 / (1 - p)))

    functional.dropout = dropout
    try:
        yield
    finally:
        functional.dropout = own


def _called(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func not in _FACTS:
        found = _put_off(func, args, kwargs) if torch.is_grad_enabled() else None
        if found is not None:
            return found
        if Later in types:
            args, kwargs = _pytree.tree_map_only(Later, real, (args, kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _put_off(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a promise of what is asked for; None where it is to be done now."""
    if func in _SUMS:
        return _sum(*args) if len(args) == 2 and not kwargs else None
    first = args[0] if args else None
    if not isinstance(first, (Result, Later)) or head_of(first) is None:
        return None
    if func in _VIEWS and not kwargs:
        return _view(func, first, args[1:])
    if func is _T.float or (func is _T.to and _wants_float32(args[1:], kwargs)):
        return first if isinstance(first, Later) else _copy(first)
    return None


def _wants_float32(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = [*args, *([kwargs["dtype"]] if set(kwargs) == {"dtype"} else kwargs)]
    return given == [torch.float32]


def _sum(one: Any, other: Any) -> Any:
    """Return the sum of a layer's result and of what went around the layer, put off."""
    half, whole = (one, other) if isinstance(one, Result) else (other, one)
    if not isinstance(half, Result) or not isinstance(whole, torch.Tensor):
        return None
    whole = real(whole)
    fits = type(whole) is torch.Tensor and whole.dtype == torch.float32
    if not fits or whole.shape != half.shape or whole.device != half.device:
        return None
    if not half.is_contiguous() or not whole.is_contiguous():
        return None
    return promised(lambda: half + whole, half, whole)


def _copy(seen: Result) -> Any:
    return promised(lambda: torch.Tensor.float(seen), seen, head=seen.head)


def _view(func: Any, first: Any, args: tuple[Any, ...]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        if isinstance(first, Result):
            return result(func(first, *args), head=first.head)
        if first.promise.made is not None:
            return None
        part = func(first.promise.parts[0], *args)
    return promised(lambda: func(real(first), *args), part, head=first.promise.head)
