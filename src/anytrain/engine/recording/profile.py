"""Profile a stretch of training with torch's profiler, one trace file a rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from anytrain.core.errors import BadInput
from anytrain.core.notices import give_notice

ACTIVITIES = ("cpu", "cuda", "xpu", "mtia", "hpu")
_SCHEDULE = ("wait", "warmup", "active", "repeat", "skip_first")
_NEEDED = ("wait", "warmup", "active")

TraceReady = Callable[[torch.profiler.profile], Any]


@dataclass
class ProfileOptions:
    """What to measure, when, and where the trace goes.

    `activities` None means everything this machine can measure. `schedule_option` counts the
    steps that `profiler.step()` marks; without it all is recorded.
    """

    activities: Sequence[str] | None = None
    schedule_option: Mapping[str, int] | None = None
    on_trace_ready: TraceReady | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | os.PathLike[str] | None = None


@contextmanager
def profile(options: ProfileOptions, rank: int) -> Iterator[torch.profiler.profile]:
    """Profile the block; `output_trace_dir` then holds `profile_{rank}.json`."""
    export = _export(options, rank)
    with _profiler(options, export) as profiler:
        yield profiler
    if export is not None and not export.has_recorded:
        give_notice(
            f"The profiler recorded nothing, so there is no {export.path.name}: the block ended "
            f"before the schedule {dict(options.schedule_option or {})} reached an active step. "
            "Call profiler.step() at the end of each step, and take more of them.",
            stacklevel=3,
        )


def build(options: ProfileOptions, rank: int) -> torch.profiler.profile:
    """Return a profiler that writes `profile_{rank}.json` whenever a trace is complete.

    With a schedule that repeats, the file holds the last recorded cycle.
    """
    return _profiler(options, _export(options, rank))


def _profiler(options: ProfileOptions, export: _Export | None) -> torch.profiler.profile:
    return torch.profiler.profile(
        activities=_activities(options.activities),
        schedule=_schedule(options.schedule_option),
        on_trace_ready=options.on_trace_ready if export is None else export,
        record_shapes=options.record_shapes,
        profile_memory=options.profile_memory,
        with_stack=options.with_stack,
        with_flops=options.with_flops,
        with_modules=options.with_modules,
    )


def _export(options: ProfileOptions, rank: int) -> _Export | None:
    if options.output_trace_dir is None:
        return None
    folder = Path(options.output_trace_dir)
    folder.mkdir(parents=True, exist_ok=True)  # now: a folder that can't be made costs no training
    return _Export(folder / f"profile_{rank}.json", options.on_trace_ready)


class _Export:
    """Write each complete trace, after the user's own callback has seen it.

    Writing when the trace is ready, and not at the end of the block, keeps what was recorded:
    with a schedule the profiler may by then hold an empty next cycle.
    """

    def __init__(self, path: Path, then: TraceReady | None) -> None:
        self.path, self._then = path, then
        self.has_recorded = False

    def __call__(self, profiler: torch.profiler.profile) -> None:
        self.has_recorded = True
        if self._then is not None:
            self._then(profiler)
        try:
            profiler.export_chrome_trace(str(self.path))
        except RuntimeError as error:
            if "already saved" not in str(error):
                raise
            give_notice(
                f"{self.path} is not written: on_trace_ready has exported this trace already, and "
                "torch gives each trace out once.",
                stacklevel=2,
            )


def _activities(names: Sequence[str] | None) -> list[torch.profiler.ProfilerActivity] | None:
    if names is None:
        return None
    return [_activity(str(getattr(name, "value", name))) for name in names]


def _activity(name: str) -> torch.profiler.ProfilerActivity:
    if name not in ACTIVITIES:
        raise BadInput(
            f"Unknown profiler activity {name!r}.",
            why=f"the known activities are {', '.join(map(repr, ACTIVITIES))}.",
            fix="pass some of them, or leave activities out to measure all that can be.",
        )
    supported: set[torch.profiler.ProfilerActivity] = torch.profiler.supported_activities()
    here = {activity.name.lower(): activity for activity in supported}
    if name not in here:
        raise BadInput(
            f"Cannot profile {name!r} here.",
            why=f"torch {torch.__version__} measures {', '.join(sorted(here))} on this machine.",
            fix="leave activities out to measure all that can be, or pass only those.",
        )
    return here[name]


def _schedule(
    option: Mapping[str, int] | None,
) -> Callable[[int], torch.profiler.ProfilerAction] | None:
    if option is None:
        return None
    wrong = [key for key in option if key not in _SCHEDULE]
    missing = [key for key in _NEEDED if key not in option]
    if wrong or missing:
        raise BadInput(
            f"Cannot use the profiler schedule {dict(option)}.",
            why=f"unknown: {', '.join(wrong) or 'nothing'}; missing: "
            f"{', '.join(missing) or 'nothing'}.",
            fix="pass wait, warmup and active, and where you like repeat and skip_first.",
        )
    _check_counts(option)
    return torch.profiler.schedule(**option)


def _check_counts(option: Mapping[str, int]) -> None:
    bad = [key for key, n in option.items() if type(n) is not int or n < (key == "active")]
    if bad:
        raise BadInput(
            f"Cannot use the profiler schedule {dict(option)}.",
            why=f"{' and '.join(bad)} must be a whole number: active at least 1, the others 0.",
            fix='pass for instance schedule_option={"wait": 1, "warmup": 1, "active": 3}.',
        )
