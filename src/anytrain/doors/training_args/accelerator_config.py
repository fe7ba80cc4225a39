"""How loaders are dealt to processes: the dataclass behind `accelerator_config`."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, fields
from typing import Any

from anytrain.core import documents
from anytrain.core.errors import BadInput, BadType, Unsupported
from anytrain.core.nearest import nearest


@dataclass
class AcceleratorConfig:
    """What the loaders of a run are told."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    non_blocking: bool = False
    gradient_accumulation_kwargs: dict[str, Any] | None = None
    use_configured_state: bool = False

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str]) -> AcceleratorConfig:
        """Return what the file says."""
        return read(os.fspath(json_file))

    def to_dict(self) -> dict[str, Any]:
        """Return every option."""
        return copy.deepcopy(self.__dict__)

    def pop(self, key: str, default: Any = None) -> Any:
        """Take an option out, as from a dict."""
        return self.__dict__.pop(key, default)


NAMES = tuple(f.name for f in fields(AcceleratorConfig))


def read(given: Any) -> AcceleratorConfig:
    """Return the configuration that was given: none, one, a dict, JSON text or a file's name."""
    if isinstance(given, AcceleratorConfig):
        config = given
    elif given is None:
        config = AcceleratorConfig()
    elif isinstance(given, dict):
        config = _from_dict(given)
    elif isinstance(given, str | os.PathLike):
        config = _from_dict(_from_file(os.fspath(given)))
    elif hasattr(given, "to_dict") and not isinstance(given, type):
        config = _from_dict(given.to_dict())
    elif isinstance(given, type):
        raise Unsupported(
            "Tried passing in a callable to `accelerator_config`.",
            why=f"{given.__name__} is a class; its values are not known before it is made.",
            fix=f"pass accelerator_config={given.__name__}(), or use default_factory in a field.",
        )
    else:
        raise BadType(
            f"Cannot read accelerator_config={given!r}.",
            why="it is a dict, JSON text, the name of a JSON file, or an AcceleratorConfig.",
            fix='pass accelerator_config={"even_batches": True}, for example.',
        )
    _check(config)
    return config


def refuse_configured(config: AcceleratorConfig) -> None:
    """Refuse to begin a run with what another object was made with.

    Only there: libraries make arguments with it that they read and never run.
    """
    if config.use_configured_state:
        raise Unsupported(
            "anytrain does not do use_configured_state=True.",
            why="a run takes what its arguments say, not what another object was made with.",
            fix="drop it; use_cpu, bf16 and the like say what the run uses.",
        )


def _from_dict(given: dict[str, Any]) -> AcceleratorConfig:
    for key in given:
        if key not in NAMES:
            near = nearest(str(key), NAMES)
            raise BadInput(
                f"Unknown key {key!r} in accelerator_config.",
                why=f"the known ones are {', '.join(NAMES)}.",
                fix=f"did you mean {near!r}?" if near else "drop it.",
            )
    return AcceleratorConfig(**given)


def _from_file(name: str) -> dict[str, Any]:
    try:
        with open(os.path.expanduser(name), encoding="utf-8") as file:
            found = documents.from_json(file.read())
    except (OSError, ValueError) as error:
        raise BadInput(
            f"Cannot read accelerator_config from {name}.",
            why=f"{error}.",
            fix="pass a dict, or a file that holds one as JSON.",
        ) from None
    if not isinstance(found, dict):
        raise BadInput(
            f"Cannot read accelerator_config from {name}.",
            why="it holds no JSON object.",
            fix='write an object such as {"even_batches": true}.',
        )
    return found


_ACCUMULATION = ("num_steps", "sync_each_batch", "adjust_scheduler", "sync_with_dataloader")


def _check(config: AcceleratorConfig) -> None:
    for key in config.gradient_accumulation_kwargs or {}:
        if key not in _ACCUMULATION:
            raise BadInput(
                f"Unknown key {key!r} in gradient_accumulation_kwargs.",
                why=f"the known ones are {', '.join(_ACCUMULATION)}.",
                fix="drop it.",
            )
