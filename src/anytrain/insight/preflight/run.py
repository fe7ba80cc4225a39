"""Preflight: trace the run for each target, run the checks, forecast memory and time, report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from anytrain.core.errors import BadInput
from anytrain.insight.preflight.batch_search import MOST, Fit, largest_batch
from anytrain.insight.preflight.checks import ask_all
from anytrain.insight.preflight.checks.host_reads import is_left_out
from anytrain.insight.preflight.findings import Finding
from anytrain.insight.preflight.memory import Forecast, forecast as forecast_memory
from anytrain.insight.preflight.report import Outlook, Report, keep
from anytrain.insight.preflight.step_time import Rates, estimate, measured, rates_of
from anytrain.insight.preflight.targets import Target, parse_targets
from anytrain.insight.preflight.tpu.compile import Compiled, Compiler, NotCompiled
from anytrain.insight.preflight.trace import Setting, Trace, TracedJob
from anytrain.insight.preflight.units import size

Tracing = Callable[[Target, Setting | None], Trace]
"""Traces the run for a target: as it is, or in another setting."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Start:
    """How a launcher would start the run."""

    num_processes: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that it sets for each process."""


def preflight_command(
    command: Sequence[str],
    targets: Sequence[str] = (),
    start: Start = Start(),
    *,
    json_file: str | None = None,
    html_file: Path | None = None,
    quick: bool = False,
    thorough: bool = False,
) -> Report:
    """Trace a script (or "-m" and a module) and its arguments; show what awaits it on each target.

    Targets are words such as "mps:16GB". `json_file="-"` prints JSON instead of the tables. A quick
    one does not look for the largest batch, which takes more traces; a thorough one looks for it
    with bf16 and with activation checkpointing, too, though the run fits as it is.
    """
    for path in (json_file, html_file):
        if path is not None and path != "-":
            _check_writable(Path(path))
    from anytrain.core.text import safe_console
    from anytrain.insight.preflight.rendering import show
    from anytrain.insight.preflight.trace_process import ForkServer, trace_run

    aside = safe_console(stderr=True, markup=False)
    with ForkServer(start.variables) as warm:
        report = preflight_of(
            lambda target, setting: trace_run(target, command, setting, warm=warm),
            parse_targets(tuple(targets)),
            tuple(command),
            start,
            quick=quick,
            thorough=thorough,
            say=lambda text: aside.print(f"anytrain: {text}", style="dim"),
        )
    if json_file == "-":
        sys.stdout.write(report.as_json() + "\n")
    else:
        show(report, safe_console(markup=False))
        if json_file is not None:
            Path(json_file).write_text(report.as_json() + "\n", encoding="utf-8")
    if html_file is not None:
        html_file.write_text(report.as_html(), encoding="utf-8")
        aside.print(f"anytrain: the page is {html_file}")
    return report


def _check_writable(path: Path) -> None:
    was_there = path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise BadInput(
            f"Cannot write the report to {path}.",
            why=f"{error.strerror or error}.",
            fix="pass the path of a file in a folder that is there.",
        ) from error
    if not was_there:
        path.unlink()


def preflight_of(
    tracing: Tracing,
    targets: Sequence[Target],
    command: tuple[str, ...] = (),
    start: Start = Start(),
    *,
    quick: bool = False,
    thorough: bool = False,
    say: Say = lambda text: None,
) -> Report:
    """Return the report of a run that `tracing` traces; keep its forecast in the run's folder."""
    once = _TraceCache(tracing, start.num_processes, say)
    compiler = Compiler(command, say, start.variables)
    found = []
    for target in targets:
        outlook = _outlook(once, target, compiler)
        if not quick and not any(each.kind == "trace" for each in outlook.findings):
            outlook = replace(outlook, fits=_largest(once, target, outlook.job, thorough))
        found.append(outlook)
    report = Report(command, tuple(found))
    keep(report)
    return report


class _TraceCache:
    """Trace each kind of device once in each setting: memory and torch's version change nothing."""

    def __init__(self, tracing: Tracing, num_processes: int, say: Say) -> None:
        self._tracing, self._num_processes, self._say = tracing, num_processes, say
        self._known: dict[tuple[str, int, Setting | None], Trace] = {}

    def __call__(self, target: Target, setting: Setting | None) -> Trace:
        key = (target.kind, target.num_devices, setting)
        if key not in self._known:
            self._known[key] = self._traced(target, setting)
        return self._known[key]

    def _traced(self, target: Target, setting: Setting | None) -> Trace:
        own = self._known.get((target.kind, target.num_devices, None))
        what = "the run"
        if setting is not None:
            # Where a setting checkpoints, every block does; in the run itself it may be fewer.
            if own is not None and setting == _own(own.job) and not setting.is_checkpointed:
                return own
            what = f"a batch of {setting.batch_size} in {setting}"
        self._say(f"{target.name}: tracing {what}")
        trace = self._tracing(target, setting)
        return replace(trace, job=replace(trace.job, world_size=self._num_processes))


def _own(job: TracedJob) -> Setting:
    """Return the setting that a run has by itself."""
    return Setting(job.batch_size, job.precision, bool(job.checkpointed_modules))


def _outlook(tracing: Tracing, target: Target, compiler: Compiler) -> Outlook:
    trace = tracing(target, None)
    findings = [*_failed(trace), *ask_all(trace, target)]
    # A step that was not seen whole has no peak and no time: only the second update is like others.
    if not trace.ops or not trace.parts.get("is_whole", True):
        return Outlook(target, trace.job, tuple(findings), notes=trace.notes)
    is_recorded = _records(trace, target)
    forecast = forecast_memory(trace, target, is_recorded=is_recorded)
    known = _rates(target)
    compiled = compiler.compile(target) if target.kind == "tpu" else None
    return Outlook(
        target=target,
        job=trace.job,
        findings=(*findings, *_too_large(forecast, compiled)),
        memory=forecast,
        time=None if known is None else estimate(trace, known),
        recorded_time=estimate(trace, known, is_recorded=True) if known and is_recorded else None,
        compiled=compiled,
        timeline=trace.held.timeline,
        notes=trace.notes,
        trace_s=trace.trace_s,
    )


def _failed(trace: Trace) -> list[Finding]:
    """Return the error that ended the trace, as a finding."""
    if not trace.failure:
        return []
    first, _, rest = trace.failure.partition("\n")
    if trace.parts.get("decided"):
        return [
            Finding(
                "trace",
                "warning",
                f"The trace ended here, and the run may: {first}",
                why="A value of the device decided it, and no values are there: each is taken "
                "for 1, and for a finite number.",
                fix="Nothing, where real values decide otherwise; put the check after the "
                "second update, or out of the script, to have the rest traced.",
                certain=False,
                place=trace.failure_place,
            )
        ]
    why, fix = _own_words(rest.strip())
    return [
        Finding(
            "trace",
            "error",
            f"The run fails: {first}",
            why=why or "The script raised it in its first steps.",
            fix=fix
            or "Let the script run for two steps on the CPU: what fails there, too, has "
            "nothing to do with the device.",
            place=trace.failure_place,
        )
    ]


def _own_words(text: str) -> tuple[str, str]:
    """Return an error's own `why` and `fix`, as far as it has them."""
    if text.startswith("anytrain: "):  # a note below an error of somebody else's
        text = text.removeprefix("anytrain: ").replace(".\n  why: ", ": ", 1)
    why, _, fix = text.partition("  fix: ")
    return why.removeprefix("why: ").strip(), fix.strip()


def _too_large(forecast: Forecast, compiled: Compiled | NotCompiled | None) -> Sequence[Finding]:
    """Return the finding that memory is too small; the TPU compiler's answer counts alone."""
    if compiled is not None and compiled.fits is not None:
        return compiled.findings()
    if forecast.fits is not False or forecast.limit is None:
        return []
    needed, usable = size(forecast.needed_bytes), size(forecast.limit.usable_bytes)
    counted = f" of {forecast.batch_size}" if forecast.batch_size else ""
    length = f", {forecast.length} long as the longest of the data" if forecast.length else ""
    return [
        Finding(
            "memory",
            "error",
            f"The step needs {needed} and may use {usable} of this device.",
            why=f"A batch{counted} was traced{length}; usable is {forecast.limit.because}.",
            fix="Take a smaller batch and accumulate, bf16, or activation checkpointing; "
            "auto_find_batch_size=True splits a batch that does not fit and keeps what a step "
            "learns from.",
            certain=False,
        )
    ]


def _largest(tracing: Tracing, target: Target, job: TracedJob, thorough: bool) -> tuple[Fit, ...]:
    """Return the largest batch as asked for, with bf16, and with activation checkpointing.

    Each takes some traces more: the last two are looked at where the batch does not fit as asked
    for, or where somebody wants to know.
    """
    if target.memory_bytes is None or not job.batch_size:
        return ()
    own = _own(job)
    wanted = [own]
    if job.precision == "no":
        wanted.append(Setting(job.batch_size, "bf16", own.is_checkpointed))
    if not own.is_checkpointed:
        wanted.append(Setting(job.batch_size, wanted[-1].precision, True))
    found = []
    for setting in wanted:
        fit = _fit(tracing, target, job, setting)
        if fit is not None:
            found.append(fit)
        if not thorough and fit is not None and fit.largest >= job.batch_size:
            break
    return tuple(found)


def _fit(tracing: Tracing, target: Target, job: TracedJob, setting: Setting) -> Fit | None:
    class Impossible(Exception):
        """The run does not train in that setting."""

    def trace_at(wanted: Setting) -> Trace:
        seen = tracing(target, wanted)
        if seen.failure or seen.job.batch_size != wanted.batch_size:
            raise Impossible
        if wanted.is_checkpointed and not seen.job.checkpointed_modules:
            raise Impossible  # it has no repeated blocks
        return seen

    try:
        return largest_batch(
            trace_at, target, setting, accumulation=job.accumulation, most=_most(job)
        )
    except Impossible:
        return None


def _most(job: TracedJob) -> int:
    if not job.num_samples:
        return MOST
    return min(max(job.num_samples // job.world_size, 1), MOST)


def _rates(target: Target) -> Rates | None:
    """Return how fast the target is: this machine's own device is measured."""
    if not target.is_local:
        return rates_of(target)
    from anytrain.core import environment
    from anytrain.machine.backends import probe

    backend = probe.choose(environment.read().wishes.device)
    return measured(backend, backend.device(0))


def _records(trace: Trace, target: Target) -> bool:
    """Whether nothing in the step keeps CUDA from recording it."""
    steps = ("forward", "backward", "clip", "optimizer")
    waits = any(
        op.host_read and op.phase in steps and not (op.place.is_ours or is_left_out(op, target))
        for op in trace.ops
    )
    return target.kind == "cuda" and not waits
