"""A TPU's training step as a graph, taken by torch_xla and never run.

torch_xla writes down what a step does and compiles it where the step is cut. Here a cut takes the
graph instead, and lets all that is pending count as computed: the next step begins with tensors
that have a shape and no values. The first step makes the optimizer's state; the second is taken.

This runs in a process of its own, in the environment that has torch_xla. It leans on names of
torch_xla that are not public, and its version is pinned.
"""

from __future__ import annotations

import faulthandler
import gc
import pickle
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.overrides import TorchFunctionMode

from anytrain.core.facts import Capabilities
from anytrain.engine.assemble import run as runs, session as sessions
from anytrain.engine.prepared.optimizer import place_state
from anytrain.insight.preflight.fake_device.backend import facts_of
from anytrain.insight.preflight.fake_device.weights import weights_unread
from anytrain.insight.preflight.observer import TraceObserver
from anytrain.insight.preflight.recorder import NUM_UPDATES, LeaveScript
from anytrain.insight.preflight.script import bounded, error_text
from anytrain.insight.preflight.targets import Target
from anytrain.insight.preflight.tpu.libtpu import Alias, CapturedStep, Graph
from anytrain.insight.preflight.trace_process import REQUEST, leave_result
from anytrain.insight.program import run_program
from anytrain.machine.backends import probe
from anytrain.machine.backends.base import Lane
from anytrain.machine.backends.xla import Xla

_READS = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        "item", "tolist", "cpu", "numpy", "__array__", "__bool__", "__int__", "__float__",
        "__index__", "__repr__", "__format__",
    )
)  # fmt: skip
# Where all is well these say yes, and other questions of yes or no are answered with no.
_YES = frozenset((torch.isfinite, torch.Tensor.isfinite))
_ALL = frozenset((torch.all, torch.Tensor.all))
# Writing a large weight's first values is all that makes it take memory: until then its pages are
# only promised. No step hangs on them.
# By name: transformers puts functions of its own into torch.nn.init.
_FILLS = frozenset(
    (
        "uniform_", "normal_", "zero_", "fill_", "erfinv_", "mul_", "add_", "clamp_", "div_",
        *(name for name in vars(nn.init) if name.endswith("_")),
    )
)  # fmt: skip
_LARGE = 2**18


class StepCapture:
    """The steps of a run, and the graphs of the second one.

    It stands where a recorder does, for whoever asks how far the run is.
    """

    def __init__(self) -> None:
        self.phase = "make"
        self.updates = 0
        self.graphs: list[Graph] = []
        self.batch: set[int] = set()
        """The numbers of the tensors that hold a batch."""
        self._first: Any = None
        self._cut_at = 0
        """How many updates there were at the last cut."""
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}
        """What was on the device then, by number."""

    @property
    def has_seen_all(self) -> bool:
        return self.updates >= NUM_UPDATES

    def cut(self) -> None:
        """End a graph: keep it if it is of the second step, and leave behind the last one."""
        live = {id(tensor): tensor for tensor in _live()}
        if self._cut_at >= 1:
            self._take(list(live.values()))
        _library()._clear_pending_irs(str(_device()))
        self._known = {_number(tensor): weakref.ref(tensor) for tensor in live.values()}
        self._cut_at = self.updates
        if self.has_seen_all:
            self.leave()

    def _take(self, live: list[torch.Tensor]) -> None:
        pending = _library()._check_tensor_need_materialization(live)
        results = [tensor for tensor, waits in zip(live, pending, strict=True) if waits]
        if not results:
            return
        numbers, _ = _library()._get_tensors_xla_device_data_node(results)
        places = {id(tensor): index for index, tensor in enumerate(results)}
        aliases = []
        for argument, number in enumerate(numbers):
            before = self._known[number]() if number in self._known else None
            if before is not None and id(before) in places:
                aliases.append(Alias(argument, places[id(before)]))
        used = {*numbers, *map(_number, results)}
        self.graphs.append(
            Graph(
                module=_library()._get_stablehlo(results, str(_device()), [], True),
                aliases=tuple(aliases),
                split=tuple(n for n, number in enumerate(numbers) if number in self.batch),
                beside_bytes=sum(
                    {_number(t): t.nbytes for t in live if _number(t) not in used}.values()
                ),
            )
        )

    def end_steps(self) -> None:
        """Both updates are through: cut here, if the run has not done it."""
        if self.has_seen_all:
            self.cut()

    def leave(self) -> None:
        raise LeaveScript

    @contextmanager
    def listening(self) -> Iterator[None]:
        with ExitStack() as stack:
            for handle in (
                module_hooks.register_module_forward_pre_hook(self._enter),
                optimizer_hooks.register_optimizer_step_post_hook(self._after_update),
            ):
                stack.callback(handle.remove)
            yield

    def _enter(self, module: nn.Module, args: Any) -> None:
        evaluates = not module.training and not torch.is_grad_enabled()
        self.phase = "evaluate" if evaluates else "forward"

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._first is None:
            self._first = optimizer
        self.updates += optimizer is self._first


def _live() -> Iterator[torch.Tensor]:
    """Yield the device's tensors, and the gradients that only torch itself holds."""
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "xla":
            yield thing
            if thing.is_leaf and thing.grad is not None:
                yield thing.grad


@dataclass(frozen=True)
class LazyTpu(Xla):
    """torch_xla's device with a TPU's facts, on which nothing is ever computed."""

    target: Target | None = None
    cuts: StepCapture = field(default_factory=StepCapture)

    def capabilities(self, device: torch.device) -> Capabilities:
        assert self.target is not None
        return replace(facts_of(self.target), device=str(device))

    def place(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        """Return a batch's tensor on the device, with rows for each chip."""
        assert self.target is not None
        rows = (self.target.num_devices, *[1] * (tensor.dim() - 1))
        placed = self.send(tensor.repeat(rows) if tensor.dim() else tensor)
        if placed.dim():
            self.cuts.batch.add(_number(placed))
        return placed

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return any other tensor on the device, as it is."""
        with torch._C.DisableTorchFunction():
            return tensor.to(_device())

    def lane(self, device: torch.device) -> Lane | None:
        return None

    def end_step(self) -> None:
        self.cuts.cut()

    def synchronize(self, device: torch.device) -> None:
        """Do nothing: there is nothing to wait for."""

    def rng_state(self, device: torch.device) -> torch.Tensor | None:
        return None

    def restore_rng(self, device: torch.device, state: torch.Tensor) -> None:
        """Do nothing."""


class MadeUpReads(TorchFunctionMode):
    """Answer what a script reads from the device, and send it no weights."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer a read with made-up values; leave everything else as it is."""
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("tensor")  # as torch.nn.init calls it
        if isinstance(first, torch.Tensor):
            is_here = first.device.type != "xla"
            if func in _READS and not is_here:
                return func(_made_up(first), *args[1:], **kwargs)
            if getattr(func, "__name__", "") in _FILLS and is_here and _is_large(first):
                return first
            if func is torch.Tensor.to:
                return _sent(first, is_here, args[1:], kwargs)
        found = func(*args, **kwargs)
        if func in _YES or (func in _ALL and hasattr(first, "_says_yes")):
            found._says_yes = True
        return found


def _sent(tensor: torch.Tensor, is_here: bool, args: Any, kwargs: Any) -> torch.Tensor:
    """Return a tensor where `to` sends it: made-up on its way back, a mere shape as a weight."""
    other = args[0] if args else kwargs.get("other")
    if isinstance(other, torch.Tensor):
        device: torch.device | None = other.device
        dtype: torch.dtype | None = other.dtype
    else:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    if device is not None and device.type == "xla" and is_here and isinstance(tensor, nn.Parameter):
        return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=device)
    if device is not None and device.type != "xla" and not is_here:
        return _made_up(tensor).to(*args, **kwargs)
    return tensor.to(*args, **kwargs)


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() >= _LARGE


def _made_up(tensor: torch.Tensor) -> torch.Tensor:
    # A flag that says no, a count that may be divided by, a loss of nothing.
    is_count = not tensor.dtype.is_floating_point and tensor.dtype != torch.bool
    value = int(is_count or hasattr(tensor, "_says_yes"))
    return torch.full(tuple(tensor.shape), value, dtype=tensor.dtype)


def _number(tensor: torch.Tensor) -> int:
    return int(_library()._xla_get_tensor_id(tensor))


def _device() -> torch.device:
    import torch_xla

    device: torch.device = torch_xla.device()
    return device


def _library() -> Any:
    import torch_xla

    return torch_xla._XLAC


# -- one script -----------------------------------------------------------------------------------


def main(folder: str) -> None:
    """Take what the folder asks for, and leave it there."""
    faulthandler.enable()
    target, command = pickle.loads((Path(folder) / REQUEST).read_bytes())
    leave_result(folder, lambda: take(target, command))


def take(target: Target, command: Sequence[str]) -> CapturedStep:
    """Return the graphs of a command's training step, for as many chips as the target has."""
    began = time.perf_counter()
    cuts, failure = StepCapture(), ""
    backend = LazyTpu(target=target, cuts=cuts)
    backend.device(0)  # before any backward pass, even one on the CPU
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        recorder: Any = cuts
        own = TraceObserver(recorder, folder)
        stack.enter_context(sessions.observed_by(own))
        probe.stand_in(backend)
        stack.callback(probe.stand_in, None)
        stack.enter_context(cuts.listening())
        stack.enter_context(bounded(own))
        stack.enter_context(mock.patch.object(runs, "place_state", _state_to(backend)))
        stack.enter_context(weights_unread())
        stack.enter_context(MadeUpReads())
        try:
            run_program(command)
        except LeaveScript:
            pass
        except BaseException as error:  # noqa: BLE001  whatever ends a script is what it shows
            traceback.print_exception(error)
            failure = error_text(error)
        if not cuts.graphs and not failure:
            failure = "the script ended without two training steps"
        return CapturedStep(
            graphs=tuple(cuts.graphs),
            batch_size=own.job.batch_size,
            precision=own.job.precision,
            seconds=time.perf_counter() - began,
            failure=failure,
        )


def _state_to(backend: LazyTpu) -> Callable[..., None]:
    """Return what sends an optimizer's state to the device: it has no rows for each chip."""
    return lambda optimizer, place: place_state(optimizer, backend.send)
