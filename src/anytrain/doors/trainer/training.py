"""Train: how long, with what, and what the loop asks of a Trainer on its way."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytrain.core.errors import AnytrainError, BadInput, add_to_message
from anytrain.core.events import EventKind
from anytrain.core.notices import give_notice
from anytrain.doors.callbacks import TrainerState
from anytrain.doors.trainer import preparing, trimming
from anytrain.doors.trainer.best import CheckpointMetricMissing
from anytrain.doors.trainer.input_errors import InputErrors
from anytrain.doors.trainer.outputs import (
    PREFIX_CHECKPOINT_DIR,
    TrainOutput,
    has_length,
    speed_metrics,
)
from anytrain.doors.trainer.overrides import call, call_by_name
from anytrain.doors.trainer.preflight import was_split
from anytrain.doors.trainer.preparing import set_mode
from anytrain.doors.trainer.resuming import position_of
from anytrain.doors.training_args import TrainingArguments
from anytrain.engine.assemble.loaders import Recount, build_feed, count_items
from anytrain.engine.assemble.steps import StepOptions, build_step
from anytrain.engine.checkpoint import Loaded
from anytrain.engine.data.columns import base_model
from anytrain.engine.loop import Feed, Progress, Requests, fit, serve
from anytrain.engine.optim.schedules import follows_metric
from anytrain.engine.prepared.rounds import PlaceInRound
from anytrain.engine.recording.meter import Meter, Reading

if TYPE_CHECKING:
    from anytrain.doors.trainer.trainer import Trainer

_SERVED: Requests = frozenset({"log", "evaluate", "save"})


class Training:
    """One training of a Trainer, put together and walked through."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.loss_so_far: tuple[float, int] = (0.0, 0)
        """The sum of the losses that were read, and of how many steps."""
        self._num_examples = 0
        self._feed: Feed

    def set_length(self, loader: Any, trial: Any, saved: Loaded | None) -> None:
        """Work out how long the training is, and begin its state."""
        trainer = self._trainer
        args = trainer.args
        num_batches = len(loader) if has_length(loader) else None
        samples = args.train_batch_size * trainer._session.world.size
        where = place = None
        if saved is not None:
            where = saved.part("registered")["progress"]
            place = loader.place_of(position_of(saved, loader))
        trainer._progress = plan(args, num_batches, samples, where, place)
        max_steps, num_epochs = trainer._progress.max_steps, trainer._progress.num_epochs
        trainer._meter = Meter(trainer._session.device)
        self.loss_so_far, trainer._total_loss_scalar = (0.0, 0), 0.0
        trainer.state = TrainerState(stateful_callbacks=trainer.callback_handler.exported())
        trainer.state.is_hyper_param_search = trial is not None
        trainer.state.train_batch_size = args.train_batch_size
        trainer.state.compute_steps(args, max_steps)
        trainer.state.init_training_references(trainer, max_steps, num_epochs, trial)
        self._num_examples = trainer.num_examples(loader) if num_batches else 0

    def assemble(self, loader: Any) -> None:
        """Prepare loader, model, optimizer and schedule, and make the step."""
        trainer = self._trainer
        run, args, steps = trainer._run, trainer.args, trainer._parts.steps
        trainer.model.zero_grad()  # whatever an earlier attempt has left behind
        loader = run.loader(loader)
        optimizing = trainer._parts.optimizing
        if optimizing.made_scheduler:
            trainer.lr_scheduler, optimizing.made_scheduler = None, False
        if trainer.optimizer is None or trainer.lr_scheduler is None:
            trainer.create_optimizer_and_scheduler(trainer._progress.max_steps)
        looks = steps.looks_for_unused()
        trainer.model_wrapped = run.model(trainer.model, looks_for_unused=looks)
        trainer.optimizer = run.optimizer(trainer.optimizer)
        if not follows_metric(trainer.lr_scheduler):
            trainer.lr_scheduler = run.scheduler(trainer.lr_scheduler)
        run.close(trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler, loader)
        handler = trainer.callback_handler
        handler.model, handler.optimizer = trainer.model, trainer.optimizer
        handler.lr_scheduler, handler.train_dataloader = trainer.lr_scheduler, loader
        count = count_items(trainer._session, base_model(trainer.model))
        is_one = trainer._session.world.size * args.gradient_accumulation_steps == 1
        alone = is_one and not steps.reads_items()
        self._feed = build_feed(
            trainer._session,
            loader,
            args.gradient_accumulation_steps,
            lambda micro: None if alone else count(micro),
            keeps_repeats=steps.keeps_repeats(),
        )
        makes_others = steps.makes_batches() and (not alone or args.auto_find_batch_size)
        steps.counted = Recount(trainer._session, trainer.model) if makes_others else None
        trainer._engine_step = build_step(
            run,
            trainer.model_wrapped,
            steps.micro(),
            StepOptions(
                max_grad_norm=args.max_grad_norm,
                holds_bad=args.on_nonfinite != "skip",
                splits=args.auto_find_batch_size,
                own_functions=steps.own_functions(),
                sum_up=trainer._meter.sum_up,
                obstacle=trainer._obstacle(),
                activations=trainer._activations,
                steps_left=lambda: trainer._progress.max_steps - trainer._progress.step,
                looks_for_unused=looks,
                recounted=steps.counted,
            ),
            count=count,
            tell=trainer._parts.recorder.tell if handler.looks_inside() else None,
            split=partial(was_split, trainer),
        )

    def fit(self) -> TrainOutput:
        """Walk the loop and return how it went."""
        trainer, parts = self._trainer, self._trainer._parts
        state, first = trainer.state, trainer.state.global_step
        parts.recorder.tokens_before = state.num_input_tokens_seen
        trainer._began = time.time()
        parts.recorder.begin()
        trainer.model_wrapped.train()
        set_mode(trainer.optimizer, is_training=True)
        trimming.in_training(trainer, trainer._run.loaders[0])
        parts.recorder.tell("train_begin", facts=parts.recorder.facts)
        if trainer.args.eval_on_start and not trainer._session.observer.is_watching:
            trainer._evaluate(trainer._trial, trainer._ignored_in_eval, skip_scheduler=True)
        inputs = InputErrors(trainer, model=trainer.model_wrapped)
        ledger, meter = trainer._session.ledger, trainer._meter
        step = parts.steps.recorded(inputs.checked_first(trainer._engine_step))
        cut = trainer._session.end_step
        if cut is not None and first:
            cut()  # what was restored is an input now: the next step is the run's usual graph
        with inputs.explained():
            fit(TrainerJob(trainer), self._feed, step, meter, trainer._progress, ledger, cut)
            parts.saver.end()
            parts.saver.tell_unsaved()
            reading = meter.read(trainer._session.world)
        self.take_loss(reading)
        parts.steps.answer_bad_steps(reading)
        total, num_steps = self.loss_so_far
        done = state.global_step - first
        parts.steps.refuse_idle_skipping(done)
        if not done:
            preparing.tell_nothing_done(state.global_step, state.max_steps, trainer.args)
        share = done / max(state.max_steps, 1)
        epochs = trainer.args.num_train_epochs if trainer.args.max_steps <= 0 else 0
        per_step = parts.recorder.samples_per_step()
        samples = self._num_examples * epochs or state.max_steps * per_step
        metrics = speed_metrics(
            "train", trainer._began, num_samples=round(samples * share), num_steps=done
        )
        trainer.store_flos()
        metrics["total_flos"] = state.total_flos
        metrics["train_loss"] = train_loss = total / max(num_steps, 1)
        trainer._memory.stop("train", metrics)
        trainer.log(metrics)
        parts.best.end()
        parts.recorder.tell("train_end")
        trainer._finish_current_push()
        return TrainOutput(state.global_step, train_loss, metrics)

    def take_loss(self, reading: Reading | None) -> None:
        """Add what was read to the mean over the whole training."""
        if reading is not None and reading.num_steps > reading.num_bad:
            total, steps = self.loss_so_far
            num = reading.num_steps - reading.num_bad
            self.loss_so_far = (total + reading.loss * num, steps + num)

    def evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate in the middle of training, and let the schedule and the search know."""
        trainer = self._trainer
        metrics = trainer.evaluate(ignore_keys=ignore_keys_for_eval)
        trainer._parts.saver.last_metrics = metrics
        trainer._report_to_hp_search(trial, trainer.state.global_step, metrics)
        if follows_metric(trainer.lr_scheduler) and not skip_scheduler:
            name = trainer._parts.best.metric_name() or "eval_loss"
            if name not in metrics:
                raise CheckpointMetricMissing(name, list(metrics), "let the schedule follow")
            trainer.lr_scheduler.step(metrics[name])
        return metrics

    def serve(self) -> None:
        """Log, evaluate and save, as callbacks ask."""
        trainer = self._trainer
        serve(TrainerJob(trainer), trainer.callback_handler.requests, trainer._session.ledger)

    def initial_values(
        self, args: TrainingArguments, loader: Any
    ) -> tuple[int, int, int, float, int, int, int]:
        """Return how long a training with this loader is, as HF's Trainer counts it."""
        num_batches = len(loader) if has_length(loader) else None
        planned = plan(args, num_batches, args.train_batch_size)
        in_step, in_all = self._trainer.get_total_train_batch_size(args), planned.max_steps
        per_epoch, per_training = in_all, float(in_step * in_all)
        examples = in_step * in_all
        if num_batches is not None:
            per_epoch = -(-num_batches // args.gradient_accumulation_steps)
            examples = self._trainer.num_examples(loader)
            if args.max_steps <= 0:
                per_training = examples * args.num_train_epochs
        batches = planned.batches_per_epoch
        return planned.num_epochs, per_epoch, examples, per_training, in_step, batches, in_all


class TrainerJob:
    """Serve the loop on a Trainer's behalf, through the methods that users may override."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._has_own_way = trainer._is_own("_maybe_log_save_evaluate")

    def tell(self, kind: EventKind) -> Requests:
        """Show the position in the Trainer's state, and tell the callbacks."""
        trainer = self._trainer
        progress, state = trainer._progress, trainer.state
        state.global_step = progress.step
        # An epoch that was left, or a stream's, ends where its last step did.
        if kind == "step_end":
            state.epoch = progress.epochs
        if trainer._parts.best.coming is not None:
            trainer._parts.best.tell()
        asked = trainer.callback_handler.tell(kind, trainer.args, state)
        if self._has_own_way and kind in ("step_end", "epoch_end"):
            return self._serve_own_way()
        return asked

    def log(self) -> None:
        """Read what the steps left behind: the one wait for the device."""
        trainer = self._trainer
        with trainer._session.ledger.span("wait"):
            reading = trainer._meter.read(trainer._session.world)
        if reading is None:
            return
        trainer._parts.training.take_loss(reading)
        trainer._parts.steps.read_tokens()
        trainer.store_flos()
        logs: dict[str, Any] = {"loss": reading.loss}
        if reading.grad_norm is not None:
            logs["grad_norm"] = reading.grad_norm
        logs["learning_rate"] = reading.learning_rate
        if trainer._is_own("_get_learning_rate"):
            logs["learning_rate"] = trainer._get_learning_rate()
        if reading.num_bad and trainer.args.on_nonfinite == "skip":
            logs["skipped_steps"] = reading.num_bad
        trainer._parts.steps.answer_bad_steps(reading)
        trainer._globalstep_last_logged = trainer.state.global_step
        call(trainer.log, logs, trainer._began)

    def settle(self) -> None:
        """Wait for the device; who evaluates or saves would wait for it anyway."""
        session = self._trainer._session
        session.backend.synchronize(session.device)

    def evaluate(self) -> Requests:
        """Evaluate; a new best asks for a save where saves follow the best."""
        trainer = self._trainer
        try:
            metrics = trainer._evaluate(trainer._trial, trainer._ignored_in_eval)
            trainer._parts.saver.last_metrics = {**metrics, "step": trainer.state.global_step}
            is_best = trainer._determine_best_metric(metrics, trainer._trial)
        except Exception as error:
            self._save_in_spite_of(error)
            raise
        if trainer.args.save_strategy == "best":
            trainer.control.should_save = is_best
        return trainer.callback_handler.requests

    def _save_in_spite_of(self, error: Exception) -> None:
        """Save what was to be saved after an evaluation that failed: a mistake in it costs no step.

        Of several processes nobody knows which others have failed.
        """
        trainer = self._trainer
        if not trainer.control.should_save or trainer._session.world.size > 1:
            return
        with suppress(Exception):  # the evaluation's error is the one to tell
            trainer._save_checkpoint(trainer.model, trainer._trial, wait=True)
            step = trainer.state.global_step
            go_on = "resume_from_checkpoint=True to go on from there."
            if isinstance(error, AnytrainError):
                error.why += f" That was after step {step}, whose checkpoint was saved."
                error.fix += f" Then pass {go_on}"
                return
            add_to_message(
                error,
                f"anytrain: the evaluation failed after step {step}, whose checkpoint was saved; "
                f"pass {go_on}",
            )

    def save(self) -> Requests:
        """Save the run, tell once it is committed, and push it where it is to be pushed."""
        trainer = self._trainer
        trainer._parts.steps.answer_bad_steps()
        trainer._save_checkpoint(trainer.model, trainer._trial)
        if trainer.args.push_to_hub or trainer.callback_handler.listens("save"):
            trainer._between.finish()  # who is told of a save may look at it, or add to it
            trainer._parts.best.tell()
        if trainer._between.unsaved is not None:
            trainer.control.should_save = False
            return trainer.callback_handler.requests  # nothing was saved, and nobody is told so
        if trainer.args.push_to_hub:
            folder = Path(trainer._get_output_dir(trainer._trial))
            trainer._push_from_checkpoint(
                str(folder / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}")
            )
        return trainer._parts.recorder.tell("save")

    def between(self) -> None:
        """Save and leave, if a signal has come that no step of this epoch could answer."""
        self._trainer._between.boundary()

    def _serve_own_way(self) -> Requests:
        """Call a subclass's own way to log, evaluate and save; return what is asked for besides."""
        trainer, training = self._trainer, self._trainer._parts.training
        meter, last = trainer._meter, trainer._globalstep_last_logged
        total = trainer._total_loss_scalar
        values = {
            "tr_loss": meter.loss,
            "grad_norm": meter.grad_norm,
            "model": trainer.model,
            "trial": trainer._trial,
            "epoch": trainer.state.epoch,
            "ignore_keys_for_eval": trainer._ignored_in_eval,
            "start_time": trainer._began,
            # To read it waits for the device, which nobody has to who does not log.
            "learning_rate": meter.learning_rate if trainer.control.should_log else None,
        }
        call_by_name(trainer._maybe_log_save_evaluate, values)
        has_logged = trainer._globalstep_last_logged > last  # with super() the meter was read there
        if has_logged and (reading := meter.read(trainer._session.world)) is not None:
            logged, steps = training.loss_so_far
            num = reading.num_steps - reading.num_bad
            training.loss_so_far = (logged + trainer._total_loss_scalar - total, steps + num)
            trainer._parts.steps.answer_bad_steps(reading)
        return trainer.callback_handler.requests - _SERVED


def check_end(args: TrainingArguments, *, has_end: bool) -> None:
    """Refuse a training that would never end."""
    if not has_end and args.max_steps <= 0:
        raise BadInput(
            "Cannot tell how long to train.",
            why="the training data has no length, and max_steps is not set.",
            fix="pass max_steps=, or give the data set a __len__.",
        )


def plan(
    args: TrainingArguments,
    num_batches: int | None,
    samples_per_batch: int,
    saved: Mapping[str, Any] | None = None,
    place: PlaceInRound | None = None,
) -> Progress:
    """Return a training's length from its arguments, and where it stands.

    A run goes on from what was `saved` of it, at the place in the data that its loader tells as
    `place`. Where it had another batch size, accumulation or number of ranks, its steps count
    otherwise: what is left of the data is counted anew and added to the steps that were done.
    """
    check_end(args, has_end=num_batches is not None)
    if num_batches == 0:
        raise BadInput(
            "Cannot train: there is no batch.",
            why="dataloader_drop_last leaves out the only batch, which is not full."
            if args.dataloader_drop_last
            else "the training data is empty.",
            fix="give more samples, a smaller per_device_train_batch_size, or keep the last batch.",
        )
    micro = args.gradient_accumulation_steps
    per_epoch = args.max_steps if num_batches is None else -(-num_batches // micro)
    max_steps = args.max_steps
    num_epochs = sys.maxsize if num_batches is None else -(-max_steps // per_epoch)
    if max_steps <= 0:
        max_steps = math.ceil(args.num_train_epochs * per_epoch)
        num_epochs = math.ceil(args.num_train_epochs)
    length = num_batches or max_steps * micro
    progress = Progress(max_steps, num_epochs, length, samples_per_batch, micro)
    if saved is not None and place is not None:
        _go_on(progress, saved, place, args, None if num_batches is None else per_epoch)
    return progress


def _go_on(
    progress: Progress,
    saved: Mapping[str, Any],
    place: PlaceInRound,
    args: TrainingArguments,
    per_epoch: int | None,
) -> None:
    """Stand where the saved run stood, as far from the end as the data is."""
    progress.step, progress.epoch = saved["step"], saved["epoch"]
    progress.batch, left = place.batches, place.left
    if per_epoch is None:  # nobody knows how long an epoch is: it is as long as the run
        left = max(0, args.max_steps - progress.step) * progress.num_micro
    elif left == 0:
        progress.batch = progress.batches_per_epoch
    same, surplus = progress.is_laid_out_like(saved), saved.get("surplus")
    if same and (surplus is None or per_epoch is None):
        progress.this_epoch, progress.surplus = saved.get("this_epoch"), surplus
        return
    if left and progress.batch + left != progress.batches_per_epoch:
        progress.this_epoch = progress.batch + left
    if args.max_steps > 0 or per_epoch is None:
        progress.num_epochs, progress.surplus = sys.maxsize, 0
    elif same:
        progress.surplus = surplus
        progress.max_steps += surplus or 0
    else:
        in_all = progress.step + _steps_left(progress, place, args.num_train_epochs, per_epoch)
        progress.surplus = in_all - progress.max_steps
        progress.max_steps = in_all
    if not same:
        _tell_laid_out_anew(progress, saved)


def _steps_left(progress: Progress, place: PlaceInRound, num_epochs: float, per_epoch: int) -> int:
    """Return how many steps the rest of the data makes; a short last one of an epoch is one."""
    here = -(-(place.left or 0) // progress.num_micro)
    whole = int(num_epochs)
    part = math.ceil((num_epochs - whole) * per_epoch)  # of a last epoch that is not gone through
    if progress.epoch < whole:
        return here + (whole - progress.epoch - 1) * per_epoch + part
    missing = num_epochs - progress.epoch - (place.share or 0.0)
    return min(here, max(0, math.ceil(missing * per_epoch - 1e-9)))


def _tell_laid_out_anew(progress: Progress, saved: Mapping[str, Any]) -> None:
    give_notice(
        f"The saved run had {saved['samples_per_batch']} samples in a batch and "
        f"{saved['num_micro']} batches in a step, this one has {progress.samples_per_batch} and "
        f"{progress.num_micro}. It is at step {saved['step']}, and the training and its schedule "
        f"end at step {progress.max_steps}.",
        stacklevel=6,
    )
