"""What a tracker is, and what all of ours share.

A user's own tracker is a subclass of GeneralTracker with `name`, `requires_logging_directory`
and `tracker`; everything else has a default.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from anytrain.core.errors import BadInput, BadType, Unsupported

REQUIRED = ("name", "requires_logging_directory", "tracker")


class LacksMembers(BadType, NotImplementedError):
    """A tracker class lacks required members; HF's libraries raise a NotImplementedError there."""


class GeneralTracker:
    """Record a run somewhere; subclass it to record somewhere new.

    `name` is the word that `get_tracker` takes, `requires_logging_directory` says whether it
    writes into a folder, and `tracker` is the library's own object. Each may be a class
    attribute, a property, or set on the instance before `super().__init__()` is called.
    """

    main_process_only = True
    """Whether only the main process may write; read by `on_main_process`."""

    if TYPE_CHECKING:
        # Not defined at run time, so that a subclass which forgets one can be told.
        @property
        def name(self) -> str: ...
        @property
        def requires_logging_directory(self) -> bool: ...
        @property
        def tracker(self) -> Any: ...

    def __init__(self, _blank: bool = False) -> None:
        if not _blank:
            check_members(self)

    def go_on(self, run: str, step: int) -> None:
        """Let `start` open the run that `kept_as` named, which goes on from that step."""

    def kept_as(self) -> str | None:
        """Return what finds the open run again; None if there is no way back into it."""
        return None

    def start(self) -> None:
        """Open the run; called once, on the main process, before anything is logged."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the run's settings."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values at a step."""

    def finish(self) -> None:
        """Close the run."""

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record lists of images by name; the trackers that cannot say so."""
        self._refuse("images")

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Record a table from columns and rows, or a dataframe; the trackers that cannot say so."""
        self._refuse("tables")

    def _refuse(self, what: str) -> None:
        # A bare GeneralTracker is what ranks that track nothing hold: it takes any call.
        if type(self) is not GeneralTracker:
            raise Unsupported(
                f"The tracker {self.name!r} does not record {what}.",
                why=f"{type(self).__name__} has no way to store them.",
                fix="use a tracker that does, such as wandb or trackio, or log numbers instead.",
            )


class RunTracker(GeneralTracker):
    """A tracker whose library hands out a run, which takes values and tables of any kind.

    It is of the project `run_name`; other arguments go to the library's `init`.
    """

    module: str
    """The library; a subclass of the tracker may have another name than it."""
    requires_logging_directory = False
    run: Any

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self._library = library(self.module, self.name)
        self.run_name = run_name
        self._options = {"project": run_name, **kwargs}

    @property
    def tracker(self) -> Any:
        return self.run

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values, the library's own types among them."""
        self.run.log(as_numbers(values), step=step, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        table = self._library.Table(columns=columns, data=data, dataframe=dataframe)
        self.run.log({table_name: table}, step=step, **kwargs)


def check_members(tracker: GeneralTracker) -> None:
    """Refuse a tracker that lacks a required member, naming it."""
    # dir() and not hasattr(): `tracker` is often a property that only works after start().
    there = dir(tracker)
    missing = [name for name in REQUIRED if name not in there]
    if missing:
        kind = type(tracker).__name__
        raise LacksMembers(
            f"The tracker class {kind} lacks {' and '.join(map(repr, missing))}.",
            why=f"every GeneralTracker has {', '.join(map(repr, REQUIRED))}.",
            fix=f"define {' and '.join(missing)} in {kind}, as class attributes or properties.",
        )


def is_installed(module: str) -> bool:
    """Whether a library can be imported; it is not loaded to find out."""
    spec = find_spec(module)
    # wandb writes a folder named `wandb` where it runs: such a folder is importable as an empty
    # namespace, which has no origin.
    return spec is not None and spec.origin is not None


def library(module: str, tracker: str) -> Any:
    """Return a tracking library's module, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise not_installed(tracker, f"{type(error).__name__}: {error}") from error


def not_installed(tracker: str, why: str) -> BadInput:
    """Return the error for a tracker whose library is absent."""
    return BadInput(
        f"Cannot log with {tracker!r}.",
        why=why if why.endswith(".") else f"{why}.",
        fix='`pip install "anytrain[trackers]"`, or log with "jsonl" or "csv", which need nothing.',
    )


def check_config(config: object) -> None:
    """Refuse a run's settings that are no mapping."""
    if not isinstance(config, Mapping):
        raise BadType(
            f"Cannot record a config of type {type(config).__name__}.",
            why="trackers store settings by name, so they take a dictionary.",
            fix="pass config=vars(args) for argparse, or dataclasses.asdict(args).",
        )


# -- what people log, as libraries can store it ---------------------------------------------------


def as_numbers(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the values with tensors and arrays of one element as Python numbers.

    Tensors of one device and dtype cross to the host together, so a log waits for the device
    once and not once per value. Everything else passes as it is.

    >>> as_numbers({"loss": torch.tensor(0.5), "eval": {"hits": np.int64(3)}, "note": "warm"})
    {'loss': 0.5, 'eval': {'hits': 3}, 'note': 'warm'}
    """
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    _find(values, groups)
    numbers: dict[int, Any] = {}
    for group in groups.values():
        on_host = torch.stack([tensor.detach().reshape(()) for tensor in group]).tolist()
        numbers.update(zip(map(id, group), on_host, strict=True))
    return _replace(values, numbers)


def _find(
    values: Mapping[Any, Any],
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]],
) -> None:
    for value in values.values():
        if isinstance(value, Mapping):
            _find(value, groups)
        elif isinstance(value, torch.Tensor) and _is_number(value):
            groups.setdefault((value.device, value.dtype), []).append(value)


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and tensor.numel() == 1


def _replace(values: Mapping[Any, Any], numbers: dict[int, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            plain[str(key)] = _replace(value, numbers)
        elif isinstance(value, np.generic | np.ndarray) and value.size == 1:
            plain[str(key)] = value.item()
        else:
            plain[str(key)] = numbers.get(id(value), value)
    return plain


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings as one level, their keys joined by a slash.

    >>> flatten({"eval": {"loss": 1, "by": {"task": 2}}})
    {'eval/loss': 1, 'eval/by/task': 2}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}/{inner}": v for inner, v in flatten(value).items()})
        else:
            flat[str(key)] = value
    return flat


def settings(config: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a config made of mappings, lists, numbers, strings and None; the rest as its text.

    >>> settings({"dtype": torch.float16, "betas": (0.9, 0.99), "model": {"layers": 2}})
    {'dtype': 'torch.float16', 'betas': [0.9, 0.99], 'model': {'layers': 2}}
    """
    return {key: _simple(value) for key, value in as_numbers(config).items()}


def _simple(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _simple(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_simple(inner) for inner in value]
    return str(value)
