"""Tokenize rows once, keep them in flat arrays, and pad them batch by batch.

Padding is the collator's: rows of 128 places would take several times the memory, and the
batches come out the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from anytrain.core import environment
from anytrain.core.errors import BadInput
from anytrain.core.notices import give_notice
from anytrain.engine.data.cache import ArrayCache, Arrays, CachedArrays
from anytrain.recipes.glue.tasks import GlueTask, Labels, TextTable, columns_of, texts_of

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset

    from anytrain.engine.data.columns import Rows

    MapStyle = Dataset[dict[str, Any]]
else:
    MapStyle = object  # tokenizing need not wait for torch

Array: TypeAlias = np.ndarray[Any, Any]

_ROWS_AT_ONCE = 4096
_FILL = {"attention_mask": 0, "special_tokens_mask": 1}
_BEGINS = ""  # no column of a tokenizer's has this name


class Encoded(MapStyle):
    """Tokenized rows: each column is one array of numbers, with where each row begins."""

    draws_nothing = True  # a row is what it is, whatever the seed
    loads_alike = True  # and whoever reads it

    def __init__(self, columns: Mapping[str, Sequence[Any]], labels: Any = None) -> None:
        self._take(_flattened(columns), labels)

    @classmethod
    def of(cls, arrays: Arrays, labels: Any = None, *, was_kept: bool = False) -> Encoded:
        """Return rows whose columns are flat already."""
        made = cls.__new__(cls)
        made._take(arrays, labels, was_kept)
        return made

    def _take(self, arrays: Arrays, labels: Any, was_kept: bool = False) -> None:
        self.columns = {name: array for name, array in arrays.items() if name != _BEGINS}
        self.begins = arrays[_BEGINS]
        self.labels: Any = None if labels is None else np.asarray(labels)
        self.was_kept = was_kept
        """Whether the rows were on disk, from a run before."""
        self.texts: dict[str, Sequence[str]] = {}
        """What was tokenized, by its columns' names."""
        self.evaluated_as: str | None = None
        """The name of this set's evaluations, where it is one of several."""

    def in_words(self, index: int) -> dict[str, str]:
        """Return the texts of a row by their columns' names, where they are known."""
        return {name: texts[index] for name, texts in self.texts.items()}

    @property
    def lengths(self) -> Array:
        """How many tokens each row has."""
        lengths: Array = np.diff(self.begins)
        return lengths

    def __len__(self) -> int:
        return len(self.begins) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(len(self))[index]
        begin, end = self.begins[index], self.begins[index + 1]
        row: dict[str, Any] = {name: flat[begin:end] for name, flat in self.columns.items()}
        if self.labels is not None:
            row["label"] = self.labels[index].item()
        return row

    def __getitems__(self, indices: Sequence[int]) -> Rows:
        """Return the rows without taking them apart: a collator may want them as columns."""
        from anytrain.engine.data.columns import Rows

        names = (*self.columns, *(() if self.labels is None else ("label",)))
        return Rows(self, indices, names)


@dataclass(frozen=True, slots=True)
class Pad:
    """Make a batch of rows: as long as the longest, or as `length` where that is given."""

    draws_nothing: ClassVar[bool] = True
    loads_alike: ClassVar[bool] = True
    token: int
    segment: int = 0
    left: bool = False
    length: int | None = None
    multiple: int = 1
    most: int | None = None
    """The most places that the model has: nothing is rounded up beyond it."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return the rows as tensors, with `labels` where the rows have a label."""
        import torch

        fill = {"input_ids": self.token, "token_type_ids": self.segment, **_FILL}
        begins, counts, columns = _flat_rows(rows)
        grid, is_text = self._grid(begins, counts)
        batch: dict[str, torch.Tensor] = {}
        for name, flat in columns.items():
            if name == "label":
                dtype = torch.int64 if flat.dtype.kind in "iub" else torch.float32
                batch["labels"] = torch.from_numpy(flat).to(dtype)
                continue
            found = flat.take(grid, mode="clip")  # outside of the text it is filled below
            batch[name] = torch.from_numpy(np.where(is_text, found, np.int64(fill.get(name, 0))))
        return batch

    def _grid(self, begins: Array, counts: Array) -> tuple[Array, Array]:
        """Return where each place of the batch is read from, and whether there is text."""
        longest = int(counts.max())
        if self.length is not None and longest > self.length:
            raise BadInput(
                f"Cannot pad a row of {longest} tokens to {self.length}.",
                why="it is longer than that.",
                fix="cut the rows when they are tokenized.",
            )
        width = -(-(self.length or longest) // self.multiple) * self.multiple
        if self.most is not None:
            width = max(longest, min(width, self.most))
        if self.left:
            across = np.arange(width) - (width - counts)[:, None]
            return begins[:, None] + across, across >= 0
        across = np.arange(width)
        return begins[:, None] + across, across < counts[:, None]


def _flat_rows(rows: Sequence[Mapping[str, Any]]) -> tuple[Array, Array, dict[str, Array]]:
    """Return where each row begins, how long it is, the columns that it lies in, and labels."""
    from anytrain.engine.data.columns import Rows

    if isinstance(rows, Rows) and isinstance(rows.source, Encoded):
        source, numbers = rows.source, np.asarray(rows.numbers)
        begins = source.begins[numbers]
        columns = {n: source.columns[n] for n in rows.names if n != "label"}
        if "label" in rows.names and source.labels is not None:
            columns["label"] = source.labels[numbers]
        return begins, source.begins[numbers + 1] - begins, columns
    names = [name for name in rows[0] if name != "label"]
    counts = np.array([len(row[names[0]]) for row in rows])
    columns = {name: np.concatenate([row[name] for row in rows]) for name in names}
    if "label" in rows[0]:
        columns["label"] = np.array([row["label"] for row in rows])
    return np.cumsum(counts) - counts, counts, columns


def encode(
    table: TextTable,
    task: GlueTask | None,
    labels: Labels | None,
    tokenizer: Any,
    max_length: int,
    cache: ArrayCache | None = None,
) -> Encoded:
    """Return the table's rows as numbers; without `labels` they are not looked at.

    With a `cache`, rows that were tokenized before in the same way are taken from there.
    """
    columns = columns_of(table, task)
    names = [name for name in (columns.first, columns.second) if name]
    texts = [texts_of(table, name) for name in names]
    numbers = None
    if labels is not None and columns.label is not None:
        numbers = labels.numbers(table.columns[columns.label], table.origin)
    key = None if cache is None else _key(texts, tokenizer, max_length)
    if cache is None or key is None:
        kept = CachedArrays(_tokenized(texts, tokenizer, max_length), False)
    else:
        kept = cache.get(key, lambda: _tokenized(texts, tokenizer, max_length))
    encoded = Encoded.of(kept.arrays, numbers, was_kept=kept.was_there)
    encoded.texts = dict(zip(names, texts, strict=True))
    return encoded


def token_cache(*, fresh: bool) -> ArrayCache:
    """Return where tokenized rows are kept; `fresh` replaces what is there, once per host."""
    # The other ranks of this host may take what is there: it is the same by its key.
    first = environment.read().place.local_rank == 0
    return ArrayCache(environment.cache_folder() / "tokens", fresh=fresh and first)


def _tokenized(texts: Sequence[Sequence[str]], tokenizer: Any, max_length: int) -> Arrays:
    found: dict[str, list[Sequence[int]]] = {}
    for begin in range(0, len(texts[0]), _ROWS_AT_ONCE):
        part = [text[begin : begin + _ROWS_AT_ONCE] for text in texts]
        for name, rows in tokenizer(*part, truncation=True, max_length=max_length).items():
            found.setdefault(name, []).extend(rows)
    return _flattened(found)


def _flattened(columns: Mapping[str, Sequence[Any]]) -> Arrays:
    """Return each column's rows one after the other, and where each begins."""
    arrays: Arrays = {
        name: np.concatenate(rows, dtype=np.int32)
        if len(rows) and isinstance(rows[0], np.ndarray)
        else np.fromiter(chain.from_iterable(rows), dtype=np.int32)
        for name, rows in columns.items()
    }
    lengths = [len(row) for row in next(iter(columns.values()))]
    return {**arrays, _BEGINS: np.cumsum([0, *lengths], dtype=np.int64)}


def _key(texts: Sequence[Sequence[str]], tokenizer: Any, max_length: int) -> str | None:
    """Return a name for what tokenizing would give; None where a tokenizer cannot be named."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # one written in Python: its code is part of what it does
        return None
    import tokenizers
    import transformers

    does = json.loads(backend.to_str())
    for state in ("truncation", "padding"):  # left by the last call, and told anew in each
        does.pop(state, None)
    asked = {
        "class": f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}",
        "columns": list(tokenizer.model_input_names),
        "cuts": tokenizer.truncation_side,
        "length": max_length,
        "versions": [tokenizers.__version__, transformers.__version__],
    }
    digest = hashlib.blake2b(digest_size=20)
    for part in (does, asked, *texts):
        text = json.dumps(part).encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()


def fitting_length(asked: int, tokenizer: Any, config: Any, *, pairs: bool) -> int:
    """Return how long rows may get: what was asked for, or what the model can read."""
    places = getattr(config, "max_position_embeddings", None)
    limits = [tokenizer.model_max_length, *([places] if isinstance(places, int) else [])]
    limit = min(limits)
    needed = tokenizer.num_special_tokens_to_add(pair=pairs) + (2 if pairs else 1)
    if asked < needed:
        raise BadInput(
            f"Cannot use --max_seq_length {asked}.",
            why=f"this tokenizer needs at least {needed} places for "
            f"{'a pair' if pairs else 'a sentence'}.",
            fix="pass --max_seq_length 128, or the length of your texts.",
        )
    if asked > limit:
        give_notice(
            f"--max_seq_length {asked} is more than the {limit} places this model has: "
            f"{limit} are used.",
            stacklevel=2,
        )
    return int(min(asked, limit))
