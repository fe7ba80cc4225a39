"""Read csv, tsv, json and parquet files, plain or gzipped, without any data library.

A tsv has no quoting: every line is a row and a quote is text, as GLUE's files are written.
"""

from __future__ import annotations

import csv
import gzip
import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from anytrain.core import documents
from anytrain.core.errors import BadInput
from anytrain.core.notices import give_notice
from anytrain.recipes.glue.table import Table

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


def read(path: str | Path, bare_columns: Sequence[str] = ()) -> Table:
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
    table = Table(columns, str(path))
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
        raise BadInput(
            f"Cannot read {path!r}: {len(ragged)} of {num_whole + len(ragged)} rows are broken.",
            why=f"the header names {width} columns, and lines {shown} have another number.",
            fix="correct those lines. A tsv has no quoting: a tab always begins a new column.",
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
