"""The text of `anytrain glue --help`: every option, in groups."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

from anytrain.doors.training_args import TrainingArguments
from anytrain.recipes.glue.arguments import DataTrainingArguments, ModelArguments

_EXAMPLE = """\
  {command} --model_name_or_path google-bert/bert-base-cased --task_name mrpc \\
    --do_train --do_eval --max_seq_length 128 --per_device_train_batch_size 32 \\
    --learning_rate 2e-5 --num_train_epochs 3 --output_dir runs/mrpc
"""
_PREFLIGHT = """\
Before anything is trained:
  --preflight [TARGET ...]        Only tell what awaits the job on other devices: mps:16GB,
                                  cuda:24GB, tpu:v5e; alone: on this machine's own.
"""
_MARGIN = " " * 34
# What TrainingArguments leaves to the script that reads them.
_HERE = {
    "do_train": "Learn from the training rows.",
    "do_eval": "Evaluate on the validation rows.",
    "do_predict": "Write predictions for the test rows.",
    "resume_from_checkpoint": "Go on from this checkpoint; alone: from the newest one; "
    "auto: from the newest one where there is one.",
}
_USUAL = {
    "What to do": (
        "do_train",
        "do_eval",
        "do_predict",
        "output_dir",
        "overwrite_output_dir",
        "resume_from_checkpoint",
    ),
    "Training": (
        "num_train_epochs",
        "max_steps",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "learning_rate",
        "lr_scheduler_type",
        "warmup_steps",
        "optim",
        "weight_decay",
        "max_grad_norm",
        "label_smoothing_factor",
        "seed",
    ),
    "Speed and memory": (
        "precision",
        "bf16",
        "fp16",
        "gradient_checkpointing",
        "auto_find_batch_size",
        "torch_compile",
        "train_sampling_strategy",
        "length_buckets",
        "dataloader_num_workers",
        "per_device_eval_batch_size",
        "use_cpu",
    ),
    "Evaluating, saving, logging": (
        "eval_strategy",
        "eval_steps",
        "save_strategy",
        "save_steps",
        "save_total_limit",
        "load_best_model_at_end",
        "metric_for_best_model",
        "logging_steps",
        "report_to",
        "push_to_hub",
        "on_nonfinite",
    ),
}


def wants_help(argv: Sequence[str]) -> bool:
    """Whether the user asks for the options rather than for work."""
    return not argv or "--help" in argv or "-h" in argv


def text(command: str) -> str:
    """Return the help of the command by that name."""
    known = {f.name: f for f in fields(TrainingArguments)}
    usual = {name for names in _USUAL.values() for name in names}
    parts = [
        f"Usage: {command} [run.yaml or run.json] [OPTIONS]; an option wins over the file\n\n"
        "Train, evaluate and predict text classification on whatever device is here.\n\n"
        f"{_EXAMPLE.format(command=command)}"
    ]
    parts += [
        _group("Model", fields(ModelArguments)),
        _group("Data", fields(DataTrainingArguments)),
    ]
    parts += [_group(title, [known[n] for n in names]) for title, names in _USUAL.items()]
    parts.append(_PREFLIGHT)
    others = ", ".join(name for name in known if name not in usual)
    parts.append(
        "All other options of TrainingArguments (docs/arguments.md tells what each does here):\n"
        + textwrap.fill(others, 96, initial_indent="  ", subsequent_indent="  ")
        + "\n"
    )
    return "\n".join(parts)


def _group(title: str, members: Iterable[Field[Any]]) -> str:
    return f"{title}:\n" + "".join(_lines(members))


def _lines(members: Iterable[Field[Any]]) -> Iterator[str]:
    for member in members:
        told = _HERE.get(member.name) or str(member.metadata.get("help", ""))
        default = None if member.default is MISSING else member.default
        if default not in (None, False, ""):
            told += f" [{getattr(default, 'value', default)}]"
        name = f"  --{member.name}"
        begin = name.ljust(34) if len(name) < 33 else f"{name}\n{_MARGIN}"
        folded = textwrap.fill(told, 96, initial_indent=_MARGIN, subsequent_indent=_MARGIN)
        yield f"{begin}{folded.lstrip()}\n"
