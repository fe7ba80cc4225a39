"""What a Trainer adds to the engine's step.

The loss, with what may be overridden about it; what is counted of each step; and the answer to a
loss or a gradient that is not finite. The update of such a step was left out and every later one
held back, so the weights are still those that the step began with: it can be replayed to name what
went wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from anytrain.core.errors import NotFinite
from anytrain.core.notices import give_notice
from anytrain.doors.trainer.override_points import OverridePoints
from anytrain.doors.trainer.overrides import call
from anytrain.engine import checkpoint, objective
from anytrain.engine.assemble import run_state
from anytrain.engine.assemble.loaders import Recount
from anytrain.engine.data.columns import base_model
from anytrain.engine.prepared.model import meets_other_ranks
from anytrain.engine.recording.meter import Padding, Reading
from anytrain.engine.step.diagnose import find
from anytrain.engine.step.step import Micro, StepOutput, keep_rng

if TYPE_CHECKING:
    from anytrain.doors.trainer.trainer import Trainer

_MAKING = ("training_step", "_prepare_inputs", "_prepare_input")
"""What may be overridden to train on another batch than the loader's."""
_ON_BATCHES = (*_MAKING, "compute_loss", "prediction_step")
_MOST_REWINDS = 3
_MOST_SKIPPED = 200
"""Steps left out in a row, after which the next ones will not be better: no weight has moved."""


class Steps:
    """What a Trainer adds to the engine's step: the user's loss, counts, and bad steps answered."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.items_now: torch.Tensor | int | None = None
        """The step's items, while a training_step runs that takes none."""
        self.counted: Recount | None = None
        """What counts a step's items as they come, where the user's code may make batches."""
        self.at_work: Any = None
        """The batches of the step that runs, or has failed."""
        self.flos_of: dict[Any, float] = {}
        """The operations of a batch by its shape."""
        self.padding = Padding(is_on=False)
        self._tokens: torch.Tensor | int | None = None
        """The tokens since the last log point."""
        self._kept: deque[tuple[int, int, int, Callable[[], None]]] = deque()
        """What the replay of each step since the last log point needs."""
        self._num_rewinds = 0
        self._num_skipped = 0
        """Steps that were left out in a row, up to the last log point."""

    # -- a step, and what is taken down of it ---------------------------------------------------

    def recorded(self, step: Callable[[Any], StepOutput]) -> Callable[[Any], StepOutput]:
        """Return the step, its inputs counted, with what its replay needs taken down first."""
        trainer, self._kept = self._trainer, deque(maxlen=2_000)  # 5 kB each: torch's generator
        self._num_rewinds = self._num_skipped = 0
        self.at_work = None
        session = trainer._session
        self.padding = Padding(is_on=session.end_step is None)
        replays = trainer.args.on_nonfinite != "skip"
        name = getattr(trainer.model, "main_input_name", "input_ids")

        def recorded_step(batch: Any) -> StepOutput:
            for micro in batch.micro:
                found = micro.get(name) if isinstance(micro, Mapping) else None
                main = found if isinstance(found, torch.Tensor) else None
                shape = None if main is None else main.shape
                if shape not in self.flos_of:
                    self.flos_of[shape] = trainer.floating_point_ops(micro)
                trainer.current_flos += self.flos_of[shape]
                if main is not None and self.padding.is_due:
                    self.padding.look(main, micro.get("attention_mask"))
                if main is not None and trainer.args.include_num_input_tokens_seen != "no":
                    self._count_tokens(micro, main)
            trainer.current_gradient_accumulation_steps = len(batch.micro)
            if replays:
                put_back = keep_rng(session.backend, session.device)
                told = (trainer._progress.step, batch.first, len(batch.micro), put_back)
                self._kept.append(told)
            self.at_work = batch
            output = step(batch)
            self.at_work = None
            return output

        return recorded_step

    def _count_tokens(self, batch: Any, main: torch.Tensor) -> None:
        asked = self._trainer.args.include_num_input_tokens_seen
        mask = batch.get("attention_mask")
        padding = getattr(self._trainer.processing_class, "pad_token_id", None)
        if asked == "non_padding" and isinstance(mask, torch.Tensor):
            seen: torch.Tensor | int = mask.sum()
        elif asked == "non_padding" and padding is not None:
            seen = (main != padding).sum()
        else:
            seen = main.numel()  # on the host: to make a tensor of it would wait for the device
        self._tokens = seen if self._tokens is None else self._tokens + seen

    def read_tokens(self) -> None:
        """Add the tokens since the last log point to the state; waits for the device."""
        trainer = self._trainer
        self.padding.read()
        if self._tokens is not None:
            own = torch.as_tensor(self._tokens, device=trainer._session.device)
            total = trainer._session.world.reduce(own, "sum")
            trainer.state.num_input_tokens_seen += int(total.item())
            self._tokens = None

    # -- the loss -----------------------------------------------------------------------------

    def micro(self) -> Micro:
        """Return what trains on a micro-batch: training_step, in the form it has."""
        knows = objective.takes(self._trainer.training_step, "num_items_in_batch")
        return self._trainer.training_step if knows else self.train_micro

    def train_micro(
        self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | int | None
    ) -> torch.Tensor:
        """Run an older training_step: it takes no items, and finds the step's by itself."""
        self.items_now = num_items_in_batch
        try:
            step = self._trainer.training_step
            loss: torch.Tensor = call(step, model, inputs, num_items_in_batch)
            return loss
        finally:
            self.items_now = None

    def labels_of(self, inputs: Any) -> Any:
        """Return a batch's labels: those of label_names, or the last of a tuple; else None."""
        if isinstance(inputs, Mapping):
            found = tuple(inputs.get(name) for name in self._trainer.label_names or ["labels"])
            if any(labels is None for labels in found):
                return None
            return found[0] if len(found) == 1 else found
        return inputs[-1] if _is_row(inputs) else None

    def labels_apart(self, inputs: Any) -> tuple[Any, Any]:
        """Return a batch without its labels, and these; None where it is unclear which they are."""
        if _is_row(inputs):
            return inputs[:-1], inputs[-1]
        if not isinstance(inputs, Mapping):
            return inputs, None
        names = self._trainer.label_names
        known = ["labels"] if "labels" in inputs else [n for n in names if n in inputs]
        if len(known) != 1:
            return inputs, None
        left = dict(inputs)
        return left, left.pop(known[0])

    def obstacle(self) -> str | None:
        """Name what was asked for that a recorded step cannot do; None where nothing was."""
        own = type(self._trainer).training_step
        if own is not OverridePoints.training_step:
            return f"your training_step ({_written_at(own)}) is called at every step"
        if self._trainer.args.torch_empty_cache_steps is not None:
            return "torch_empty_cache_steps asks for something between two ops"
        if self.counted is not None:
            return "your _prepare_inputs may return another batch: it is counted at every step"
        return None

    def own_functions(self) -> tuple[Callable[..., Any], ...]:
        """Return what users may have written of a step: it must do nothing but compute."""
        trainer = self._trainer
        mine: list[Callable[..., Any]] = [trainer.compute_loss, trainer._prepare_inputs]
        mine += [trainer._prepare_input] if trainer._is_own("_prepare_input") else []
        mine.append(trainer.compute_loss_context_manager)
        mine += [] if trainer.compute_loss_func is None else [trainer.compute_loss_func]
        return tuple(mine)

    def has_own_loss(self) -> bool:
        """Whether the loss is another one than what the model returns."""
        own = type(self._trainer).compute_loss is not OverridePoints.compute_loss
        return own or self._trainer.compute_loss_func is not None or self._trainer._smoothing > 0

    def makes_batches(self) -> bool:
        """Whether code of the user's may train on another batch than the loader gave."""
        return any(map(self._trainer._is_own, _MAKING))

    def looks_for_unused(self) -> bool:
        """Whether the first steps tell if parameters go unused, so that DDP need not search.

        Not where one backward may not be one step's: DDP then searches, as it does in HF.
        """
        trainer = self._trainer
        args, session = trainer.args, trainer._session
        is_open = args.ddp_find_unused_parameters is None and not args.gradient_checkpointing
        is_cut = args.auto_find_batch_size or args.activation_checkpointing == "fit"
        shares_often = session.cursor.accumulation.sync_each_batch or args.ddp_static_graph
        is_compiled = session.plan.step.value == "compiled" or session.device.type == "xla"
        own = trainer._is_own("training_step")
        return is_open and not (is_cut or shares_often or is_compiled or own)

    def keeps_repeats(self) -> bool:
        """Whether code of the user's computes the loss: it may gather what all ranks compute."""
        trainer = self._trainer
        own = trainer.compute_loss_func is not None or any(map(trainer._is_own, _ON_BATCHES))
        return own or meets_other_ranks(base_model(trainer.model))

    def own_items(self, inputs: Any) -> torch.Tensor | int:
        return objective.num_items(inputs, shifted=self._trainer._shifts)

    def is_scaled(self) -> bool:
        """Whether compute_loss has made use of the step's items."""
        trainer = self._trainer
        if trainer.loss_is_scaled_for_ga is not None:
            return trainer.loss_is_scaled_for_ga
        return objective.reads(trainer.compute_loss, "num_items_in_batch")

    def reads_items(self) -> bool:
        """Whether somebody's own loss wants to know the items also where they change nothing."""
        custom = self._trainer.compute_loss_func
        if custom is not None:
            return objective.reads(custom, "num_items_in_batch")
        return (
            type(self._trainer).compute_loss is not OverridePoints.compute_loss and self.is_scaled()
        )

    # -- losses and gradients that are not finite ----------------------------------------------

    def answer_bad_steps(self, reading: Reading | None = None) -> None:
        """Stop or rewind if a step since the last log point was bad."""
        trainer = self._trainer
        num_bad = trainer._meter.num_bad() if reading is None else reading.num_bad
        rule = str(trainer.args.on_nonfinite)
        if reading is not None:
            all_bad = num_bad == reading.num_steps
            self._num_skipped = self._num_skipped + num_bad if all_bad else 0
        if num_bad == 0:
            self._kept.clear()
            return
        if rule == "skip":
            self.refuse_idle_skipping(_MOST_SKIPPED)
            return
        first = trainer._meter.first_bad() if reading is None else reading.first_bad
        num_steps = trainer._meter.num_steps if reading is None else reading.num_steps
        step = trainer._progress.step - num_steps + first
        if rule == "rewind":
            self._rewind(step)
            return
        told = trainer._session.world.gather_object(self._replayed(step))
        cause = next((text for text in told if not text.startswith("Not ")), told[0])
        raise NotFinite(
            f"Training stopped: the gradient of step {step + 1} is not finite.",
            why=f"{cause} No weight was changed by it or after it.",
            fix="look at these samples, lower learning_rate, clip (max_grad_norm=1.0); or pass "
            'on_nonfinite="skip" to leave such steps out, "rewind" to go back to a checkpoint.',
        )

    def refuse_idle_skipping(self, most: int) -> None:
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
        trainer = self._trainer
        found = next((kept for kept in self._kept if kept[0] == step), None)
        loader = trainer._run.loaders[0]
        if found is None:
            return "It is too long ago to be replayed."
        _, first, num_micro, put_back = found
        samples = [loader.samples_of(number) for number in range(first, first + num_micro)]
        known = [ids for ids in samples if ids is not None]
        if len(known) < len(samples):
            return "Its samples are not known any more (a stream), so it cannot be replayed."
        batches = [loader.load_again(ids) for ids in known]
        put_back()
        inner = trainer._run.unwrap(trainer.model_wrapped, keep_forward=True, keep_compiled=False)

        def run(batch: Any) -> Any:
            return self.train_micro(inner, batch, None)

        return str(find(inner, run, batches, known))

    def _rewind(self, step: int) -> None:
        """Go back to the newest checkpoint's weights; data and schedule go on."""
        trainer = self._trainer
        trainer._between.finish()
        store = checkpoint.Store(Path(trainer._get_output_dir(trainer._trial)))
        newest = store.newest_whole(world=trainer._session.world)
        self._num_rewinds += 1
        if newest.path is None or self._num_rewinds > _MOST_REWINDS:
            raise NotFinite(
                f"Training stopped: the gradient of step {step + 1} is not finite.",
                why="there is no checkpoint to go back to."
                if newest.path is None
                else f"it was taken back {_MOST_REWINDS} times already.",
                fix="save more often (save_steps), lower learning_rate, or clip the gradients.",
            )
        loaded = store.load(newest, world=trainer._session.world)
        run_state.rewind(trainer._run, loaded, trainer._parts.saver.load_hooks())
        trainer._meter.forget_bad()  # a later save must not answer this step once more
        if trainer._engine_step.judge is not None:
            trainer._engine_step.judge.release()
        self._kept.clear()
        give_notice(
            f"Step {step + 1} was not finite: went back to the weights of {newest.path.name}. "
            "The data and the schedule go on.",
            stacklevel=4,
        )


def _written_at(function: Callable[..., Any]) -> str:
    """Return the file and line where a function is written."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None:
        return getattr(function, "__qualname__", repr(function))
    return f"{Path(code.co_filename).name} line {code.co_firstlineno}"


def _is_row(inputs: Any) -> bool:
    """Whether a batch is a row of tensors that has a last one besides the first."""
    return isinstance(inputs, (list, tuple)) and len(inputs) > 1
