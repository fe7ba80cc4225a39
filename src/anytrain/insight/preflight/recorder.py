"""Record what a run does on the fake device: operations, memory, and the phases of the step.

Phases follow from torch's hooks: a module's forward, autograd's nodes, an optimizer's step. The
first update makes the optimizer's state; what is counted is the second, which is like all that
follow, and one evaluation step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

from anytrain.insight.preflight.fake_device.device import FakeDevice, Storage
from anytrain.insight.preflight.memory_log import MemoryLog
from anytrain.insight.preflight.op_costs import flops, num_bytes, scratch, wait_of
from anytrain.insight.preflight.source_lines import SourceLines, Spot
from anytrain.insight.preflight.trace import (
    Held,
    Op,
    Phase,
    SourcePlace,
    TensorFacts,
    Trace,
    TracedJob,
)

NUM_UPDATES = 2
_DECIDES = ("if ", "elif ", "while ", "assert ", "and ", "or ")
_PLAIN = (bool, int, float, str, type(None))
_DRAWS = torch.Tag.nondeterministic_seeded
Key = tuple[Any, ...]


class LeaveScript(BaseException):
    """Everything was seen: leave the user's script, whatever it is doing."""


class OpRecorder:
    """Records one traced run."""

    def __init__(self, device: FakeDevice, kind: str) -> None:
        self.device, self.kind = device, kind
        self.memory, self.places = MemoryLog(), SourceLines()
        self.phase: Phase = "make"
        self.updates = 0
        self.is_done = False
        self.has_evaluated = False
        """Whether one evaluation step was seen whole."""
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.unused: tuple[str, ...] = ()
        self._makers: WeakKeyDictionary[nn.Module, Spot] = WeakKeyDictionary()
        """The lines at which modules with parameters of their own were made."""
        self.recomputed: dict[str, None] = {}
        self.draws: dict[Spot, None] = {}
        self.notes: dict[str, None] = {}
        self.has_just_read = False
        """Whether the last operation was a read of a value by the host, which is made up."""
        self.meet: Callable[[nn.Module], Any] = lambda model: None
        """Called with each model before its first training step."""
        self._ops: dict[str, dict[Key, list[int]]] = {"make": {}, "step": {}, "evaluate": {}}
        self._held: Held | None = None
        self._counts = True
        self._step = -1
        """How many updates there were when the step began that is counted."""
        self._saw_backward = False
        self._began: float | None = None
        self._ended: float | None = None

    @property
    def has_seen_all(self) -> bool:
        """Whether both updates and an evaluation were seen."""
        evaluated = self.has_evaluated or self.phase == "evaluate"
        return self.updates >= NUM_UPDATES and evaluated

    # -- called by the fake device ----------------------------------------------------------------

    def born(self, storage: Storage) -> None:
        self._follow()
        self.memory.born(storage, self.places.module)

    def ran(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[torch.Tensor],
        made: list[torch.Tensor],
        host_read: str,
        is_dynamic: bool,
    ) -> None:
        """Count an operation, with all that are alike."""
        if self.is_done:
            raise LeaveScript
        self.has_just_read = bool(host_read)
        node = self._follow()
        phase = self.memory.phase
        self.memory.num_ops += 1
        if self.kind == "cuda":
            if not host_read and any(self.device.claim(t) == self.device.device for t in given):
                host_read = wait_of(func, args, kwargs)
            if (taken := scratch(func, given, made)) is not None:
                self.memory.passed(taken.num_bytes, is_certain=taken.is_certain)
        if not self._counts:
            return
        spot = self.places.here(node)
        inputs, outputs = self._facts(given), self._facts(made)
        settings = _settings(func, args, kwargs)
        if node is not None and spot[1] is not None and _draws(func, settings):
            self.draws[spot] = None
        key = (func, phase, spot, inputs, outputs, settings, host_read, is_dynamic)
        part = self._ops.get(phase, self._ops["step"])
        known = part.get(key)
        if known is None:
            count = 0 if host_read else flops(func, args, kwargs, made)
            known = part[key] = [0, count, num_bytes(given) + num_bytes(made)]
        known[0] += 1

    def _follow(self) -> Any:
        """Find out the phase by autograd's node, if one is at work; return the node."""
        node = torch._C._current_autograd_node()
        if node is not None:
            self._saw_backward = True
        elif self._saw_backward and self.phase == "forward" and not self.places.depth:
            self.phase = "clip"
        self.memory.phase = self.phase if node is None else "backward"
        return node

    def _facts(self, tensors: list[torch.Tensor]) -> tuple[TensorFacts, ...]:
        claim, own, kind = self.device.claim, self.device.device, self.kind
        return tuple(
            TensorFacts(_dtype_name(t.dtype), tuple(t.shape), kind if claim(t) == own else "cpu")
            for t in tensors
        )

    # -- hooks of the run -------------------------------------------------------------------

    @contextmanager
    def listening(self) -> Iterator[None]:
        with ExitStack() as stack:
            for handle in (
                module_hooks.register_module_parameter_registration_hook(self._made),
                module_hooks.register_module_forward_pre_hook(self._enter),
                module_hooks.register_module_forward_hook(self._leave_module, always_call=True),
                optimizer_hooks.register_optimizer_step_pre_hook(self._before_update),
                optimizer_hooks.register_optimizer_step_post_hook(self._after_update),
            ):
                stack.callback(handle.remove)
            yield

    def _made(self, module: nn.Module, name: str, parameter: Any) -> None:
        if module not in self._makers:
            self._makers[module] = self.places.maker()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self.places.depth:
            pass
        elif torch._C._current_autograd_node() is not None:
            self.recomputed[self.places.name(module)] = None
        else:
            self._begin_forward(module)
        self.places.enter(module)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self.places.leave()

    def _begin_forward(self, module: nn.Module) -> None:
        if not any(module is known for known in self.models):
            self.models.append(module)
            self.places.know(module)
            if module.training:
                self.meet(module)
        if not module.training and not torch.is_grad_enabled():
            self.phase = "evaluate"
            self._counts = not self.has_evaluated
            return
        self._begin_step()
        self._saw_backward = False
        self.phase = "forward"

    def placing(self) -> None:
        """A batch is sent to the device."""
        if self.phase == "evaluate":
            self.has_evaluated, self._counts = True, False
        if self.phase != "evaluate" and self.updates < NUM_UPDATES:
            self._begin_step()
        self._saw_backward = False
        self.phase = "data"

    def _begin_step(self) -> None:
        """Begin to count anew, unless this is still the same step."""
        if self.updates >= NUM_UPDATES:
            self.end_steps()
            self.leave()
        if self._step == self.updates:
            return
        self._step = self.updates
        self._began = self._began or time.perf_counter()
        self._own_all()
        self.places.forget()
        self._ops["step"].clear()
        self.memory.restart()
        self._counts = True

    def end_steps(self) -> None:
        """Both updates are through: keep what the second one held."""
        if self._held is None:
            self._own_all()
            self._held = self.memory.held()
            self._counts = False

    def leave(self) -> None:
        self.is_done = True
        raise LeaveScript

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.phase = "optimizer"
        if not any(optimizer is known for known in self.optimizers):
            self.optimizers.append(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.memory.own(parameter.grad, "gradients")
        self.unused = tuple(
            name
            for model in self.models
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.grad is None
        )

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                self.memory.own(value, "optimizer")
        if optimizer is self.optimizers[0]:
            self.updates += 1

    def _own_all(self) -> None:
        for model in self.models:
            for parameter in model.parameters():
                self.memory.own(parameter, "parameters")
            for buffer in model.buffers():
                self.memory.own(buffer, "buffers")

    # -- the result ------------------------------------------------------------------

    def finish(self) -> None:
        self._ended = time.perf_counter()
        self.end_steps()

    def trace(self, job: TracedJob, failure: str = "", place: SourcePlace | None = None) -> Trace:
        ops = tuple(
            _op(key, *counts) for part in self._ops.values() for key, counts in part.items()
        )
        held = self._held or self.memory.held()
        notes = {**self.notes, **dict.fromkeys(_branches(ops))}
        seconds = 0.0
        if self._began is not None:
            seconds = (self._ended or time.perf_counter()) - self._began
        return Trace(
            job=replace(job, **self._found()),
            ops=ops,
            held=held,
            trace_s=seconds,
            notes=tuple(notes),
            failure=failure,
            failure_place=place,
            parts={
                "updates": self.updates,
                "is_whole": self.updates >= NUM_UPDATES,
            },
        )

    def _found(self) -> dict[str, Any]:
        """Return the facts of the job that the run itself has shown."""
        parameters = {id(p): p for model in self.models for p in model.parameters()}
        trainable = [p for p in parameters.values() if p.requires_grad]
        state = [
            value
            for optimizer in self.optimizers
            for kept in optimizer.state.values()
            for value in (kept.values() if isinstance(kept, dict) else ())
            if isinstance(value, torch.Tensor)
        ]
        with torch._C.DisableTorchFunction():
            saved = num_bytes([*parameters.values(), *state])
        return {
            "num_parameters": sum(p.numel() for p in parameters.values()),
            "num_trainable": sum(p.numel() for p in trainable),
            "optimizer": type(self.optimizers[0]).__name__ if self.optimizers else "",
            "unused_parameters": self.unused,
            "unused_place": self._maker_of(self.unused[0]) if self.unused else None,
            "checkpointed_modules": tuple(self.recomputed),
            "draws_in_checkpointed": tuple(map(self.places.place, self.draws)),
            "checkpoint_bytes": saved,
        }

    def _maker_of(self, parameter: str) -> SourcePlace | None:
        """Return where the module of a parameter was made; None where that was not seen."""
        path = parameter.rpartition(".")[0]
        for model in self.models:
            spot = self._makers.get(dict(model.named_modules()).get(path, model))
            if spot is not None and spot[1] is not None:
                return replace(SourceLines.place(spot), module=path)
        return None


def _branches(ops: tuple[Op, ...]) -> Iterator[str]:
    """Name the lines that decide by a value, of which one way was seen."""
    for op in ops:
        place = op.place
        if op.host_read and not place.is_ours and place.text.startswith(_DECIDES):
            yield f"Only one branch of `{place.text}` at {place.file}:{place.line} was followed."


def _op(key: Key, calls: int, count: int, size: int) -> Op:
    func, phase, spot, inputs, outputs, settings, host_read, is_dynamic = key
    return Op(
        name=func.name().removeprefix("aten::"),
        phase=phase,
        place=SourceLines.place(spot),
        inputs=inputs,
        outputs=outputs,
        settings=settings,
        calls=calls,
        flops=count * calls,
        bytes=size * calls,
        host_read=host_read,
        is_dynamic=is_dynamic,
    )


def _settings(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments that are no tensors, by name."""
    names = _argument_names(func)
    found = [(name, value) for name, value in zip(names, args, strict=False)]
    return tuple(
        (name, _plain(value)) for name, value in (*found, *kwargs.items()) if not _is_tensor(value)
    )


def _draws(func: Any, settings: tuple[Any, ...]) -> bool:
    """Whether an operation draws random numbers; attention does with dropout alone."""
    return _DRAWS in func.tags and dict(settings).get("dropout_p", 1) != 0


def _is_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    return isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value)


def _plain(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return str(value).removeprefix("torch.")


@cache
def _argument_names(func: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in func._schema.arguments)


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
