"""Follow a run by its record alone, in the view that the run itself has.

Only the run's files are read: watching costs the run nothing, and leaving does not touch it. Each
line of the record is told at the time that it was written, so speeds and times are the run's own.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anytrain.core.documents import real, whole
from anytrain.core.errors import BadInput, Notice
from anytrain.core.records import RunRecord, is_unasked, open_run
from anytrain.core.text import amount, in_no_checkpoint, one_line
from anytrain.engine.recording.console import Course, Display, PlainDisplay
from anytrain.engine.recording.formatting import LogEntry, Summary, duration, entry, number
from anytrain.engine.recording.terminal import Terminal
from anytrain.insight.report.starts import logs_at_updates, own_count, position
from anytrain.insight.report.why import over_starts, shares

_LOOK_S = 0.5
_NEWEST = 1000
_EARLIER = 10
"""How many of the entries that were there before are shown when watching begins."""
# A timesheet has a line for each hundredth of the time so far, unless a step takes longer.
_SILENT_S, _SILENT_SHARE = 60.0, 0.05
ON_ITS_WAY = ("running", "unknown")
"""How a run stands that may go on."""
_WELL = ("finished", "ended", "stopped")


class SilentDisplay(Display):
    """A view that shows nothing: it knows how the run stands, for others to show."""

    is_broken = False

    def say(self, text: str) -> None:
        """Say nothing."""


View = Terminal | PlainDisplay | SilentDisplay
Wait = Callable[[float], bool]
"""Waits so many seconds, or less; returns whether the person wants to leave."""


class Clock:
    """The time now, or that of the line which is being told."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self) -> float:
        return time.time() if self.at is None else self.at


class RunView:
    """A run's record, told to a view as it grows."""

    def __init__(
        self, run: RunRecord, view: Callable[[Clock], View], earlier: int = _EARLIER
    ) -> None:
        self.run = run
        self.clock = Clock()
        self.view = view(self.clock)
        self._earlier = earlier
        self._began: dict[str, Any] | None = None
        self._num_times = self._num_entries = 0
        self._num_events, self._num_apart = len(run.events), 0
        self._last: dict[str, Any] | None = None
        self._silent_for = 0.0
        self.evaluated: dict[str, str] = {}
        """The newest figures of each evaluation."""
        self.was_alive = False
        """Whether the run was under way at any look."""

    @property
    def is_over(self) -> bool:
        """Whether the run is known to have come to an end, good or bad."""
        return self.run.state not in ON_ITS_WAY

    def look(self) -> None:
        """Tell the view what has come since the last look, and draw it."""
        self.was_alive |= not self.is_over
        told = self._first_new()
        if self._began is None or self.run.life.began != self._began:
            told = self._begin(told)
        self.view.measure_memory()
        for at, tell in sorted(self._moments(told), key=lambda moment: moment[0]):
            self.clock.at = at
            tell()
        self.clock.at = heard(self.run) if self.is_over else None
        self.view.standing.is_over = self.is_over
        self._mind_silence()
        self.view.draw()

    def _begin(self, told: int) -> int:
        """Begin the view of a life; return how many entries are in it already."""
        run, before = self.run, self._began
        self._began = first = run.life.began
        self.clock.at = real(first.get("time")) or heard(run)
        self.view.begin(
            Course(
                total=whole(first.get("max_steps")),
                step=whole(first.get("step")) or 0,
                samples_per_step=whole(first.get("samples_per_step")),
                memory=lambda: memory(run),
                shares=lambda: shares(run.total),
                spent_in=f"time{over_starts(len(run.counted_lives))}",
                is_here=False,
            )
        )
        if before is None:
            told = max(len(run.metrics) - self._earlier, 0)
            if told:
                self.view.say(
                    f"{amount(told, 'earlier entry')} {'is' if told == 1 else 'are'} not shown"
                )
        elif before:
            self.view.say(f"started again at step {self.view.course.step}")
        self._num_times = 0
        for raw in _telling(run.metrics[:told]):
            self.clock.at = real(raw.get("time"))
            self._take(raw)
        return told

    def _first_new(self) -> int:
        metrics, seen = self.run.metrics, self._num_entries
        if not seen or (seen <= len(metrics) and metrics[seen - 1] is self._last):
            return seen
        # A life that went on from an earlier step has taken entries back.
        last = real((self._last or {}).get("time")) or 0.0
        later = [n for n, raw in enumerate(metrics) if (real(raw.get("time")) or 0.0) > last]
        return later[0] if later else len(metrics)

    def _moments(self, told: int) -> list[tuple[float, Callable[[], None]]]:
        run, found = self.run, []
        times = run.life.times
        for line in times[self._num_times :]:
            found.append((line, lambda line=line: self._move(whole(line.get("step")))))
        for raw in run.metrics[told:]:
            found.append((raw, lambda raw=raw: self._note(raw)))
        for event in run.events[min(self._num_events, len(run.events)) :]:
            found.append((event, lambda event=event: self._say(event)))
        for raw in run.apart[min(self._num_apart, len(run.apart)) :]:
            found.append((raw, lambda raw=raw: self.view.say(apart_words(raw))))
        self._num_times, self._num_events = len(times), len(run.events)
        self._num_apart = len(run.apart)
        self._num_entries = len(run.metrics)
        self._last = run.metrics[-1] if run.metrics else None
        now = time.time()
        return [(real(line.get("time")) or now, tell) for line, tell in found]

    def _move(self, step: int | None) -> None:
        view = self.view
        if step is not None and step > view.step and view.pace is not None:
            view.step = step
            view.pace.mark(self.clock(), step)

    def _take(self, raw: dict[str, Any]) -> LogEntry | None:
        """Take the figures of an entry; return it if it is one to be shown."""
        if "train_runtime" in raw:  # it sums up a training, and is told at the end
            return None
        found = shown(raw)
        spent = sum(real(value) or 0.0 for n, value in raw.items() if n.endswith("_runtime"))
        pace, now = self.view.pace, self.clock()
        if pace is not None and spent and found.step >= self.view.course.step:
            pace.pause(now - spent)
            pace.go_on(now)
        if found.is_evaluation:
            self.evaluated.update(found.pairs())
        at_update = logs_at_updates(self.run) or is_unasked(raw)
        self.view.take(found, at_update=at_update)
        if at_update:
            self.view.step = max(self.view.step, found.step)
        return found

    def _note(self, raw: dict[str, Any]) -> None:
        found = self._take(raw)
        if found is not None:
            self.view.tell(found)

    def _say(self, event: dict[str, Any]) -> None:
        told = event_words(event)
        if told:
            self.view.say(told)

    def _mind_silence(self) -> None:
        """Say that nothing was heard for long; as a line, each time that it is twice as long."""
        run, last = self.run, heard(self.run)
        silent = 0.0 if last is None or self.is_over else time.time() - last
        spent = sum(run.life.seconds.values())
        self.view.standing.remark = ""
        if silent < max(_SILENT_S, _SILENT_SHARE * spent):
            self._silent_for = 0.0
            return
        words = f"nothing heard for {duration(silent)}; {whereabouts(run)}"
        self.view.standing.remark = words
        if isinstance(self.view, PlainDisplay) and silent > 2 * self._silent_for:
            self._silent_for = silent
            self.view.say(words)


def follow(
    folder: Path,
    view: Callable[[Clock], View],
    wait: Wait,
    say: Callable[[str], None],
    linger_s: float,
) -> bool:
    """Follow a run to its end; return whether it ended well, or somebody left before.

    A run that is killed, fails or is stopped meanwhile may be started again: that is waited for
    `linger_s` seconds.
    """
    run = await_steps(folder, wait, say)
    if run is None:
        return True
    watch = RunView(run, view)
    with warnings.catch_warnings():
        # That nobody reads any more is no news to a watcher: it leaves.
        warnings.simplefilter("ignore", Notice)
        try:
            if _to_the_end(watch, wait, linger_s):
                watch.view.end(summary(watch))
                return _ended_well(run)
            return True
        finally:
            watch.view.close()


def _to_the_end(watch: RunView, wait: Wait, linger_s: float) -> bool:
    """Tell a run to its end; return whether that came before somebody left."""
    while not watch.view.is_broken:
        watch.look()
        if watch.is_over:
            watch.run.refresh()  # its end may have been read before its last entry
            watch.look()
            if watch.run.state in _WELL[:2] or not _is_back(watch, wait, linger_s):
                return True
        elif wait(_LOOK_S):
            return False
        watch.run.refresh()
    return False


def await_steps(folder: Path, wait: Wait, say: Callable[[str], None]) -> RunRecord | None:
    """Wait until there is a record with something in it; None if nobody wants to any more."""
    told, run = "", None
    while True:
        words = f"Waiting for the record of a run in {folder} ... (q or Ctrl-C leaves)"
        try:
            run = run or open_run(folder)
        except BadInput:  # nothing is there yet
            pass
        else:
            run.refresh()
            if run.lives or run.metrics or run.state not in ON_ITS_WAY:
                return run
            words = f"{run.name} has started; waiting for its first step ... (q or Ctrl-C leaves)"
        if words != told:
            say(words)
            told = words
        if wait(_LOOK_S):
            return None


def _is_back(watch: RunView, wait: Wait, linger_s: float) -> bool:
    """Whether a run that went away while it was watched is started again before long."""
    if not watch.was_alive or linger_s <= 0:
        return False
    run, until = watch.run, time.monotonic() + linger_s
    before = run.life.began
    watch.view.say(f"{ending(run)} Waiting {linger_s:.0f} s for it to be started again.")
    while time.monotonic() < until and not wait(min(_LOOK_S, linger_s)):
        run.refresh()
        if run.life.began != before or not watch.is_over:
            return True
    return False


def present(run: RunRecord, width: int, is_ascii: bool) -> list[str]:
    """Return how a run stands now, as lines no wider than `width` but for names."""
    import io

    watch = RunView(run, lambda clock: Terminal(io.StringIO(), width, clock), earlier=0)
    watch.look()
    bars = [line.plain for line in watch.view.bars(width, is_ascii)]  # type: ignore[union-attr]
    told = [f"{one_line(run.name)}: {standing(run)}"]
    last = heard(run)
    if last is not None and not watch.is_over:
        told[0] += f", last heard {_ago(last)}"
    told += bars if run.lives or run.metrics else []
    logged = own_count(run)
    told += [] if logged is None else [f"last logged at step {logged}"]
    evaluated = [f"{name} {value}" for name, value in watch.evaluated.items()]
    if evaluated:
        told.append("  ".join(evaluated))
    watch.view.close()
    return told


def is_well(run: RunRecord) -> bool:
    """Whether a run goes on, or came to a good end."""
    return run.state in ON_ITS_WAY or _ended_well(run)


def _ended_well(run: RunRecord) -> bool:
    return run.state in _WELL and run.unsaved is None


def standing(run: RunRecord) -> str:
    """Return in words how a run stands."""
    if run.state not in ON_ITS_WAY:
        return ending(run)
    if not run.lives:
        return f"started, no step yet; {whereabouts(run)}"
    starts = max(len(run.lives), len(run.starts))
    again = f", started {starts} times" if starts > 1 else ""
    return f"{'running' if run.state == 'running' else 'under way'}{again}; {whereabouts(run)}"


def ending(run: RunRecord) -> str:
    """Return in words how a run ended."""
    step, last, unsaved = position(run), heard(run), run.unsaved
    but = "" if unsaved is None else f", but {in_no_checkpoint(one_line(unsaved[0]))}"
    told = {
        "finished": f"Training done{but}.",
        "failed": f"The run failed at step {step}{_by(run)}.",
        "stopped": f"The run was stopped at step {step}.",
        "ended": f"The run's process ended at step {step}{but}.",
        "killed": f"The run was killed after step {step}"
        + ("." if last is None else f"; last heard {_ago(last)}."),
    }
    return told.get(run.state, f"The run is over: {one_line(run.state)}.")


def _by(run: RunRecord) -> str:
    error = run.life.error
    return f" by {one_line(error).rstrip('.')}" if error else ""


def summary(watch: RunView) -> Summary:
    """Return what came of a run."""
    run, nothing = watch.run, dict[str, Any]()
    last = next((raw for raw in reversed(run.metrics) if "train_runtime" in raw), nothing)
    best = next((e for e in reversed(run.events) if e.get("kind") == "best"), nothing)
    value = real(best.get("value"))
    life, unsaved = run.life, run.unsaved
    losses = _losses(run, watch.view.standing.loss)
    finite = [pair for pair in losses if math.isfinite(pair[0])]
    return Summary(
        steps=position(run),
        max_steps=whole(life.began.get("max_steps")),
        epochs=real((run.metrics[-1] if run.metrics else nothing).get("epoch")),
        seconds=real(last.get("train_runtime"))
        or sum(s for name, s in life.seconds.items() if name != "start"),
        samples_per_second=real(last.get("train_samples_per_second")),
        loss=losses[-1][0] if losses else None,
        lowest_loss=min(finite) if finite else None,
        metrics=watch.evaluated,
        best=None
        if value is None
        else (one_line(best.get("metric", "")), value, whole(best.get("step"))),
        best_checkpoint=one_line(best["path"]) if best.get("path") else None,
        results=str(run.folder),
        since=whole(life.began.get("step")) or 0,
        unsaved=None if unsaved is None else (one_line(unsaved[0]), one_line(unsaved[1])),
        heading=None if run.state == "finished" else ending(run),
    )


def shown(raw: dict[str, Any]) -> LogEntry:
    """Return what is shown of a line of the log; nothing in it can move a cursor."""
    values = {
        one_line(name): one_line(value) if isinstance(value, str) else value
        for name, value in raw.items()
        if name not in ("step", "time", "epoch", "event")
    }
    return entry(whole(raw.get("step")) or 0, real(raw.get("epoch")), values)


def heard(run: RunRecord) -> float | None:
    """Return when the run last wrote anything, in seconds since the epoch."""
    times = [run.life.heard]
    times += [real(lines[-1].get("time")) for lines in (run.metrics, run.starts) if lines]
    return max((at for at in times if at is not None), default=None)


def memory(run: RunRecord) -> dict[str, int]:
    """Return the memory that the run last said it uses, by place."""
    last = run.life.last
    amounts = {"memory": last.get("used_bytes"), "peak": last.get("peak_bytes")}
    found = {name: whole(value) for name, value in amounts.items()}
    return {name: value for name, value in found.items() if value}


def whereabouts(run: RunRecord) -> str:
    """Return which process a run is, as far as that is known here."""
    began = run.life.began if run.lives else run.start
    pid, host = began.get("pid", "?"), one_line(began.get("host", "?"))
    if run.state == "unknown":
        return f"whether it still runs is known on {host} only (process {pid})"
    return f"process {pid}"


def event_words(event: dict[str, Any]) -> str:
    """Return an event as a line; nothing for one that the log tells anyway."""
    kind, path = event.get("kind"), one_line(Path(str(event.get("path", ""))).name)
    if kind == "notice":
        return f"notice: {one_line(event.get('text', ''))}"
    if kind == "checkpoint":
        return f"saved {path}"
    if kind == "best":
        value = number(event.get("value"))
        return f"best so far: {one_line(event.get('metric', ''))} {one_line(value)}"
    return ""


def apart_words(raw: dict[str, Any]) -> str:
    """Return an evaluation after a training as a line, with the weights that it was of."""
    found = shown({name: value for name, value in raw.items() if name != "of"})
    of, told = raw.get("of"), ", ".join(f"{name} {value}" for name, value in found.pairs())
    return f"evaluated {one_line(of) if of else 'after the training'}: {told}"


def _telling(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return of a long history its evaluations, its newest entries, and some of the others."""
    older, newest = history[:-_NEWEST], history[-_NEWEST:]
    every = max(len(older) // _NEWEST, 1)
    return [
        *(
            r
            for i, r in enumerate(older)
            if i % every == 0 or any(n.endswith("_runtime") for n in r)
        ),
        *newest,
    ]


def _losses(run: RunRecord, name: str) -> list[tuple[float, int]]:
    """Return the training losses under the name that they are logged by, with their steps."""
    found = ((real(r.get(name)), r) for r in run.metrics if "train_runtime" not in r)
    return [(loss, whole(r.get("step")) or 0) for loss, r in found if loss is not None]


def _ago(at: float) -> str:
    return f"{duration(max(time.time() - at, 0.0))} ago"
