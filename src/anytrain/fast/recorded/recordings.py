"""Record a step once for each shape of its batch, and replay it.

The first steps run op by op, so that training begins at once and what a step does besides
computing comes to light. Whatever cannot be recorded runs op by op, and the reason is kept.
"""

from __future__ import annotations

import linecache
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

import anytrain
from anytrain.engine.tree import Slot, put_together, take_apart
from anytrain.fast.purity.users import is_installed
from anytrain.fast.recorded.assumptions import Assumptions, HostState
from anytrain.fast.recorded.cuda_graph import Draws
from anytrain.fast.recorded.host_draws import HostDraws, noted
from anytrain.fast.recorded.numbers import as_written
from anytrain.fast.recorded.payback import Payback
from anytrain.fast.shortcuts.attention import Masks
from anytrain.fast.shortcuts.shortcuts import Shortening

MOST_SHAPES = 8
_WARM_UP = 2
_MANY_STEPS = 10
_MOST_RESTARTS = 4
_REPAID = 20
"""Replays that repay the recordings of a run."""
_OWN = str(Path(anytrain.__file__).parent)
Tell = Callable[[str, str], None]
"""Told how steps run from here on, and why."""


class Recorder(Protocol):
    """What records work without running it."""

    problem: str | None
    """Why its recordings cannot be trusted; None where they can."""

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

    @property
    def shortening(self) -> Shortening:
        """What does parts of it in fewer kernels."""

    @property
    def is_whole(self) -> bool:
        """Whether one micro-batch is the step."""

    def compute(self, tree: Any) -> Any:
        """Do the device's part of the step on these inputs."""


class Outside(NamedTuple):
    """What is asked of the code and the objects around a step."""

    obstacle: Callable[[], str | None] = lambda: None
    """Asked before each recording what stands in its way."""
    looked_up: Callable[[], tuple[Any, ...]] = tuple
    """Asked for the values that the user's code looks up, which a recording holds fast."""


class Manner(NamedTuple):
    """What is recorded, and what belongs to it."""

    what: str = "a step"
    takes_differentiable: bool = False
    """Whether inputs may want gradients."""
    owns_gradients: bool = True
    """Whether the parameters' gradients come and go inside of it."""


@dataclass(slots=True)
class Recording:
    """A step of one shape."""

    inputs: list[torch.Tensor]
    """Where the batch goes; the step sees others of the same memory, of which it may ask for
    gradients."""
    replay: Callable[[], None]
    outputs: Any
    chances: HostDraws
    """What the step draws on the host, though nothing depends on it."""

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        """Replay it on these inputs; what it returns is written over by the next replay."""
        for own, given in zip(self.inputs, tensors, strict=True):
            own.copy_(given, non_blocking=True)
        self.chances.draw()
        self.replay()
        return self.outputs


class Recordings:
    """The recordings of one function.

    INVARIANT: one is replayed only while the tensors, modes and settings that it was made with are
    as they were.
    """

    def __init__(  # noqa: PLR0913  the last four have answers of their own
        self,
        recorder: Recorder,
        model: nn.Module,
        optimizers: tuple[Any, ...],
        tell: Tell,
        span: AbstractContextManager[Any] | None = None,
        returns: Payback | None = None,
        outside: Outside | None = None,
        manner: Manner | None = None,
    ) -> None:
        self._manner = manner or Manner()
        self._recorder, self._model, self._optimizers = recorder, model, optimizers
        self._tell, self._span = tell, span or nullcontext()
        self._returns = returns or Payback()
        self._outside = outside or Outside()
        self._known: dict[Hashable, Recording] = {}
        """The last used is the last."""
        self._draws: dict[Hashable, Draws] = {}
        """What each shape drew when it ran op by op."""
        self._failed: set[Hashable] = set()
        self._masks = Masks()
        self._facts: Assumptions | None = None
        self._shortening: Shortening | None = None
        """What the recordings were made with."""
        self._num_forgotten = 0
        self._num_seen: Counter[Hashable] = Counter()
        self._num_restarts = 0
        """In a row, each before the recordings were repaid."""
        self._num_replays = 0
        self._has_blocks = False
        """Whether blocks of the last watched step were checkpointed."""
        self._is_as_written = False
        """Whether scripted functions are recorded as they are written: one failed as it was."""
        self._current: tuple[Hashable, Hashable] = (None, None)
        self.stopped: str | None = None
        """Why nothing is recorded any more."""

    def find(
        self, work: Work, tree: Any, kind: Hashable
    ) -> tuple[Recording, list[torch.Tensor]] | None:
        """Return the recording for inputs like these; None where they must run op by op.

        Each `kind` of step runs op by op a few times first.
        """
        if self.stopped is not None:
            return None
        self._shortening = work.shortening
        skeleton, tensors = take_apart(tree)
        key = _key(
            skeleton, tensors, (kind, self._outside.looked_up()), self._manner.takes_differentiable
        )
        self._current = kind, key
        if key is None:
            self.stop(
                "the batch holds things that are no tensors, or tensors that are sparse, "
                "learnt, or of another device"
            )
            return None
        self._check_facts(kind, key)
        found = self._known.pop(key, None)
        if found is not None:
            self._known[key] = found  # the last used is the last
            self._num_replays += 1
        if found is None and self._may_record(key, work):
            found = self._make(key, work, skeleton, tensors)
        self._returns.count(key)
        if found is not None:
            return found, tensors
        is_first = self._num_seen[kind] + 1 < _WARM_UP  # it may make what later ones use
        if self._known or is_first or self.stopped is not None:
            return None
        if self._must_watch(kind, key):
            self._facts = self._assumed()
        return None

    @contextmanager
    def observed(self, work: Work) -> Iterator[None]:
        """Watch a step that runs op by op for what a recording would miss."""
        kind, key = self._current
        if self.stopped is not None or not self._must_watch(kind, key):
            with self._masks.observed():
                yield
            return
        before, forgotten = HostState(self._model, self._optimizers), self._num_forgotten
        layers = work.shortening.observed()
        knew_blocks = self._has_blocks
        masks = self._masks.observed(as_recorded=knew_blocks)
        with self._recorder.watching() as draws, masks, layers, noted() as chances:
            yield
        self._num_seen[kind] += 1
        self._has_blocks = bool(draws.marks)
        if self._num_seen[kind] < _WARM_UP:  # the first step may make what later ones use
            return
        if self._has_blocks and not knew_blocks:  # its masks were not built as a recording's are
            return
        if self._num_forgotten != forgotten:  # the step was begun twice: its draws are mixed up
            return
        self._draws[key] = draws
        missed = before.missed(chances)
        if missed is not None:
            self.stop(missed)

    def forget(self) -> None:
        """Record anew: something that recordings were made with has changed."""
        self._known.clear()
        self._draws.clear()
        self._facts = None
        self._num_forgotten += 1
        self._recorder.renew()
        if self._shortening is not None:
            self._shortening.forget()

    def stop(self, because: str) -> None:
        """Record nothing more, and replay nothing."""
        self.stopped = because
        self.forget()
        self._tell("eager", because)

    def _assumed(self) -> Assumptions:
        owns = self._manner.owns_gradients
        return Assumptions(self._model, self._optimizers, owns_gradients=owns)

    def _check_facts(self, kind: Hashable, key: Hashable) -> None:
        if self._recorder.problem is not None:
            self.stop(self._recorder.problem)
        # Else nothing depends on them. What is watched next replaces them, and must not hide that
        # other shapes were watched before the change.
        depends = bool(self._known) or self._returns.repay(key) or self._must_watch(kind, key)
        if self._facts is None or not depends:
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
        return has_marks or key in self._failed

    def _may_record(self, key: Hashable, work: Work) -> bool:
        """Whether all is known that a recording of this shape needs."""
        if self.stopped is not None or self._must_watch(self._current[0], key):
            return False
        if not work.shortening.is_ready():
            return False
        if self._has_room():
            return self._repays(key) and not self._is_hindered()
        self._tell(
            "cuda_graph",
            f"{MOST_SHAPES} shapes are recorded; others run op by op (length_buckets bounds the "
            "number of shapes)",
        )
        return False

    def _has_room(self) -> bool:
        """Whether one more may be recorded, if need be in the place of one that is not used."""
        if len(self._known) < MOST_SHAPES:
            return True
        oldest = next(iter(self._known))
        if not self._returns.is_gone(oldest):
            return False
        del self._known[oldest]
        return True

    def _repays(self, key: Hashable) -> bool:
        repays = self._returns.repay(key, len(self._known))
        if not repays and not self._known and self._returns.num_steps >= _MANY_STEPS:
            self._tell(
                "eager",
                "no shape comes often enough to repay its recording (length_buckets bounds the "
                "number of shapes)",
            )
        return repays

    def _is_hindered(self) -> bool:
        because = self._outside.obstacle()
        if because is not None:
            self.stop(because)
        return because is not None

    def _make(
        self, key: Hashable, work: Work, skeleton: Any, tensors: list[torch.Tensor]
    ) -> Recording | None:
        inputs = [torch.empty_like(tensor).copy_(tensor) for tensor in tensors]
        is_scripted = False
        before = HostState(self._model, self._optimizers)
        try:
            masks = self._masks.recorded(inputs)
            plain = as_written(self._model) if self._is_as_written else nullcontext()
            with self._span, masks, plain, noted() as chances:
                work.shortening.prepare(is_whole=work.is_whole)
                replay, outputs = self._recorder.record(
                    lambda: work.compute(put_together(skeleton, [own.detach() for own in inputs])),
                    self._draws.get(key),
                )
                work.shortening.settle()
            missed = before.missed(chances)
        except BaseException as error:
            missed = describe(error)
            is_scripted = "TorchScript" in str(error)
            if not isinstance(error, Exception):  # Ctrl-C: what was begun must not stay behind
                self._clear_up(work, before)
                raise
        if missed is not None:
            self._clear_up(work, before)
            if self._simplify(work, missed, is_scripted):
                return self._make(key, work, skeleton, tensors)
            self._give_up(key, missed)
            return None
        before.rewind()
        if not self._known:
            self._recorder.release()
            self._facts = self._assumed()
        self._known[key] = Recording(inputs, replay, outputs, chances)
        how = work.shortening.how()
        self._tell(
            "cuda_graph",
            f"{self._manner.what} is recorded once for each shape and replayed"
            + (f"; {how}" if how else ""),
        )
        return self._known[key]

    def _clear_up(self, work: Work, before: HostState) -> None:
        """Undo what a recording that failed has done."""
        work.shortening.clear()
        before.restore()
        self._known.clear()  # the generator that they draw from is another one now
        self._recorder.renew()

    def _simplify(self, work: Work, because: str, is_scripted: bool) -> bool:
        """Leave out what may have made a recording fail; False where nothing is left of it."""
        if is_scripted and not self._is_as_written:
            self._is_as_written = True
            return True
        return work.shortening.reduce(because)

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
    return is_installed(filename) or filename.startswith(_OWN)


def _key(
    skeleton: Any, tensors: list[torch.Tensor], also: Hashable, takes_differentiable: bool = False
) -> Hashable | None:
    """Return what two inputs must have in common to share a recording; None where none can."""
    try:
        facts = tuple((t.shape, t.dtype, t.device, t.requires_grad) for t in tensors)
        shape = (also, _frozen(skeleton), facts)
        hash(shape)
    except TypeError:
        return None
    is_plain = all(t.layout is torch.strided for t in tensors)
    is_plain = is_plain and (takes_differentiable or not any(t.requires_grad for t in tensors))
    return shape if is_plain and not any(map(_is_elsewhere, tensors)) else None


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
