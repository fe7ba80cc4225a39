"""Get the rows of a job: from files, from a data set's folder, or from the hub.

csv, tsv, json and parquet files, plain or gzipped, are read without any data library. A tsv has no
quoting: every line is a row and a quote is text, as GLUE's files are written.
"""

from __future__ import annotations

import csv
import gzip
import io
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from anytrain.core import documents
from anytrain.core.errors import BadInput
from anytrain.core.notices import give_notice
from anytrain.recipes.glue.network import cached_if_unreachable
from anytrain.recipes.glue.tasks import GlueTask, Split, TextTable

if TYPE_CHECKING:
    from anytrain.recipes.glue.arguments import GlueJob

_GLUE = "nyu-mll/glue"
Named = tuple[tuple[str | None, TextTable], ...]


@dataclass(frozen=True, slots=True)
class GlueData:
    """The rows to learn from, and the sets to evaluate and to predict, by name."""

    train: TextTable | None
    evaluated: Named
    predicted: Named

    @property
    def labelled(self) -> TextTable | None:
        """The table that tells the labels: the one to learn from, else one to evaluate."""
        return self.train or next((table for _, table in self.evaluated), None)


def load(job: GlueJob) -> GlueData:
    """Return all rows of the sets that this job needs."""
    data, training = job.data, job.training
    get = _from_files(job) if data.files else _from_datasets(job)
    task = data.task
    evaluated = task.eval_splits if task else (Split("", "validation"),)
    predicted = task.predict_splits if task else (Split("", "test"),)

    def named(splits: tuple[Split, ...]) -> Named:
        found = [(split.name or None, get(split.source)) for split in splits]
        return tuple((name, table) for name, table in found if table is not None)

    return GlueData(
        train=get("train") if training.do_train else None,
        evaluated=named(evaluated) if training.do_eval else (),
        predicted=named(predicted) if training.do_predict else (),
    )


def _from_files(job: GlueJob) -> Callable[[str], TextTable | None]:
    """Return what reads the file of a split; MNLI's second sets may be missing."""
    bare = job.data.task.bare_columns if job.data.task else ()
    option = {
        "validation_matched": "validation_file",
        "test_matched": "test_file",
        "validation_mismatched": "validation_mismatched_file",
        "test_mismatched": "test_mismatched_file",
    }

    def get(split: str) -> TextTable | None:
        path = job.data.files.get(option.get(split, f"{split}_file"))
        return read(path, bare) if path else None

    return get


def _from_datasets(job: GlueJob) -> Callable[[str], TextTable | None]:
    """Return what takes a split out of a data set, which is loaded once."""
    name = job.data.dataset_name or _GLUE
    part = job.data.dataset_config_name if job.data.dataset_name else job.data.task_name
    found = _loaded(job, name, part)
    origin = name if part is None else f"{name}/{part}"

    def get(split: str) -> TextTable | None:
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


def _table(rows: Any, origin: str) -> TextTable:
    label = rows.features.get("label")
    names = tuple(getattr(label, "names", None) or ())
    return TextTable({name: list(rows[name]) for name in rows.column_names}, origin, names)


def _loaded(job: GlueJob, name: str, part: str | None) -> Any:
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


def _files_to_give(task: GlueTask | None) -> str:
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


KINDS = ("csv", "tsv", "json", "jsonl", "parquet")
_MOST_RAGGED = 0.01  # QQP's own download has a few broken lines in 364,000


def kind_of(path: str | Path) -> str:
    """Return the kind of a file by its name, or refuse it.

    >>> kind_of("train.tsv.gz")
    'tsv'
    """
    words = Path(path).name.lower().removesuffix(".gz").split(".")
    if len(words) > 1 and words[-1] in KINDS:
        return words[-1]
    raise BadInput(
        f"Cannot tell what kind of file {str(path)!r} is.",
        why=f"the kind is read from the name, and this one ends in none of {', '.join(KINDS)}.",
        fix="rename it, such as train.csv or train.tsv.gz.",
    )


def read(path: str | Path, bare_columns: Sequence[str] = ()) -> TextTable:
    """Return the columns of a file.

    `bare_columns` names the columns of a tsv that may come without a header line. Texts that
    look like numbers stay texts: the reader of a column decides what it holds.
    """
    kind, file = kind_of(path), Path(path)
    if not file.is_file():
        raise BadInput(
            f"Cannot read {str(path)!r}.",
            why="it is a folder." if file.is_dir() else "there is no such file.",
            fix="give the path of a file.",
        )
    try:
        columns = _columns(_bytes(file), kind, str(path), bare_columns)
    except (UnicodeDecodeError, EOFError, OSError) as error:
        raise _unreadable(path, str(error)) from None
    table = TextTable(columns, str(path))
    if len(table) == 0:
        raise _unreadable(path, "it holds no rows")
    return table


def _columns(raw: IO[bytes], kind: str, path: str, bare: Sequence[str]) -> dict[str, list[Any]]:
    if kind == "parquet":
        return _parquet(raw, path)
    # Only \n ends a row of a tsv or jsonl: a text may hold other line marks of Unicode.
    newline = "" if kind == "csv" else "\n"
    text = io.TextIOWrapper(raw, encoding="utf-8-sig", newline=newline)
    if kind in ("json", "jsonl"):
        return _by_column(_records(text, path), path)
    if kind == "tsv":
        lines: Iterator[list[str]] = (line.rstrip("\r\n").split("\t") for line in text)
        return _table_of(lines, path, bare)
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # long texts are no mistake
    try:
        return _table_of(csv.reader(text, strict=True), path, ())
    except csv.Error as error:
        raise _unreadable(path, f"it is not a valid csv: {error}") from None


def _bytes(file: Path) -> IO[bytes]:
    content = file.read_bytes()
    return io.BytesIO(gzip.decompress(content) if file.name.lower().endswith(".gz") else content)


def _table_of(
    rows: Iterable[list[str]], path: str, bare_columns: Sequence[str]
) -> dict[str, list[Any]]:
    """Read a header line and rows; a few rows of another length are left out, and told."""
    lines = iter(rows)
    header = next(lines, [])
    kept: list[list[str]] = []
    if _has_no_header(header, bare_columns):
        kept, header = [header], list(bare_columns)
    if len(set(header)) != len(header):
        raise _unreadable(path, "two columns have the same name, or there is no header line")
    ragged: list[int] = []
    for number, row in enumerate(lines, start=2):
        if len(row) == len(header):
            kept.append(row)
        elif row not in ([], [""]):
            ragged.append(number)
    _judge_ragged(ragged, len(kept), len(header), path)
    return {name: [row[place] for row in kept] for place, name in enumerate(header)}


def _has_no_header(first: Sequence[str], bare_columns: Sequence[str]) -> bool:
    if not bare_columns or len(first) != len(bare_columns):
        return False
    return first[list(bare_columns).index("label")].strip() in ("0", "1")


def _judge_ragged(ragged: Sequence[int], num_whole: int, width: int, path: str) -> None:
    if not ragged:
        return
    shown = ", ".join(map(str, ragged[:5])) + (", ..." if len(ragged) > 5 else "")
    if len(ragged) > _MOST_RAGGED * num_whole:
        is_one = len(ragged) == 1
        are = "is" if is_one else "are"
        which = f"line {shown} has" if is_one else f"lines {shown} have"
        raise BadInput(
            f"Cannot read {path!r}: {len(ragged)} of {num_whole + len(ragged)} rows {are} broken.",
            why=f"the header names {width} columns, and {which} another number.",
            fix=f"correct {'it' if is_one else 'them'}. A tsv has no quoting: a tab always begins "
            "a new column.",
        )
    give_notice(
        f"{path}: {len(ragged)} of {num_whole + len(ragged)} rows do not have {width} columns and "
        f"are left out (lines {shown}).",
        stacklevel=2,
    )


def _records(text: IO[str], path: str) -> list[dict[str, Any]]:
    """Return the objects of a list, of {"data": [...]}, or one a line."""
    whole = text.read()
    try:
        try:
            found = documents.from_json(whole)
        except ValueError:
            found = [documents.from_json(line) for line in whole.split("\n") if line.strip()]
    except ValueError as error:
        raise _unreadable(path, f"it is neither json nor one json object a line: {error}") from None
    if isinstance(found, dict):
        found = found["data"] if isinstance(found.get("data"), list) else [found]
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise _unreadable(path, "it holds something other than objects with a key for each column")
    return found


def _by_column(records: Sequence[dict[str, Any]], path: str) -> dict[str, list[Any]]:
    names = list(records[0]) if records else []
    for number, row in enumerate(records, start=1):
        if set(row) != set(names):
            odd = sorted(set(row) ^ set(names))
            raise _unreadable(path, f"row {number} differs from the first in {', '.join(odd)}")
    return {name: [row[name] for row in records] for name in names}


def _parquet(raw: IO[bytes], path: str) -> dict[str, list[Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise BadInput(
            f"Cannot read {path!r}.",
            why="parquet files are read with pyarrow, and it is not installed.",
            fix="pip install pyarrow, or give the rows as csv, tsv or json.",
        ) from None
    try:
        found: dict[str, list[Any]] = parquet.read_table(raw).to_pydict()
    except pyarrow.ArrowException as error:
        raise _unreadable(path, str(error)) from None
    return found


def _unreadable(path: object, why: str) -> BadInput:
    return BadInput(
        f"Cannot read {str(path)!r}.",
        why=f"{why}.",
        fix="give a csv, tsv, json or parquet file (or .gz) with UTF-8 text and named columns.",
    )
