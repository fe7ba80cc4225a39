"""Train, evaluate and predict, as run_glue does: an ordinary user of Trainer.

Whatever can be wrong with the options, the files or the output folder is found before a model
is loaded. Rows are tokenized in a thread of their own while the model's classes are imported: the
one runs outside of Python, the other inside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from anytrain.core import environment
from anytrain.core.errors import BadInput
from anytrain.recipes import folder
from anytrain.recipes.glue import models, scores, sources
from anytrain.recipes.glue.arguments import GlueJob
from anytrain.recipes.glue.encode import Encoded, Pad, encode, fitting_length, token_cache
from anytrain.recipes.glue.sources import GlueData
from anytrain.recipes.glue.tasks import GlueTask, Labels, TextTable, columns_of, find_labels, verify

Tell = Callable[[str], None]
Metrics = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Checked:
    """A job whose data, labels, metrics and output folder have been found to be right."""

    job: GlueJob
    data: GlueData
    labels: Labels | None
    metrics: tuple[str, ...]
    start: folder.RunStart

    @property
    def pairs(self) -> bool:
        """Whether each row holds two texts."""
        table = self.data.labelled or self.data.predicted[0][1]
        return columns_of(table, self.job.data.task).second is not None


def check(job: GlueJob) -> Checked:
    """Read the data and look at the output folder; refuse what could not end well."""
    task, training = job.data.task, job.training
    data = sources.load(job)
    _check_alike(data, task)
    labels = Labels(task.labels, task.labels) if task else None
    if data.labelled is not None:
        labels = find_labels(data.labelled, task, trained=training.do_train)
        _verify(job, data, labels)
    metrics = scores.metrics_of(task, labels) if labels is not None else ()
    if training.do_eval:
        scores.require(metrics)
    start = folder.RunStart("fresh")
    if training.do_train:
        start = folder.look(
            job.folder,
            job.settings(),
            overwrite=bool(training.overwrite_output_dir),
            resume=environment.resume_from(training.resume_from_checkpoint),
        )
    return Checked(job, data, labels, metrics, start)


def _check_alike(data: GlueData, task: GlueTask | None) -> None:
    """Refuse sets of which one holds pairs of texts and another single ones."""
    named = (data.train, *(table for _, table in (*data.evaluated, *data.predicted)))
    tables = [table for table in named if table is not None]
    for table in tables[1:]:
        first = tables[0]
        one, other = columns_of(first, task), columns_of(table, task)
        if (one.second is None) != (other.second is None):
            texts = [" and ".join(filter(None, (each.first, each.second))) for each in (one, other)]
            raise BadInput(
                f"{first.origin} and {table.origin} do not hold the same columns.",
                why=f"the texts of a row are {texts[0]} in one, and {texts[1]} in the other.",
                fix="name the columns alike: sentence1 and sentence2 for pairs, or one of texts.",
            )


def _verify(job: GlueJob, data: GlueData, labels: Labels) -> None:
    asked, task = job.data, job.data.task
    if data.train is not None:
        verify(data.train.first(asked.max_train_samples), task, labels)
    for _, table in data.evaluated:
        verify(table.first(asked.max_eval_samples), task, labels)


def run(checked: Checked, tell: Tell) -> Metrics:
    """Do the work and return its metrics; `tell` gets a line for what the user should know."""
    job = checked.job
    if checked.start.said:
        tell(checked.start.said)
    work = GlueRun(checked)
    tell(work.introduction())
    metrics: Metrics = {}
    if job.training.do_train:
        metrics |= work.train()
    if job.training.do_eval:
        metrics |= work.evaluate()
    if job.training.do_predict:
        work.predict()
    work.finish()
    return metrics


if TYPE_CHECKING:
    from anytrain.doors.trainer import Trainer

T = TypeVar("T")


class GlueRun:
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
        rows = _in_thread(self._tokenized)
        model = self._model(parts)
        self.train_set, self.eval_sets = rows.result()
        self.trainer = self._trainer(model)
        if training.do_train:
            take_quick_draws(self.trainer)

    def _tokenized(self) -> tuple[Encoded | None, list[tuple[str | None, Encoded]]]:
        """Return the rows to learn from, and the named sets to evaluate."""
        asked, data = self.job.data, self.checked.data
        train = self._rows(data.train, asked.max_train_samples) if data.train else None
        evaluated = [(n, self._rows(t, asked.max_eval_samples)) for n, t in data.evaluated]
        for name, rows in evaluated[1:]:  # MNLI's second set: its record is another file
            rows.evaluated_as = name
        return train, evaluated

    def _rows(self, table: TextTable, most: int | None, *, labelled: bool = True) -> Encoded:
        labels = self.labels if labelled else None
        task, rows = self.job.data.task, table.first(most)
        return encode(rows, task, labels, self.tokenizer, self.length, self._cache)

    def _model(self, parts: models.ModelParts) -> Any:
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

        trainer, start = self.trainer, self.checked.start
        with trainer._alone_in_folder(), with_quick_draws(trainer):
            self._begin()
            resume: Any = self.job.training.resume_from_checkpoint
            if start.kind == "continue":
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
            folder.begin(self.job.folder, self.checked.start, self.job.settings())
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
                write_predictions(self.job.folder / predictions_file(name), said, self.labels)

    def finish(self) -> None:
        """Close the run: its card, the hub where it is wanted, and the note that it is over."""
        job, trainer = self.job, self.trainer
        card: dict[str, Any] = {
            "finetuned_from": job.model.model_name_or_path,
            "tasks": "text-classification",
        }
        if job.data.task_name:
            card |= {
                "language": "en",
                "dataset_tags": "glue",
                "dataset_args": job.data.task_name,
                "dataset": f"GLUE {job.data.task_name.upper()}",
            }
        if job.training.push_to_hub:
            trainer.push_to_hub(**card)
        elif job.training.do_train:
            trainer.create_model_card(**card)
        if job.training.do_train and trainer.is_world_process_zero():
            folder.finish(job.folder)


def _in_thread(work: Callable[[], T]) -> Future[T]:
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


_ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")


def take_quick_draws(trainer: Any) -> None:
    """Choose what trains faster on a CPU, whatever the precision, and put it on record."""
    if trainer.accelerator.device.type != "cpu":
        return
    model, taken = trainer.model, ["quick dropout"]
    config = getattr(model, "config", None)
    drops = any(getattr(config, name, 0) for name in _ATTENTION_DROPOUT)
    if drops and getattr(config, "_attn_implementation", None) == "sdpa":
        # With dropout, torch's own attention leaves bf16 on a CPU and computes in float32.
        model.set_attn_implementation("eager")
        taken.append("eager attention")
    because = "faster on a CPU: the same model, with other draws of dropout"
    trainer._session.revise("kernels", ", ".join(taken), because)


def with_quick_draws(trainer: Any) -> AbstractContextManager[Any]:
    """Return what a training runs in that has taken them."""
    from anytrain.machine.backends.cpu import quick_dropout

    return quick_dropout() if trainer.accelerator.device.type == "cpu" else nullcontext()


def predictions_file(split: str | None) -> str:
    """Return the file of a task's predictions, or of a job's without a task.

    >>> predictions_file("mnli-mm"), predictions_file(None)
    ('predict_results_mnli-mm.txt', 'predict_results.txt')
    """
    return f"predict_results_{split}.txt" if split else "predict_results.txt"


def prediction_lines(predictions: Sequence[Any], labels: Labels) -> list[str]:
    """Return the lines of the file: the label's name, or a value with three places.

    >>> prediction_lines([1, 0], Labels(("no", "yes")))
    ['index\\tprediction', '0\\tyes', '1\\tno']
    """
    said = [f"{p:3.3f}" if labels.is_regression else labels.names[int(p)] for p in predictions]
    return ["index\tprediction", *(f"{index}\t{word}" for index, word in enumerate(said))]


def write_predictions(path: Path, predictions: Sequence[Any], labels: Labels) -> None:
    """Write the file of one set's predictions."""
    path.write_text("\n".join(prediction_lines(predictions, labels)) + "\n", encoding="utf-8")
