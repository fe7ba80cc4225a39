"""Turn what was given into the types that fields declare, and fill in what follows from it.

YAML reads 1e-4 as a string, JSON has no integers of its own, a shell has nothing but strings.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from enum import Enum
from functools import cache
from importlib.util import find_spec
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from anytrain.core import documents, environment
from anytrain.core.errors import BadInput, BadType
from anytrain.core.nearest import unknown
from anytrain.core.notices import notify_caller
from anytrain.doors.training_args import accelerator_config
from anytrain.doors.training_args.fields import (
    DebugOption,
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    SaveStrategy,
    SchedulerType,
)

TRUE = ("yes", "true", "t", "y", "1", "on")
FALSE = ("no", "false", "f", "n", "0", "off")
ENUMS: dict[str, type[Any]] = {
    "eval_strategy": IntervalStrategy,
    "logging_strategy": IntervalStrategy,
    "save_strategy": SaveStrategy,
    "hub_strategy": HubStrategy,
    "lr_scheduler_type": SchedulerType,
    "optim": OptimizerNames,
}
LIBRARIES = ("tensorboard", "wandb", "mlflow", "trackio")
_SETTINGS = ("lr_scheduler_kwargs", "gradient_checkpointing_kwargs")
# None means the default for these: HF's parser and setters give it.
_NONE_IS = {"report_to": "none", "debug": "", "eval_delay": 0, "include_for_metrics": ()}
# They hold more than one type, and are read further down or refused whole.
_OWN = (
    frozenset(
        (
            *ENUMS,
            *_SETTINGS,
            "debug",
            "accelerator_config",
            "parallelism_config",
            "deepspeed",
            "fsdp_config",
        )
    )
    | {"fsdp", "report_to", "include_num_input_tokens_seen", "resume_from_checkpoint"}
    | {
        "trackio_static_space_id",
        "optim_target_modules",
        "sharded_ddp",
        "generation_config",
        "length_buckets",
    }
)
_OLD_OPTIMIZERS = {"adamw_hf": "adamw_torch", "adamw_apex_fused": "adamw_torch_fused"}


class Unreadable(Exception):
    """A value that a type cannot hold; the caller names the argument."""


def to_bool(value: Any) -> bool:
    """Return yes or no.

    >>> to_bool("True"), to_bool("no"), to_bool(1)
    (True, False, True)
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in (*TRUE, *FALSE):
        return value.strip().lower() in TRUE
    if type(value) is int and value in (0, 1):
        return value == 1
    raise Unreadable("true or false")


def to_int(value: Any) -> int:
    """Return a whole number.

    >>> to_int("8"), to_int(8.0), to_int("1e3")
    (8, 8, 1000)
    """
    if isinstance(value, bool):
        raise Unreadable("a whole number")
    if hasattr(value, "__index__"):
        return int(value)
    try:
        number = int(value) if isinstance(value, str) and value.strip().isdecimal() else None
        if number is None:
            real = float(value)
            number = int(real)
            if number != real:
                raise Unreadable("a whole number")
    except (TypeError, ValueError, OverflowError):
        raise Unreadable("a whole number") from None
    return number


def to_float(value: Any) -> float | int:
    """Return a number; a whole number that came as one stays one.

    >>> to_float("1e-4"), to_float(3)
    (0.0001, 3)
    """
    if isinstance(value, bool):
        raise Unreadable("a number")
    if type(value) in (int, float):
        return value  # type: ignore[no-any-return]  # the line above says which
    try:
        return float(value)
    except (TypeError, ValueError):
        raise Unreadable("a number") from None


def to_str(value: Any) -> str:
    """Return text; paths and numbers are written out."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, str):
        return value
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if type(value) in (int, float):
        return str(value)
    raise Unreadable("text")


def to_dict(value: Any) -> dict[str, Any]:
    """Return a mapping, from itself or from JSON text; text in it that is a number becomes one."""
    if isinstance(value, dict):
        return value
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            return {key: scalar_from_text(item) for key, item in documents.from_json(value).items()}
        except ValueError:
            pass
    raise Unreadable('a dict, or JSON text such as {"key": 1}')


def scalar_from_text(value: Any) -> Any:
    """Return text as the number or truth that it spells, and everything else as it is.

    >>> scalar_from_text("0.5"), scalar_from_text("true"), scalar_from_text("cosine")
    (0.5, True, 'cosine')
    """
    if isinstance(value, dict):
        return {key: scalar_from_text(item) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


_BY_TYPE: dict[Any, Callable[[Any], Any]] = {
    bool: to_bool,
    int: to_int,
    float: to_float,
    str: to_str,
}


def is_union(hint: Any) -> bool:
    """Whether the hint offers several types."""
    return get_origin(hint) in (Union, UnionType)


def union_members(hint: Any) -> tuple[Any, ...]:
    """Return the types that a hint offers, None left out.

    >>> union_members(int | None)
    (<class 'int'>,)
    """
    kinds = get_args(hint) if is_union(hint) else (hint,)
    return tuple(kind for kind in kinds if kind is not NoneType)


def takes_none(hint: Any) -> bool:
    """Whether None is among the values that a hint allows."""
    return hint in (None, NoneType, Any) or (is_union(hint) and NoneType in get_args(hint))


def converted(name: str, value: Any, hint: Any) -> Any:
    """Return the value in the first of the hint's types that holds it, or refuse it by name."""
    if value is None and takes_none(hint):
        return None
    wanted = []
    for kind in union_members(hint):
        try:
            return to_type(value, kind)
        except Unreadable as problem:
            wanted.append(str(problem))
    raise BadType(
        f"Cannot use {name}={value!r}.",
        why=f"{name} must be {' or '.join(dict.fromkeys(wanted))}.",
        fix=f"pass another value, or leave {name} out.",
    )


def to_type(value: Any, kind: Any) -> Any:
    """Return the value as one type, raising Unreadable where that cannot be."""
    origin = get_origin(kind)
    if origin is Literal:
        return _to_literal(value, get_args(kind))
    if kind in _BY_TYPE:
        return _BY_TYPE[kind](value)
    if origin in (list, tuple, set) or kind in (list, tuple, set):
        return _to_collection(value, origin or kind, get_args(kind))
    if origin is dict or kind is dict:
        return to_dict(value)
    if isinstance(kind, type) and not isinstance(value, kind):
        if issubclass(kind, Enum):
            return kind(value)
        raise Unreadable(f"a {kind.__name__}")
    return value


def _to_literal(value: Any, words: tuple[Any, ...]) -> Any:
    for word in words:
        if value == word or str(value) == str(word):
            return word
    raise Unreadable(f"one of {', '.join(map(repr, words))}")


def _to_collection(value: Any, kind: type[Any], inner: tuple[Any, ...]) -> Any:
    if isinstance(value, str) or not hasattr(value, "__iter__") or isinstance(value, dict):
        raise Unreadable("a list")
    hint = inner[0] if inner else Any
    return kind(converted("each item", item, hint) for item in value)


@cache
def hints(kind: type[Any]) -> dict[str, Any]:
    """Return the types of anytrain's own fields; those that a user's subclass adds are its own."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith(__package__)]
    names = {name for base in ours for name in base.__dict__.get("__annotations__", {})}
    return {
        name: hint
        for base in reversed(ours)
        for name, hint in get_type_hints(base).items()
        if name in names
    }


def convert_all(args: Any) -> None:
    """Give every argument the type that it declares."""
    _accept_shapes(args)
    kind: Any = type(args)
    for name, hint in hints(kind).items():
        value = getattr(args, name)
        unset = value is None and kind.__dataclass_fields__[name].default is None
        if name not in _OWN and not unset:
            object.__setattr__(args, name, converted(name, value, hint))
    args.resume_from_checkpoint = _path_or_flag(args.resume_from_checkpoint)
    args.trackio_static_space_id = _path_or_flag(args.trackio_static_space_id)
    for name in _SETTINGS:
        # A file's "1e-6" is a number here too, and "false" is no.
        setattr(
            args,
            name,
            scalar_from_text(converted(name, getattr(args, name), dict[str, Any] | None)),
        )
    for name in {*type(args)._VALID_DICT_FIELDS} - {*_SETTINGS, *_OWN}:
        setattr(args, name, _json(name, getattr(args, name)))
    args.length_buckets = _buckets(args.length_buckets)
    args.accelerator_config = accelerator_config.read(
        _json("accelerator_config", args.accelerator_config)
    )
    args.output_dir = os.path.expanduser(args.output_dir or "trainer_output")
    for name, kind in ENUMS.items():
        setattr(args, name, _member(name, getattr(args, name), kind))
    _old_optimizer(args)


def _accept_shapes(args: Any) -> None:
    """Take None, a bare `no` of YAML and words with spaces for what they mean."""
    for name, value in _NONE_IS.items():
        if getattr(args, name) is None:
            setattr(args, name, list(value) if isinstance(value, tuple) else value)
    if args.precision is False:
        args.precision = "no"
    for name in ("include_for_metrics", "label_names"):
        if isinstance(getattr(args, name), str):
            setattr(args, name, getattr(args, name).split())


def _member(name: str, value: Any, kind: type[Any]) -> Any:
    """Return the enum's member; YAML reads a bare `no` as False."""
    word = getattr(value, "value", value)
    if word is False and "no" in kind._value2member_map_:
        word = "no"
    if word not in kind._value2member_map_:
        raise unknown(name, word, kind.accepted())
    return kind(word)


def _json(name: str, value: Any) -> Any:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return converted(name, value, dict[str, Any])
    return value


def _path_or_flag(value: Any) -> Any:
    """Return a path, or yes or no where it spells that."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return value


def _buckets(value: Any) -> Any:
    """Return None, "auto", a number of lengths, or a list of them."""
    if value is None or isinstance(value, str) and value.strip().lower() in ("", "none", "no"):
        return None
    if isinstance(value, str):
        word = value.strip().lower()
        if word == "auto":
            return word
        parts = word.strip("[]").replace(",", " ").split()
        listed = len(parts) > 1 or word.startswith("[")
        return [_whole(value, part) for part in parts] if listed else _whole(value, word)
    if isinstance(value, (list, tuple)):
        return [_whole(value, part) for part in value]
    return _whole(value, value)


def _whole(given: Any, value: Any) -> int:
    try:
        return to_int(value)
    except Unreadable:
        raise BadType(
            f"Cannot use length_buckets={given!r}.",
            why='it is "auto", a number of lengths, or a list of lengths in tokens.',
            fix='pass length_buckets="auto", 6 or [64, 128, 256], for example.',
        ) from None


def _old_optimizer(args: Any) -> None:
    new = _OLD_OPTIMIZERS.get(args.optim)
    if new is not None:
        notify_caller(f"optim={str(args.optim)!r} is an old name: taken as optim={new!r}.")
        args.optim = OptimizerNames(new)


def complete(args: Any) -> None:
    """Fill in what follows from other arguments, as HF does."""
    for name, kind in ENUMS.items():  # an old name may have set one of them as text
        setattr(args, name, _member(name, getattr(args, name), kind))
    _complete_words(args)
    _complete_evaluation(args)
    _complete_best(args)
    _complete_machine(args)


def _complete_words(args: Any) -> None:
    args.debug = _debug(args.debug)
    args.report_to = _trackers(args.report_to)
    seen = args.include_num_input_tokens_seen
    if isinstance(seen, bool) or str(seen).lower() in ("true", "false"):
        seen = "all" if str(seen).lower() == "true" else "no"
    args.include_num_input_tokens_seen = seen
    if args.disable_tqdm is None:
        args.disable_tqdm = logging.getLogger("anytrain").getEffectiveLevel() > logging.WARNING


def _debug(value: Any) -> list[DebugOption]:
    if isinstance(value, bool):
        raise BadType(
            f"Cannot use debug={value}.",
            why="it names what to watch.",
            fix='pass debug="underflow_overflow", or leave it out.',
        )
    words = value.replace(",", " ").split() if isinstance(value, str) else list(value)
    return [_member("debug", word, DebugOption) for word in words]


def _trackers(value: Any) -> list[Any]:
    """Return the trackers by name; "all" means those whose libraries are installed."""
    words = [value] if isinstance(value, str) or not hasattr(value, "__iter__") else list(value)
    if words in (["none"], [False], [""]):
        return []
    if "all" not in words:
        return words
    here = [name for name in LIBRARIES if _is_installed(name)]
    absent = [name for name in LIBRARIES if name not in here]
    if absent:
        notify_caller(
            f"report_to='all' means {', '.join(here) or 'no tracker'} here: {', '.join(absent)} "
            "cannot be imported."
        )
    return here


def _is_installed(name: str) -> bool:
    """Whether the library is there; a folder of that name, as wandb leaves one, has no origin."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


def _complete_evaluation(args: Any) -> None:
    if args.eval_strategy != IntervalStrategy.NO:
        args.do_eval = True
    if args.eval_strategy == IntervalStrategy.STEPS and not args.eval_steps:
        if not args.logging_steps > 0:
            raise BadInput(
                "Cannot evaluate every 0 steps.",
                why="eval_strategy='steps' takes eval_steps, or logging_steps where it is unset.",
                fix="pass eval_steps=100, for example.",
            )
        args.eval_steps = args.logging_steps
    for name in ("logging_steps", "eval_steps", "save_steps", "warmup_steps"):
        value = getattr(args, name)
        if value is not None and value >= 1 and value == int(value):
            setattr(args, name, int(value))


def _complete_best(args: Any) -> None:
    judged = args.load_best_model_at_end or args.lr_scheduler_type in (
        SchedulerType.REDUCE_ON_PLATEAU,
        SchedulerType.GREEDY,
    )
    if judged and args.metric_for_best_model is None:
        args.metric_for_best_model = "loss"
    if args.greater_is_better is None and args.metric_for_best_model is not None:
        args.greater_is_better = not args.metric_for_best_model.endswith("loss")


def _complete_machine(args: Any) -> None:
    if args.torch_compile_backend is not None or args.torch_compile_mode is not None:
        args.torch_compile = True
    if args.torch_compile and args.torch_compile_backend is None:
        args.torch_compile_backend = "inductor"
    if args.use_cpu:
        args.dataloader_pin_memory = False
    place = environment.read().place
    if place.size > 1:
        args.local_rank = place.local_rank
    num = (args.accelerator_config.gradient_accumulation_kwargs or {}).get("num_steps")
    if num is None or num == args.gradient_accumulation_steps:
        return
    if args.gradient_accumulation_steps != 1:
        raise BadInput(
            "The `AcceleratorConfig`'s `num_steps` is set but gradient_accumulation_steps is too.",
            why=f"the argument says {args.gradient_accumulation_steps}, accelerator_config {num}.",
            fix="pass one of them.",
        )
    args.gradient_accumulation_steps = num
