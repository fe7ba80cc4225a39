"""Run a user's script on a claimed device, until it has shown everything.

The script runs from its first line as if the device were there. Loops over prepared loaders end
after the second update, evaluations after one batch, and what the script would save or report is
left out: nothing of the real run is touched, and no file of the user's is written or removed.
"""

from __future__ import annotations

import inspect
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch.utils.data import DataLoader

from anytrain.engine.assemble import session as sessions
from anytrain.engine.assemble.input_errors import explain_inputs
from anytrain.engine.data.grouped import quick_lengths
from anytrain.engine.data.packing import Packed
from anytrain.engine.data.seeded import load
from anytrain.engine.prepared.loader import PreparedLoader
from anytrain.engine.recording import trackers
from anytrain.insight.preflight import fallback, weights
from anytrain.insight.preflight.batches import Setting
from anytrain.insight.preflight.claimed import Device
from anytrain.insight.preflight.claimed_backend import device_of, stand_in
from anytrain.insight.preflight.claimed_ops import claimed
from anytrain.insight.preflight.findings import SourcePlace
from anytrain.insight.preflight.indices import Indices
from anytrain.insight.preflight.observer import TraceObserver
from anytrain.insight.preflight.overrides import checkpoint, planned, sized
from anytrain.insight.preflight.places import is_inside, users_place
from anytrain.insight.preflight.programs import held_back
from anytrain.insight.preflight.recorder import NUM_UPDATES, Leave, Recorder
from anytrain.insight.preflight.sandbox import Apart, apart
from anytrain.insight.preflight.targets import Target
from anytrain.insight.preflight.traced import ENDED, Trace
from anytrain.insight.preflight.workers import handover_trouble
from anytrain.insight.program import run_program
from anytrain.machine.backends import probe

MAX_BATCHES = 64
"""Batches without an update after which a loop is not a training."""
NEVER_TRAINED = (
    "the script ended without a training step\n"
    "why: Neither Trainer.train() nor an optimizer that was prepared has made an update.  "
    "fix: Name the script that trains, with the options that make it train."
)


def trace_script(target: Target, command: Sequence[str], setting: Setting | None = None) -> Trace:
    """Run a script, or a module after "-m", with its arguments; return what was seen."""
    trace = trace_here(target, lambda: run_program(command), setting)
    return replace(trace, job=replace(trace.job, mps_fallback=fallback.is_on(command)))


def trace_here(target: Target, work: Callable[[], Any], setting: Setting | None = None) -> Trace:
    """Do some work on the claimed device, in this process; a device can end it."""
    device = Device(device_of(target.kind))
    recorder = Recorder(device, target.kind)
    device.watcher = recorder
    if setting is not None and setting.is_checkpointed:
        recorder.meet = checkpoint
    failure, place, decided = "", None, False
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        own = TraceObserver(recorder, folder, setting)
        stack.enter_context(sessions.observed_by(own))
        probe.stand_in(stand_in(target, recorder.placing))
        stack.callback(probe.stand_in, None)
        stack.enter_context(claimed(device, target.num_devices, target.memory_bytes))
        stack.enter_context(recorder.listening())
        stack.enter_context(bounded(own))
        stack.enter_context(planned(setting))
        stack.enter_context(weights.unread())
        try:
            work()
        except Leave:
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
            failure, place = words(error), _place(error)
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
    indices = Indices(own)
    with ExitStack() as stack:
        stack.enter_context(indices.looked_at())
        files = stack.enter_context(apart(own.folder))
        stack.enter_context(held_back(lambda told: own.recorder.notes.setdefault(told)))
        for holder, name, changed in (
            (PreparedLoader, "walk_from", _short_walk(own, indices)),
            (PreparedLoader, "_batches", _longest_batches(own)),
            (DataLoader, "__init__", _own_process(own)),
            (trackers.Trackers, "start", lambda *args, **kwargs: None),
            (torch, "save", _unless_trained(own, files, torch.save)),
        ):
            stack.enter_context(mock.patch.object(holder, name, changed))
        try:
            import safetensors.torch as tensors
        except ImportError:
            pass
        else:
            stack.enter_context(
                mock.patch.object(
                    tensors, "save_file", _unless_trained(own, files, tensors.save_file)
                )
            )
        yield


def _short_walk(own: TraceObserver, indices: Indices) -> Callable[..., Iterator[Any]]:
    """Return a walk that hands out no more batches than are needed."""
    walk_from = PreparedLoader.walk_from
    recorder = own.recorder
    trained: set[int] = set()

    def walk(loader: PreparedLoader, skip: int | None = None) -> Iterator[Any]:
        if recorder.updates >= NUM_UPDATES and id(loader) in trained:
            own.leave()  # its second epoch: evaluation, if there is one, came before
        own.tell(**loader_facts(loader.given))
        before = recorder.updates
        for number, batch in enumerate(walk_from(loader, skip), 1):
            made = sized(batch, own.setting)
            indices.hand(loader, (skip or 0) + number - 1, made)
            yield made
            if recorder.updates > before:
                trained.add(id(loader))
            if recorder.updates >= NUM_UPDATES:
                recorder.end_steps()
                return
            if recorder.phase == "evaluate" or number >= MAX_BATCHES:
                return

    return walk


def loader_facts(loader: Any) -> dict[str, Any]:
    """Return what a loader says of the job."""
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    try:
        number = len(loader.dataset)
    except (TypeError, AttributeError):  # a stream
        number = 0
    facts = {"batch_size": int(size or 0), "num_samples": number}
    return {**facts, **vars(loader).get("_asked", {})}


def _longest_batches(own: TraceObserver) -> Callable[..., Iterator[Any]]:
    """Return batches of the longest samples in the place of those that come first.

    The longest batch takes the most memory, wherever in an epoch it comes.
    """
    batches_of = PreparedLoader._batches

    def batches(loader: PreparedLoader, base: DataLoader[Any]) -> Iterator[Any]:
        length, samples = longest_samples(loader)
        own.tell(length=length)
        found = None
        for batch in batches_of(loader, base):
            if samples and found is None:
                tickets = loader.walk.tickets
                drawn = samples if tickets is None else tickets.draw(samples)
                found = load(base.dataset, base.collate_fn, drawn)
            yield batch if found is None else found

    return batches


def longest_samples(loader: Any) -> tuple[int, list[int]]:
    """Return the greatest length and a batch of such samples; 0 and none where nobody knows.

    The last one is the shortest of all: batches with padding have a mask, which takes memory too.
    """
    size = getattr(loader.batch_sampler, "batch_size", None)
    if not size or isinstance(loader.collate_fn, Packed):  # a row of all tokens has no longest
        return 0, []
    try:
        lengths = quick_lengths(loader.dataset) or []
    except (TypeError, AttributeError):  # a stream
        lengths = []
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    if not order:
        return 0, []
    most = order[:size]
    return lengths[order[0]], [*most[:-1], order[-1]]


def _own_process(own: TraceObserver) -> Callable[..., None]:
    """Return a loader's constructor that starts no workers and pins nothing."""
    construct = DataLoader.__init__
    signature = inspect.signature(construct)

    def init(self: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        kwargs = dict(signature.bind(self, *args, **kwargs).arguments)  # some by position
        dataset = kwargs.pop("dataset")
        del kwargs["self"]
        number = int(kwargs.get("num_workers") or 0)
        collate = kwargs.get("collate_fn")
        trouble = handover_trouble(dataset, collate) if number else ""
        for name in ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers"):
            kwargs.pop(name, None)
        kwargs.pop("multiprocessing_context", None)
        construct(self, dataset, **kwargs)
        self.__dict__["_asked"] = {
            "loader_workers": number,
            "worker_trouble": trouble,
            "loader_place": users_place(),
        }

    return init


def _unless_trained(
    own: TraceObserver, files: Apart, save: Callable[..., Any]
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


def words(error: BaseException) -> str:
    """Return an error as Python would end with it; what it says comes first, its line after."""
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
