"""Compile the repeated block of a model once, in the background, and let all its copies use it.

Training goes on uncompiled meanwhile. A process of its own compiles and leaves the code in torch's
caches on disk; this process then takes it from there, which is the one time that training waits.
"""

from __future__ import annotations

import platform
import time
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anytrain.engine.step.blocks import MIN_BLOCKS, change_call, has_hooks, is_free, repeated
from anytrain.engine.step.regional import rehearsal
from anytrain.engine.step.regional.example import CannotTell, Example, note
from anytrain.engine.step.regional.expectation import Expectation, Memory, repays
from anytrain.engine.step.regional.rehearsal import Outcome, Piece, Rehearsal
from anytrain.machine.parallel.world import World

_MOST_NOTED = 16
_SHARE_OF_BLOCKS = 0.8
"""How much of a step passes in its blocks: the rest gains nothing."""
_SLOWER = 1.05


class Region:
    """A model's repeated block, compiled once for all its copies.

    It notes by itself how the blocks are called in the first steps. Whatever goes wrong leaves the
    model as it was, and the reason in `because`.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._calls: dict[nn.Module, Example] = {}
        self._second: Example | None = None
        self._num_noted = 0
        self._handles: dict[nn.Module, Any] = {}
        self._chosen: tuple[nn.Module, ...] = ()
        self._examples: tuple[Example, ...] = ()
        self._rehearsal: Rehearsal | None = None
        self._outcome: Outcome | None = None
        self.is_installed = False
        self.is_off = False
        """Whether nothing more will come of it."""
        self.because = "nothing is known yet of how the blocks are called"
        self._blocks = tuple(filter(is_free, repeated(model)))
        unfit = _unfit(self._blocks)
        if unfit is not None:
            self._give_up(unfit)
            return
        for block in self._blocks:
            self._handles[block] = block.register_forward_pre_hook(self._note, with_kwargs=True)

    # -- what blocks are called with ----------------------------------------------------------

    @property
    def is_noted(self) -> bool:
        """Whether it is known how the blocks are called."""
        return len(self._calls) >= MIN_BLOCKS and not self.is_off

    def _note(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        if not (block.training and torch.is_grad_enabled()):
            return
        try:
            example = note(args, kwargs, self._device)
        except CannotTell as reason:
            self._give_up(f"{type(block).__name__} cannot be called on made-up inputs: {reason}")
            return
        first = self._calls.setdefault(block, example)
        # One block goes on, for a second size: it shows whether code for one serves another.
        if block is not self._blocks[len(self._blocks) // 2]:
            self._handles.pop(block).remove()
            return
        self._num_noted += 1
        if example.kind == first.kind and example != first:
            self._second = example
        if self._second is not None or self._num_noted >= _MOST_NOTED:
            self._handles.pop(block).remove()

    def _stop_noting(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    # -- compiling ----------------------------------------------------------------------------

    def choose(self) -> None:
        """Settle which blocks can share one compilation."""
        self._stop_noting()
        unfit = _unfit(self._blocks)  # somebody may have hooked them since
        alike: dict[Hashable, list[nn.Module]] = defaultdict(list)
        for block, example in self._calls.items():
            alike[(_signature(block), example.kind)].append(block)
        most = max(alike.values(), key=len, default=[])
        if unfit is not None or len(most) < MIN_BLOCKS:
            self._give_up(unfit or "too few of the repeated blocks are alike")
            return
        first = self._calls[most[0]]
        second = self._second if self._second and self._second.kind == first.kind else None
        self._chosen = tuple(most)
        self._examples = (first,) if second is None else (first, second)

    @property
    def key(self) -> str:
        """What two runs must have in common to expect the same of compiling."""
        block, example = self._chosen[0], self._examples[0]
        facts = (torch.__version__, _machine(self._device), _signature(block), example.kind)
        return sha256(repr(facts).encode()).hexdigest()[:24]

    def prepare(self) -> None:
        """Begin to compile, in the background."""
        piece = Piece(self._chosen[:2], self._examples, self._device)
        try:
            self._rehearsal = Rehearsal(piece)
        except Exception as error:  # noqa: BLE001  what cannot be pickled raises anything
            self._give_up(f"the block cannot be sent to another process: {_said(error)}")
            return
        self.because = f"{self._name} is being compiled in the background"

    def ready(self) -> Outcome | None:
        """Return what compiling it gave; None while it goes on, or where it failed."""
        if self._rehearsal is not None and self._outcome is None:
            self._outcome = self._rehearsal.poll()
            if self._outcome is not None and self._outcome.failed is not None:
                self._give_up(f"{self._name} was not compiled: {self._outcome.failed}")
        return None if self.is_off else self._outcome

    def can_install(self) -> bool:
        """Whether the blocks are in the mode in which they train."""
        return all(block.training for block in self._chosen)

    def install(self) -> float:
        """Let the blocks run compiled from now on; return how long that took."""
        began, kind = time.perf_counter(), type(self._chosen[0])
        forward = rehearsal.compiled(kind)
        try:
            with _left_as_it_was(self._chosen[0], self._device), rehearsal.tracing():
                for example in self._examples:
                    rehearsal.call(forward, self._chosen[0], example, self._device)
        except Exception as error:  # noqa: BLE001  the block stays as it is, whatever it was
            self._give_up(f"{self._name} was not compiled: {_said(error)}")
            return time.perf_counter() - began
        for block in self._chosen:
            change_call(block, compiled=forward)
        self.is_installed = True
        took = time.perf_counter() - began
        self._num_compiled = rehearsal.num_compiled(kind)
        self.because = (
            f"{len(self._chosen)} x {self._name} run compiled; training waited {took:.1f} s for it"
        )
        return took

    def was_compiled_again(self) -> bool:
        """Whether the installed code did not serve some call, and training waited for more."""
        return rehearsal.num_compiled(type(self._chosen[0])) > self._num_compiled

    def remove(self, because: str) -> None:
        """Let the blocks run as they came, for good."""
        for block in self._chosen:
            change_call(block, compiled=None)
        self._give_up(because)

    def close(self) -> None:
        """End what goes on in the background; what is installed is taken out."""
        self.remove(self.because)

    def _give_up(self, because: str) -> None:
        self.is_off, self.is_installed, self.because = True, False, because
        self._stop_noting()
        if self._rehearsal is not None:
            self._rehearsal.close()

    @property
    def _name(self) -> str:
        return type(self._chosen[0]).__name__


class RegionalTier:
    """Decide at log points whether blocks run compiled; all ranks at the same step, or none.

    Nobody asks it in deterministic mode, or where the user has compiled the model.
    """

    def __init__(self, region: Region, world: World, folder: Path | None = None) -> None:
        self.region = region
        self._world = world
        self._memory = Memory(folder)
        self._is_prepared = False
        self._expected = Expectation()
        self._before_s = 0.0
        self._num_looks = 0

    @property
    def because(self) -> str:
        """Why blocks run as they do."""
        return self.region.because

    def tend(self, steps_left: int, step_s: float, *, has_room: bool = True) -> bool:
        """Look after it between two steps; return whether the blocks' calls have changed.

        `step_s` is the mean over the steps since the last time; `has_room` says whether another
        process fits on the device. Every rank must call it at the same step.
        """
        if self._agreed_off():
            return False
        if self.region.is_installed:
            return self._look(step_s)
        if not self._is_prepared:
            self._begin(steps_left, step_s, has_room)
            return False
        return self._swap(steps_left, step_s)

    def close(self) -> None:
        """End what goes on in the background, and give the blocks their own calls back."""
        self.region.close()

    def _agreed_off(self) -> bool:
        """Whether it is over on any rank, and so on all."""
        reasons = self._world.gather_object(self.region.because if self.region.is_off else None)
        found = next(filter(None, reasons), None)
        if found is not None and not self.region.is_off:
            self.region.remove(found)
        return found is not None

    def _begin(self, steps_left: int, step_s: float, has_room: bool) -> None:
        if not all(self._world.gather_object(self.region.is_noted and has_room)):
            return
        if not self.region._chosen:
            self.region.choose()
        if self.region.is_off:
            return
        self._expected = self._memory.read(self.region.key)
        if not self._first(repays(steps_left, step_s, self._expected)):
            return
        self._is_prepared = True
        if self._world.local_rank == 0:  # the others find the code in their machine's caches
            self.region.prepare()

    def _swap(self, steps_left: int, step_s: float) -> bool:
        region, follows = self.region, self._world.local_rank != 0
        outcome = region.ready()
        found = self._world.gather_object((follows or outcome is not None, region.can_install()))
        if self._agreed_off() or not all(all(each) for each in found):
            return False
        outcome = self._first(outcome)
        assert outcome is not None
        gain = outcome.gain * _SHARE_OF_BLOCKS
        expected = Expectation(0.0, gain, self._expected.stall_s)
        known = Expectation(outcome.compile_s, gain, self._expected.stall_s)
        if not self._first(repays(steps_left, step_s, expected)):
            self._memory.write(region.key, known)
            region.remove(f"compiled, a block saves {gain:.0%} of a step: too little for the rest")
            return False
        stall_s = region.install()
        if self._agreed_off():
            return False
        self._memory.write(region.key, Expectation(outcome.compile_s, gain, stall_s))
        self._before_s = step_s
        return True

    def _look(self, step_s: float) -> bool:
        """Take it out again where it is not faster; the first look has the swap itself in it."""
        self._num_looks += 1
        reason = None
        if self.region.was_compiled_again():
            reason = "the compiled blocks were compiled again and again for other inputs"
        elif self._num_looks == 2 and step_s > self._before_s * _SLOWER:
            reason = f"compiled blocks were slower: {step_s:.4f} s a step, {self._before_s:.4f} s"
        reason = self._first(reason)
        if reason is not None:
            self.region.remove(reason)
        return reason is not None

    def _first(self, value: Any) -> Any:
        """Return the first rank's word."""
        return self._world.broadcast_object(value)


def _unfit(blocks: Sequence[nn.Module]) -> str | None:
    """Say why the blocks cannot run compiled; None where they may."""
    if len(blocks) < MIN_BLOCKS:
        return "the model repeats no block, or somebody has compiled it"
    for block in blocks:
        name = type(block).__name__
        if "forward" in vars(block):
            return f"somebody has replaced the forward of a {name}"
        hooked = any(map(has_hooks, block.modules()))
        if hooked or any(p._backward_hooks for p in block.parameters()):
            return f"there are hooks on a {name}, which compiled code would not call"
    return None


def _signature(block: nn.Module) -> Hashable:
    """Return what two blocks must have in common to share compiled code."""
    return (
        tuple((name, type(m).__qualname__, m.training) for name, m in block.named_modules()),
        tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in block.named_parameters()),
        tuple((n, tuple(b.shape), b.dtype) for n, b in block.named_buffers()),
    )


@contextmanager
def _left_as_it_was(block: nn.Module, device: torch.device) -> Iterator[None]:
    """Put the random streams, and the block's buffers and gradients, back afterwards.

    The gradients are out of sight meanwhile: with them, torch's caches would not know the code.
    """
    gradients = [(parameter, parameter.grad) for parameter in block.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in block.buffers()]
    devices = [] if device.type == "cpu" else [device.index or 0]
    kind = "cuda" if device.type == "cpu" else device.type
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        with torch.random.fork_rng(devices=devices, device_type=kind):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _machine(device: torch.device) -> str:
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return f"{platform.machine()} {device.type} {name(device) if name is not None else ''}"


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:200] if lines else type(error).__name__
