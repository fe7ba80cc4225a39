"""Refuse values that cannot work, and arguments that contradict each other.

Everything here needs nothing but the arguments, so that it comes before a model is loaded. What
the device has a say in (a precision it cannot compute in) is refused by the Plan.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from anytrain.core import environment
from anytrain.core.errors import BadInput, Unsupported
from anytrain.core.nearest import unknown
from anytrain.core.plan import STEPS
from anytrain.doors.training_args.convert import LIBRARIES
from anytrain.doors.training_args.fields import (
    ACTIVATIONS,
    COMPILE_MODES,
    LOG_LEVELS,
    METRIC_EXTRAS,
    ON_NONFINITE,
    PRECISIONS,
    SAMPLING,
    START_METHODS,
    TOKEN_COUNTS,
    TRANSPORTS,
    IntervalStrategy,
    SaveStrategy,
    SchedulerType,
    packs,
)

_LARGEST_SEED = 2**32 - 1  # numpy takes no larger one


class Range(NamedTuple):
    """The numbers that an argument may be, and how to say so; not-a-number is in none."""

    low: float
    high: float
    meaning: str
    with_high: bool = True

    def holds(self, value: float) -> bool:
        """Whether the number is in the range."""
        return self.low <= value and (value <= self.high if self.with_high else value < self.high)


_COUNT = Range(1, math.inf, "at least 1")
_AMOUNT = Range(0, math.inf, "a number of at least 0", with_high=False)
_SHARE = Range(0, 1, "from 0 to below 1", with_high=False)
_SEED = Range(0, _LARGEST_SEED, f"from 0 to {_LARGEST_SEED}")
_RANGES: dict[str, Range] = {
    "per_device_train_batch_size": _COUNT,
    "per_device_eval_batch_size": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "learning_rate": _AMOUNT,
    "weight_decay": _AMOUNT,
    "adam_beta1": _SHARE,
    "adam_beta2": _SHARE,
    "adam_epsilon": _AMOUNT,
    "max_grad_norm": Range(0, math.inf, "at least 0; 0 does not clip"),
    "label_smoothing_factor": Range(0, 1, "from 0 to 1"),
    "neftune_noise_alpha": _AMOUNT,
    "torch_empty_cache_steps": _COUNT,
    "warmup_steps": Range(0, math.inf, "at least 0; below 1, a share of all steps", False),
    "eval_delay": Range(0, math.inf, "at least 0"),
    "eval_accumulation_steps": _COUNT,
    "seed": _SEED,
    "data_seed": _SEED,
    "dataloader_num_workers": Range(0, math.inf, "at least 0"),
    "dataloader_prefetch_factor": _COUNT,
    "ddp_bucket_cap_mb": _COUNT,
    "ddp_timeout": Range(1, math.inf, "at least 1 second"),
    "generation_max_length": _COUNT,
    "generation_num_beams": _COUNT,
}
_WORDS: dict[str, Iterable[str]] = {
    "precision": PRECISIONS,
    "on_nonfinite": ON_NONFINITE,
    "activation_checkpointing": ACTIVATIONS,
    "step_engine": STEPS,
    "log_level": LOG_LEVELS,
    "log_level_replica": LOG_LEVELS,
    "include_num_input_tokens_seen": TOKEN_COUNTS,
    "dataloader_multiprocessing_context": START_METHODS,
    "train_sampling_strategy": SAMPLING,
    "ddp_backend": TRANSPORTS,
    "torch_compile_mode": COMPILE_MODES,
}


def check(args: Any) -> None:
    """Refuse what cannot work."""
    values(args)
    _check_duration(args)
    _check_steps(args)
    _check_precision(args)
    _check_evaluating(args)
    _check_best(args)
    _check_loading(args)
    _check_buckets(args)
    _check_packing(args)
    _check_activations(args)
    _check_reports(args)
    _check_saving(args)
    _check_processes(args)
    _check_hub(args)
    check_writable(args.output_dir)


def values(args: Any) -> None:
    """Refuse numbers out of their range and words that are not known."""
    for name, allowed in _RANGES.items():
        value = getattr(args, name, None)
        if value is not None and not allowed.holds(value):
            raise BadInput(
                f"Cannot use {name}={value}.",
                why=f"{name} must be {allowed.meaning}.",
                fix=f"pass another {name}, or leave it out.",
            )
    for name, known in _WORDS.items():
        word = getattr(args, name)
        if word is not None and not isinstance(word, bool) and word not in known:
            raise unknown(name, word, known)
    for word in args.include_for_metrics:
        if word not in METRIC_EXTRAS:
            raise unknown("name in include_for_metrics", word, METRIC_EXTRAS)


def _check_duration(args: Any) -> None:
    epochs = args.num_train_epochs
    if args.max_steps <= 0 and not 0 <= epochs < math.inf:
        raise BadInput(
            f"Cannot train for num_train_epochs={epochs}.",
            why="it is the number of passes over the data, and max_steps is not set.",
            fix="pass num_train_epochs=3, for example, or max_steps=1000.",
        )
    if args.warmup_steps > 1 and args.warmup_steps != int(args.warmup_steps):
        raise BadInput(
            f"Cannot warm up for {args.warmup_steps} steps.",
            why="from 1 on it is a whole number of steps; below 1 it is a share of all steps.",
            fix=f"pass warmup_steps={int(args.warmup_steps)}.",
        )


def _check_steps(args: Any) -> None:
    strategies = {
        "logging_steps": args.logging_strategy,
        "eval_steps": args.eval_strategy,
        "save_steps": args.save_strategy,
    }
    for name, strategy in strategies.items():
        value = getattr(args, name)
        if strategy != IntervalStrategy.STEPS or value is None:
            continue
        other = name.replace("_steps", "_strategy")
        if not 0 < value < math.inf or (value > 1 and value != int(value)):
            raise BadInput(
                f"Cannot use {name}={value}.",
                why="it is a whole number of steps, or a share of all steps between 0 and 1.",
                fix=f'pass {name}=100 or {name}=0.1, for example; {other}="no" switches it off.',
            )


def _check_precision(args: Any) -> None:
    asked = [name for name in ("bf16", "fp16") if getattr(args, name)]
    if len(asked) == 2:
        raise BadInput(
            "Cannot train in bf16 and fp16 together.",
            why="a step computes in one precision.",
            fix="pass one of them; bf16 where the device has it.",
        )
    if asked and args.precision not in (None, asked[0]):
        raise BadInput(
            f"Cannot train with {asked[0]}=True and precision={args.precision!r}.",
            why=f"{asked[0]}=True is HF's spelling of precision={asked[0]!r}.",
            fix="pass one of them.",
        )
    if args.bf16_full_eval and args.fp16_full_eval:
        raise BadInput(
            "Cannot evaluate in bf16 and fp16 together.",
            why="bf16_full_eval and fp16_full_eval are both set.",
            fix="pass one of them.",
        )


def _check_evaluating(args: Any) -> None:
    if args.eval_strategy != IntervalStrategy.NO:
        return
    kind = args.lr_scheduler_type
    if kind in (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY):
        raise BadInput(
            f"Cannot use lr_scheduler_type={str(kind)!r} without evaluations.",
            why="it moves the learning rate by what evaluations say, and eval_strategy is 'no'.",
            fix='pass eval_strategy="epoch", or "steps".',
        )
    if args.save_strategy == SaveStrategy.BEST:
        raise BadInput(
            "Cannot use save_strategy='best' without evaluations.",
            why="an evaluation decides what is best, and eval_strategy is 'no'.",
            fix='pass eval_strategy="epoch", or "steps".',
        )


def _check_best(args: Any) -> None:
    if args.save_strategy == SaveStrategy.BEST and args.metric_for_best_model is None:
        raise BadInput(
            "`args.metric_for_best_model` must be provided with save_strategy='best'.",
            why="it says what is best, and is not set.",
            fix='pass metric_for_best_model="loss", or a metric that compute_metrics returns.',
        )
    if not args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST:
        return
    if args.eval_strategy != str(args.save_strategy):
        raise BadInput(
            "Cannot load the best model at the end.",
            why=f"evaluations come by {str(args.eval_strategy)!r} and saves by "
            f"{str(args.save_strategy)!r}: the best model may never have been saved.",
            fix='give eval_strategy and save_strategy the same value, or save_strategy="best".',
        )
    if args.eval_strategy == IntervalStrategy.STEPS and not _is_multiple(
        args.save_steps, args.eval_steps
    ):
        raise BadInput(
            "Cannot load the best model at the end.",
            why=f"save_steps={args.save_steps} is not a multiple of eval_steps={args.eval_steps}: "
            "a save would come where nothing was evaluated.",
            fix="make save_steps a multiple of eval_steps, both in steps or both as shares.",
        )


def _is_multiple(save: float, evaluate: float) -> bool:
    """Whether every save falls on an evaluation; 0.3 is three times 0.1, as it is written."""
    if (save < 1) != (evaluate < 1):
        return False
    return (Fraction(str(save)) / Fraction(str(evaluate))).denominator == 1


def _check_loading(args: Any) -> None:
    if args.dataloader_num_workers > 0:
        return
    for name in (
        "dataloader_prefetch_factor",
        "dataloader_persistent_workers",
        "dataloader_multiprocessing_context",
    ):
        value = getattr(args, name)
        if value:
            raise BadInput(
                f"Cannot use {name}={value!r} without workers.",
                why="it is about processes that load data, and dataloader_num_workers is 0.",
                fix=f"pass dataloader_num_workers=2, for example, or drop {name}.",
            )


def _check_activations(args: Any) -> None:
    if args.activation_checkpointing != "off" and args.gradient_checkpointing:
        raise BadInput(
            "Cannot use activation_checkpointing with gradient_checkpointing.",
            why="each says which activations are computed again.",
            fix="pass gradient_checkpointing=True for every block from the start, or "
            'activation_checkpointing="fit" for as many as the memory needs.',
        )


def _check_buckets(args: Any) -> None:
    asked = args.length_buckets
    if asked is None:
        return
    numbers = asked if isinstance(asked, list) else [1 if asked == "auto" else asked]
    if not numbers or min(numbers) < 1:
        raise BadInput(
            f"Cannot use length_buckets={asked!r}.",
            why="it is a number of lengths, or a list of lengths in tokens: at least 1 each.",
            fix='pass length_buckets="auto", 6 or [64, 128, 256], for example.',
        )
    if args.train_sampling_strategy != "random":
        raise BadInput(
            f"Cannot use length_buckets with train_sampling_strategy="
            f"{str(args.train_sampling_strategy)!r}.",
            why="each says in which order samples come.",
            fix="pass one of them.",
        )


def _check_packing(args: Any) -> None:
    if not packs(args):
        return
    against = {
        "length_buckets": "it pads rows to a few lengths, and a packed batch is one row",
        "neftune_noise_alpha": "its noise is by the length of a row, and all rows lie in one",
    }
    for name, why in against.items():
        if getattr(args, name) is not None:
            raise BadInput(
                f"Cannot use packing=True with {name}={getattr(args, name)!r}.",
                why=f"{why}.",
                fix="pass one of them.",
            )


_TRACKERS = (*LIBRARIES, "jsonl", "csv")
_NO_TRACKER = (
    "azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte", "kubeflow",
    "neptune", "swanlab", "aim",
)  # fmt: skip


def _check_reports(args: Any) -> None:
    # A user's tracker is known by name once it is registered, which loads that module.
    table = getattr(sys.modules.get("anytrain.engine.recording.trackers"), "TABLE", {})
    for name in args.report_to:
        if name in _NO_TRACKER:
            raise Unsupported(
                f"Cannot report to {name!r}.",
                why="anytrain has no tracker for it: it ships only those that its tests run.",
                fix=f"use {', '.join(_TRACKERS)}, or a callback of your own.",
            )
        if isinstance(name, str) and name not in (*_TRACKERS, *table):
            raise unknown("name in report_to", name, (*_TRACKERS, "all", "none"))


def _check_saving(args: Any) -> None:
    if args.enable_jit_checkpoint and not args.save_on_signal:
        raise BadInput(
            "Cannot use enable_jit_checkpoint=True with save_on_signal=False.",
            why="one asks for a save when the job is told to end, the other for none.",
            fix="drop one of them.",
        )
    if args.optim_args and not re.fullmatch(r"\s*\w+\s*=[^,=]+(,\s*\w+\s*=[^,=]+)*,?\s*",
                                            args.optim_args):  # fmt: skip
        raise BadInput(
            f"Cannot read optim_args={args.optim_args!r}.",
            why="it is a list of options of the optimizer.",
            fix='write it as "momentum=0.9,nesterov=true".',
        )


def _check_processes(args: Any) -> None:
    if environment.read().place.size == 1:
        return
    if not args.average_tokens_across_devices:
        raise Unsupported(
            "anytrain does not do average_tokens_across_devices=False.",
            why="the loss of a step is the mean over all its items, whichever rank saw them.",
            fix="drop it.",
        )
    if args.eval_use_gather_object:
        raise Unsupported(
            "anytrain does not do eval_use_gather_object=True with several processes.",
            why="predictions are gathered as tensors; shorter rows are padded with -100.",
            fix="drop it; turn what is no tensor into one in preprocess_logits_for_metrics.",
        )


def _check_hub(args: Any) -> None:
    if not args.push_to_hub:
        return
    if find_spec("huggingface_hub") is None:
        raise BadInput(
            "Cannot push to the hub.",
            why="huggingface_hub is not installed.",
            fix="install it: pip install huggingface_hub; or drop push_to_hub.",
        )
    name = args.hub_model_id
    if name is not None and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise BadInput(
            f"Cannot push to hub_model_id={name!r}.",
            why="a repository is called name, or owner/name.",
            fix='pass hub_model_id="owner/name".',
        )


def check_writable(folder: str) -> None:
    """Refuse a folder that could not be written to, without making it."""
    try:
        here = _nearest_that_exists(Path(folder).absolute())
    except (OSError, ValueError) as error:  # a name too long, or with a NUL in it
        raise _unwritable(folder, str(error)) from None
    if not here.is_dir():
        raise _unwritable(folder, f"{here} is there and is not a folder")
    if not os.access(here, os.W_OK | os.X_OK):
        raise _unwritable(folder, f"{here} may not be written to by this user")


def _nearest_that_exists(path: Path) -> Path:
    for here in (path, *path.parents):
        try:
            here.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        return here
    return path


def _unwritable(folder: str, why: str) -> BadInput:
    return BadInput(
        f"Cannot write to output_dir={folder!r}.",
        why=f"{why}.",
        fix="pass another output_dir.",
    )
