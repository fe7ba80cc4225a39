"""Run a user's script on torch_xla until its training step is taken as a graph.

This runs in a process of its own, in the environment that has torch_xla.
"""

from __future__ import annotations

import faulthandler
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from anytrain.engine.assemble import run as runs, session as sessions
from anytrain.engine.prepared.optimizer import place_state
from anytrain.insight.preflight import weights
from anytrain.insight.preflight.child import REQUEST, leave
from anytrain.insight.preflight.observer import TraceObserver
from anytrain.insight.preflight.recorder import Leave
from anytrain.insight.preflight.script import bounded, words
from anytrain.insight.preflight.targets import Target
from anytrain.insight.preflight.tpu.graphs import Taken
from anytrain.insight.preflight.tpu.lazy import Cuts, LazyTpu, Unread
from anytrain.insight.program import run_program
from anytrain.machine.backends import probe


def main(folder: str) -> None:
    """Take what the folder asks for, and leave it there."""
    faulthandler.enable()
    target, command = pickle.loads((Path(folder) / REQUEST).read_bytes())
    leave(folder, lambda: take(target, command))


def take(target: Target, command: Sequence[str]) -> Taken:
    """Return the graphs of a command's training step, for as many chips as the target has."""
    began = time.perf_counter()
    cuts, failure = Cuts(), ""
    backend = LazyTpu(target=target, cuts=cuts)
    backend.device(0)  # before any backward pass, even one on the CPU
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        recorder: Any = cuts
        own = TraceObserver(recorder, folder)
        stack.enter_context(sessions.observed_by(own))
        probe.stand_in(backend)
        stack.callback(probe.stand_in, None)
        stack.enter_context(cuts.listening())
        stack.enter_context(bounded(own))
        stack.enter_context(mock.patch.object(runs, "place_state", _state_to(backend)))
        stack.enter_context(weights.unread())
        stack.enter_context(Unread())
        try:
            run_program(command)
        except Leave:
            pass
        except BaseException as error:  # noqa: BLE001  whatever ends a script is what it shows
            traceback.print_exception(error)
            failure = words(error)
        if not cuts.graphs and not failure:
            failure = "the script ended without two training steps"
        return Taken(
            graphs=tuple(cuts.graphs),
            batch_size=own.job.batch_size,
            precision=own.job.precision,
            seconds=time.perf_counter() - began,
            failure=failure,
        )


def _state_to(backend: LazyTpu) -> Callable[..., None]:
    """Return what sends an optimizer's state to the device: it has no rows for each chip."""
    return lambda optimizer, place: place_state(optimizer, backend.send)
