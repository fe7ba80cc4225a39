"""The part of `Trainer` that answers a loss or a gradient that is not finite.

The step's update was left out and every later one held back, so the weights are still those that
the step began with: it can be replayed to name what went wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from anytrain.core.errors import NotFinite
from anytrain.core.notices import give_notice
from anytrain.doors.trainer.saving import Saving
from anytrain.engine import checkpoint
from anytrain.engine.assemble import run_state
from anytrain.engine.assemble.steps import keep_rng
from anytrain.engine.recording.meter import Reading
from anytrain.engine.step.diagnose import find
from anytrain.engine.step.step import Step, StepOutput

_MOST_REWINDS = 3
_MOST_SKIPPED = 200
"""Steps left out in a row, after which the next ones will not be better: no weight has moved."""


class NonFinite(Saving):
    """Stop, skip or rewind, as on_nonfinite says."""

    model_wrapped: nn.Module
    _train_micro: Callable[..., Any]
    _count_inputs: Callable[[tuple[Any, ...]], None]
    _engine_step: Step
    _kept: deque[tuple[int, int, int, Callable[[], None]]]
    _num_rewinds: int
    _num_skipped: int
    """Steps that were left out in a row, up to the last log point."""
    _at_work: Any
    """The batches of the step that runs, or has failed."""
    current_gradient_accumulation_steps: int
    """The batches of the present update; subclasses read it in compute_loss."""

    def _remembering(self, step: Callable[[Any], StepOutput]) -> Callable[[Any], StepOutput]:
        """Return the step, its inputs counted, with what its replay needs taken down first."""
        self._kept = deque(maxlen=2_000)  # each holds 5 kB: torch's generator
        self._num_rewinds = self._num_skipped = 0
        self._at_work = None
        replays = self.args.on_nonfinite != "skip"

        def remembered(batch: Any) -> StepOutput:
            self._count_inputs(batch.micro)
            self.current_gradient_accumulation_steps = len(batch.micro)
            if replays:
                told = (self._progress.step, batch.first, len(batch.micro), keep_rng(self._run))
                self._kept.append(told)
            self._at_work = batch
            output = step(batch)
            self._at_work = None
            return output

        return remembered

    def _answer_bad_steps(self, reading: Reading | None = None) -> None:
        """Stop or rewind if a step since the last log point was bad."""
        num_bad = self._meter.num_bad() if reading is None else reading.num_bad
        rule = str(self.args.on_nonfinite)
        if reading is not None:
            all_bad = num_bad == reading.num_steps
            self._num_skipped = self._num_skipped + num_bad if all_bad else 0
        if num_bad == 0:
            self._kept.clear()
            return
        if rule == "skip":
            self._refuse_idle_skipping(_MOST_SKIPPED)
            return
        first = self._meter.first_bad() if reading is None else reading.first_bad
        num_steps = self._meter.num_steps if reading is None else reading.num_steps
        step = self._progress.step - num_steps + first
        if rule == "rewind":
            self._rewind(step)
            return
        told = self._session.world.gather_object(self._replayed(step))
        cause = next((text for text in told if not text.startswith("Not ")), told[0])
        raise NotFinite(
            f"Training stopped: the gradient of step {step + 1} is not finite.",
            why=f"{cause} No weight was changed by it or after it.",
            fix="look at these samples, lower learning_rate, clip (max_grad_norm=1.0); or pass "
            'on_nonfinite="skip" to leave such steps out, "rewind" to go back to a checkpoint.',
        )

    def _refuse_idle_skipping(self, most: int) -> None:
        """Stop where so many steps were left out in a row: nothing is learnt any more."""
        if self._num_skipped < max(most, 1):
            return
        raise NotFinite(
            f"Training stopped: all of the last {self._num_skipped} steps were left out.",
            why='the loss or the gradient of each was not finite, and on_nonfinite="skip" leaves '
            "such steps out: no weight has changed.",
            fix='pass on_nonfinite="stop", which names the module and the samples; or lower '
            "learning_rate, clip (max_grad_norm=1.0), and look at the data.",
        )

    def _replayed(self, step: int) -> str:
        """Run the step again with the same samples and randomness; return what was found."""
        found = next((kept for kept in self._kept if kept[0] == step), None)
        loader = self._run.loaders[0]
        if found is None:
            return "It is too long ago to be replayed."
        _, first, num_micro, put_back = found
        samples = [loader.samples_of(number) for number in range(first, first + num_micro)]
        known = [ids for ids in samples if ids is not None]
        if len(known) < len(samples):
            return "Its samples are not known any more (a stream), so it cannot be replayed."
        batches = [loader.load_again(ids) for ids in known]
        put_back()
        inner = self._run.unwrap(self.model_wrapped, keep_forward=True, keep_compiled=False)

        def run(batch: Any) -> Any:
            return self._train_micro(inner, batch, None)

        return str(find(inner, run, batches, known))

    def _rewind(self, step: int) -> None:
        """Go back to the newest checkpoint's weights; data and schedule go on."""
        self._between.finish()
        store = checkpoint.Store(Path(self._get_output_dir(self._trial)))
        newest = store.newest_whole(world=self._session.world)
        self._num_rewinds += 1
        if newest.path is None or self._num_rewinds > _MOST_REWINDS:
            raise NotFinite(
                f"Training stopped: the gradient of step {step + 1} is not finite.",
                why="there is no checkpoint to go back to."
                if newest.path is None
                else f"it was taken back {_MOST_REWINDS} times already.",
                fix="save more often (save_steps), lower learning_rate, or clip the gradients.",
            )
        loaded = store.load(newest, world=self._session.world)
        run_state.rewind(self._run, loaded, self._load_hooks())
        self._meter.forget_bad()  # a later save must not answer this step once more
        if self._engine_step.judge is not None:
            self._engine_step.judge.release()
        self._kept.clear()
        give_notice(
            f"Step {step + 1} was not finite: went back to the weights of {newest.path.name}. "
            "The data and the schedule go on.",
            stacklevel=4,
        )
