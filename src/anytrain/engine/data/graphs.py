"""Know a batch of a new shape, where the device compiles a graph for each.

A compiler takes seconds or minutes, once a shape. While it does, a line says so; a shape that comes
late is told of, with the tensor that changed. Nothing here looks at a value, and a device that
compiles nothing has none of this.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from anytrain.core.errors import Notice
from anytrain.engine.data.ahead import Ahead

# Creating the optimizer's state makes the second step another graph than the first.
WARM_UP = 2
_FIRST_S, _LATER_S, _LONG_S = 10.0, 30.0, 60.0
_MOST_NAMED = 3

Shape = tuple[int, ...]


def shapes_of(batch: Any, name: str = "batch") -> Iterator[tuple[str, Shape]]:
    """Yield each tensor's name and shape, in the batch's order.

    >>> dict(shapes_of({"input_ids": torch.zeros(2, 3), "rest": [torch.zeros(2)]}))
    {'input_ids': (2, 3), 'rest.0': (2,)}
    """
    if isinstance(batch, torch.Tensor):
        yield name, tuple(batch.shape)
        return
    if isinstance(batch, Mapping):
        parts: Any = batch.items()
    elif isinstance(batch, list | tuple):
        parts = enumerate(batch)
    else:
        return
    for key, value in parts:
        yield from shapes_of(value, str(key) if name == "batch" else f"{name}.{key}")


class Heartbeat:
    """A line now and then, from a thread of its own, for as long as something goes on."""

    def __init__(
        self,
        say: Callable[[str], None],
        first_s: float = _FIRST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._first_s, self._clock = say, first_s, clock
        self._timer: threading.Timer | None = None
        self._began = 0.0

    def begin(self, what: str) -> None:
        """Say `what`, and for how long, once it takes long."""
        self.end()
        self._began = self._clock()
        self._wait(what, self._first_s)

    def end(self) -> None:
        """Say no more."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _wait(self, what: str, seconds: float) -> None:
        timer = threading.Timer(seconds, self._beat, (what,))
        timer.daemon = True
        self._timer = timer
        timer.start()

    def _beat(self, what: str) -> None:
        mine = threading.current_thread()
        if self._timer is not mine:  # it ended meanwhile
            return
        elapsed = self._clock() - self._began
        self._say(f"{what}, {elapsed:.0f} s so far")
        if self._timer is mine:
            self._wait(what, self._first_s if elapsed < _LONG_S else _LATER_S)


class Graphs:
    """What a run's device has compiled for: how many graphs, and which shapes came late."""

    def __init__(
        self,
        count: Callable[[], int | None],
        *,
        is_main: bool = True,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self._count, self._is_main = count, is_main
        self._heartbeat = heartbeat or Heartbeat(_say)
        self._before: int | None = None
        self.known: set[tuple[tuple[str, Shape], ...]] = set()
        """The shapes of batches that were handed out."""
        self.late: dict[str, int] = {}
        """How often each tensor had a new shape after the first batches."""

    @property
    def num_compiled(self) -> int:
        """Graphs since the run's first batch."""
        return 0 if self._before is None else (self._count() or 0) - self._before

    def summary(self) -> str:
        """Return in a few words what was compiled.

        >>> Graphs(lambda: 0).summary()
        '0 graphs'
        """
        told = f"{self.num_compiled} graph{'' if self.num_compiled == 1 else 's'}"
        if self.late:
            name, times = max(self.late.items(), key=lambda each: each[1])
            told += f"; {name!r} had {times} new shape{'' if times == 1 else 's'} after the first"
        return told

    def begin(self) -> None:
        """Expect the device to compile, from here until `end`."""
        if self._before is None:
            self._before = self._count() or 0
        if self._is_main:
            self._heartbeat.begin(f"compiling graph {self.num_compiled + 1}")

    def end(self) -> None:
        """Expect it no more: what was computed has been handed over."""
        self._heartbeat.end()

    def tell_late(self, changed: Mapping[str, tuple[Shape, Shape]]) -> None:
        """Count tensors with a new shape, and tell of those that had none before."""
        news = [name for name in changed if name not in self.late]
        for name in changed:
            self.late[name] = self.late.get(name, 0) + 1
        if not news or not self._is_main:
            return
        new, old = changed[news[0]]
        others = news[1 : 1 + _MOST_NAMED]
        more = f"; new too: {', '.join(map(repr, others))}" if others else ""
        short = len(new) == len(old) and new[1:] == old[1:]
        fix = (
            "Pass drop_last=True to the loader, or fill the last batch up."
            if short
            else 'Pad batches to one length (padding="max_length"), or to a few: length_buckets.'
        )
        warnings.warn(
            f"batch tensor {news[0]!r} is {_by(new)}, was {_by(old)}: it compiles again "
            f"(graph {self.num_compiled + 1}){more}. {fix} This is told once; the run's record "
            "counts the shapes.",
            Notice,
            stacklevel=5,
        )


class LoaderShapes:
    """The shapes of one loader's batches; so many of them make a step.

    `collate` may know the lengths that it pads to: they are expected.
    """

    def __init__(self, graphs: Graphs, collate: Any = None, each: int = 1) -> None:
        self.graphs, self._each = graphs, each
        self._num_armed = WARM_UP * each
        """How many batches more may be compiled for."""
        self._lengths = frozenset(getattr(collate, "lengths", ()))
        self._input_name = getattr(collate, "input_name", None)
        self._rows = getattr(collate, "rows", None)
        self._num_seen = 0
        self._last: dict[str, Shape] = {}

    def sees(self, batch: Any) -> None:
        """Look at a batch that is handed out now."""
        found = tuple(shapes_of(batch))
        self._num_seen += 1
        if found not in self.graphs.known:
            self.graphs.known.add(found)
            self._num_armed = max(self._num_armed, self._each)
            if self._num_seen > WARM_UP * self._each and not self._is_expected(found):
                last = self._last
                self.graphs.tell_late({n: (s, last[n]) for n, s in found if last.get(n, s) != s})
        if self._num_armed:
            self._num_armed -= 1
            self._last = dict(found)
            self.graphs.begin()

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # a copy of a loader, in another process, compiles nothing

    def done(self) -> None:
        """Note that the next batch is asked for: the one before has been computed with."""
        self.graphs.end()

    def _is_expected(self, found: tuple[tuple[str, Shape], ...]) -> bool:
        """Whether it is one of the lengths that batches are padded to."""
        shape = dict(found).get(str(self._input_name), ())
        is_full = self._rows is None or shape[:1] == (self._rows,)
        return is_full and shape[1:2] != () and shape[1] in self._lengths


class Watched(Ahead):
    """A loader's batches, each looked at when it is handed out."""

    def __init__(self, shapes: LoaderShapes, *ahead: Any) -> None:
        super().__init__(*ahead)
        self.shapes = shapes

    def __next__(self) -> Any:
        self.shapes.done()
        batch = super().__next__()
        self.shapes.sees(batch)
        return batch

    def close(self) -> None:
        """Let go of what was not asked for."""
        self.shapes.done()
        super().close()


def _nothing() -> None:
    return None


def _by(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "a number"


def _say(line: str) -> None:
    """Write a line where people see it: above a bar, or into a notebook's cell."""
    try:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    except (OSError, ValueError):  # nobody reads any more
        return
