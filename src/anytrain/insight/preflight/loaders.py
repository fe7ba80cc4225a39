"""Feed a traced run: loops end after the second update, and batches are the longest.

Data are loaded in the traced process itself. No tensor on a fake device has values, so nothing
there is out of range: in a loop of the user's own, what a module or a loss is called with is found
again on the host, where the batch was read, and looked up there. A Trainer looks by itself.
"""

from __future__ import annotations

import inspect
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader

from anytrain.engine.assemble.input_errors import Fed, out_of_range
from anytrain.engine.data.grouped import quick_lengths
from anytrain.engine.data.packing import Packed
from anytrain.engine.data.prefetch import ReadBatch
from anytrain.engine.data.seeded import load
from anytrain.engine.prepared.loader import PreparedLoader
from anytrain.engine.step import ranges
from anytrain.engine.tree import leaves, map_tensors, num_rows
from anytrain.insight.preflight.observer import TraceObserver
from anytrain.insight.preflight.recorder import NUM_UPDATES
from anytrain.insight.preflight.source_lines import users_place
from anytrain.insight.preflight.trace import Setting

ENOUGH = 2**26
"""Bytes after which a pickle is believed to go through: a data set may hold all of its rows."""
MAX_BATCHES = 64
"""Batches without an update after which a loop is not a training."""
_MOST_LOOKS = 2
"""How often the call of each kind of module is looked at: once for each update that is traced."""


def short_walk(own: TraceObserver, indices: RangeChecks) -> Callable[..., Iterator[Any]]:
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
    """Return a loader's facts: batch size, number of samples, workers."""
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    try:
        number = len(loader.dataset)
    except (TypeError, AttributeError):  # a stream
        number = 0
    facts = {"batch_size": int(size or 0), "num_samples": number}
    return {**facts, **vars(loader).get("_asked", {})}


def longest_batches(own: TraceObserver) -> Callable[..., Iterator[Any]]:
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
                seeded = loader.walk.seeded
                drawn = samples if seeded is None else seeded.draw(samples)
                found = load(base.dataset, base.collate_fn, drawn)
            yield batch if found is None else found

    return batches


def longest_samples(loader: Any) -> tuple[int, list[int]]:
    """Return the greatest length and a batch of such samples; 0 and none if not known.

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


def own_process(own: TraceObserver) -> Callable[..., None]:
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


def sized(batch: Any, setting: Setting | None) -> Any:
    """Return a batch of the setting's size; what is in it does not matter."""
    rows = None if setting is None else num_rows(batch)
    if setting is None or rows is None or rows == setting.batch_size:
        return batch
    wanted = setting.batch_size

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 or tensor.size(0) != rows:
            return tensor
        if wanted <= rows:
            return tensor[:wanted].clone()
        return tensor.new_zeros((wanted, *tensor.shape[1:]))

    return map_tensors(resize, batch)


# -- what workers would be handed -----------------------------------------------------------------


class _Enough(Exception):
    """So much went through that the rest will."""


class _Nowhere:
    def __init__(self) -> None:
        self._written = 0

    def write(self, part: bytes) -> int:
        self._written += len(part)
        if self._written > ENOUGH:
            raise _Enough
        return len(part)


def handover_trouble(*parts: Any) -> str:
    """Return why some part of a loader cannot be pickled; empty where all can."""
    for part in parts:
        try:
            pickle.Pickler(_Nowhere(), protocol=5).dump(part)
        except _Enough:
            continue
        except Exception as error:  # noqa: BLE001  a user's object may raise anything
            words = str(error).strip().splitlines()
            return f"{type(part).__name__}: {words[0] if words else type(error).__name__}"
    return ""


# -- values outside of tables ---------------------------------------------------------------------


class RangeChecks:
    """Check ids and labels of the user's batches against the tables of modules and losses."""

    def __init__(self, own: TraceObserver) -> None:
        self._own = own
        self._handed: tuple[PreparedLoader, int, list[Any]] | None = None
        self._looks: Counter[type[nn.Module]] = Counter()
        self._is_inside = False

    def hand(self, loader: PreparedLoader, number: int, batch: Any) -> None:
        self._handed = loader, number, list(leaves(batch))  # the loop may take the batch apart

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """Look at what modules and losses are called with in the block."""
        call, loss = nn.Module.__call__, torch._C._nn.cross_entropy_loss

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return call(module, *args, **kwargs)
            self._look(module, args, kwargs)
            self._is_inside = True
            try:
                return call(module, *args, **kwargs)
            finally:
                self._is_inside = False

        def lost(scores: Any, target: Any, weight: Any, reduction: Any, *rest: Any) -> Any:
            if not self._is_inside:  # torch's function gives all of them by their places
                self._look(nn.CrossEntropyLoss(ignore_index=rest[0]), (scores, target), {})
            return loss(scores, target, weight, reduction, *rest)

        with (
            mock.patch.object(nn.Module, "__call__", called),
            mock.patch.object(torch._C._nn, "cross_entropy_loss", lost),
        ):
            yield

    def _look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._handed is None or self._own.has_begun or self._own.setting is not None:
            return
        self._looks[type(module)] += 1
        if self._looks[type(module)] > _MOST_LOOKS:
            return
        loader, number, handed = self._handed
        with _disable_current_modes():  # no part of the step that is traced
            read = _read(loader, number)
            if read is None:
                return
            host = read.on_host()
            given = _on_host(handed, host, (args, kwargs))
            if given is None:
                return
            try:
                tables = ranges.tables(module)
            except NotImplementedError:  # a buffer without data, as a batch norm's count
                return
            outside = ranges.find(module, given, _run, tables)
        if outside is not None:
            fed = Fed(host, read.samples, loader.walk.cursor.updates + 1, read.number)
            raise out_of_range(fed, outside)


def _run(module: nn.Module, given: Any) -> Any:
    args, kwargs = given
    return module(*args, **kwargs)


def _read(loader: PreparedLoader, number: int) -> ReadBatch | None:
    """Return what was read for a batch of this epoch, if it is kept: others are read ahead."""
    known = reversed(loader.read_before())
    return next((each for each in known if each.number == number), None)


def _on_host(handed: list[Any], host: Any, given: Any) -> Any:
    """Return what is given with the host's values of a batch; None where some are unknown.

    `handed` are the tensors of the batch as it was handed out.
    """
    found = {
        id(claimed): own
        for claimed, own in zip(handed, leaves(host), strict=False)
        if isinstance(claimed, torch.Tensor) and getattr(own, "shape", None) == claimed.shape
    }
    has_unknown = False

    def taken(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal has_unknown
        has_unknown |= id(tensor) not in found and not tensor.is_floating_point()
        own: torch.Tensor = found.get(id(tensor), tensor)
        return own

    taken_all = map_tensors(taken, given)
    return None if has_unknown or not found else taken_all
