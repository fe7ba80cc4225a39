"""Record a step once for each shape of its batch, and replay it.

The first steps run op by op, so that training begins at once and what a step does besides
computing comes to light. Whatever cannot be recorded runs op by op, and the reason is kept.
"""

from __future__ import annotations

import linecache
import random
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from operator import is_, methodcaller
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from anytrain.engine.step.attention import Masks
from anytrain.engine.step.cuda_graph import Draws
from anytrain.engine.step.returns import Returns
from anytrain.engine.step.shortcuts import Shortening
from anytrain.engine.tree import Slot, put_together, take_apart

MOST_SHAPES = 8
_WARM_UP = 2
_MANY_STEPS = 10
_MOST_RESTARTS = 4
_REPAID = 20
"""Replays that repay the recordings of a run."""
_OWN = str(Path(__file__).parents[2])
_PLAIN = (bool, int, float, str)
_FIXED = ("_parameters", "_buffers", "_modules")
_values = methodcaller("values")
Tell = Callable[[str, str], None]
"""Told how steps run from here on, and why."""


class Recorder(Protocol):
    """What records work without running it."""

    def watching(self) -> AbstractContextManager[Draws]:
        """Note what a block draws while it runs."""

    def record(
        self, work: Callable[[], Any], draws: Draws | None
    ) -> tuple[Callable[[], None], Any]:
        """Return what replays the work, and where each replay leaves its results.

        `draws` is what it drew when it ran op by op; None if it did not.
        """

    def release(self) -> None:
        """Give back memory that only running op by op needs."""

    def is_current(self) -> bool:
        """Whether recordings still draw from the generator that all others draw from."""

    def renew(self) -> None:
        """Begin with memory of its own: all recordings are gone."""


class Work(Protocol):
    """A step, as a recording sees it."""

    shortening: Shortening

    @property
    def is_whole(self) -> bool:
        """Whether one micro-batch is the step."""

    def compute(self, tree: Any) -> Any:
        """Do the device's part of the step on these inputs."""


@dataclass(slots=True)
class Recording:
    """A step of one shape."""

    inputs: list[torch.Tensor]
    replay: Callable[[], None]
    outputs: Any

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        """Replay it on these inputs; what it returns is written over by the next replay."""
        for own, given in zip(self.inputs, tensors, strict=True):
            own.copy_(given, non_blocking=True)
        self.replay()
        return self.outputs


class Recordings:
    """The recordings of one function.

    INVARIANT: one is replayed only while the tensors, modes and settings that it was made with are
    as they were.
    """

    def __init__(
        self,
        recorder: Recorder,
        model: nn.Module,
        optimizers: tuple[Any, ...],
        tell: Tell,
        span: AbstractContextManager[Any] | None = None,
        returns: Returns | None = None,
    ) -> None:
        self._recorder, self._model, self._optimizers = recorder, model, optimizers
        self._tell, self._span = tell, span or nullcontext()
        self._returns = returns or Returns()
        self._known: dict[Hashable, Recording] = {}
        self._draws: dict[Hashable, Draws] = {}
        """What each shape drew when it ran op by op."""
        self._failed: set[Hashable] = set()
        self._masks = Masks()
        self._facts: _Facts | None = None
        self._num_forgotten = 0
        self._num_seen: Counter[Hashable] = Counter()
        self._num_restarts = 0
        """In a row, each before the recordings were repaid."""
        self._num_replays = 0
        self._runs_first = False
        """Whether each shape must run op by op once before it is recorded."""
        self._current: tuple[Hashable, Hashable] = (None, None)
        self.is_recording = False
        self.stopped: str | None = None
        """Why nothing is recorded any more."""

    def find(
        self, work: Work, tree: Any, kind: Hashable, settings: Hashable
    ) -> tuple[Recording, list[torch.Tensor]] | None:
        """Return the recording for inputs like these; None where they must run op by op.

        Each `kind` of step runs op by op a few times first.
        """
        if self.stopped is not None:
            return None
        skeleton, tensors = take_apart(tree)
        key = _key(skeleton, tensors, (kind, settings))
        self._current = kind, key
        if key is None:
            self.stop("the batch holds things that are no tensors, or tensors of another device")
            return None
        self._check_facts()
        found = self._known.get(key)
        self._num_replays += found is not None
        if found is None and self._may_record(key, work):
            found = self._make(key, work, skeleton, tensors)
        self._returns.count(key)
        return None if found is None else (found, tensors)

    @contextmanager
    def observed(self, work: Work) -> Iterator[None]:
        """Watch a step that runs op by op for what a recording would miss."""
        kind, key = self._current
        if self.stopped is not None or not self._must_watch(kind, key):
            with self._masks.observed():
                yield
            return
        before, forgotten = _Remains(self._model, self._optimizers), self._num_forgotten
        layers = work.shortening.observed()
        with self._recorder.watching() as draws, self._masks.observed(), layers:
            yield
        self._num_seen[kind] += 1
        if self._num_seen[kind] < _WARM_UP:  # the first step may make what later ones use
            return
        if self._num_forgotten != forgotten:  # the step was begun twice: its draws are mixed up
            return
        self._draws[key] = draws
        missed = before.missed()
        if missed is not None:
            self.stop(missed)

    def forget(self, *, code_changed: bool = False) -> None:
        """Record anew: something that recordings were made with has changed.

        Code that was never run may be compiled when it is first called, which a recording cannot
        hold: each shape runs op by op once, then.
        """
        self._runs_first = self._runs_first or code_changed
        self._known.clear()
        self._draws.clear()
        self._facts = None
        self._num_forgotten += 1
        self._recorder.renew()

    def stop(self, because: str) -> None:
        """Record nothing more, and replay nothing."""
        self.stopped = because
        self.forget()
        self._tell("eager", because)

    def try_again(self) -> None:
        """Record once more though it was given up: what stood in the way is gone."""
        if self.stopped is not None:
            self.stopped = None
            self._failed.clear()
            self.forget()

    def _check_facts(self) -> None:
        if not self._known or self._facts is None:
            return
        if self._recorder.is_current() and self._facts.hold():
            return
        self._num_restarts = self._num_restarts + 1 if self._num_replays < _REPAID else 0
        self._num_replays = 0
        self.forget()
        if self._num_restarts > _MOST_RESTARTS:
            self.stop(
                "the model's tensors, modes or the optimizer's settings keep changing between steps"
            )

    def _must_watch(self, kind: Hashable, key: Hashable) -> bool:
        """Whether a step must be seen to run op by op before one of this shape is recorded.

        Where blocks are checkpointed each shape must, as its draws are its own; and whether they
        are is not known until a step has run since the last change.
        """
        if key in self._draws:
            return False
        if self._num_seen[kind] < _WARM_UP or not self._draws:
            return True
        has_marks = any(draws.marks for draws in self._draws.values())
        return has_marks or self._runs_first or key in self._failed

    def _may_record(self, key: Hashable, work: Work) -> bool:
        """Whether all is known that a recording of this shape needs."""
        if self.stopped is not None or self._must_watch(self._current[0], key):
            return False
        if not work.shortening.is_ready():
            return False
        if len(self._known) < MOST_SHAPES:
            repays = self._returns.repay(key, len(self._known))
            if not repays and not self._known and self._returns.num_steps == _MANY_STEPS:
                self._tell(
                    "eager",
                    "no shape comes often enough to repay its recording (length_buckets bounds "
                    "the number of shapes)",
                )
            return repays
        self._tell(
            "cuda_graph",
            f"{MOST_SHAPES} shapes are recorded; others run op by op (length_buckets bounds the "
            "number of shapes)",
        )
        return False

    def _make(
        self, key: Hashable, work: Work, skeleton: Any, tensors: list[torch.Tensor]
    ) -> Recording | None:
        inputs = [torch.empty_like(tensor).copy_(tensor) for tensor in tensors]
        before = _Remains(self._model, self._optimizers)
        try:
            with self._span, self._masks.recorded(inputs):
                work.shortening.prepare(is_whole=work.is_whole)
                self.is_recording = True
                replay, outputs = self._recorder.record(
                    lambda: work.compute(put_together(skeleton, inputs)),
                    self._draws.get(key),
                )
                work.shortening.settle()
            missed = before.missed()
        except BaseException as error:
            missed = describe(error)
            if not isinstance(error, Exception):  # Ctrl-C: what was begun must not stay behind
                self._clear_up(work, before, missed)
                raise
        finally:
            self.is_recording = False
        if missed is not None:
            if self._clear_up(work, before, missed):
                return self._make(key, work, skeleton, tensors)
            self._give_up(key, missed)
            return None
        if not self._known:
            self._recorder.release()
            self._facts = _Facts(self._model, self._optimizers)
        self._known[key] = Recording(inputs, replay, outputs)
        how = work.shortening.how()
        self._tell(
            "cuda_graph",
            "a step is recorded once for each shape and replayed" + (f"; {how}" if how else ""),
        )
        return self._known[key]

    def _clear_up(self, work: Work, before: _Remains, because: str) -> bool:
        """Undo what a recording that failed has done; say if it is worth another try."""
        may_work = work.shortening.undo(because)
        before.restore()
        self._known.clear()  # the generator that they draw from is another one now
        return may_work

    def _give_up(self, key: Hashable, because: str) -> None:
        """Try a shape once more after a step of its own; the second failure is the last."""
        if key in self._draws or key in self._failed:
            self.stop(because)
        self._failed.add(key)


def describe(error: BaseException) -> str:
    """Say in one line what kept a step from being recorded, and which line of whose code."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [f for f in frames if not _is_library(f.filename)]
    others = [
        f for f in frames if not f.filename.startswith((_OWN, str(Path(torch.__file__).parent)))
    ]
    place = (users or others or frames)[-1]
    text = linecache.getline(place.filename, place.lineno or 0).strip()
    where = f"{Path(place.filename).name} line {place.lineno} (`{text}`)"
    message = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "captur" in str(error):
        told = "" if users else f" ({message})"
        return f"{where} reads a value on the host, or does what only the host can{told}"
    return f"{where} cannot be recorded: {message}"


def _is_library(filename: str) -> bool:
    return "site-packages" in filename or "dist-packages" in filename or filename.startswith(_OWN)


def _key(skeleton: Any, tensors: list[torch.Tensor], also: Hashable) -> Hashable | None:
    """Return what two inputs must have in common to share a recording; None where none can."""
    try:
        shape = (also, _frozen(skeleton), tuple((t.shape, t.dtype, t.device) for t in tensors))
        hash(shape)
    except TypeError:
        return None
    return None if any(map(_is_elsewhere, tensors)) else shape


def _is_elsewhere(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _frozen(skeleton: Any) -> Hashable:
    if isinstance(skeleton, Mapping):
        return tuple((name, _frozen(value)) for name, value in skeleton.items())
    if isinstance(skeleton, (list, tuple)):
        return tuple(_frozen(value) for value in skeleton)
    if skeleton is None or isinstance(skeleton, (Slot, str, int, float)):
        return (type(skeleton), skeleton)
    raise TypeError(type(skeleton))


class _Facts:
    """All that a recording has taken for granted, cheap enough to look at every step.

    Objects are kept and compared by identity, so that none can take another's place unseen.
    """

    def __init__(self, model: nn.Module, optimizers: tuple[Any, ...]) -> None:
        self._parameters = list(model.parameters())
        self._tensors = [*self._parameters, *model.buffers()]
        self._kept: list[dict[str, Any]] = []
        self._empty: list[dict[str, Any]] = []
        """The modules' hooks and the like: most are empty, and need only stay so."""
        for module in model.modules():
            own = vars(module)
            inner = [value for value in own.values() if isinstance(value, dict)]
            self._kept += [own, *filter(None, inner)]
            self._empty += [value for value in inner if not value]
        self._optimizers = optimizers
        self._lengths = list(map(len, self._kept))
        self._objects = list(self._look())
        self._numbers = self._count()

    def hold(self) -> bool:
        """Whether all is as it was."""
        return (
            not any(self._empty)
            and list(map(len, self._kept)) == self._lengths
            and all(map(is_, self._look(), self._objects))
            and self._count() == self._numbers
        )

    def _look(self) -> Iterator[Any]:
        return chain.from_iterable(map(_values, self._kept))

    def _count(self) -> tuple[Any, ...]:
        groups = [group for o in self._optimizers for group in o.param_groups]
        return (
            [tensor.data_ptr() for tensor in self._tensors],
            [parameter.requires_grad for parameter in self._parameters],
            [None if (g := p.grad) is None else g.data_ptr() for p in self._parameters],
            [(id(o.state), len(o.state)) for o in self._optimizers],
            [
                value.data_ptr() if isinstance(value, torch.Tensor) else value
                for group in groups
                for name, value in group.items()
                if name != "params"
            ],
            [len(group["params"]) for group in groups],
        )


class _Remains:
    """What the host holds of a step's doing: a replay would not touch it."""

    def __init__(self, model: nn.Module, optimizers: tuple[Any, ...]) -> None:
        self._model, self._optimizers = model, optimizers
        self._generators = _generators()
        self._attributes = [(module, dict(vars(module))) for module in model.modules()]
        self._states = [set(optimizer.state) for optimizer in optimizers]
        self._gradients = [(p, p.grad) for p in model.parameters()]

    def missed(self) -> str | None:
        """Name what was left on the host since; None where a replay would miss nothing."""
        if not _same_generators(self._generators, _generators()):
            return (
                "the step draws random numbers on the host (as LayerDrop does), which a recording "
                "would repeat"
            )
        for module, old in self._attributes:
            new = vars(module)
            for name in new.keys() | old.keys():
                if name not in _FIXED and not _is_same(old.get(name), new.get(name)):
                    return (
                        f"{type(module).__name__} keeps something in its attribute {name!r} at "
                        "every step, which a recording would not do"
                    )
        if any(len(o.state) > len(s) for o, s in zip(self._optimizers, self._states, strict=True)):
            return "a parameter has got its first gradient only now"
        return None

    def restore(self) -> None:
        """Put attributes and states back: what a recording makes is no place for real values."""
        for module, old in self._attributes:
            vars(module).clear()
            vars(module).update(old)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for optimizer, known in zip(self._optimizers, self._states, strict=True):
            for parameter in set(optimizer.state) - known:
                del optimizer.state[parameter]


def _generators() -> tuple[Any, Any, torch.Tensor]:
    numpys: Any = np.random.get_state()
    return random.getstate(), numpys, torch.get_rng_state()


def _same_generators(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    same = before[0] == after[0] and before[1][2] == after[1][2]
    return same and np.array_equal(before[1][1], after[1][1]) and torch.equal(before[2], after[2])


def _is_same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    plain = (*_PLAIN, tuple)
    return isinstance(old, plain) and isinstance(new, plain) and bool(old == new)
