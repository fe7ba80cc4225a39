"""Say which sample and column a step of a Trainer failed on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from anytrain.core.errors import AnytrainError
from anytrain.engine.assemble.input_errors import (
    Fed,
    explain,
    is_lost,
    may_be_outside,
    origin,
    out_of_range,
    search,
)
from anytrain.engine.data.prefetch import ReadBatch
from anytrain.engine.loop import Progress
from anytrain.engine.step import ranges
from anytrain.engine.step.activations import is_compiled
from anytrain.engine.step.step import StepOutput
from anytrain.engine.tree import map_tensors

if TYPE_CHECKING:
    from anytrain.doors.trainer.trainer import Trainer

_CHECKED = ("cuda", "mps")
"""Devices that tell of an index out of range too late, or not at all."""


class InputErrors:
    """What a Trainer's steps are fed, for the time when one of them fails."""

    def __init__(self, trainer: Trainer, *, loader: Any = None, model: nn.Module) -> None:
        self._trainer, self._loader = trainer, loader
        self._model = trainer._run.unwrap(model, keep_forward=True, keep_compiled=False)
        self._failed: list[tuple[Any, int]] = []
        """The batches of the step that failed, with their numbers in the epoch."""
        is_apart = trainer._session.device.type != "cpu"
        self._tables = ranges.tables(self._model) if is_apart else None

    def checked_first(self, step: Callable[[Any], StepOutput]) -> Callable[[Any], StepOutput]:
        """Return the step, whose first run looks at each index before the device uses it."""
        device = self._trainer._session.device
        is_compiling = any(map(is_compiled, self._model.modules()))
        if self._trainer._session.observer.is_watching:
            return self._looked_at(step)
        if device.type not in _CHECKED or is_compiling:
            return step
        is_first = [True]

        def checked(batch: Any) -> StepOutput:
            if not is_first:
                return step(batch)
            is_first.clear()
            with ranges.Checking(self._model).watching():
                return step(batch)

        return checked

    def _looked_at(self, step: Callable[[Any], StepOutput]) -> Callable[[Any], StepOutput]:
        """Return the step of a preflight, where no batch has values: its samples are read again."""

        def looked_at(batch: Any) -> StepOutput:
            with _disable_current_modes():  # no part of the step that is traced
                found = self._outside()
            if found is not None:
                raise out_of_range(*found)
            return step(batch)

        return looked_at

    def fed(self, predict: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return what predicts a batch, and leaves it here when that fails."""
        count = [0]

        def watched(batch: Any) -> Any:
            count[0] += 1
            try:
                return predict(batch)
            except Exception:
                self._failed = [(batch, count[0] - 1)]
                raise

        return watched

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Say of an error in the block which input it came of."""
        try:
            yield
        except Exception as error:
            told = self._told(error)
            if told is None:
                raise
            raise told from error

    def _told(self, error: Exception) -> AnytrainError | None:
        if is_lost(error) and self._trainer._session.device.type != "cpu":
            return self._of_lost()
        at_work = None if self._is_evaluation else self._trainer._parts.steps.at_work
        if at_work is not None:
            self._failed = [(micro, at_work.first + n) for n, micro in enumerate(at_work.micro)]
        feds = [
            self._batch(each, number, self._samples_of(number)) for each, number in self._failed
        ]
        if isinstance(error, ranges.OutsideTable):
            fed = next((each for each in feds if origin(each, error.outside)), feds[0])
            return out_of_range(fed, error.outside)
        found = search(map(_here, feds), self._found) if may_be_outside(error) else None
        if found is not None:
            return out_of_range(*found)
        if not feds:
            return None
        dropped = self._trainer._parts.loaders.columns_left_out(is_training=not self._is_evaluation)
        return explain(error, feds[0], self._model, dropped)

    def _found(self, batch: Any) -> ranges.BadIndex | None:
        known = ranges.tables(self._model) if self._tables is None else self._tables
        return ranges.find(self._model, batch, self._trainer.compute_loss, known)

    def _of_lost(self) -> AnytrainError | None:
        """Look through the batches since the device was last heard of; nothing may touch it."""
        found = self._outside()
        return None if found is None else out_of_range(*found, is_lost=True)

    def _outside(self) -> tuple[Fed, ranges.BadIndex] | None:
        """Read the newest batches again, on the host, and return a value outside its table."""
        steps = self._of_evaluation() if self._is_evaluation else self._steps_since_last_log()
        fed = (Fed(read.on_host(), read.samples, step, read.number) for step, read in steps)
        return search(fed, self._found)

    def _of_evaluation(self) -> list[tuple[int | None, ReadBatch]]:
        """Return the last batches of this evaluation, which may have read all of its own."""
        read = self._loader.read_before()
        return [(None, each) for each in read if each.epoch == read[-1].epoch]

    def _steps_since_last_log(self) -> list[tuple[int | None, ReadBatch]]:
        """Return the batches that the device was given since it was last heard of, and when."""
        trainer, progress = self._trainer, self._trainer._progress
        found: list[tuple[int | None, ReadBatch]] = []
        epoch, first = progress.epoch, progress.step + 1 - _num_steps(progress.batch, progress)
        read = [each for loader in trainer._run.loaders[:1] for each in loader.read_before()]
        for each in reversed(read):
            if each.epoch != epoch:
                epoch, first = each.epoch, first - _num_steps(each.number + 1, progress)
            step = first + each.number // progress.num_micro
            if step > trainer._globalstep_last_logged:
                found.append((step, each))
        return found[::-1]

    @property
    def _is_evaluation(self) -> bool:
        return self._loader is not None

    def _batch(self, batch: Any, number: int, samples: Any) -> Fed:
        progress = None if self._is_evaluation else self._trainer._progress
        if progress is None:
            return Fed(batch, samples, None, number)
        steps = (number - progress.batch) // progress.num_micro
        return Fed(batch, samples, progress.step + 1 + steps, number)

    def _samples_of(self, number: int) -> Any:
        loader = self._loader if self._is_evaluation else self._trainer._run.loaders[0]
        known = getattr(loader, "samples_of", None)
        return None if known is None else known(number)


def _num_steps(num_batches: int, progress: Progress) -> int:
    """Return how many steps so many batches of an epoch make; the last may be a short one."""
    return -(-num_batches // progress.num_micro)


def _here(fed: Fed) -> Fed:
    return replace(fed, batch=map_tensors(torch.Tensor.cpu, fed.batch))
