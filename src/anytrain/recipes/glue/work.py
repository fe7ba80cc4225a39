"""The working half of a job: a Trainer with its model and data, used step by step.

Rows are tokenized in a thread of their own while the model's classes are imported: the one runs
outside of Python, the other inside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from anytrain.recipes import folder
from anytrain.recipes.glue import models, predict, quick, scores
from anytrain.recipes.glue.encode import Encoded, Pad, encode, fitting_length, token_cache
from anytrain.recipes.glue.job import Checked, Metrics
from anytrain.recipes.glue.table import Table

if TYPE_CHECKING:
    from anytrain.doors.trainer import Trainer

T = TypeVar("T")


class Work:
    """A job's model, its tokenized data and the Trainer that has them."""

    def __init__(self, checked: Checked) -> None:
        self.checked, self.job = checked, checked.job
        asked, training = self.job.data, self.job.training
        parts = models.prepare(
            self.job.model, checked.labels, task=asked.task_name, trained=training.do_train
        )
        self.labels, self.tokenizer = parts.labels, parts.tokenizer
        self.kind: str = parts.config.model_type
        self.length = fitting_length(
            asked.max_seq_length, parts.tokenizer, parts.config, pairs=checked.pairs
        )
        self._cache = token_cache(fresh=asked.overwrite_cache)
        rows = _beside(self._tokenized)
        model = self._model(parts)
        self.train_set, self.eval_sets = rows.result()
        self.trainer = self._trainer(model)
        if training.do_train:
            quick.take(self.trainer)

    def _tokenized(self) -> tuple[Encoded | None, list[tuple[str | None, Encoded]]]:
        """Return the rows to learn from, and the named sets to evaluate."""
        asked, data = self.job.data, self.checked.data
        train = self._rows(data.train, asked.max_train_samples) if data.train else None
        evaluated = [(n, self._rows(t, asked.max_eval_samples)) for n, t in data.evaluated]
        for name, rows in evaluated[1:]:  # MNLI's second set: its record is another file
            rows.evaluated_as = name
        return train, evaluated

    def _rows(self, table: Table, most: int | None, *, labelled: bool = True) -> Encoded:
        labels = self.labels if labelled else None
        task, rows = self.job.data.task, table.first(most)
        return encode(rows, task, labels, self.tokenizer, self.length, self._cache)

    def _model(self, parts: models.Parts) -> Any:
        from anytrain.doors.trainer.outputs import set_seed

        # The head of the model is drawn at random: a seed gives one model.
        set_seed(int(self.job.training.seed))
        return models.build(self.job.model, parts)

    def _trainer(self, model: Any) -> Trainer:
        from anytrain.doors.trainer import Trainer

        # F1 looks for the task's second label, wherever this model keeps it.
        task = self.job.data.task
        names = [name.lower() for name in self.labels.names]
        positive = names.index(task.labels[1]) if task and task.labels else 1
        return Trainer(
            model=model,
            args=self.job.training,
            train_dataset=self.train_set,
            eval_dataset=self.eval_sets[0][1] if self.eval_sets else None,
            processing_class=self.tokenizer,
            data_collator=self._collator(),
            compute_metrics=scores.Scorer(self.checked.metrics, positive),
            preprocess_logits_for_metrics=scores.reducer(self.labels),
        )

    def _collator(self) -> Pad:
        training = self.job.training
        half = training.bf16 or training.fp16 or training.precision not in (None, "no")
        by_batch = training.length_buckets is None and not self.job.data.pad_to_max_length
        return Pad(
            token=self.tokenizer.pad_token_id,
            segment=self.tokenizer.pad_token_type_id,
            left=self.tokenizer.padding_side == "left",
            length=self.length if self.job.data.pad_to_max_length else None,
            # Tensor cores take multiples of 8; length_buckets round up by themselves.
            multiple=8 if half and by_batch else 1,
            most=self.length,
        )

    def introduction(self) -> str:
        """Return what works on what, and where: one line."""
        trainer, plan = self.trainer, self.trainer.accelerator.plan
        size = sum(parameter.numel() for parameter in trainer.model.parameters())
        rows = [f"{len(self.train_set):,} rows to learn from"] if self.train_set else []
        rows += [f"{len(some):,} to evaluate" for _, some in self.eval_sets]
        sets = [some for some in (self.train_set, *dict(self.eval_sets).values()) if some]
        if sets and all(some.was_kept for some in sets):
            rows.append("tokenized by a run before")
        count = trainer.accelerator.num_processes
        where = f"{trainer.accelerator.device}" + (f", {count} processes" if count > 1 else "")
        # "no" is HF's word for plain float32.
        dtype = plan.precision.value.replace("no", "fp32")
        return (
            f"{self.kind}, {size:,} parameters, on {where}, in "
            f"{dtype} ({plan.precision.because}). {', '.join(rows)}".rstrip(". ")
            + "."
        )

    def train(self) -> Metrics:
        """Train to the end, from the newest checkpoint where the run was cut short."""
        from anytrain.doors.trainer.outputs import get_last_checkpoint

        trainer, way = self.trainer, self.checked.way
        with trainer._alone_in_folder(), quick.in_use(trainer):
            self._begin()
            resume: Any = self.job.training.resume_from_checkpoint
            if way.kind == "continue":
                resume = get_last_checkpoint(self.job.folder)
            result = trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
        assert self.train_set is not None
        metrics: Metrics = {**result.metrics, "train_samples": len(self.train_set)}
        trainer.save_metrics("train", metrics)
        trainer.save_state()
        return metrics

    def _begin(self) -> None:
        """Keep the settings in the folder, once every rank has looked into it."""
        self.trainer.accelerator.wait_for_everyone()
        if self.trainer.is_world_process_zero():
            folder.begin(self.job.folder, self.checked.way, self.job.settings())
        self.trainer.accelerator.wait_for_everyone()

    def evaluate(self) -> Metrics:
        """Evaluate every set; MNLI's second one has _mm behind its names, as run_glue does."""
        combined: Metrics = {}
        for name, rows in self.eval_sets:
            metrics = self.trainer.evaluate(eval_dataset=rows)
            metrics["eval_samples"] = len(rows)
            ending = "_mm" if name == "mnli-mm" else ""
            combined |= {key + ending: value for key, value in metrics.items()}
        self.trainer.save_metrics("eval", combined)
        return combined

    def predict(self) -> None:
        """Write a file of predictions for every set."""
        most = self.job.data.max_predict_samples
        for name, table in self.checked.data.predicted:
            rows = self._rows(table, most, labelled=False)
            said = self.trainer.predict(rows, metric_key_prefix="predict").predictions
            if self.trainer.is_world_process_zero():
                self.job.folder.mkdir(parents=True, exist_ok=True)
                predict.write(self.job.folder / predict.file_name(name), said, self.labels)

    def finish(self) -> None:
        """Close the run: its card, the hub where it is wanted, and the note that it is over."""
        job, trainer = self.job, self.trainer
        told: dict[str, Any] = {
            "finetuned_from": job.model.model_name_or_path,
            "tasks": "text-classification",
        }
        if job.data.task_name:
            told |= {
                "language": "en",
                "dataset_tags": "glue",
                "dataset_args": job.data.task_name,
                "dataset": f"GLUE {job.data.task_name.upper()}",
            }
        if job.training.push_to_hub:
            trainer.push_to_hub(**told)
        elif job.training.do_train:
            trainer.create_model_card(**told)
        if job.training.do_train and trainer.is_world_process_zero():
            folder.finish(job.folder)


def _beside(work: Callable[[], T]) -> Future[T]:
    """Begin work in a thread; what it returns or raises is there when it is asked for."""
    promised: Future[T] = Future()

    def run() -> None:
        try:
            promised.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised again where the result is taken
            promised.set_exception(error)

    # A daemon: nobody who stops the command waits for it.
    threading.Thread(target=run, name="tokenize", daemon=True).start()
    return promised
