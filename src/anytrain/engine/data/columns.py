"""The columns of a data set: those that a model takes, and rows and tables made of them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, overload

from torch import nn
from torch.utils.data import Dataset, IterableDataset

from anytrain.core.errors import BadInput

_LOGGER = logging.getLogger(__name__)
_POSITIONS = ("start_positions", "end_positions")
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def base_model(model: nn.Module) -> nn.Module:
    """Return the model that adapters were put on, or the model itself."""
    if callable(getattr(model, "get_base_model", None)):
        base: nn.Module = model.get_base_model()  # type: ignore[operator]  # it is callable
        return base
    if hasattr(model, "peft_config") and type(model).__module__.split(".")[0] == "peft":
        inner: nn.Module = model.base_model.model  # type: ignore[assignment,union-attr]  # a mixed one
        return inner
    return model


def forward_names(model: nn.Module) -> list[str]:
    """Return the names of what the model's forward takes, below any adapters."""
    return list(inspect.signature(base_model(model).forward).parameters)


def label_names(model: nn.Module) -> list[str]:
    """Return the names of what forward takes as labels.

    They are those with "label" in them, and an answer's positions where the model's class is one
    for question answering.
    """
    kind = type(base_model(model))
    answers = _POSITIONS if "QuestionAnswering" in kind.__name__ else ()
    names = inspect.signature(kind.forward).parameters
    return [name for name in names if "label" in name or name in answers]


def can_return_loss(model: nn.Module) -> bool:
    """Whether the model returns its loss by itself, with no labels (`return_loss=True`)."""
    names = inspect.signature(type(base_model(model)).forward).parameters
    return "return_loss" in names and names["return_loss"].default is True


def kept_columns(model: nn.Module, labels: Sequence[str]) -> list[str] | None:
    """Return the columns that reach the model; None means all.

    They are what forward takes and the labels under any name that collating knows. A forward
    that names nothing (`*args, **kwargs` alone) takes all.
    """
    parameters = inspect.signature(base_model(model).forward).parameters.values()
    if parameters and all(parameter.kind in _ANY for parameter in parameters):
        return None
    return list(dict.fromkeys([*forward_names(model), "label", "label_ids", *labels]))


def column_names(dataset: Any) -> list[Any]:
    """Return the names of a dataset's columns, by its first sample where it does not tell them."""
    told = getattr(dataset, "column_names", None)
    if told is not None:
        return list(told)
    try:
        is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
        first = next(iter(dataset)) if is_stream else dataset[0]
    except Exception:  # noqa: BLE001  whoever asks has another error to explain
        return []
    return list(first) if isinstance(first, Mapping) else []


class DropColumns:
    """A collator that leaves out what the model does not take, and says so once."""

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        keep: Sequence[str],
        *,
        model_name: str = "the model",
        description: str | None = None,
        takes: Sequence[str] = (),
    ) -> None:
        self.collate = collate
        self.takes = tuple(takes or keep)
        self.keep = frozenset(keep)
        self.model_name = model_name
        self.description = description
        self.has_told = False

    def __call__(self, features: list[Any]) -> Any:
        """Return the batch of what is kept; samples that are no dicts are passed on whole."""
        if isinstance(features, Rows):
            self._kept(dict.fromkeys(features.names))  # tells, or refuses
            return self.collate(features.only(self.keep))
        keep = self.keep
        return self.collate(
            [  # a copy of each: collators take labels out
                dict(each) if type(each) is dict and each.keys() <= keep else self._kept(each)
                for each in features
            ]
        )

    def _kept(self, feature: Any) -> Any:
        if not isinstance(feature, Mapping):
            return feature
        kept = {key: value for key, value in feature.items() if key in self.keep}
        if not self.has_told and len(kept) < len(feature):
            self.has_told = True
            dropped = [key for key in feature if key not in self.keep]
            if not kept:
                raise _nothing_left(dropped, self.takes, self.model_name, self.description)
            _tell(dropped, self.model_name, self.description)
        return kept


def drop_dataset_columns(
    dataset: Any,
    keep: Sequence[str],
    *,
    model_name: str = "the model",
    description: str | None = None,
    takes: Sequence[str] = (),
) -> Any:
    """Return a dataset that has columns without those that are not kept.

    The dataset is one with `column_names` and `remove_columns`, as those of `datasets`. What the
    model's forward `takes` is named where nothing is left; `keep` may hold more.
    """
    columns = list(dataset.column_names or ())
    dropped = [column for column in columns if column not in set(keep)]
    if not dropped:
        return dataset
    if len(dropped) == len(columns):
        raise _nothing_left(dropped, takes or keep, model_name, description)
    _tell(dropped, model_name, description)
    return dataset.remove_columns(dropped)


def _nothing_left(
    dropped: Sequence[str], takes: Sequence[str], model_name: str, description: str | None
) -> BadInput:
    taken = ", ".join(name for name in takes if name not in ("args", "kwargs"))
    return BadInput(
        f"No column of the {_set(description)} reaches {model_name}.",
        why=f"it has {', '.join(map(str, dropped))}, and forward takes {taken}.",
        fix="rename the columns, or pass remove_unused_columns=False and a data_collator "
        "that makes what forward takes.",
    )


def _set(description: str | None) -> str:
    return f"{description.lower()} set" if description else "data set"


def _tell(dropped: Sequence[str], model_name: str, description: str | None) -> None:
    _LOGGER.info(
        "Columns of the %s that %s.forward does not take are left out: %s.",
        _set(description),
        model_name,
        ", ".join(map(str, dropped)),
    )


class Rows(Sequence[dict[str, Any]]):
    """The samples of a batch: dicts where one is looked at, and the data set's columns until then.

    A data set returns it from `__getitems__`. A collator that knows the data set makes its batch
    of whole columns; to every other one it is a list of dicts.
    """

    __slots__ = ("names", "numbers", "source")

    def __init__(self, source: Any, numbers: Sequence[int], names: Collection[str]) -> None:
        self.source = source
        self.numbers = numbers
        self.names = names

    def only(self, keep: Collection[str]) -> Rows:
        """Return the same samples with the columns that are kept."""
        return Rows(self.source, self.numbers, [name for name in self.names if name in keep])

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, place: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, place: slice) -> Rows: ...

    def __getitem__(self, place: int | slice) -> dict[str, Any] | Rows:
        if isinstance(place, slice):
            return Rows(self.source, self.numbers[place], self.names)
        row = self.source[self.numbers[place]]
        return {name: row[name] for name in self.names}


class Table(Dataset[dict[str, Any]]):
    """The rows of columns that are given by name.

    >>> rows = Table({"x": [1, 2, 3], "labels": [0, 1, 0]})
    >>> len(rows), rows[1]
    (3, {'x': 2, 'labels': 1})
    """

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self.columns = dict(columns)
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) != 1:
            told = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise BadInput(
                "Cannot make rows of these columns.",
                why=f"they must be equally long: {told}." if lengths else "there is none.",
                fix="give every sample a value in each column.",
            )

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self.columns.items()}


def as_rows(dataset: Any) -> Any:
    """Return what can be asked for a row: a dict of columns as a `Table`, all else as it is."""
    return Table(dataset) if isinstance(dataset, dict) else dataset
