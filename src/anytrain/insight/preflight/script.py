"""Run a user's script on a fake device, until two updates and one evaluation were recorded.

The script runs from its first line as if the device were there. Loops over prepared loaders end
after the second update, evaluations after one batch, and what the script would save or report is
left out: nothing of the real run is touched, and no file of the user's is written or removed.
"""

from __future__ import annotations

import ast
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader

from anytrain.core import environment
from anytrain.core.plan import Wish
from anytrain.engine.assemble import session as sessions
from anytrain.engine.assemble.input_errors import explain_inputs
from anytrain.engine.prepared.loader import PreparedLoader
from anytrain.engine.recording import trackers
from anytrain.engine.step.activations import Activations
from anytrain.insight.preflight.fake_device.backend import device_of, fake_backend
from anytrain.insight.preflight.fake_device.device import FakeDevice
from anytrain.insight.preflight.fake_device.function_mode import claimed
from anytrain.insight.preflight.fake_device.weights import weights_unread
from anytrain.insight.preflight.loaders import (
    RangeChecks,
    longest_batches,
    own_process,
    short_walk,
)
from anytrain.insight.preflight.observer import TraceObserver
from anytrain.insight.preflight.recorder import LeaveScript, OpRecorder
from anytrain.insight.preflight.sandbox import Sandbox, sandboxed, without_other_programs
from anytrain.insight.preflight.source_lines import is_inside
from anytrain.insight.preflight.targets import Target
from anytrain.insight.preflight.trace import ENDED, Setting, SourcePlace, Trace
from anytrain.insight.program import run_program
from anytrain.machine.backends import probe

NEVER_TRAINED = (
    "the script ended without a training step\n"
    "why: Neither Trainer.train() nor an optimizer that was prepared has made an update.  "
    "fix: Name the script that trains, with the options that make it train."
)
# Libraries that scripts import early, and that load no torch by being imported.
_WITHOUT_TORCH = frozenset({"numpy", "pandas", "scipy", "sklearn", "yaml", "tqdm", "rich", "typer"})


def trace_script(target: Target, command: Sequence[str], setting: Setting | None = None) -> Trace:
    """Run a script, or a module after "-m", with its arguments; return what was seen."""
    trace = trace_here(target, lambda: run_program(command), setting)
    return replace(trace, job=replace(trace.job, mps_fallback=mps_fallback_is_on(command)))


def trace_here(target: Target, work: Callable[[], Any], setting: Setting | None = None) -> Trace:
    """Do some work on the fake device, in this process, which may die of it."""
    device = FakeDevice(device_of(target.kind))
    recorder = OpRecorder(device, target.kind)
    device.recorder = recorder
    if setting is not None and setting.is_checkpointed:
        recorder.meet = checkpoint
    failure, place, decided = "", None, False
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        own = TraceObserver(recorder, folder, setting)
        stack.enter_context(sessions.observed_by(own))
        probe.stand_in(fake_backend(target, recorder.placing))
        stack.callback(probe.stand_in, None)
        stack.enter_context(claimed(device, target.num_devices, target.memory_bytes))
        stack.enter_context(recorder.listening())
        stack.enter_context(bounded(own))
        stack.enter_context(planned(setting))
        stack.enter_context(weights_unread())
        try:
            work()
        except LeaveScript:
            pass
        except SystemExit as end:
            if end.code not in (None, 0):
                failure = f"{ENDED} {end.code!r}"
                place = _place(end) if isinstance(end.code, str) else None
                decided = recorder.has_just_read and _is_users(end)
        except BaseException as error:  # noqa: BLE001  whatever ends a script is what it shows
            with suppress(Exception):  # the error is what must be shown
                explain_inputs(error, error.__traceback__, has_values=False)
            traceback.print_exception(error)
            failure, place = error_text(error), _place(error)
            decided = recorder.has_just_read and _is_users(error)
        recorder.finish()
        if not failure and not recorder.updates:
            failure = NEVER_TRAINED
        trace = recorder.trace(own.job, failure, place)
        return replace(trace, parts={**trace.parts, "decided": decided})


# -- where a run is cut short -------------------------------------------------------------------


@contextmanager
def bounded(own: TraceObserver) -> Iterator[None]:
    """End the block's loops early, load its data in this process, save and report nothing."""
    indices = RangeChecks(own)
    with ExitStack() as stack:
        stack.enter_context(indices.looked_at())
        files = stack.enter_context(sandboxed(own.folder))
        stack.enter_context(
            without_other_programs(lambda told: own.recorder.notes.setdefault(told))
        )
        changes = [
            (PreparedLoader, "walk_from", short_walk(own, indices)),
            (PreparedLoader, "_batches", longest_batches(own)),
            (DataLoader, "__init__", own_process(own)),
            (trackers.Trackers, "start", lambda *args, **kwargs: None),
            (torch, "save", _unless_trained(own, files, torch.save)),
        ]
        with suppress(ImportError):
            import safetensors.torch as tensors

            changes.append((tensors, "save_file", _unless_trained(own, files, tensors.save_file)))
        for holder, name, changed in changes:
            stack.enter_context(mock.patch.object(holder, name, changed))
        yield


def _unless_trained(
    own: TraceObserver, files: Sandbox, save: Callable[..., Any]
) -> Callable[..., Any]:
    """Return what saves before the training alone, and no file of the user's."""

    def placed(given: Any) -> Any:
        is_path = isinstance(given, (str, os.PathLike))
        return files.written(given, keeps=False) if is_path else given

    def saved(*args: Any, **kwargs: Any) -> Any:
        if own.skips_save():
            return None
        return save(*map(placed, args), **{name: placed(kwargs[name]) for name in kwargs})

    return saved


# -- how it failed ------------------------------------------------------------------------------


def error_text(error: BaseException) -> str:
    """Return an error as Python prints it; of a syntax error the message first, then its line."""
    lines = traceback.format_exception_only(type(error), error)
    if isinstance(error, SyntaxError):
        lines = [lines[-1], *lines[:-1]]
    return "".join(lines).strip()


def _is_users(error: BaseException) -> bool:
    """Whether a line of the user's own raised it, and nothing that the line calls."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return step is not None and not is_inside(step.tb_frame.f_code.co_filename)


def _place(error: BaseException) -> SourcePlace | None:
    """Return the innermost line of the error that is neither torch's nor ours."""
    found: SourcePlace | None = None
    step: TracebackType | None = error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if not is_inside(code.co_filename):
            lines = traceback.extract_tb(step, limit=1)
            text = (lines[0].line or "") if lines else ""
            found = SourcePlace("", code.co_filename, step.tb_lineno, code.co_name, text)
        step = step.tb_next
    return found


# -- another setting than its own -----------------------------------------------------------------


@contextmanager
def planned(setting: Setting | None) -> Iterator[None]:
    """Let the block's sessions compute in the setting's precision."""
    if setting is None:
        yield
        return
    resolve: Any = vars(sessions)["resolve"]
    wish = Wish(setting.precision, "preflight")

    def resolved(wishes: Any, *facts: Any) -> Any:
        return resolve(replace(wishes, precision=wish), *facts)

    with mock.patch.object(sessions, "resolve", resolved):
        yield


def checkpoint(model: nn.Module) -> bool:
    """Checkpoint every repeated block of a model; False where it has none."""
    activations = Activations(model)
    while activations.fewer():
        pass
    return activations.num_blocks > 0


# -- the fallback of mps to the CPU ---------------------------------------------------------------


def mps_fallback_is_on(command: Sequence[str]) -> bool:
    """Return whether a script, or a module after "-m", runs with the fallback of mps to the CPU.

    libtorch reads PYTORCH_ENABLE_MPS_FALLBACK when it is loaded. `import anytrain` sets it, so it
    depends on which of the two a script imports first.
    """
    told = environment.variable(environment.MPS_FALLBACK)
    if told in ("", "0"):
        return False
    # On a Mac this very process has set it, by importing anytrain; it says nothing of the script.
    if told is not None and sys.platform != "darwin":
        return True
    if tuple(command[:1]) == ("-m",):
        return command[1].partition(".")[0] == "anytrain"
    try:
        tree = ast.parse(Path(command[0]).read_bytes())
    except (OSError, SyntaxError, IndexError):
        return False
    return next(_loads_torch_after_us(tree), False)


def mps_fallback_is_on_here() -> bool:
    """Return whether this process would, were it started on a Mac."""
    told = environment.variable(environment.MPS_FALLBACK)
    return not environment.torch_came_first() if told is None else told not in ("", "0")


def _loads_torch_after_us(tree: ast.Module) -> Iterator[bool]:
    """Yield at each import that decides whether anytrain comes first."""
    for statement in tree.body:
        for root in _imported_roots(statement):
            if root == "anytrain":
                yield True
            elif root not in sys.stdlib_module_names and root not in _WITHOUT_TORCH:
                yield False


def _imported_roots(statement: ast.stmt) -> list[str]:
    # What is imported inside of functions, or in a `try`, runs later or may not.
    if isinstance(statement, ast.Import):
        return [name.name.partition(".")[0] for name in statement.names]
    if isinstance(statement, ast.ImportFrom):
        return [(statement.module or "").partition(".")[0]]
    return []
