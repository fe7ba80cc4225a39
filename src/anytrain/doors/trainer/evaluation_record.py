"""Write down what an evaluation showed, beside the run's other records.

Nothing here may stop or change an evaluation: what goes wrong is one notice. A data set may name
its classes (`class_names`) and the file that its evaluations go to (`evaluated_as`), and say what
a sample is (`in_words(index)`).

INVARIANT: for its inputs in words no row is asked for that does not lie in memory already. To read
one runs the user's code, in a process it may not expect: it may move generators, share a file with
the workers, or take its time. Known are lists, tuples and columns of rows, tensors, tables of
`datasets` (without what they would make of a row), and parts of these. Any other data set may
offer `in_words(index)`, which returns texts by name. The texts of a row are shown, else its tokens
decoded, else what kind of numbers it holds.
"""

from __future__ import annotations

import math
import re
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import (
    ConcatDataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from anytrain.core.notices import give_notice
from anytrain.doors.trainer.override_points import OverridePoints
from anytrain.engine import objective
from anytrain.engine.data.columns import Table, as_rows, base_model
from anytrain.engine.data.seeded import hold, put_back, seed_all
from anytrain.engine.data.shard import IterableBatches
from anytrain.engine.prepared.loader import PreparedLoader
from anytrain.engine.recording.evaluation import RankVerdicts, Verdicts, figures, join, store
from anytrain.engine.tree import batch_size, take_rows

if TYPE_CHECKING:
    from anytrain.doors.trainer.trainer import Trainer

LONGEST = 500
"""The characters that are shown of one text."""
_MOST_COLUMNS = 8
_MOST_VALUES = 6
_MOST_SECONDS = 2.0
_HELD = (list, tuple, np.ndarray, torch.Tensor)
_LABELS = ("label", "labels", "label_ids")
_NO_INPUTS = (*_LABELS, "attention_mask", "token_type_ids", "special_tokens_mask")
_UNNAMED = re.compile(r"LABEL_\d+")


class SampleRecorder:
    """What looks on while an evaluation goes.

    With `gives_scores`, a step that is asked for its loss alone is asked for its scores too, as
    long as they are of use: nobody else sees them.
    """

    def __init__(
        self, loader: Any, verdicts: Verdicts, *, gives_scores: bool, sees_repeats: bool
    ) -> None:
        self.loader, self.verdicts = loader, verdicts
        self._gives_scores, self._sees_repeats = gives_scores, sees_repeats
        self._num_rows = 0

    def step(
        self, predict: Callable[[bool], Any], only_loss: bool, num_own: int | None
    ) -> tuple[Any, Any, Any]:
        """Return the loss, scores and labels that a step gives, asked for its loss alone or not.

        `num_own` of the batch's rows count, the first ones.
        """
        more = only_loss and self._gives_scores and self.verdicts.is_looking
        loss, scores, labels = predict(only_loss and not more)
        if num_own != 0:
            self.verdicts.look(*self._counted(scores, labels, num_own))
        return (loss, None, None) if more else (loss, scores, labels)

    def _counted(self, scores: Any, labels: Any, num_own: int | None) -> tuple[Any, Any]:
        """Return the rows that count, where repeats have kept their labels."""
        held = batch_size(labels)
        if num_own is None or held is None or not self._sees_repeats:
            return scores, labels
        counted: tuple[Any, Any] = take_rows((scores, labels), slice(0, num_own), held)
        return counted

    def end_batch(self, num_rows: int) -> None:
        """Take note of how many rows the evaluation has counted so far."""
        new, self._num_rows = num_rows - self._num_rows, num_rows
        self.verdicts.end_batch(new)


def look_on(trainer: Trainer, loader: Any, description: str) -> SampleRecorder:
    """Return what looks on at an evaluation; it sees nothing where nothing is to be written.

    `owner` is the class whose step is known to do no more work where it gives its scores too;
    somebody's own may generate, for example.
    """
    writes = description == "Evaluation" and trainer.args.output_dir is not None
    verdicts = Verdicts(
        shifted=objective.shifts_labels(base_model(trainer.model)),
        is_looking=writes and not trainer._session.observer.is_watching,
    )
    return SampleRecorder(
        loader,
        verdicts,
        gives_scores=_is_ours(trainer, "prediction_step", OverridePoints),
        sees_repeats=trainer._parts.steps.keeps_repeats(),
    )


def note(trainer: Trainer, looking: SampleRecorder | None, asked: Any, prefix: str) -> None:
    """Write the file of an evaluation that is over; every rank calls it, the main one writes.

    `asked` is the data set that `evaluate` was given, or its name.
    """
    if looking is None:
        return
    share, failure = None, looking.verdicts.failure
    loader = looking.loader
    try:
        share = looking.verdicts.share(_samples_of(loader))
    except Exception as error:  # noqa: BLE001  every rank has to come to the gathering
        failure = f"{type(error).__name__}: {error}"
    parts = trainer._session.world.gather_object((share, failure))
    if not trainer.is_world_process_zero():
        return
    failure = next((said for _, said in parts if said is not None), None)
    try:
        joined = join([part for part, _ in parts]) if failure is None else None
        if joined is not None:
            _write(trainer, _in_order(joined, loader), _evaluated(trainer, asked, loader), prefix)
    except Exception as error:  # noqa: BLE001  see above
        failure = f"{type(error).__name__}: {error}"
    if failure is not None:
        give_notice(
            f"What the evaluation showed could not be written down: {failure}. Its metrics are not "
            "affected.",
            stacklevel=3,
        )


def _write(trainer: Trainer, shown: RankVerdicts, dataset: Any, prefix: str) -> None:
    found = figures(shown, _class_names(trainer, dataset, shown.num_classes))
    _add_inputs(found, dataset, trainer.processing_class)
    place: dict[str, Any] = {"step": None, "epoch": None}
    if trainer._parts.recorder.has_trained():
        place = {"step": trainer.state.global_step, "epoch": trainer.state.epoch}
        if trainer._parts.recorder.weights_of is not None:
            place["of"] = trainer._parts.recorder.weights_of
    split = prefix.removeprefix("eval_")
    if split == "eval":
        split = str(getattr(dataset, "evaluated_as", None) or split)
    folder = Path(trainer._get_output_dir(trainer._trial))
    store(folder, split, {**place, "time": round(time.time(), 3), **found})


def _add_inputs(found: dict[str, Any], dataset: Any, tokenizer: Any) -> None:
    """Show the inputs of the worst samples; what goes wrong with them costs them alone."""
    try:
        inputs = _inputs(found, dataset, tokenizer)
    except Exception:  # noqa: BLE001  the figures are worth more than the texts beside them
        return
    for sample, texts in zip(found["worst"], inputs, strict=False):
        sample["inputs"] = texts


def _inputs(found: dict[str, Any], dataset: Any, tokenizer: Any) -> list[dict[str, str]]:
    """Return the inputs of the worst samples, where it is certain that they are these samples'."""
    worst, names = found["worst"], found.get("classes", [])
    rows = look_up(dataset, [sample["index"] for sample in worst], tokenizer)
    inputs: list[dict[str, str]] = []
    for sample in worst:
        looked = rows.get(sample["index"])
        if looked is None:
            inputs.append({})
            continue
        if _differs(label_of(looked.row), sample["label"], names):
            return []
        word = token(looked.row, sample["token"], tokenizer) if "token" in sample else None
        inputs.append(looked.inputs if word is None else {**looked.inputs, "token": word})
    return inputs


def _differs(held: Any, seen: Any, names: Sequence[str]) -> bool:
    """Whether a row has another label than its sample had: then it is another row."""
    try:
        number = float(held)
    except (TypeError, ValueError, RuntimeError):
        return False  # a name, or labels of many tokens
    if isinstance(seen, str):
        return seen in names and names.count(seen) == 1 and names.index(seen) != number
    return seen is not None and not math.isclose(number, seen, rel_tol=1e-5, abs_tol=1e-5)


# -- which samples these were ---------------------------------------------------------------------


def _evaluated(trainer: Trainer, asked: Any, loader: Any) -> Any:
    """Return the data set whose rows were evaluated, with all its columns where they are known."""
    if not all(
        _is_ours(trainer, name, OverridePoints)
        for name in ("get_eval_dataloader", "_get_dataloader")
    ):
        return loader.dataset
    if isinstance(asked, str):
        return trainer.eval_dataset[asked]
    return trainer.eval_dataset if asked is None else asked


def _is_ours(trainer: Any, name: str, owner: type) -> bool:
    """Whether nobody has put something else in a method's place."""
    return name not in vars(trainer) and getattr(type(trainer), name) is getattr(owner, name)


def _walks_in_order(loader: Any) -> bool:
    if not isinstance(loader, PreparedLoader):
        return False
    if isinstance(loader.dataset, IterableDataset):
        return not isinstance(loader.dataset, IterableBatches) and loader.num_workers <= 1
    return isinstance(loader.get_sampler(), SequentialSampler)


def _samples_of(loader: Any) -> Callable[[int], Sequence[Any] | None] | None:
    """Return what knows the samples of this rank's batches, where they follow no plain order."""
    if not isinstance(loader, PreparedLoader) or _walks_in_order(loader):
        return None
    is_dealt_whole = loader.walk.dispatching and loader.walk.world.size > 1
    return None if is_dealt_whole or loader.walk.seeded is None else loader.samples_of


def _in_order(shown: RankVerdicts, loader: Any) -> RankVerdicts:
    if not _walks_in_order(loader):
        return shown
    return replace(shown, samples=range(shown.rows.shape[1]))


# -- what they are called -------------------------------------------------------------------------


def _class_names(trainer: Trainer, dataset: Any, num_classes: int) -> list[str]:
    """Return the classes' names: the model's where it has real ones, else the data set's."""
    config = getattr(base_model(trainer.model), "config", None)
    named = getattr(config, "id2label", None) or {}
    found = [str(named[number]) for number in range(num_classes) if number in named]
    if len(found) == num_classes and not all(map(_UNNAMED.fullmatch, found)):
        return found
    own = None
    with suppress(Exception):  # what a data set's attributes do is its own affair
        own = _named_by(dataset)
    return [str(name) for name in own] if own and len(own) == num_classes else []


def _named_by(dataset: Any) -> Any:
    own = getattr(dataset, "class_names", None)
    for column in ("label", "labels"):
        features: Any = getattr(dataset, "features", None)
        feature = features.get(column) if hasattr(features, "get") else None
        own = own or getattr(feature, "names", None)
    return own


# -- a sample in words ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Looked:
    """A row that was looked up, and its inputs in words."""

    row: Any
    inputs: dict[str, str]


def look_up(dataset: Any, places: Iterable[int | None], tokenizer: Any = None) -> dict[int, Looked]:
    """Return some samples by their indices; none of a data set whose rows are not at hand.

    A slow `in_words` gives those that came in time. Nothing that it draws moves the process's own
    generators.
    """
    at = _at_hand(as_rows(dataset) if type(dataset) is dict else dataset, tokenizer)
    if at is None:
        return {}
    found: dict[int, Looked] = {}
    before, late = hold(), time.monotonic() + _MOST_SECONDS
    try:
        seed_all(0)
        for place in places:
            if place is not None and place >= 0 and time.monotonic() < late:
                found[place] = at(place)
    finally:
        put_back(before)
    return found


def _at_hand(dataset: Any, tokenizer: Any) -> Callable[[int], Looked] | None:
    """Return what gives a data set's samples from memory, or from its own words; None: nothing."""
    own = getattr(dataset, "in_words", None)
    if callable(own):
        return lambda place: Looked(None, {str(n): _cut(str(t)) for n, t in own(place).items()})
    if type(dataset) is Subset:
        inner, places = _at_hand(dataset.dataset, tokenizer), dataset.indices
        return None if inner is None else lambda place: inner(int(places[place]))
    if type(dataset) is ConcatDataset:
        return _of_several(dataset, tokenizer)
    row = _row_of(dataset)
    if row is None:
        return None
    return lambda place: Looked(found := row(place), in_words(found, tokenizer))


def _of_several(dataset: ConcatDataset[Any], tokenizer: Any) -> Callable[[int], Looked] | None:
    parts = [_at_hand(part, tokenizer) for part in dataset.datasets]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    starts = [0, *dataset.cumulative_sizes]

    def at(place: int) -> Looked:
        part = bisect_right(starts, place) - 1
        return known[part](place - starts[part])

    return at


def _row_of(dataset: Any) -> Callable[[int], Any] | None:
    """Return what gives a row that lies in memory. A class of somebody's own may do anything."""
    if type(dataset) in (list, tuple):
        return lambda place: dataset[place]
    if type(dataset) is Table:
        held = dataset.columns.values()
        is_plain = all(type(column) in _HELD for column in held)
        return (lambda place: dataset[place]) if is_plain else None
    if type(dataset) is TensorDataset:
        is_plain = all(type(tensor) is torch.Tensor for tensor in dataset.tensors)
        return (lambda place: dataset[place]) if is_plain else None
    tables = sys.modules.get("datasets")
    if tables is not None and type(dataset) is tables.Dataset:
        return lambda place: _arrow_row(dataset, place)
    return None


def _arrow_row(table: Any, place: int) -> Any:
    """Return a row as it is stored: neither a format, nor a transform, nor a decoder runs."""
    from datasets.formatting import query_table

    return query_table(table.data, place, indices=table._indices).to_pylist()[0]


def in_words(row: Any, tokenizer: Any = None) -> dict[str, str]:
    """Return the inputs of one row as texts by name.

    >>> in_words({"text": "<b>good</b>", "input_ids": [3, 4], "label": 1})
    {'text': '<b>good</b>'}
    >>> in_words({"x": [0.5, 1.5, 2.5], "labels": 1})
    {'x': '3 numbers: 0.5, 1.5, 2.5'}
    """
    if isinstance(row, (list, tuple)):  # the last of a tuple is its label
        row = {str(place): value for place, value in enumerate(row[:-1] or row)}
    if not isinstance(row, Mapping):
        return {"input": _value(row)}
    texts = {name: text for name, value in row.items() if (text := _text(value)) is not None}
    if texts:
        return _first_columns(texts)
    tokens = row.get("input_ids")
    if tokens is not None and callable(getattr(tokenizer, "decode", None)):
        said = tokenizer.decode(_listed(tokens), skip_special_tokens=True)
        return {"text": _cut(str(said).strip())}
    others = {name: value for name, value in row.items() if name not in _NO_INPUTS}
    return _first_columns({name: _value(value) for name, value in others.items()})


def token(row: Any, place: int, tokenizer: Any) -> str | None:
    """Return one token of a row in words; None where nobody can tell which it is."""
    tokens = row.get("input_ids") if isinstance(row, Mapping) else None
    if tokens is None or not callable(getattr(tokenizer, "decode", None)):
        return None
    known = _listed(tokens)
    is_there = place < len(known) and getattr(tokenizer, "padding_side", "right") == "right"
    return _cut(str(tokenizer.decode([known[place]])).strip()) if is_there else None


def label_of(row: Any) -> Any:
    """Return a row's label; None where it has none."""
    if isinstance(row, Mapping):
        return next((row[name] for name in _LABELS if name in row), None)
    return row[-1] if isinstance(row, (list, tuple)) and len(row) > 1 else None


def _first_columns(columns: Mapping[Any, str]) -> dict[str, str]:
    return {str(name): _cut(text) for name, text in islice(columns.items(), _MOST_COLUMNS)}


def _text(value: Any) -> str | None:
    """Return a text, or words in a row; None where it is something else."""
    if isinstance(value, str):
        return value
    words = isinstance(value, (list, tuple)) and value and all(isinstance(v, str) for v in value)
    return " ".join(value) if words else None


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _listed(values: Any) -> list[Any]:
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _value(value: Any) -> str:
    """Return what a value is: a number, or the shape of many and the first of them."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
    if not isinstance(value, (*_HELD, np.generic, bool, int, float)):
        # A picture, for example, would be read from its file.
        return _cut(f"{type(value).__name__} {getattr(value, 'size', '')}".strip())
    try:
        numbers = np.asarray(value)
    except (TypeError, ValueError):
        return type(value).__name__
    if numbers.dtype.kind not in "biuf":
        return type(value).__name__
    first = ", ".join(f"{number:.4g}" for number in numbers.reshape(-1)[:_MOST_VALUES].tolist())
    if numbers.ndim == 0:
        return first
    many = f"{len(numbers)} numbers" if numbers.ndim == 1 else " × ".join(map(str, numbers.shape))
    return f"{many}: {first}{', …' if numbers.size > _MOST_VALUES else ''}"
