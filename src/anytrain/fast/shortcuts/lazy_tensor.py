"""Values of a recorded step that are put off until it is known what they are for.

A layer's result that is dropped out, added to what went around the layer and normalized is one pass
over memory if it is known to be all that; and the float32 copy of a head's logits is often read by
nobody. So both are promised first (`LazyTensor`). A promise that is read gets the values that torch
would have computed, by the operation that torch would have used.

INVARIANT: values and gradients are torch's, or the recording fails. A promise has two places in
the graph of gradients, its own and that of its values, and gradients may come to either. So whoever
asks for that place (a hook, `retain_grad`, `torch.autograd.grad`), writes to a promise, or reads it
below Python gets a `BrokenPromise`; the step is recorded anew, and nothing is put off in it. What
is not seen: writes that torch does not count (`x.data.mul_(2)`) to a tensor that a promised sum
still waits for, that a layer norm has made, or that is a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from anytrain.core import patches
from anytrain.fast.shortcuts.refusals import BrokenPromise

Make = Callable[[], torch.Tensor]
ALIGNED = 16
"""Kernels read this many bytes at once."""
_T = torch.Tensor
_AS_PLAIN = torch._C.DisableTorchFunctionSubclass


def _getters(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, name).__get__ for name in names}


_FACTS = _getters("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad") | {
    *(_T.size, _T.dim, _T.numel, _T.is_floating_point, _T.__hash__)
}
"""What is known of a promise before its values are."""
_PLACES = _getters("data", "grad", "grad_fn", "is_leaf", "output_nr", "_backward_hooks") | {
    *(_T.register_hook, _T.retain_grad, _T.requires_grad_, _T.register_post_accumulate_grad_hook),
    torch.autograd.grad,
}
"""What asks for a tensor's place in the graph of gradients, or goes around it."""
_SUMS = {torch.add, _T.add, _T.__add__, _T.__radd__}
_VIEWS = {_T.view, _T.reshape, torch.reshape}
_WRITERS = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__"} | {
    *("__ifloordiv__", "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__"),
    *("__ilshift__", "__irshift__"),
}
"""What writes to a tensor, besides functions whose names end in `_`."""
_is_on = False
"""Whether a step is recorded: tensors that outlive it are plain ones."""


class Dropped(NamedTuple):
    """What a dropout has read, which of it was kept, and by how much that was scaled."""

    inputs: torch.Tensor
    mask: torch.Tensor
    scale: float
    versions: tuple[int, int]
    """Of what it has read and made; others, once something was written to one of them."""

    def is_all(self, made: torch.Tensor) -> bool:
        """Whether nothing else was done to the values."""
        return self.versions == (self.inputs._version, made._version)


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
    """How the values of a tensor are computed once they are wanted."""

    make: Make | None
    """None once they are there."""
    parts: tuple[torch.Tensor, ...]
    """What must not be written to until then. Of two, the values are the sum."""
    head: Head | None = None
    """What the values are a copy of."""
    origin: Promise | None = None
    """What they are a view of."""
    versions: tuple[int, ...] = ()
    hooks: Any = None
    """What saved tensors went through when it was given: a checkpointed block runs twice, and
    must do the same both times."""
    made: torch.Tensor | None = None
    made_version: int = 0

    def __post_init__(self) -> None:
        self.versions = tuple(part._version for part in self.parts)
        self.hooks = saving_hooks()

    def values(self) -> torch.Tensor:
        """Return the values, which are computed now if they are not there."""
        if self.make is not None:
            self.check()
            # Modes may count what a block does: of a checkpointed one, each time it runs.
            with (
                _AS_PLAIN(),
                torch.inference_mode(False),
                torch.enable_grad(),
                _disable_current_modes(),
            ):
                self.settle(self.make())
        assert self.made is not None
        return self.made

    def settle(self, made: torch.Tensor) -> None:
        """Take these values for it."""
        self.made, self.made_version = made, made._version
        self.make, self.parts, self.versions, self.hooks = None, (), (), None

    def check(self) -> None:
        """Raise where the values can no longer be computed."""
        if self.versions != tuple(part._version for part in self.parts):
            raise BrokenPromise("a tensor is written over after it was added to another")

    def is_as_made(self) -> bool:
        """Whether nobody has written to the values."""
        if self.origin is not None and not self.origin.is_as_made():
            return False
        return self.made is None or self.made._version == self.made_version


def saving_hooks() -> Any:
    """Return what saved tensors go through here, to compare; another each time if unknown."""
    find = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return object() if find is None else find(False)


class LazyTensor(torch.Tensor):
    """A float32 tensor whose values are computed when something reads them."""

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
        """Refuse what comes from below Python: there, no place in the graph is to be had."""
        raise BrokenPromise(f"{func} reads a tensor that is not computed yet")


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose values are there."""
    if not isinstance(tensor, LazyTensor):
        return tensor
    with _AS_PLAIN():
        if tensor._version:  # a function of the user's own has marked it so
            raise BrokenPromise("a function writes to a tensor that is not computed yet")
    return tensor.promise.values()


class _Promised(torch.autograd.Function):
    """The place of a promise in the graph of gradients."""

    @staticmethod
    def forward(ctx: Any, *parts: Any) -> Any:
        ctx.dtypes = [part.dtype for part in parts]
        ctx.set_materialize_grads(False)
        first = parts[0]
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(LazyTensor, first.shape, dtype=torch.float32, device=first.device)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        sent = given[0]
        return tuple(None if sent is None else sent.to(dtype) for dtype in ctx.dtypes)


def _promised(make: Make, *parts: torch.Tensor, **more: Any) -> Any:
    apply: Callable[..., Any] = _Promised.apply
    with _AS_PLAIN():
        found = apply(*parts)
    found.promise = Promise(make, parts, **more)
    return found


def promised_sum(tensor: torch.Tensor) -> Promise | None:
    """Return the promise of a sum whose values may be computed together with what comes next."""
    promise = tensor.promise if isinstance(tensor, LazyTensor) else None
    if promise is None or len(promise.parts) != 2:
        return None
    if promise.hooks != saving_hooks() or not torch.is_grad_enabled():
        return None
    promise.check()
    return promise


def head_of(logits: torch.Tensor) -> Head | None:
    """Return the head that these logits are the untouched result of; None where there is none."""
    head = None
    if isinstance(logits, LazyTensor):
        head = logits.promise.head if logits.promise.is_as_made() else None
    elif isinstance(logits, Result):
        head = logits.head
    return head if head is not None and head.seen._version == head.version else None


@contextmanager
def promises() -> Iterator[None]:
    """Let sums and copies in the block be put off, and dropouts remember what they did."""
    global _is_on
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
        with _AS_PLAIN():
            made, mask = torch.native_dropout(input, p, True)
            versions = input._version, made._version
        return result(made, dropped=Dropped(input, mask, 1 / (1 - p), versions))

    _is_on = True
    try:
        with patches.replaced("dropout", functional, dropout=dropout):
            yield
    finally:
        _is_on = False


def _called(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do what torch is asked to do with tensors of which some are results or promises."""
    if func not in _FACTS:
        if _is_on:
            _refuse(func, args, kwargs)
            found = _put_off(func, args, kwargs) if torch.is_grad_enabled() else None
            if found is not None:
                return found
        if LazyTensor in types:
            args, kwargs = _pytree.tree_map_only(LazyTensor, real, (args, kwargs))
    with _AS_PLAIN():
        return func(*args, **kwargs)


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise where something is asked for that a promise cannot give."""
    name = str(getattr(func, "__name__", ""))
    func = getattr(func, "instead_of", func)
    if func in _PLACES or name == "__set__" or kwargs.get("inputs") is not None:
        of = getattr(func, "__self__", func)  # of an attribute, what it is called
        asker = getattr(of, "__name__", name)
        raise BrokenPromise(f"{asker} asks for the place of a layer's result or sum in the graph")
    writes = name in _WRITERS or (name.endswith("_") and not name.endswith("__"))
    written = [kwargs.get("out"), args[0] if args and writes else None]
    if any(isinstance(tensor, LazyTensor) for tensor in written):
        raise BrokenPromise(f"{name} writes to a sum or a copy")


def _put_off(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a promise of what is asked for; None where it is to be done now."""
    if func in _SUMS:
        return _sum(*args) if len(args) == 2 and not kwargs else None
    first = args[0] if args else None
    if not isinstance(first, (Result, LazyTensor)) or head_of(first) is None:
        return None
    if func in _VIEWS and not kwargs:
        return _view(func, first, args[1:])
    if func is _T.float or (func is _T.to and _wants_float32(args[1:], kwargs)):
        return first if isinstance(first, LazyTensor) else _copy(first)
    return None


def _wants_float32(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = [*args, *([kwargs["dtype"]] if set(kwargs) == {"dtype"} else kwargs)]
    return len(given) == 1 and given[0] is torch.float32


def _sum(one: Any, other: Any) -> Any:
    """Return the sum of a layer's result and of what went around the layer, put off."""
    half, whole = (one, other) if isinstance(one, Result) else (other, one)
    if not isinstance(half, Result) or not isinstance(whole, torch.Tensor):
        return None
    whole = real(whole)
    fits = type(whole) is torch.Tensor and whole.dtype == torch.float32
    if not fits or whole.shape != half.shape or whole.device != half.device:
        return None
    if not (can_be_read(half) and can_be_read(whole)):
        return None
    return _promised(lambda: half + whole, half, whole)


def can_be_read(tensor: torch.Tensor) -> bool:
    """Whether kernels can read it as it lies."""
    is_dense = tensor.is_contiguous() and tensor.numel() > 0 and not tensor.is_inference()
    return is_dense and tensor.data_ptr() % ALIGNED == 0


def _copy(seen: Result) -> Any:
    return _promised(lambda: torch.Tensor.float(seen), seen, head=seen.head)


def _view(func: Any, first: Any, args: tuple[Any, ...]) -> Any:
    """Return the same logits in another shape, as long as each row stays one."""
    if isinstance(first, LazyTensor) and first.promise.made is not None:
        return None
    part = first if isinstance(first, Result) else first.promise.parts[0]
    try:
        with _AS_PLAIN():
            seen = func(part, *args)
    except (RuntimeError, TypeError):  # torch is to say what is wrong
        return None
    if seen.shape[-1:] != part.shape[-1:] or seen.dtype != part.dtype:
        return None
    if seen.data_ptr() != part.data_ptr():  # a copy
        return None
    if isinstance(first, Result):
        return result(seen, head=first.head)
    origin = first.promise
    return _promised(lambda: func(origin.values(), *args), seen, head=origin.head, origin=origin)
