"""Train, evaluate and predict, as run_glue does: an ordinary user of Trainer.

Whatever can be wrong with the options, the files or the output folder is found before a model
is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from anytrain.core import environment
from anytrain.core.errors import BadInput
from anytrain.recipes import folder
from anytrain.recipes.glue import scores, sources
from anytrain.recipes.glue.arguments import Job
from anytrain.recipes.glue.labels import Labels, columns_of, find_labels, verify
from anytrain.recipes.glue.sources import Data
from anytrain.recipes.glue.tasks import Task

Tell = Callable[[str], None]
Metrics = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Checked:
    """A job whose data, labels, metrics and output folder have been found to be right."""

    job: Job
    data: Data
    labels: Labels | None
    metrics: tuple[str, ...]
    way: folder.Way

    @property
    def pairs(self) -> bool:
        """Whether each row holds two texts."""
        table = self.data.labelled or self.data.predicted[0][1]
        return columns_of(table, self.job.data.task).second is not None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a job came to: its metrics, and the model's labels."""

    metrics: Mapping[str, Any]
    labels: Labels
    pairs: bool


def check(job: Job) -> Checked:
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
    way = folder.Way("fresh")
    if training.do_train:
        way = folder.look(
            job.folder,
            job.settings(),
            overwrite=bool(training.overwrite_output_dir),
            resume=environment.resume_from(training.resume_from_checkpoint),
        )
    return Checked(job, data, labels, metrics, way)


def _check_alike(data: Data, task: Task | None) -> None:
    """Refuse sets of which one holds pairs of texts and another single ones."""
    named = (data.train, *(table for _, table in (*data.evaluated, *data.predicted)))
    tables = [table for table in named if table is not None]
    for table in tables[1:]:
        first = tables[0]
        one, other = columns_of(first, task), columns_of(table, task)
        if (one.second is None) != (other.second is None):
            told = [" and ".join(filter(None, (each.first, each.second))) for each in (one, other)]
            raise BadInput(
                f"{first.origin} and {table.origin} do not hold the same columns.",
                why=f"the texts of a row are {told[0]} in one, and {told[1]} in the other.",
                fix="name the columns alike: sentence1 and sentence2 for pairs, or one of texts.",
            )


def _verify(job: Job, data: Data, labels: Labels) -> None:
    asked, task = job.data, job.data.task
    if data.train is not None:
        verify(data.train.first(asked.max_train_samples), task, labels)
    for _, table in data.evaluated:
        verify(table.first(asked.max_eval_samples), task, labels)


def run(checked: Checked, tell: Tell) -> Outcome:
    """Do the work; `tell` gets a line for what the user should know."""
    from anytrain.recipes.glue.work import Work

    job = checked.job
    if checked.way.said:
        tell(checked.way.said)
    work = Work(checked)
    tell(work.introduction())
    metrics: Metrics = {}
    if job.training.do_train:
        metrics |= work.train()
    if job.training.do_eval:
        metrics |= work.evaluate()
    if job.training.do_predict:
        work.predict()
    work.finish()
    return Outcome(metrics, work.labels, checked.pairs)
