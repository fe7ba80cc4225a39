"""Get the rows of a job: from files, from a data set's folder, or from the hub."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anytrain.core.errors import BadInput
from anytrain.recipes.glue.arguments import Job
from anytrain.recipes.glue.network import cached_if_unreachable
from anytrain.recipes.glue.read import read
from anytrain.recipes.glue.table import Table
from anytrain.recipes.glue.tasks import Split, Task

_GLUE = "nyu-mll/glue"
Named = tuple[tuple[str | None, Table], ...]


@dataclass(frozen=True, slots=True)
class Data:
    """The rows to learn from, and the sets to evaluate and to predict, by name."""

    train: Table | None
    evaluated: Named
    predicted: Named

    @property
    def labelled(self) -> Table | None:
        """The table that tells the labels: the one to learn from, else one to evaluate."""
        return self.train or next((table for _, table in self.evaluated), None)


def load(job: Job) -> Data:
    """Return all rows of the sets that this job needs."""
    data, training = job.data, job.training
    get = _from_files(job) if data.files else _from_datasets(job)
    task = data.task
    evaluated = task.eval_splits if task else (Split("", "validation"),)
    predicted = task.predict_splits if task else (Split("", "test"),)

    def named(splits: tuple[Split, ...]) -> Named:
        found = [(split.name or None, get(split.source)) for split in splits]
        return tuple((name, table) for name, table in found if table is not None)

    return Data(
        train=get("train") if training.do_train else None,
        evaluated=named(evaluated) if training.do_eval else (),
        predicted=named(predicted) if training.do_predict else (),
    )


def _from_files(job: Job) -> Callable[[str], Table | None]:
    """Return what reads the file of a split; MNLI's second sets may be missing."""
    bare = job.data.task.bare_columns if job.data.task else ()
    option = {
        "validation_matched": "validation_file",
        "test_matched": "test_file",
        "validation_mismatched": "validation_mismatched_file",
        "test_mismatched": "test_mismatched_file",
    }

    def get(split: str) -> Table | None:
        path = job.data.files.get(option.get(split, f"{split}_file"))
        return read(path, bare) if path else None

    return get


def _from_datasets(job: Job) -> Callable[[str], Table | None]:
    """Return what takes a split out of a data set, which is loaded once."""
    name = job.data.dataset_name or _GLUE
    part = job.data.dataset_config_name if job.data.dataset_name else job.data.task_name
    found = _loaded(job, name, part)
    origin = name if part is None else f"{name}/{part}"

    def get(split: str) -> Table | None:
        aliases = [split, *([split.partition("_")[0]] if split.endswith("_matched") else [])]
        chosen = next((alias for alias in aliases if alias in found), None)
        if chosen is None and split.endswith("_mismatched"):
            return None
        if chosen is None:
            raise BadInput(
                f"{origin} has no split {split!r}.",
                why=f"its splits are {', '.join(map(repr, found))}.",
                fix="leave out the option that needs it, or give your own files.",
            )
        return _table(found[chosen], f"{origin}, {chosen}")

    return get


def _table(rows: Any, origin: str) -> Table:
    label = rows.features.get("label")
    names = tuple(getattr(label, "names", None) or ())
    return Table({name: list(rows[name]) for name in rows.column_names}, origin, names)


def _loaded(job: Job, name: str, part: str | None) -> Any:
    try:
        import datasets
    except ImportError:
        raise BadInput(
            f"Cannot load {name!r}.",
            why="data sets are loaded with the library datasets, and it is not installed.",
            fix=f"pip install datasets, or {_files_to_give(job.data.task)}",
        ) from None
    if (Path(name) / "dataset_dict.json").is_file():
        return datasets.load_from_disk(name)
    alone = nullcontext() if Path(name).exists() else cached_if_unreachable()
    try:
        with alone:
            return datasets.load_dataset(
                name, part, cache_dir=job.model.cache_dir, token=job.model.token
            )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        said = str(error).strip().split("\n")[0].rstrip(".")
        raise BadInput(
            f"Cannot load the data set {name if part is None else f'{name}/{part}'}.",
            why=f"{said}.",
            fix=f"with no network, {_files_to_give(job.data.task)}",
        ) from None


def _files_to_give(task: Task | None) -> str:
    """Return the sentence that says which files would do."""
    if task is None:
        return (
            "pass --train_file and --validation_file (csv, tsv, json or parquet) with a column "
            "'label' and one or two columns of texts; --test_file for --do_predict."
        )
    label = "a number" if task.is_regression else f"one of {', '.join(task.labels)} (or its number)"
    second = " --validation_mismatched_file is the second set." if task.evaluated else ""
    return (
        f"keep --task_name {task.name} and pass --train_file and --validation_file (csv, tsv, json "
        f"or parquet) with the columns {', '.join(task.columns)}, the label being {label}; "
        f"--test_file for --do_predict. GLUE's own downloads work as they are.{second}"
    )
