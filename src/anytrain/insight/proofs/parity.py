"""Hold one step on a device against the same step on the CPU in float32, module by module.

Both sides have the same weights, the same batch and the same random numbers, and drop nothing
(`torch_modes.py`). Each module of the device is given the inputs and gradients of the CPU's
(`module_taps.py`), so the first one that departs is the one at fault, not the last of many that
drift.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import nn

from anytrain.core.errors import BadInput, BadType
from anytrain.engine.assemble import session as sessions
from anytrain.engine.prepared.model import move, restore_forward
from anytrain.engine.tree import leaves, map_tensors
from anytrain.insight.preflight.units import plain
from anytrain.insight.program import run_program
from anytrain.insight.proofs.module_taps import Measure, Measures, Taps, unlike_calls
from anytrain.insight.proofs.torch_modes import UNITS, Rounded, SameDraws

LossFunction = Callable[[nn.Module, Any], torch.Tensor]
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
FLOAT32 = 1e-4
"""What sums of a few thousand terms in another order make, as a share of the largest value."""
_GRADIENTS_MORE = 4.0
"""Gradients pass through two such sums, of terms that cancel."""
TIMES_ROUNDING = 4.0
"""Two roundings of one computation differ by chance, and a device may round sums on the way."""
LEAST_ROUNDINGS = 4.0
"""Roundings of the largest value that are always allowed: its factors' and its own."""
_NAMED = 8
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


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
    rounding: float | None = None
    """What rounding to the format makes there by itself; None in float32, which is not rounded."""
    is_gradient: bool = False

    def __str__(self) -> str:
        name = f"{self.module} ({self.kind})" if self.module else f"the model ({self.kind})"
        size = "is not finite" if math.isinf(self.error) else f"is off by {_share(self.error)}"
        alone = "" if self.rounding is None else f", rounding makes {_share(self.rounding)}"
        return f"{name}: {self.what} {size}, {_share(self.tolerance)} is allowed{alone}"


def _share(value: float) -> str:
    return f"{plain(100 * value)} %"


@dataclass(slots=True)
class Parity:
    """How a device's step compares."""

    device: str
    dtype: str
    num_modules: int
    departures: list[Departure] = field(default_factory=list)
    """In the order in which they came: forward, then backward."""
    compared: list[Departure] = field(default_factory=list)
    """All that was held against the CPU, whether it departs or not."""
    worst: Departure | None = None
    """The largest error in units of its tolerance, whether it departs or not."""
    loss: float = math.nan
    """Of the device's step by itself, nothing corrected on the way."""
    reference_loss: float = math.nan
    loss_is_stand_in: bool = False
    """Whether the model gave no loss, and both are made from its output."""
    unlike_calls: list[str] = field(default_factory=list)
    """Modules that one side calls more often than the other."""

    @property
    def num_compared(self) -> int:
        return len(self.compared)

    @property
    def is_equal(self) -> bool:
        return not self.departures and not self.unlike_calls

    @property
    def first(self) -> Departure | None:
        return next(iter(self.departures), None)

    def __str__(self) -> str:
        against = f"{self.device} in {self.dtype} against the CPU in float32"
        counted = f"{self.num_compared} tensors of {self.num_modules} modules"
        name = "a stand-in loss made from the model's output:" if self.loss_is_stand_in else "loss"
        losses = f"{name} {self.loss:.6g}, on the CPU {self.reference_loss:.6g}"
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
    other than "no" runs the device's forward under autocast; what is allowed then is measured: a
    third step, on the CPU, rounds each result in float32 to that format.
    """
    where = _device(device)
    name = str(_dtype(dtype)).removeprefix("torch.")
    loss_of = loss_fn or OutputLoss(_call)
    reference = _Side(_copied(model, torch.device("cpu"), whole=True), batch, loss_of, name)
    subject = _Side(_copied(model, where, whole=False), batch, loss_of, name, autocast=True)
    taken = reference.run(Taps()).book
    # Another copy: in training mode a forward pass moves what batch normalisation remembers.
    alone = _Side(_copied(model, where, whole=False), batch, loss_of, name, autocast=True)
    free = alone.loss_alone()
    found = subject.run(Taps(taken)).book
    parity = Parity(str(where), name, sum(1 for _ in model.modules()))
    parity.loss, parity.reference_loss = free, reference.loss
    parity.loss_is_stand_in = isinstance(loss_of, OutputLoss) and loss_of.is_stand_in
    parity.unlike_calls = unlike_calls(taken, found)
    measured = Measures(reference.model, taken)
    allowed = _allowances(model, batch, loss_of, measured, _computes_in(name, where))
    for each in measured.against(subject.model, found):
        _judge(parity, each, *allowed(each))
    return parity


def _allowances(
    model: nn.Module, batch: Any, loss_of: LossFunction, measured: Measures, name: str
) -> Callable[[Measure], tuple[float, float | None]]:
    """Return a function of the allowed error of a tensor, and the error of rounding alone."""
    if name == "float32":
        return lambda each: (FLOAT32 * (_GRADIENTS_MORE if each.is_gradient else 1.0), None)
    rounded = Rounded(name)
    side = _Side(_copied(model, torch.device("cpu"), whole=True), batch, loss_of, name)
    for parameter in side.model.parameters():
        rounded.narrow(parameter.data)
    with rounded:
        book = side.run(Taps(measured.book)).book
    alone: dict[str, float] = {}
    for each in measured.against(side.model, book):
        alone[each.group] = max(alone.get(each.group, 0.0), each.error)

    def allowed(each: Measure) -> tuple[float, float]:
        known = alone.get(each.group, 0.0)
        return max(TIMES_ROUNDING * known, LEAST_ROUNDINGS * UNITS[name]), known

    return allowed


def _judge(parity: Parity, each: Measure, allowed: float, alone: float | None) -> None:
    met = Departure(each.module, each.kind, each.what, each.error, allowed, alone, each.is_gradient)
    parity.compared.append(met)
    if each.error > allowed:
        parity.departures.append(met)
    worst = parity.worst
    if worst is None or each.error / allowed > worst.error / worst.tolerance:
        parity.worst = met


def _computes_in(name: str, device: torch.device) -> str:
    """Return the format that decides what is allowed: products may be narrower on CUDA."""
    if name != "float32":
        return name
    narrow = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if narrow else "float32"


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
        """Return the loss of a forward pass without taps."""
        with SameDraws(_SEED), torch.no_grad(), self._precision():
            return float(self._loss_fn(self.model, self._batch))

    def _precision(self) -> AbstractContextManager[Any]:
        if not self._mixed:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=_DTYPES[self._dtype])


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


# -- what was given ---------------------------------------------------------------------------


class OutputLoss:
    """Take the loss that a model's output offers; else a stand-in made from its values."""

    def __init__(self, call: Callable[[nn.Module, Any], Any]) -> None:
        self._call = call
        self.is_stand_in = False
        """Whether the last output offered none."""

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        output = self._call(model, batch)
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        self.is_stand_in = not isinstance(own, torch.Tensor)
        return own.mean() if isinstance(own, torch.Tensor) else _weighted(output)


def _call(model: nn.Module, batch: Any) -> Any:
    """Call the model with a batch: by name, in order, or as one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _weighted(output: Any) -> Any:
    """Return the sum of an output's values, weighted at random."""
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
        why=f"the known ones are {', '.join(_DTYPES)}.",
        fix='pass "no", "bf16" or "fp16".',
    )


# -- the first step of a script -------------------------------------------------------------------


class _Compared(BaseException):
    """The step was compared: leave the script, whatever it is doing."""

    def __init__(self, parity: Parity) -> None:
        super().__init__()
        self.parity = parity


class _TakeoverObserver:
    """Let a script run to its first training step, and no further; it writes to the folder."""

    is_watching = True

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = {}
        self._has_begun = False

    def begin(self) -> bool:
        """Whether this training is the first one."""
        is_first, self._has_begun = not self._has_begun, True
        return is_first

    def tell(self, **facts: Any) -> None:
        """Take down what the run says of itself; what was said first stays."""
        self.facts = {**facts, **self.facts}

    def end_steps(self) -> None:
        """Do nothing: no step is recorded."""

    def leave(self) -> NoReturn:
        """Leave the script: it has trained without a model to compare."""
        raise SystemExit(0)

    def skips_save(self) -> bool:
        """Let no file of the user's be written."""
        return True


def compare_script(
    command: Sequence[str],
    precision: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Parity:
    """Run a script (or "-m" and a module) up to its first training step; return how it compares.

    The script runs on this machine's device until a model with weights to learn is called in
    training mode. The call's own arguments are the batch; nothing is trained, and a Trainer writes
    to a folder that is removed.

    `precision` takes the place of the run's own. `say` is told what is going on.
    """
    say("running the script up to its first training step")
    with tempfile.TemporaryDirectory() as folder:
        own = _TakeoverObserver(folder)
        try:
            # Not a hook: those for all modules are not told the arguments that have names.
            taking_over = mock.patch.object(
                nn.Module, "__call__", _taking_over(own, precision, say)
            )
            with sessions.observed_by(own), taking_over:
                run_program(command)
        except _Compared as done:
            return done.parity
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
    raise BadInput(
        f"{command[0]} has not trained.",
        why="it ended before a model with weights to learn was called in training mode.",
        fix="pass the options with which it trains, such as --do_train.",
    )


def _taking_over(own: _TakeoverObserver, precision: str | None, say: Callable[[str], None]) -> Any:
    """Return a call of modules whose first one in training is compared instead."""
    call: Any = nn.Module.__call__
    taken: list[nn.Module] = []

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if taken or not _is_training(module):
            return call(module, *args, **kwargs)
        taken.append(module)
        model: nn.Module = getattr(module, "_orig_mod", module)  # what torch.compile was given
        say("computing the step on the device and on the CPU, module by module")
        raise _Compared(_compared(model, args, kwargs, precision or _precision_of(own, model)))

    return called


def _is_training(module: nn.Module) -> bool:
    learns = any(parameter.requires_grad for parameter in module.parameters())
    return learns and module.training and torch.is_grad_enabled()


def _compared(model: nn.Module, args: Any, kwargs: Any, precision: str) -> Parity:
    loss_of = OutputLoss(lambda copy, batch: copy(*batch[0], **batch[1]))
    device = next(model.parameters()).device
    with torch.autocast(device.type, enabled=False):
        return compare(model, (args, kwargs), loss_of, device, precision)


def _precision_of(own: _TakeoverObserver, model: nn.Module) -> str:
    """Return how the run computes: as it said of itself, or as autocast is set just now."""
    told = own.facts.get("precision")
    if told is not None:
        return str(told)
    kind = next(model.parameters()).device.type
    if not torch.is_autocast_enabled(kind):
        return "no"
    return _NAMES.get(torch.get_autocast_dtype(kind), "no")
