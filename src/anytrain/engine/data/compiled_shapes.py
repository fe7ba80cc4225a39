"""Know a batch of a new shape, where the device compiles a graph for each.

A compiler takes seconds or minutes, once a shape. While it does, a line says so; a shape that comes
late is told of, with the tensor that changed, and so is a graph that no shape explains. Nothing
here looks at a value, and a device that compiles nothing has none of this.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from anytrain.core.notices import give_notice
from anytrain.engine.data.prefetch import Prefetcher

# Creating the optimizer's state makes the second step another graph than the first.
WARM_UP = 2
_FIRST_S, _LATER_S, _LONG_S = 10.0, 30.0, 60.0
_MOST_NAMED = 3
_ENOUGH_ODD = 3  # batches: one or two may be a first log entry, or a first save

Shape = tuple[int, ...]


class Remedies(NamedTuple):
    """What to do about a late shape, in the words of the door that the run came by."""

    last: str = "Pass drop_last=True to the loader, or fill the last batch up."
    rows: str = "Give every batch the same number of rows."
    length: str = 'Pad batches to one length (padding="max_length"), or to a few.'


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

    _speaking = threading.RLock()
    """One for all: a heartbeat can be copied, with the accelerator that has it."""

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
        with self._speaking:
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _wait(self, what: str, seconds: float) -> None:
        timer = threading.Timer(seconds, self._beat, (what,))
        timer.daemon = True
        self._timer = timer
        timer.start()

    def _beat(self, what: str) -> None:
        with self._speaking:
            if self._timer is not threading.current_thread():  # it ended meanwhile
                return
            elapsed = self._clock() - self._began
            self._say(f"{what}, {elapsed:.0f} s so far")
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
        self._expects = False
        self._num_explained = self._num_odd = 0
        self.remedies = Remedies()
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
        self._expects = True
        if self._is_main:
            self._heartbeat.begin(f"compiling graph {self.num_compiled + 1}")

    def end(self) -> None:
        """Expect it no more: what was computed has been handed over."""
        self._expects = False
        self._heartbeat.end()

    def watched(self, end_step: Callable[[], None]) -> Callable[[], None]:
        """Return what cuts a graph, with a word only while it does: then it is compiled."""

        def cut() -> None:
            if self._expects:
                self.begin()
            try:
                end_step()
            finally:
                self._heartbeat.end()

        return cut

    @property
    def num_unexplained(self) -> int:
        """Graphs so far that were compiled where none was expected."""
        return (self._count() or 0) - self._num_explained

    def explain(self, since: int) -> None:
        """Take what was compiled since then for expected."""
        self._num_explained += self.num_unexplained - since

    def tell_odd(self, since: int) -> None:
        """Count a batch of known shapes that was compiled for; tell of it once there are some."""
        more = self.num_unexplained - since
        if more <= 0:
            return
        self._num_odd += 1
        if self._num_odd != _ENOUGH_ODD or not self._is_main:
            return
        give_notice(
            f"{self._num_odd} batches of known shapes were compiled for ({self.num_compiled} "
            "graphs so far): something other than a batch changes from step to step. It may be a "
            "Python number that the update uses (a scheduled momentum or weight decay), a shape "
            "inside the model (a slice, a mask, nonzero), or a branch on a value. This is told "
            "once; the run's record counts the graphs.",
            stacklevel=5,
        )

    def tell_late(
        self, changed: Mapping[str, tuple[Shape, Shape]], *, is_last: bool = False
    ) -> None:
        """Count tensors with a new shape, and tell of those that had none before."""
        news = [name for name in changed if name not in self.late]
        for name in changed:
            self.late[name] = self.late.get(name, 0) + 1
        if not news or not self._is_main:
            return
        new, old = changed[news[0]]
        others = news[1 : 1 + _MOST_NAMED]
        more = f"; new too: {', '.join(map(repr, others))}" if others else ""
        fix = self.remedies.length
        if len(new) == len(old) and new[1:] == old[1:]:
            fix = self.remedies.last if is_last else self.remedies.rows
        give_notice(
            f"batch tensor {news[0]!r} is {_by(new)}, was {_by(old)}: it compiles again "
            f"(graph {self.num_compiled + 1}){more}. {fix} This is told once; the run's record "
            "counts the shapes.",
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
        self._since: int | None = None
        """Graphs that nothing explained when the batch was handed out; None between batches."""
        self._is_armed = False

    def sees(self, batch: Any, *, is_last: bool = False) -> None:
        """Look at a batch that is handed out now, the loader's last or not."""
        self._since = self.graphs.num_unexplained
        found = tuple(shapes_of(batch))
        self._num_seen += 1
        if found not in self.graphs.known:
            self.graphs.known.add(found)
            self._num_armed = max(self._num_armed, self._each)
            if self._num_seen > WARM_UP * self._each and not self._is_expected(found):
                last = self._last
                changed = {n: (s, last[n]) for n, s in found if last.get(n, s) != s}
                self.graphs.tell_late(changed, is_last=is_last)
        self._is_armed = self._num_armed > 0
        if self._is_armed:
            self._num_armed -= 1
            self._last = dict(found)
            self.graphs.begin()

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # a copy of a loader, in another process, compiles nothing

    def done(self) -> None:
        """Note that the next batch is asked for: the one before has been computed with."""
        self.graphs.end()
        since, self._since = self._since, None
        if since is not None and self._is_armed:
            self.graphs.explain(since)
        elif since is not None:
            self.graphs.tell_odd(since)

    def _is_expected(self, found: tuple[tuple[str, Shape], ...]) -> bool:
        """Whether it is one of the lengths that batches are padded to."""
        shape = dict(found).get(str(self._input_name), ())
        is_full = self._rows is None or shape[:1] == (self._rows,)
        return is_full and shape[1:2] != () and shape[1] in self._lengths


class Watched(Prefetcher):
    """A loader's batches, each looked at when it is handed out."""

    def __init__(self, shapes: LoaderShapes, *ahead: Any) -> None:
        super().__init__(*ahead)
        self.shapes = shapes

    def __next__(self) -> Any:
        self.shapes.done()
        batch = super().__next__()
        self.shapes.sees(batch, is_last=self.is_last)
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
        sys.stderr.write(f"anytrain: {line}\n")
        sys.stderr.flush()
    except (OSError, ValueError):  # nobody reads any more
        return
