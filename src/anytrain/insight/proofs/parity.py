"""Hold one step on a device against the same step on the CPU in float32, module by module.

Both sides have the same weights, the same batch and the same random numbers, and drop nothing
(`draws.py`). Each module of the device is given the inputs and gradients of the CPU's (`taps.py`),
so the first one that departs is the one at fault, not the last of many that drift.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from anytrain.core.errors import BadInput, BadType
from anytrain.engine.prepared.model import move, restore_forward
from anytrain.engine.tree import leaves, map_tensors
from anytrain.insight.proofs.draws import SameDraws
from anytrain.insight.proofs.taps import Book, Spot, Taps

LossFunction = Callable[[nn.Module, Any], torch.Tensor]
# The largest difference that sums in another order make, as a share of the largest value, with
# some room: float32 adds a few thousand terms, the others round each factor.
TOLERANCES = {"float32": 1e-4, "tf32": 1e-2, "float16": 1e-2, "bfloat16": 6e-2}
_GRADIENTS_MORE = 4.0
"""Gradients pass through two such sums, of terms that cancel."""
_LEAST = 1e-3
"""Gradients below this share of the model's largest are held against that share."""
# float16 has no gradients below 6e-8: both sides' losses are scaled, as a run's is.
_SCALE = {"float16": 4096.0}
_DTYPES = {
    "no": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
_SEED = 0


@dataclass(frozen=True, slots=True)
class Departure:
    """A place at which the device's numbers are not the CPU's."""

    module: str
    """Its path; empty for the model itself."""
    kind: str
    """Its class."""
    what: str
    """Which numbers: "its output", "the gradient of its input", "the gradient of weight"."""
    error: float
    """The largest difference as a share of the largest value; infinite for NaN."""
    tolerance: float
    is_gradient: bool = False

    def __str__(self) -> str:
        name = f"{self.module} ({self.kind})" if self.module else f"the model ({self.kind})"
        size = "is not finite" if math.isinf(self.error) else f"is off by {self.error:.2g}"
        return f"{name}: {self.what} {size}, {self.tolerance:.2g} is allowed"


@dataclass(slots=True)
class Parity:
    """How a device's step compares."""

    device: str
    dtype: str
    num_modules: int
    num_compared: int = 0
    """Tensors: outputs and gradients."""
    departures: list[Departure] = field(default_factory=list)
    """In the order in which they came: forward, then backward."""
    worst: Departure | None = None
    """The largest error in units of its tolerance, whether it departs or not."""
    loss: float = math.nan
    """Of the device's step by itself, nothing corrected on the way."""
    reference_loss: float = math.nan
    unlike_calls: list[str] = field(default_factory=list)
    """Modules that one side calls more often than the other."""

    @property
    def is_equal(self) -> bool:
        """Whether no module departs."""
        return not self.departures and not self.unlike_calls

    @property
    def first(self) -> Departure | None:
        """The first module that departs."""
        return next(iter(self.departures), None)

    def __str__(self) -> str:
        against = f"{self.device} in {self.dtype} against the CPU in float32"
        counted = f"{self.num_compared} tensors of {self.num_modules} modules"
        losses = f"loss {self.loss:.6g}, on the CPU {self.reference_loss:.6g}"
        if self.is_equal:
            return (
                f"equal: {against}, {counted} within tolerance\n  {losses}\n  worst: {self.worst}"
            )
        lines = [f"departs: {against}"]
        lines += [f"first: {self.first}"] if self.first else []
        rest = self.departures[1:]
        lines += [f"also: {each}" for each in rest[:_NAMED]]
        lines += [f"and {len(rest) - _NAMED} more"] if len(rest) > _NAMED else []
        lines += [f"called unequally often: {', '.join(self.unlike_calls)}"] * bool(
            self.unlike_calls
        )
        return "\n  ".join([*lines, losses])


_NAMED = 8


def compare(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction | None = None,
    device: torch.device | str | None = None,
    dtype: str = "no",
) -> Parity:
    """Return how one step of the model on a device compares with the CPU's in float32.

    The model stays as it is: copies run, in the mode (train or eval) that it is in. `batch` is
    what the model is called with: a mapping by name, a tuple in order, else one argument.
    `loss_fn(model, batch)` returns the loss; without it the output's own `loss` counts, or where
    there is none a fixed random weighting of the outputs, whose gradients tell as much. A dtype
    other than "no" runs the device's forward under autocast.
    """
    where = _device(device)
    name = str(_dtype(dtype)).removeprefix("torch.")
    loss_of = loss_fn or _own_loss
    reference = _Side(_copied(model, torch.device("cpu"), whole=True), batch, loss_of, name)
    subject = _Side(_copied(model, where, whole=False), batch, loss_of, name, autocast=True)
    taken = reference.run(Taps())
    free = _loss_alone(model, where, subject)
    found = subject.run(Taps(taken.book))
    parity = Parity(str(where), name, sum(1 for _ in model.modules()))
    parity.loss, parity.reference_loss = free, reference.loss
    _judge(parity, model, reference, subject, taken.book, found.book)
    return parity


class _Side:
    """One of the two: a model where it runs, and how its loss comes about."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss_fn: LossFunction,
        dtype: str,
        *,
        autocast: bool = False,
    ) -> None:
        self.model, self._loss_fn, self._dtype = model, loss_fn, dtype
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._mixed = autocast and dtype != "float32"
        self._batch = map_tensors(self._place, batch)
        self.loss = math.nan

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        wide = torch.float32 if tensor.dtype is torch.float64 else tensor.dtype
        if tensor.is_floating_point() and self.device.type == "cpu" and not self._mixed:
            wide = torch.float32
        return tensor.detach().to(self.device, wide, copy=True)

    def run(self, taps: Taps) -> Taps:
        """Run forward and backward with the taps on; return them."""
        with SameDraws(_SEED), taps.on(self.model):
            with self._precision():
                loss = self._loss_fn(self.model, self._batch)
            _check_loss(loss)
            self.loss = float(loss.detach())
            taps.backward(loss.float() * _SCALE.get(self._dtype, 1.0))
        return taps

    def loss_alone(self) -> float:
        """Return the loss of a forward pass that nobody corrects."""
        with SameDraws(_SEED), torch.no_grad(), self._precision():
            return float(self._loss_fn(self.model, self._batch))

    def _precision(self) -> AbstractContextManager[Any]:
        if not self._mixed:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=_DTYPES[self._dtype])


def _loss_alone(model: nn.Module, device: torch.device, side: _Side) -> float:
    # Another copy: in training mode a forward pass moves what batch normalisation remembers.
    kept, side.model = side.model, _copied(model, device, whole=False)
    try:
        return side.loss_alone()
    finally:
        side.model = kept


def _copied(model: nn.Module, device: torch.device, *, whole: bool) -> nn.Module:
    """Return a copy on the device; a whole one computes in float32."""
    try:
        found = copy.deepcopy(model)
    except Exception as error:
        raise BadInput(
            f"Cannot copy the {type(model).__name__}.",
            why=f"each side runs its own copy, and copy.deepcopy says: {error}.",
            fix="compare the model before anything that cannot be copied is put into it.",
        ) from error
    restore_forward(found)
    if callable(off := getattr(found, "gradient_checkpointing_disable", None)):
        off()
    found.zero_grad(set_to_none=True)
    move(found, device)
    return found.float() if whole else found


# -- what is held against what ----------------------------------------------------------------


def _judge(
    parity: Parity,
    model: nn.Module,
    reference: _Side,
    subject: _Side,
    taken: Book,
    found: Book,
) -> None:
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    allowed = TOLERANCES[_computes_in(parity, subject.device)]
    parity.unlike_calls = _unlike_calls(taken, found)
    scale = max((_size(g) for g in taken.gradients.values()), default=0.0)
    for spot, value in found.values.items():
        if spot in taken.values and (spot.module or spot.end == "output"):
            module, what = _value_in_words(spot)
            _hold(parity, kinds, module, what, value, taken.values[spot], allowed)
    bound = allowed * _GRADIENTS_MORE
    for spot, grad in found.gradients.items():
        if spot in taken.gradients:
            module, what = _in_words(spot, kinds)
            floor = scale * _LEAST
            _hold(parity, kinds, module, what, grad, taken.gradients[spot], bound, floor)
    for name, what, own, other, floor in _of_parameters(reference.model, subject.model, scale):
        _hold(parity, kinds, name, what, own, other, bound, floor)


def _hold(  # noqa: PLR0913  two tensors, their place, and what is allowed there
    parity: Parity,
    kinds: Mapping[str, str],
    module: str,
    what: str,
    own: torch.Tensor,
    other: torch.Tensor,
    allowed: float,
    floor: float = 0.0,
) -> None:
    """Compare two tensors, and note how they do."""
    error = _error(own, other, floor)
    if error is None:
        return
    parity.num_compared += 1
    is_gradient = "gradient" in what
    met = Departure(module, kinds.get(module, "module"), what, error, allowed, is_gradient)
    if error > allowed:
        parity.departures.append(met)
    worst = parity.worst
    if worst is None or error / allowed > worst.error / worst.tolerance:
        parity.worst = met


def _error(own: torch.Tensor, other: torch.Tensor, floor: float) -> float | None:
    """Return the largest difference as a share of the largest value; None where nothing is told."""
    if own.shape != other.shape:
        return math.inf
    told = other.isfinite() & (other.abs() < torch.finfo(torch.float16).max)  # no masks' -inf
    if not bool(told.any()):
        return None
    own, other = own[told], other[told]
    if not bool(own.isfinite().all()):
        return math.inf
    difference = float((own - other).abs().max())
    largest = max(float(other.abs().max()), floor)
    return difference / largest if largest else (math.inf if difference else 0.0)


def _of_parameters(
    reference: nn.Module, subject: nn.Module, scale: float
) -> Iterator[tuple[str, str, torch.Tensor, torch.Tensor, float]]:
    """Yield both gradients of each parameter, the last module's first.

    A bias whose gradient is zero but for rounding is held against its module's weight.
    """
    other_modules = dict(reference.named_modules())
    for name, module in reversed(list(subject.named_modules())):
        pairs = [
            (key, own.grad, other_modules[name]._parameters[key].grad)
            for key, own in module._parameters.items()
            if own is not None and own.grad is not None
        ]
        known = [(k, a, b) for k, a, b in pairs if b is not None]
        floor = max([_size(b) for _, _, b in known], default=0.0)
        for key, own, other in known:
            wide = own.detach().to("cpu", torch.float32)
            least = max(floor, scale * _LEAST)
            yield name, f"the gradient of its {key}", wide, other.detach(), least


def _size(tensor: torch.Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _value_in_words(spot: Spot) -> tuple[str, str]:
    if spot.end == "output":
        return spot.module, "its output"
    # What goes into a module was computed between modules, by the one that calls it.
    return spot.module.rpartition(".")[0], f"what it gives to {spot.module}"


def _in_words(spot: Spot, kinds: Mapping[str, str]) -> tuple[str, str]:
    if spot.end == "input":
        return spot.module, "the gradient of its input"
    # What comes back to a module's output was computed by whoever used it.
    parent = spot.module.rpartition(".")[0]
    if not spot.module:
        return "", "the gradient of its output, by the loss function"
    return parent, f"the gradient of what it makes of {spot.module}'s output"


def _unlike_calls(taken: Book, found: Book) -> list[str]:
    calls = [{(s.module, s.call) for s in book.values} for book in (taken, found)]
    return sorted({name or "the model" for name, _ in calls[0] ^ calls[1]})


def _computes_in(parity: Parity, device: torch.device) -> str:
    """Return the format that decides the tolerance: float32 products may be narrower on CUDA."""
    if parity.dtype != "float32":
        return parity.dtype
    narrow = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if narrow else "float32"


# -- what was given ---------------------------------------------------------------------------


def _own_loss(model: nn.Module, batch: Any) -> Any:
    """Return the output's own loss, or a weighting of the outputs."""
    return loss_of_output(call(model, batch))


def call(model: nn.Module, batch: Any) -> Any:
    """Call the model with a batch: by name, in order, or as one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def loss_of_output(output: Any) -> Any:
    """Return what a model's output offers as a loss; else its values, weighted at random."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own.mean()
    draw = torch.Generator().manual_seed(_SEED)
    total: Any = 0.0
    for leaf in leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            weights = torch.randn(leaf.shape, generator=draw).to(leaf.device)
            total = total + (leaf.float() * weights).sum() / math.sqrt(max(leaf.numel(), 1))
    return total


def _check_loss(loss: Any) -> None:
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
        return
    raise BadType(
        "There is no loss to go back from.",
        why=f"the step gave {type(loss).__name__}, not one number that depends on the weights.",
        fix="pass loss_fn(model, batch), which returns a scalar tensor, and a model whose "
        "parameters require gradients.",
    )


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    from anytrain.core import environment
    from anytrain.machine.backends import probe

    return probe.choose(environment.read().wishes.device).device(0)


def _dtype(name: str) -> torch.dtype:
    if name in _DTYPES:
        return _DTYPES[name]
    raise BadInput(
        f"Unknown precision {name!r}.",
        why=f"known are {', '.join(_DTYPES)}.",
        fix='pass "no", "bf16" or "fp16".',
    )
