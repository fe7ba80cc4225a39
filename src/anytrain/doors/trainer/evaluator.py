"""Evaluate and predict.

Batches stream: what a metric needs is kept, on disk where it is much, and nothing else is. Every
sample counts once, however the last round was dealt out.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from anytrain.core.errors import BadInput, BadType, raised_by
from anytrain.core.notices import give_notice
from anytrain.doors.trainer import evaluation_record, preparing, trimming
from anytrain.doors.trainer.input_errors import InputErrors
from anytrain.doors.trainer.outputs import (
    EvalLoopOutput,
    EvalPrediction,
    PredictionOutput,
    denumpify_detensorize,
    speed_metrics,
)
from anytrain.doors.trainer.preparing import set_mode
from anytrain.engine import objective
from anytrain.engine.loop import EvaluationLoop, Predictions, evaluate
from anytrain.engine.metrics import Collected
from anytrain.engine.precision import lower
from anytrain.engine.tree import map_tensors

if TYPE_CHECKING:
    from anytrain.doors.trainer.trainer import Trainer


class Evaluator:
    """Evaluation and prediction for a Trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._prepared_here = 0.0
        """Seconds that the model took to prepare for the evaluation that goes on."""
        self._looking: evaluation_record.SampleRecorder | None = None

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Return the loss and the metrics on a data set, each of a dict's, or the Trainer's."""
        trainer = self._trainer
        given = trainer.eval_dataset if eval_dataset is None else eval_dataset
        if trainer._parts.loaders.are_several(given):
            found: dict[str, float] = {}
            for name, dataset in given.items():
                found |= trainer.evaluate(
                    name if eval_dataset is None else dataset,
                    ignore_keys,
                    f"{metric_key_prefix}_{name}",
                )
            return found
        trainer._memory.start()
        trainer._parts.recorder.open()
        loader = trainer.get_eval_dataloader(eval_dataset)
        began, self._looking = time.time(), None
        with (
            trainer._session.ledger.span("evaluate"),
            preparing.settings(trainer.args, trainer._session),
        ):
            output = trainer.evaluation_loop(
                loader,
                "Evaluation",
                prediction_loss_only=True if trainer.compute_metrics is None else None,
                ignore_keys=ignore_keys,
                metric_key_prefix=metric_key_prefix,
            )
        metrics = self._timed(output, metric_key_prefix, began)
        trainer._memory.stop("eval", metrics)
        trainer.log(metrics)
        trainer._parts.recorder.tell("evaluate", metrics=metrics)
        with trainer._session.ledger.span("evaluate"):
            looking, self._looking = self._looking, None
            evaluation_record.note(trainer, looking, eval_dataset, metric_key_prefix)
        self._note_time()
        return metrics

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
    ) -> PredictionOutput:
        """Return the predictions on a data set, with its labels and metrics where it has labels."""
        trainer = self._trainer
        trainer._memory.start()
        loader = trainer.get_test_dataloader(test_dataset)
        began = time.time()
        with (
            trainer._session.ledger.span("evaluate"),
            preparing.settings(trainer.args, trainer._session),
        ):
            output = trainer.evaluation_loop(
                loader,
                "Prediction",
                ignore_keys=ignore_keys,
                metric_key_prefix=metric_key_prefix,
            )
        metrics = self._timed(output, metric_key_prefix, began)
        trainer._memory.stop("test", metrics)
        trainer._parts.recorder.tell("predict", metrics=metrics)
        self._note_time()
        return PredictionOutput(output.predictions, output.label_ids, metrics)

    def _note_time(self) -> None:
        """Add an evaluation that follows a training to the record of its time."""
        trainer = self._trainer
        if trainer._parts.recorder.timesheet is not None and not trainer.is_in_train:
            trainer._parts.recorder.timesheet.write()

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Predict every sample of a loader once; return predictions, labels and metrics."""
        trainer = self._trainer
        asked = prediction_loss_only
        only_loss = trainer.args.prediction_loss_only if asked is None else asked
        dataloader = trainer._parts.loaders.prepared(dataloader)
        model = self._evaluation_model()
        trainer.callback_handler.eval_dataloader = dataloader
        keeps_all = description == "Prediction"
        scores = Scores(trainer.compute_metrics, trainer.args, keeps_all=keeps_all)
        self._looking = looking = evaluation_record.look_on(trainer, dataloader, description)
        keeps_inputs = "inputs" in trainer.args.include_for_metrics
        world = trainer._session.world
        keep = Predictions() if only_loss else scores.keep()

        def predict(batch: Any) -> tuple[Any, Any, Any, Any]:
            inputs = self._main_input(batch) if keeps_inputs else None
            step = partial(trainer.prediction_step, model, batch, ignore_keys=ignore_keys)
            return *looking.step(step, only_loss, keep.own_rows), inputs

        def batch_done(*found: Any) -> None:
            scores.batch(*found)
            looking.end_batch(keep.num_rows)
            trainer._parts.recorder.tell("prediction_step")

        inputs = InputErrors(trainer, loader=dataloader, model=model)
        job = EvaluationLoop(
            dataloader,
            world,
            inputs.fed(predict),
            batch_done,
            keep,
            trainer.preprocess_logits_for_metrics,
            trainer._session.end_step,
            keeps_repeats=trainer._parts.steps.keeps_repeats(),
        )
        give_back = self._lower_precision()
        trimming.in_evaluation(trainer, dataloader, model, only_loss, ignore_keys)
        try:
            with inputs.explained():
                kept = evaluate(job)
                predictions, labels, metrics = scores.result(kept)
                loss = kept.loss.value(world)  # the host may not have read of the device before
            num_samples = sum(world.gather_object(kept.num_rows))
            if description == "Evaluation" and world.rank == 0:
                scores.tell_missing(trainer.label_names, only_loss, loss is not None, num_samples)
        finally:
            give_back()
            scores.close()
            if trainer.is_in_train:  # the model itself trains again at its next step
                set_mode(trainer.optimizer, is_training=True)
        if hasattr(trainer, "model_preparation_time"):
            metrics["model_preparation_time"] = trainer.model_preparation_time
        metrics = _prefixed(denumpify_detensorize(metrics), loss, f"{metric_key_prefix}_")
        return EvalLoopOutput(predictions, labels, metrics, num_samples)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Return one batch's loss, logits and labels; each is None where there is none."""
        trainer = self._trainer
        inputs = trainer._prepare_inputs(inputs)
        labels = trainer._parts.steps.labels_of(inputs)
        with torch.no_grad():
            if self._must_give_loss(inputs, labels):
                loss, outputs = trainer.compute_loss(
                    model, inputs, return_outputs=True, **self._items_of(inputs)
                )
            else:
                outputs = objective.call(model, inputs)
                loss = objective.given_loss(outputs)
        loss = None if loss is None else loss.detach().mean()
        if prediction_loss_only:
            return loss, None, None
        logits = map_tensors(torch.Tensor.detach, self._logits(outputs, loss, ignore_keys))
        return loss, logits, labels

    def _must_give_loss(self, inputs: Any, labels: Any) -> bool:
        """Whether this batch has a loss; of another one, whatever the model returns is taken."""
        trainer = self._trainer
        named = inputs if isinstance(inputs, Mapping) else {}
        if labels is not None:
            return trainer._parts.steps.has_own_loss() or bool(named and trainer.label_names)
        return not trainer.label_names and bool(named.get("return_loss", trainer.can_return_loss))

    def _items_of(self, inputs: Any) -> dict[str, Any]:
        """Return the items for a loss of somebody's own that divides by them, else nothing.

        Training counts them over all ranks, and its loss is that many times a rank's share.
        """
        trainer = self._trainer
        if not trainer._parts.steps.reads_items():
            return {}
        return {
            "num_items_in_batch": trainer._parts.steps.own_items(inputs)
            * trainer._session.world.size
        }

    def _logits(self, outputs: Any, loss: Any, ignore_keys: list[str] | None) -> Any:
        """Return what a model gave besides its loss; one thing comes alone, several as a tuple."""
        if ignore_keys is None:
            config = getattr(self._trainer.model, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        left = [*ignore_keys, "loss"] if loss is not None else ignore_keys
        if isinstance(outputs, Mapping):
            found = tuple(v for k, v in outputs.items() if k not in left)
        elif isinstance(outputs, (list, tuple)):
            found = tuple(outputs[1:] if loss is not None else outputs)
        else:
            found = () if loss is not None else (outputs,)
        return None if not found else found[0] if len(found) == 1 else found

    def _main_input(self, batch: Any) -> Any:
        name = getattr(self._trainer.model, "main_input_name", "input_ids")
        if isinstance(batch, Mapping):
            return batch.get(name)
        return batch[0] if isinstance(batch, (list, tuple)) and batch else None

    def _evaluation_model(self) -> nn.Module:
        """Return the model itself, on its device and in its precision, for one process's use."""
        trainer = self._trainer
        run, self._prepared_here = trainer._run, 0.0
        if not run.models:
            began = time.time()
            run.model(trainer.model, evaluation_mode=True)
            run.models.clear()  # an evaluation alone is nothing to save
            self._prepared_here = trainer.model_preparation_time = round(time.time() - began, 4)
        trainer.model.eval()
        set_mode(trainer.optimizer, is_training=False)
        return trainer.model

    def _lower_precision(self) -> Callable[[], None]:
        """Round the weights as bf16_full_eval or fp16_full_eval asks; return what undoes it."""
        trainer = self._trainer
        args = trainer.args
        if trainer.is_in_train or not (args.bf16_full_eval or args.fp16_full_eval):
            return lambda: None
        return lower(trainer.model, torch.bfloat16 if args.bf16_full_eval else torch.float16)

    def _timed(self, output: EvalLoopOutput, prefix: str, began: float) -> dict[str, float]:
        """Return the metrics with how fast they came."""
        num_samples = output.num_samples or 0
        num_steps = math.ceil(
            num_samples
            / (self._trainer._parts.shapes.eval_batch_size * self._trainer.args.world_size)
        )
        began += self._prepared_here
        speed = speed_metrics(prefix, began, num_samples=num_samples, num_steps=num_steps)
        return {**(output.metrics or {}), **speed}


class Scores:
    """What is kept for the metrics of one evaluation, and how they are computed.

    `compute_metrics` may be a function of all predictions; a function that takes
    `compute_result` and is told each batch (batch_eval_metrics); or an object with `update` and
    `compute`, which needs no predictions kept.
    """

    def __init__(self, compute: Any, args: Any, *, keeps_all: bool) -> None:
        self._compute = compute
        self._args = args
        self._streams = hasattr(compute, "update") and hasattr(compute, "compute")
        self._by_batch = not self._streams and compute is not None and args.batch_eval_metrics
        self._keeps = keeps_all or not (self._streams or self._by_batch)
        self._metrics: dict[str, Any] = {}
        self._kept: list[Collected] = []
        self._has_seen = False
        if self._by_batch and not _takes_compute_result(compute):
            raise BadInput(
                "Cannot use batch_eval_metrics with this compute_metrics.",
                why="it is called with compute_result=, False on each batch and True on the last, "
                "and takes no such argument.",
                fix="def compute_metrics(prediction, compute_result): ..., or leave "
                "batch_eval_metrics out.",
            )
        if (self._streams or self._by_batch) and hasattr(compute, "reset"):
            compute.reset()

    def keep(self) -> Predictions:
        """Return where the evaluation puts what has to be kept."""
        asked = self._args.include_for_metrics
        if not self._keeps:
            return Predictions()
        return Predictions(
            logits=self._collected(),
            labels=self._collected(),
            inputs=self._collected() if "inputs" in asked else None,
            losses=self._collected() if "loss" in asked else None,
        )

    def _collected(self) -> Collected:
        folder = Path(str(self._args.output_dir))
        made = Collected(
            folder=folder if folder.is_dir() else None, concat=self._args.eval_do_concat_batches
        )
        self._kept.append(made)
        return made

    def batch(self, losses: Any, logits: Any, labels: Any, inputs: Any, is_last: bool) -> None:
        """Take one batch in, where metrics grow batch by batch."""
        if logits is None or labels is None:
            return
        self._has_seen = True
        if self._streams:
            with raised_by("compute_metrics"):
                self._compute.update(logits, labels)
        elif self._by_batch:
            asked = self._args.include_for_metrics
            prediction = EvalPrediction(
                logits,
                labels,
                inputs=inputs if "inputs" in asked else None,
                losses=losses if "loss" in asked else None,
            )
            with raised_by("compute_metrics"):
                found = self._compute(prediction, compute_result=is_last)
            self._metrics = found if is_last else {}

    def result(self, kept: Predictions) -> tuple[Any, Any, dict[str, Any]]:
        """Return predictions and labels, where they were kept, and the metrics."""
        parts = (kept.logits, kept.labels, kept.losses, kept.inputs)
        logits, labels, losses, inputs = (None if p is None else p.result() for p in parts)
        if self._streams:
            with raised_by("compute_metrics"):
                found = self._compute.compute() if kept.num_rows else {}
            return logits, labels, _named(found)
        if self._by_batch:
            return logits, labels, _named(self._metrics)
        if self._compute is None or logits is None or labels is None:
            return logits, labels, {}
        with raised_by("compute_metrics"):
            found = self._compute(EvalPrediction(logits, labels, inputs=inputs, losses=losses))
        return logits, labels, _named(found)

    def tell_missing(
        self, label_names: list[str], only_loss: bool, has_loss: bool, num_samples: int
    ) -> None:
        """Say why an evaluation has no metrics, or nothing at all to tell."""
        known = ", ".join(label_names or ["labels"])
        fix = f"labels are looked for under {known}; name yours, as in label_names=['y']."
        if not num_samples:
            told = "Nothing was evaluated: the data set is empty."
        elif self._compute is not None and not only_loss and not self._has_seen:
            told = f"compute_metrics was not called: no batch held predictions and labels; {fix}"
        elif self._compute is None and not has_loss:
            told = f"The evaluation found nothing: the model returned no loss; {fix}"
        else:
            return
        give_notice(told, stacklevel=4)

    def close(self) -> None:
        """Let go of files that predictions were put in; arrays handed out stay valid."""
        for collected in self._kept:
            collected.close()


def _prefixed(metrics: Mapping[str, Any], loss: float | None, start: str) -> dict[str, Any]:
    """Return the loss and the metrics, each under a name that begins as said."""
    named: dict[str, Any] = {} if loss is None else {f"{start}loss": loss}
    for name, value in metrics.items():
        if name.startswith(start):
            named.setdefault(name, value)
        else:
            named[start + name] = value
    return named


def _named(found: Any) -> dict[str, Any]:
    """Return metrics as a dict of their own, or refuse what is none."""
    if isinstance(found, Mapping):
        return dict(found)
    raise BadType(
        f"compute_metrics returned a {type(found).__name__}, not a dict.",
        why="metrics are numbers by name.",
        fix='return {"accuracy": ...}, or an empty dict.',
    )


def _takes_compute_result(compute: Callable[..., Any]) -> bool:
    found = inspect.signature(compute).parameters
    return "compute_result" in found or any(p.kind is p.VAR_KEYWORD for p in found.values())
