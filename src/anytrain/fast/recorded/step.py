"""A step that is replayed from a recording of its device work, where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from anytrain.engine.step.step import Batch, Step, StepOutput, TorchOps
from anytrain.fast.recorded.recordings import Recordings
from anytrain.fast.shortcuts.shortcuts import Shortcuts, Shortening

SumUp = Callable[[torch.Tensor, "torch.Tensor | bool"], None]


@dataclass(slots=True)
class RecordedOps:
    """The parts of a step on the device alone, in fewer kernels where there are shortcuts.

    What the host does besides comes at each replay: to walk schedules ahead, to count updates.
    """

    plain: TorchOps
    shortcuts: Shortcuts | None

    def passes(self) -> AbstractContextManager[None]:
        """Return what the forward and backward passes run in."""
        return nullcontext() if self.shortcuts is None else self.shortcuts.forward()

    def clip(self) -> torch.Tensor | None:
        """Bound the gradient's norm and return it."""
        if self.shortcuts is None:
            return self.plain.clip()
        norm = self.shortcuts.measure()
        self.plain.optimizers[0].guard.note_norm(norm)
        return norm if self.plain.measures else None

    def update(self) -> None:
        """Update the weights."""
        if self.shortcuts is not None:
            self.shortcuts.update(self.plain.optimizers[0].guard.decide())
            self.shortcuts.clear()
            return
        for optimizer in self.plain.optimizers:
            with _capturable(optimizer.optimizer):
                optimizer.guard.update(optimizer.optimizer, None)

    def schedule(self) -> None:
        """Move the learning rates on."""
        for scheduler in self.plain.schedulers:
            scheduler.follow()

    def clear(self) -> None:
        """Let go of the gradients."""
        self.plain.clear()


class RecordedStep:
    """Both phases of a step as one recording, for each shape of batch; else op by op."""

    def __init__(
        self,
        step: Step,
        recordings: Recordings,
        shortening: Shortening,
        sum_up: SumUp | None = None,
    ) -> None:
        self._step, self.recordings, self.shortening = step, recordings, shortening
        self._sum_up = sum_up
        """Adds a step to the meter's sums, as part of the recording."""
        self._batch: Any = None

    def __call__(self, batch: Batch) -> StepOutput:
        """Train on one batch."""
        self._batch = batch
        found = self.recordings.find(self, (batch.micro, batch.num_items), batch.kind)
        if found is None:
            with self.recordings.observed(self):
                return self._step.run(batch)
        recording, tensors = found
        ops = self._step.ops
        for scheduler in ops.schedulers if batch.ends else ():
            scheduler.walk()
        output: StepOutput = recording(tensors)
        for optimizer in ops.optimizers if batch.ends else ():
            optimizer.count_update()
        return output if output.is_summed else _kept(output)

    def compute(self, tree: Any) -> StepOutput:
        """Do the device's part of a step, to be recorded."""
        micro, num_items = tree
        batch: Batch = self._batch._replace(micro=micro, num_items=num_items)
        shortcuts = self.shortening.taken if batch.is_step else None
        output = self._step.run(batch, RecordedOps(self._step.ops, shortcuts))
        if self._sum_up is None:
            return output
        self._sum_up(output.loss, output.bad)
        return replace(output, is_summed=True)

    @property
    def is_whole(self) -> bool:
        """Whether one micro-batch is the step."""
        return bool(self._batch.is_step) and len(self._batch.micro) == 1

    def release(self) -> None:
        """Let go of the recordings and their memory."""
        self.recordings.forget()
        self.shortening.end()


def _kept(output: StepOutput) -> StepOutput:
    """Return copies: the next replay writes over what this one returned, and a loop may keep it."""

    def copy(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) else value

    made = (output.loss, output.grad_norm, output.rate, output.bad)
    return StepOutput(*map(copy, made))


@contextmanager
def _capturable(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let the block record an update: torch asks for a word that fused ones don't need."""
    groups = [g for g in optimizer.param_groups if g.get("capturable") is False]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group in groups:
            group["capturable"] = False
