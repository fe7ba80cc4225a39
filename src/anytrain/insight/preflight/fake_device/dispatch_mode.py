"""Run every operation of the fake device without data (a TorchDispatchMode).

A value that is read is one, unless it is known; a shape that depends on values is the largest it
can be. Each such read is recorded: on a real device the host would wait there.
To "is it a number?" the answer is what a healthy run would say, so that a guard such as
`if torch.isnan(loss).any(): raise` does not end the trace.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anytrain.insight.preflight.fake_device.device import (
    META,
    NOT_KNOWN,
    FakeDevice,
    flat,
    map_tensors,
    storage_of,
)
from anytrain.insight.preflight.fake_device.kernel_choice import operation_on_mps

_NEVER = ("isnan", "isinf", "isposinf", "isneginf")
_KEEP = frozenset(
    (
        *("any", "all", "sum", "mean", "max", "min", "amax", "amin", "count_nonzero"),
        *("_to_copy", "clone", "copy", "index", "masked_select"),
    )
)
_NOT = ("logical_not", "bitwise_not")
_AND = ("logical_and", "bitwise_and", "__and__", "mul")
_OR = ("logical_or", "bitwise_or", "__or__")
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "ge": operator.ge,
    "lt": operator.lt,
    "le": operator.le,
}
aten = torch.ops.aten
READABLE = 2**24
"""Elements up to which a tensor that is read becomes a real one."""
_COMPUTABLE = 2**24
_CPU = torch.device("cpu")
_SPREAD_LIST = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
# What may take tensors of two devices; everything else refuses them, as torch does.
_MIXES = {aten.copy_.default, aten._to_copy.default, aten.set_.source_Tensor, *_SPREAD_LIST}
_TAKES_LENGTHS = ("aten::_ctc_loss", "aten::_pack_padded_sequence")
"""Operations that take lengths as a CPU tensor, whatever device they compute on."""
_KEEPS_VALUE = {
    aten._to_copy.default,
    aten.clone.default,
    aten.detach.default,
    aten.view.default,
    aten.alias.default,
    aten.lift_fresh.default,
}
_SCALE_CHECK = aten._amp_foreach_non_finite_check_and_unscale_.default
Answer = tuple[Any, str, bool]


# -- what is known of values ----------------------------------------------------------------------


def note_truth(func: Any, args: tuple[Any, ...], given: list[torch.Tensor], made: Any) -> None:
    """Keep with an operation's result whether all that is in it is true, or none is."""
    if not made or not made[0].is_meta:
        return
    known = storage_of(made[0])
    if known is None:
        return
    is_view = any(storage_of(tensor) is known for tensor in given)
    if is_view and not func._schema.is_mutable:
        return  # of the same memory
    known.truth = _truth(func, args)


def _truth(func: Any, args: tuple[Any, ...]) -> bool | None:
    name = func._overloadpacket.__name__
    if not name.startswith("__"):
        name = name.removesuffix("_")  # in place
    if name in _NEVER:
        return False
    if name in _COMPARE:
        return _compared(_COMPARE[name], *args[:2])
    truths = [truth_of(tensor) for tensor in flat(args, [])]
    if name in _KEEP:
        return truths[0]
    if name in ("cat", "stack"):
        return truths[0] if len(set(truths)) == 1 else None
    if name in _NOT:
        return None if truths[0] is None else not truths[0]
    if name in _AND and len(truths) == 2:
        return _joined(truths, decisive=False)
    return _joined(truths, decisive=True) if name in _OR and len(truths) == 2 else None


def _joined(truths: list[bool | None], *, decisive: bool) -> bool | None:
    """Return what two truths are together, where one of them alone may decide."""
    if decisive in truths:
        return decisive
    return None if None in truths else not decisive


def _compared(compare: Callable[[Any, Any], bool], one: Any, other: Any) -> bool | None:
    """Compare what is known: a number is equal to itself, is finite, and is 1 unless known."""
    if one is other:
        return compare(1, 1)
    if isinstance(other, torch.Tensor) or not isinstance(one, torch.Tensor):
        return None
    if not math.isfinite(other) or one.numel() == 1:
        return compare(value_of(one), other)
    return None


def value_of(tensor: torch.Tensor) -> Any:
    """Return the value in a tensor: what is known of it, else one."""
    known = storage_of(tensor)
    if known is None or (known.value is NOT_KNOWN and known.truth is None):
        return 1.0
    return float(bool(known.truth)) if known.value is NOT_KNOWN else known.value


def truth_of(tensor: torch.Tensor) -> bool | None:
    """Return whether all that is in a tensor is true, or none is; None where that is not known."""
    known = storage_of(tensor) if tensor.is_meta else None
    return None if known is None else known.truth


def _only_of_range(args: tuple[Any, ...]) -> Any:
    """Return the number that a range consists of, where it has one alone."""
    bounds = args[:3]
    if not all(isinstance(bound, int) for bound in bounds) or len(range(*bounds)) != 1:
        return NOT_KNOWN
    return range(*bounds)[0]


def _scattered(args: tuple[Any, ...]) -> Any:
    """Return what was written to the only place that there is."""
    to, source = args[0], storage_of(args[3])
    return NOT_KNOWN if source is None or to.numel() != 1 else source.value


_SETS_VALUE: dict[Any, Callable[[tuple[Any, ...]], Any]] = {
    aten.zeros.default: lambda args: 0.0,
    aten.zero_.default: lambda args: 0.0,
    aten.zeros_like.default: lambda args: 0.0,
    aten.ones.default: lambda args: 1.0,
    aten.ones_like.default: lambda args: 1.0,
    aten.full.default: lambda args: args[1],
    aten.full_like.default: lambda args: args[1],
    aten.new_zeros.default: lambda args: 0.0,
    aten.new_full.default: lambda args: args[2],
    aten.fill_.Scalar: lambda args: args[1],
    aten.arange.default: _only_of_range,
    aten.arange.start: _only_of_range,
    aten.arange.start_step: _only_of_range,
    aten.scatter_.src: _scattered,
}


# -- operations -----------------------------------------------------------------------------------


class DispatchMode(TorchDispatchMode):
    """Run every operation of the fake device without data; make up the values that are read."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            given = flat(tuple(kwargs.values()), flat(args, []))
            wanted = kwargs.get("device")
            if not any(t.is_meta for t in given) and (wanted is None or wanted.type != "meta"):
                return func(*args, **kwargs)
            return self._run(func, args, kwargs, given)

    def _run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]
    ) -> Any:
        device = self.device
        where = self._where(func, given)
        host_read, is_dynamic = "", False
        answer = _ANSWERS.get(func)
        if answer is not None and (found := answer(self, args, kwargs)) is not None:
            out, host_read, is_dynamic = found
        else:
            out = self._shaped(func, args, kwargs, given)
        if func is aten._to_copy.default and device.intent is not None:
            where = device.intent
        made = flat(out, [])
        for tensor in made:
            device.adopt(tensor, where)
        self._note_values(func, args, made)
        note_truth(func, args, given, made)
        if device.device in (where, *(device.claim(t) for t in given)):
            device.recorder.ran(
                operation_on_mps(func), args, kwargs, given, made, host_read, is_dynamic
            )
        return out

    def _where(self, func: Any, given: list[torch.Tensor]) -> torch.device:
        """Return where the result is; refuse tensors that no device could compute together."""
        target = self.device.device
        found = [(t, self.device.claim(t)) for t in given]
        on_target = any(claim == target for _, claim in found)
        if on_target and func not in _MIXES and not func.name().startswith(_TAKES_LENGTHS):
            for tensor, claim in found:
                if claim.type == "cpu" != target.type and tensor.dim() > 0:
                    raise RuntimeError(
                        "Expected all tensors to be on the same device, but found at least two "
                        f"devices, {target} and cpu! (in {func.name()})"
                    )
        if on_target or not found:
            intent = self.device.intent
            return target if on_target or intent is None else intent
        held = [claim for tensor, claim in found if tensor.is_meta]
        return held[0] if held else self.device.intent or target

    def _shaped(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]
    ) -> Any:
        if any(not t.is_meta and t.dim() > 0 for t in given):
            args, kwargs = map_tensors(self.device.standing_in, (args, kwargs))
        if kwargs.get("generator") is not None:
            kwargs = {**kwargs, "generator": None}
        if func.name().startswith("aten::_fused_") and not func._schema.returns:
            return None  # an optimizer's whole update, in place
        try:
            return func(*args, **kwargs)
        except NotImplementedError:
            found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
            return self._computed(func, args, kwargs)

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute on the CPU for real where torch knows no other way to the shapes."""
        if sum(t.numel() for t in flat(args, [])) > _COMPUTABLE:
            raise NotImplementedError(f"torch cannot tell the shapes of {func.name()} without data")

        def real(tensor: torch.Tensor) -> torch.Tensor:
            return torch.ones(tensor.size(), dtype=tensor.dtype) if tensor.is_meta else tensor

        if "device" in kwargs:
            kwargs = {**kwargs, "device": _CPU}
        out = func(*map_tensors(real, args), **map_tensors(real, kwargs))
        return map_tensors(self.device.standing_in, out)

    def _note_values(self, func: Any, args: tuple[Any, ...], made: list[torch.Tensor]) -> None:
        """Keep what is known of single values: a check for infinities finds none."""
        if func is _SCALE_CHECK:
            self._set_value(args[1], 0.0)
            return
        value: Any = NOT_KNOWN
        if func is aten.all.default:
            known = storage_of(args[0])
            if known is not None and known.is_full is not None:
                value = float(known.is_full)
        elif func in _SETS_VALUE:
            value = _SETS_VALUE[func](args)
        elif func in _KEEPS_VALUE and isinstance(args[0], torch.Tensor):
            value = _known_value(args[0])
        for tensor in made:
            self._set_value(tensor, value)
        if func is aten._to_copy.default and made[0].is_meta:
            self._note_fullness(args[0], made[0])

    @staticmethod
    def _note_fullness(source: torch.Tensor, copy: torch.Tensor) -> None:
        """Note whether a mask hides anything: models ask, and then build masks."""
        if source.dtype.is_floating_point or source.dtype.is_complex:
            return
        known, at = storage_of(copy), storage_of(source)
        if known is None:
            return
        if not source.is_meta:
            known.is_full = bool(source.all())
        elif at is not None:
            known.is_full = at.is_full

    def _set_value(self, tensor: torch.Tensor, value: Any) -> None:
        known = storage_of(tensor) if tensor.is_meta else None
        if known is not None and known.num_bytes <= 16:
            known.value = value

    # -- answers ------------------------------------------------------------------------------

    def value(self, tensor: torch.Tensor) -> Any:
        """Return the value of a tensor of one element: what is known of it, else one."""
        value = value_of(tensor)
        if tensor.dtype is torch.bool:
            return bool(value)
        return value if tensor.dtype.is_floating_point else int(value)

    def readable(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a real CPU tensor in the place of one without data; a huge one stays without."""
        dtype = dtype or tensor.dtype
        if tensor.numel() > READABLE:
            found = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=META)
            self.device.adopt(found, _CPU)
            return found
        if tensor.numel() == 1:
            return torch.full(tensor.size(), self.value(tensor), dtype=dtype)
        truth = truth_of(tensor)
        return torch.full(tensor.size(), 1 if truth is None else int(truth), dtype=dtype)


def _known_value(tensor: torch.Tensor) -> Any:
    """Return the one value of a tensor, as it was noted, or of whole numbers as it really is."""
    is_whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    if not tensor.is_meta and tensor.numel() == 1 and is_whole:
        return tensor.item()
    known = storage_of(tensor)
    return NOT_KNOWN if known is None else known.value


def _num_hits(mask: torch.Tensor) -> int:
    """Return how many elements a mask picks: all of them, unless it is there to be looked at."""
    return mask.numel() if mask.is_meta else int(mask.count_nonzero())


def _item(mode: DispatchMode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
    return mode.value(args[0]), "item", False


def _equal(mode: DispatchMode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
    return True, "equal", False


def _to_copy(mode: DispatchMode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer | None:
    wanted, source = kwargs.get("device"), args[0]
    if wanted is None or wanted.type != "cpu" or not source.is_meta:
        return None
    read = "to cpu" if mode.device.claim(source) == mode.device.device else ""
    return mode.readable(source, kwargs.get("dtype")), read, False


def _copy(mode: DispatchMode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer | None:
    to, source = args[:2]
    if to.is_meta or not source.is_meta:
        return None
    return to.fill_(mode.value(source) if source.numel() == 1 else 1), "to cpu", False


def _rows(num_rows: int, *rest: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty((num_rows, *rest), dtype=dtype, device=like.device)


def _nonzero(mode: DispatchMode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
    given = args[0]
    found = _rows(given.numel(), given.dim(), like=given, dtype=torch.int64)
    return found, "nonzero", True


def _masked_select(mode: DispatchMode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
    given, mask = args
    shape = torch.broadcast_shapes(given.shape, mask.shape)
    num_rows = math.prod(shape) if mask.is_meta else _num_hits(mask.expand(shape))
    return (
        _rows(num_rows, like=mode.device.standing_in(given), dtype=given.dtype),
        "boolean mask",
        True,
    )


def _index(mode: DispatchMode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer | None:
    """Index by masks: as many rows as they pick."""
    given, indices = args[:2]
    if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return None
    places: list[Any] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            places.append(None if index is None else mode.device.standing_in(index))
            continue
        row = torch.empty(_num_hits(index), dtype=torch.int64, device=META)
        places += [row] * index.dim()
    return aten.index.Tensor(given, places), "boolean mask", True


def _index_put(mode: DispatchMode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer | None:
    """Write by masks: of one value no host needs to know how many places there are."""
    given, indices, values = args[:3]
    if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return None
    return given, "" if values.numel() == 1 else "boolean mask", values.numel() != 1


def _index_put_new(
    mode: DispatchMode, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Answer | None:
    found = _index_put(mode, args, kwargs)
    return None if found is None else (torch.empty_like(args[0]), *found[1:])


def _unique(mode: DispatchMode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
    given = args[0]
    values = _rows(given.numel(), like=given, dtype=given.dtype)
    inverse = torch.empty(given.shape, dtype=torch.int64, device=given.device)
    counts = _rows(given.numel(), like=given, dtype=torch.int64)
    return (values, inverse, counts), "unique", True


def _unique_dim(mode: DispatchMode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
    given, dim = args[:2]
    rows = given.size(dim)
    inverse = _rows(rows, like=given, dtype=torch.int64)
    return (torch.empty_like(given), inverse, torch.empty_like(inverse)), "unique", True


def _repeated(mode: DispatchMode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer | None:
    if kwargs.get("output_size") is not None:
        return None
    return _rows(args[0].numel(), like=args[0], dtype=torch.int64), "repeat_interleave", True


def _bincount(mode: DispatchMode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
    least = int(args[2]) if len(args) > 2 else int(kwargs.get("minlength", 0))
    return _rows(max(least, 1), like=args[0], dtype=torch.int64), "bincount", True


def _packed(mode: DispatchMode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
    """Pack sequences by their lengths, which torch reads on the CPU.

    What comes back from the device is one, and a batch that was made larger has zeros. Lengths of
    which none is more are not known, and the sequences are taken to be as long as they can be.
    """
    given, lengths, batch_first = args
    where = mode.device.claim(lengths)
    if where.type != "cpu":
        raise RuntimeError(
            "'lengths' argument should be a 1D CPU int64 tensor, but got a "
            f"{lengths.dim()}D tensor on {where}"
        )
    if lengths.is_meta or not bool((lengths > 1).any()):
        lengths = torch.full(lengths.size(), given.size(1 if batch_first else 0))
    given = mode.device.standing_in(given)
    return aten._pack_padded_sequence.default(given, lengths, batch_first), "", True


_ANSWERS: dict[Any, Callable[[DispatchMode, tuple[Any, ...], dict[str, Any]], Answer | None]] = {
    aten._local_scalar_dense.default: _item,
    aten.equal.default: _equal,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.index.Tensor: _index,
    aten.index_put_.default: _index_put,
    aten.index_put.default: _index_put_new,
    aten._index_put_impl_.default: _index_put,
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique,
    aten.unique_dim.default: _unique_dim,
    aten.repeat_interleave.Tensor: _repeated,
    aten.bincount.default: _bincount,
    aten._pack_padded_sequence.default: _packed,
}
