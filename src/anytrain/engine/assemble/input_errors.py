"""Say which input a step failed on: its column, its sample, and what would be right."""

from __future__ import annotations

import inspect
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anytrain.core.errors import AnytrainError, BadType, OutOfRange, add_to_message
from anytrain.engine.assemble import current
from anytrain.engine.data.columns import base_model, forward_names
from anytrain.engine.data.seeded import listed
from anytrain.engine.step import ranges
from anytrain.engine.step.ranges import BadIndex, user_place
from anytrain.engine.tree import map_tensors
from anytrain.machine.backends.base import Backend

_PATIENCE_S = 60.0
_IGNORED = -100
_MOST_BEFORE = 4
_LOST = ("device-side assert", "CUDA error", "CUBLAS_STATUS", "cuDNN error", "HIP error")
"""What torch says where a GPU does nothing more for this process."""
_TOLD = (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError)
"""What is told of the batch; torch asserts what it expects of shapes that have no values."""
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len")
_NO_ARGUMENT = re.compile(r"(\w+)\.forward\(\) missing \d+ required .*arguments?: (.+)")
_NO_PARAMETER = re.compile(r"(\w+)\.forward\(\) got an unexpected keyword argument '(.+?)'")
_FIT_TOKENS = (
    "take the tokenizer (or the ids) that belong to the model, or make the table larger "
    "(model.resize_token_embeddings(len(tokenizer)))."
)
_AS_MODEL = "give the columns that shape in the data set or a data_collator, or the model theirs."
_HINTS = (
    (
        r"multi-target|target tensor expected",
        "a cross entropy takes one class for each sample: labels of shape (batch,), whole numbers.",
    ),
    (
        r"dtype|scalar type|not implemented for '",
        "convert the column in the data set: features are floats (.float()); token ids and "
        "classes are whole numbers (.long()).",
    ),
    (
        r"Target size .* must be the same as input size",
        "labels that are floats or flags say yes or no to each class; where a sample has one "
        "class, give it as a whole number.",
    ),
    (r"shape|size|dimension|reduction dim", _AS_MODEL),
)
_TEXTS = (
    r"must be Tensor, not (list|tuple|str)",
    "a batch's texts stay texts: turn the column into numbers in the data set.",
)
_MARK = "\n  batch: "
_OF_INPUTS = (AssertionError, IndexError, RuntimeError, TypeError, ValueError)

Call = tuple[nn.Module, Callable[[nn.Module, Any], Any], Mapping[str, Any]]
"""A module, how it was called with a batch, and the batch by the names of its arguments."""


@dataclass(frozen=True, slots=True)
class Fed:
    """A batch that a step was fed."""

    batch: Any
    """On the host, where its values are to be read."""
    samples: Sequence[Any] | None = None
    """Which samples of the data set its rows are; None where nobody knows."""
    step: int | None = None
    """The step's number, from 1; None outside of training."""
    number: int = 0
    """The batch's number in its epoch, from 0."""

    def row(self, number: int) -> str:
        """Name what a row of it is."""
        if self.samples is not None and number < len(self.samples):
            return f"sample {self.samples[number]}"
        return f"row {number} of batch {self.number}"

    @property
    def cannot(self) -> str:
        """Begin the sentence that says what cannot be done."""
        return "Cannot evaluate" if self.step is None else f"Cannot compute step {self.step}"


def is_lost(error: BaseException) -> bool:
    """Whether the device does nothing more for this process, as after an index out of range."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST)


def may_be_outside(error: BaseException) -> bool:
    """Whether a CPU says so that an index is outside; which words it has for it varies."""
    return isinstance(error, IndexError) or (
        isinstance(error, RuntimeError) and "out of bounds" in str(error)
    )


def search(
    batches: Iterable[Fed], check: Callable[[Any], BadIndex | None]
) -> tuple[Fed, BadIndex] | None:
    """Return the first batch with a value outside its table, and the value.

    A batch is not looked at whose columns hold nothing smaller, larger or longer than those that
    were found to be right.
    """
    right: dict[str, set[tuple[int, int]]] = {}
    until = time.monotonic() + _PATIENCE_S
    for fed in batches:
        told = {name: _extent(tensor) for name, tensor in columns(fed.batch)}
        if any(not _covers(right.get(name), extent) for name, extent in told.items()):
            if time.monotonic() > until:
                return None
            outside = check(fed.batch)
            if outside is not None:
                return fed, outside
            for name, extent in told.items():
                right[name] = right.get(name, set()) | extent
    return None


def _extent(tensor: torch.Tensor) -> set[tuple[int, int]]:
    """Return the least and the greatest value, without the ignored one, and the sizes."""
    found = {(1 + dim, size) for dim, size in enumerate(tensor.shape[1:])}
    counted = tensor[tensor != _IGNORED]
    if counted.numel() < tensor.numel():
        found.add((-1, 0))
    if counted.numel():
        found |= {(0, int(counted.min())), (0, int(counted.max()))}
    return found


def _covers(known: set[tuple[int, int]] | None, extent: set[tuple[int, int]]) -> bool:
    if known is None:
        return False
    for kind, value in extent:
        values = [each for found, each in known if found == kind]
        if not values or value > max(values) or (kind == 0 and value < min(values)):
            return False
    return True


def columns(batch: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a batch's tensors of whole numbers, by the names that users know."""
    for path, tensor in _tensors(batch, name):
        if not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool):
            yield path, tensor


def _tensors(batch: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(batch, torch.Tensor):
        yield name or "the batch", batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _tensors(value, f"{name}.{key}" if name else str(key))
    elif isinstance(batch, (list, tuple)):
        for place, value in enumerate(batch):
            yield from _tensors(value, f"{name or 'batch'}[{place}]")


def out_of_range(fed: Fed, outside: BadIndex, *, is_lost: bool = False) -> OutOfRange:
    """Return the error that names the value, its column and sample, and the range."""
    found = origin(fed, outside)
    named = f"{outside.module} ({outside.kind})" if outside.module else outside.kind
    place = f" at {outside.place}" if outside.place else ""
    top = outside.high - 1
    if found is None:
        what, fix = _computed(fed, outside, named)
        why = f"the table has {outside.high} rows ({max(outside.low, 0)} to {top}); it is read "
        why += f"in {named}{place}."
    elif outside.is_loss:
        what = f"{found} is {outside.value}, and the model has {outside.high} classes (0 to {top})."
        why = f"the loss in {named}{place} looks a label up among the classes; only "
        why += f"{outside.ignored} is passed over."
        fix = f"correct the label, or give the model more classes (num_labels={outside.value + 1})."
        if outside.value < 0:
            fix = f"correct the label; {outside.ignored} leaves one out."
    else:
        what = f"{found} holds {outside.value}, and {named} has {outside.high} rows (0 to {top})."
        why = f"each value of the column is looked up there{place}."
        fix = _FIT_TOKENS if "input_ids" in found else f"correct {found}, or make the table larger."
    if is_lost:
        why += " The GPU noticed after the host had gone on, and no longer works for this process."
        fix += " Then start the process again (in a notebook: restart the kernel)."
    return OutOfRange(f"{fed.cannot}: {what}", why=why, fix=fix)


def _computed(fed: Fed, outside: BadIndex, named: str) -> tuple[str, str]:
    """Say what was looked up that the forward has computed: positions, as a rule."""
    before = _before_positions(fed.batch, outside)
    longest = _longer_than(fed.batch, outside.high - before)
    if longest is not None:
        return _long(fed, *longest, outside.high - before, named)
    what = f"{named} is asked for {outside.value}, which forward has computed from the batch."
    return what, "look at how it is computed, or make the table larger."


def _before_positions(batch: Any, outside: BadIndex) -> int:
    """Return how many of a table's rows come before the first position's: RoBERTa has two."""
    last = int(outside.index.max()) + 1
    before = (last - t.shape[1] for _, t in columns(batch) if t.ndim > 1)
    return next((n for n in before if 0 <= n <= _MOST_BEFORE), 0)


def _longer_than(batch: Any, limit: int) -> tuple[str, torch.Tensor] | None:
    wide = ((n, t) for n, t in columns(batch) if t.ndim > 1 and t.shape[1] > limit)
    return next(wide, None)


def _long(fed: Fed, name: str, tensor: torch.Tensor, limit: int, named: str) -> tuple[str, str]:
    mask = fed.batch.get("attention_mask") if isinstance(fed.batch, Mapping) else None
    is_known = isinstance(mask, torch.Tensor) and mask.shape == tensor.shape and not mask.is_meta
    row = int(mask.sum(1).argmax()) if is_known and mask is not None else 0
    what = f"{name!r} of {fed.row(row)} has {tensor.shape[1]} positions, and {named} has {limit}."
    fix = f"cut the texts (truncation=True, max_length={limit} where they are tokenized), or take "
    return what, f"{fix}a model with more positions."


def origin(fed: Fed, outside: BadIndex) -> str | None:
    """Return the column and the sample that a value came from; None where it was computed."""
    told = []
    for name, tensor in columns(fed.batch):
        host = tensor.cpu()
        bad = outside.is_outside(host)
        # What is looked up may be a part of the column, or the column with some values ignored.
        looked_up = outside.index[outside.index != outside.ignored]
        if bad.any() and torch.isin(looked_up, host).all():
            rows = bad.reshape(len(bad), -1).any(dim=1).nonzero().flatten().tolist()
            told.append((_is_likely(name, outside), name, rows))
    if not told:
        return None
    _, name, rows = max(told, key=lambda each: each[0])
    more = f" (and of {len(rows) - 1} more in its batch)" if len(rows) > 1 else ""
    return f"{name!r} of {fed.row(rows[0])}{more}"


def _is_likely(name: str, outside: BadIndex) -> bool:
    return ("label" in name) == outside.is_loss


def explain(
    error: Exception, fed: Fed, model: nn.Module, dropped: Sequence[str] = ()
) -> AnytrainError | None:
    """Return the error that says what of a batch does not suit the model.

    None where that is not known; then the error's own message tells of the batch. `dropped` are
    the columns that were left out of it.
    """
    if isinstance(error, AnytrainError):
        return None
    if isinstance(error, TypeError) and (told := _call(error, fed.batch, model, dropped)):
        return told
    if isinstance(error, (RuntimeError, IndexError)) and (long := _too_long(error, fed, model)):
        return long
    if isinstance(error, _TOLD):
        add_to_message(error, _described(error, fed, model, dropped))
    return None


def _call(error: TypeError, batch: Any, model: nn.Module, dropped: Sequence[str]) -> BadType | None:
    """Explain a forward that was not given what it takes."""
    inner = base_model(model)
    found = _NO_ARGUMENT.search(str(error)) or _NO_PARAMETER.search(str(error))
    if found is None or found[1] not in {kind.__name__ for kind in type(inner).__mro__}:
        return None
    name, taken = type(inner).__name__, ", ".join(forward_names(model))
    names = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
    left, keeps = "", ""
    if dropped:
        left = f" (dropped {', '.join(map(str, dropped))}, which it does not take)"
        keeps = ", or pass remove_unused_columns=False and a data_collator that makes them"
    what = f"needs {found[2]}, which the batch does not have."
    if found.re is _NO_PARAMETER:
        what = f"does not take {found[2]!r}, which the batch has."
    return BadType(
        f"{name}.forward {what}",
        why=f"the batch has {names}{left}; the model takes {taken}.",
        fix=f"give the data set's columns the names that forward has{keeps}.",
    )


def _too_long(error: Exception, fed: Fed, model: nn.Module) -> OutOfRange | None:
    """Explain sizes that do not match because a text has more positions than the model."""
    config, numbers = getattr(base_model(model), "config", None), re.findall(r"\d+", str(error))
    limits = [getattr(config, name, None) for name in _LENGTHS]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "pos" in name.rpartition(".")[2]:
            limits += tensor.shape
    for limit in limits:
        if not isinstance(limit, int) or limit < 2:
            continue
        longest = _longer_than(fed.batch, limit)
        if longest is not None and {str(limit), str(longest[1].shape[1])} <= set(numbers):
            what, fix = _long(fed, *longest, limit, type(base_model(model)).__name__)
            return OutOfRange(
                f"{fed.cannot}: {what}", why=f"torch says: {str(error).splitlines()[0]}", fix=fix
            )
    return None


def _described(error: Exception, fed: Fed, model: nn.Module, dropped: Sequence[str] = ()) -> str:
    """Describe the batch that an error came of, and where."""
    words, text = _in_words(fed), str(error)
    parts = [f"  batch: {words}"]
    if dropped:
        parts.append(f"  dropped: {', '.join(map(str, dropped))}, which forward does not take")
    if where := _where(error, model):
        parts.append(f"  where: {where}")
    of_values = isinstance(error, (AssertionError, RuntimeError, ValueError))
    hints = _HINTS if of_values else (_TEXTS,) if isinstance(error, TypeError) else ()
    hint = next((fix for pattern, fix in hints if re.search(pattern, text)), None)
    if hint is not None:
        parts.append(f"  fix: {hint}")
    return "\n".join(parts)


def _in_words(fed: Fed) -> str:
    shown = ", ".join(
        f"{name} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for name, tensor in _tensors(fed.batch)
    )
    for name, value in fed.batch.items() if isinstance(fed.batch, Mapping) else ():
        if value is not None and not any(True for _ in _tensors(value)):
            shown += f"{', ' if shown else ''}{name} {_kind_of(value)}"
    of = "" if fed.step is None else f" (step {fed.step})"
    samples = "" if fed.samples is None else f", of {listed(fed.samples)}"
    return f"{shown}{samples}{of}"


def _kind_of(value: Any) -> str:
    """Say what something is that is no tensor: "list of 4 str", "bool"."""
    kind = type(value).__name__
    if not isinstance(value, (list, tuple)) or not value:
        return kind
    return f"{kind} of {len(value)} {type(value[0]).__name__}"


def _where(error: Exception, model: nn.Module) -> str:
    """Name the innermost module that an error came from, and the user's line."""
    names = {id(module): name for name, module in model.named_modules()}
    found, frames = None, []
    trace = error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lineno))
        own = trace.tb_frame.f_locals.get("self")
        found = own if id(own) in names else found
        trace = trace.tb_next
    if found is None:
        return ""
    line = user_place(reversed(frames))
    shown = str(found).splitlines()[0].rstrip("(")
    name = names[id(found)]
    return f"{name + ': ' if name else ''}{shown}{', at ' + line if line else ''}"


_explained: set[str] = set()


def explain_uncaught(backend: Backend) -> None:
    """From now on, say below an uncaught error's traceback what is known of its cause."""
    if backend.name in _explained:
        return
    _explained.add(backend.name)
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        words = backend.explain(error)
        if words:
            error.add_note(words)
        with suppress(Exception):  # the error is what must be shown, whatever is known of it
            explain_inputs(error, trace)
        previous(kind, error, trace)

    sys.excepthook = hook


def explain_inputs(
    error: BaseException, trace: TracebackType | None, *, has_values: bool = True
) -> None:
    """Say which input of a loop of the user's own an error came of; a Trainer tells of its own.

    Without values, as on a claimed device, what the tensors hold is not looked at.
    """
    session = current.get()
    if session is None or session.cursor.left is None or not isinstance(error, _OF_INPUTS):
        return
    call = _outermost_call(trace)
    is_told = isinstance(error, AnytrainError) or _MARK in str(error)
    if call is None or is_told or is_lost(error):
        return
    model, run, batch = call
    number, samples = session.cursor.left
    host = map_tensors(torch.Tensor.cpu, batch)
    fed = Fed(host, samples, session.cursor.updates + 1, number)
    outside = None
    if has_values and isinstance(error, (IndexError, RuntimeError)):
        outside = ranges.find(model, fed.batch, run, ranges.tables(model))
    told = explain(error, fed, model) if outside is None else out_of_range(fed, outside)
    if told is not None:
        error.add_note(f"anytrain: {told}")


def _outermost_call(trace: TracebackType | None) -> Call | None:
    """Return the first call of a module, or of a loss function, that the error passed through."""
    while trace is not None:
        frame = trace.tb_frame
        called: Any = frame.f_locals.get("self")
        if frame.f_code is nn.Module._call_impl.__code__ and not _wraps(called):
            return _of_module(called, frame)
        if frame.f_code is functional.cross_entropy.__code__:
            return _of_loss(frame)
        trace = trace.tb_next
    return None


def _wraps(module: Any) -> bool:
    return isinstance(module, nn.parallel.DistributedDataParallel) or hasattr(module, "_orig_mod")


def _of_module(module: nn.Module, frame: FrameType) -> Call | None:
    bound = inspect.signature(module.forward)
    try:
        given = bound.bind_partial(*frame.f_locals["args"], **frame.f_locals["kwargs"])
    except TypeError:  # it is what the error says: the call does not fit
        return module, lambda model, batch: None, dict(frame.f_locals["kwargs"])
    named = {
        name: value for each, value in given.arguments.items() for name, value in _flat(each, value)
    }

    return module, lambda model, batch: model(**batch), named


def _flat(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return what a `**kwargs` took, one by one."""
    return list(value.items()) if name == "kwargs" and isinstance(value, dict) else [(name, value)]


def _of_loss(frame: FrameType) -> Call:
    held = frame.f_locals
    loss = nn.CrossEntropyLoss(ignore_index=held["ignore_index"])
    batch = {"input": held["input"], "labels": held["target"]}
    return loss, lambda model, given: model(given["input"], given["labels"]), batch
