"""The command itself: options in, results out; and the text of its --help."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from itertools import takewhile
from typing import Any

from rich.console import Console
from rich.table import Table

from anytrain.core import environment
from anytrain.core.errors import AnytrainError
from anytrain.doors.training_args import TrainingArguments
from anytrain.recipes.glue import job
from anytrain.recipes.glue.arguments import DataTrainingArguments, GlueJob, ModelArguments, parse
from anytrain.recipes.glue.job import Checked, Metrics
from anytrain.recipes.messages import notices_as_lines, says_how_to_resume

PREFLIGHT = "--preflight"
_PATIENCE_S = 15.0


def run(argv: Sequence[str]) -> None:
    """Do what the options ask for; errors are raised, and nothing is loaded before they are.

    With --preflight and targets behind it, such as mps:16GB, only tell what awaits the job there.
    """
    if PREFLIGHT in argv:
        _preflight(list(argv))
        return
    rank = environment.read().place.rank
    console = Console(highlight=False, soft_wrap=True, markup=False, quiet=rank > 0)
    with notices_as_lines():
        with _rank_0_reports(rank):
            asked = _redirected(parse(argv))
            checked = job.check(asked)
        with says_how_to_resume(_how_to_resume(asked)):
            metrics = job.run(checked, console.print)
    if rank == 0:
        _show(console, checked, metrics)


def _preflight(argv: list[str]) -> None:
    """Trace the job as it would run without the option."""
    from anytrain.insight.preflight.run import preflight_command

    at = argv.index(PREFLIGHT)
    behind = takewhile(lambda word: not word.startswith("--"), argv[at + 1 :])
    targets = list(behind)
    rest = argv[:at] + argv[at + 1 + len(targets) :]
    parse(rest)  # what is wrong with the options is said at once
    preflight_command(["-m", "anytrain.recipes.glue", *rest], targets)


def _redirected(asked: GlueJob) -> GlueJob:
    """Let a job that is only watched write where it leaves nothing behind."""
    from anytrain.engine.assemble import session as sessions  # torch: not before the options hold

    observer = sessions.observer()
    if observer.is_watching:
        observer.tell(output_dir=str(asked.folder))
        asked.training.output_dir = observer.folder
    return asked


def _how_to_resume(asked: GlueJob) -> str:
    """Return what continues this job once it has been stopped."""
    if asked.training.do_train and asked.training.overwrite_output_dir:
        return "the same command without --overwrite_output_dir"
    return "the same command"


@contextmanager
def _rank_0_reports(rank: int) -> Iterator[None]:
    """Let rank 0 say what every rank finds; the launcher ends the others once it has left.

    A rank that is still here after a while found something that rank 0 did not.
    """
    try:
        yield
    except AnytrainError:
        if rank > 0:
            time.sleep(_PATIENCE_S)
        raise


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


def help_text(command: str) -> str:
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
        text = _HERE.get(member.name) or str(member.metadata.get("help", ""))
        default = None if member.default is MISSING else member.default
        if default not in (None, False, ""):
            text += f" [{getattr(default, 'value', default)}]"
        name = f"  --{member.name}"
        begin = name.ljust(34) if len(name) < 33 else f"{name}\n{_MARGIN}"
        folded = textwrap.fill(text, 96, initial_indent=_MARGIN, subsequent_indent=_MARGIN)
        yield f"{begin}{folded.lstrip()}\n"


_NOT_SHOWN = ("_runtime", "_per_second", "_flos", "_steps", "epoch")


def _show(console: Console, checked: Checked, metrics: Metrics) -> None:
    """Print a table of the results and what can be done with them."""
    job, shown = checked.job, dict(_scores(metrics))
    if shown:
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(style="bold")
        table.add_column(justify="right")
        for name, value in shown.items():
            table.add_row(name, value)
        console.print()
        console.print(table)
    console.print()
    for line in _places(job):
        console.print(line)
    if job.training.do_train:
        pair = '{"text": "...", "text_pair": "..."}' if checked.pairs else '"..."'
        console.print("Use it:")
        console.print("  from transformers import pipeline")
        console.print(f'  pipeline("text-classification", "{job.folder}")({pair})')


def _scores(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in metrics.items():
        if not any(name.removesuffix("_mm").endswith(ending) for ending in _NOT_SHOWN):
            yield name, f"{value:.4f}" if isinstance(value, float) else f"{value:,}"


def _places(job: GlueJob) -> Iterator[str]:
    if job.training.do_train:
        yield f"Model:        {job.folder}"
    if job.training.do_train or job.training.do_eval:
        yield f"Results:      {job.folder}/all_results.json"
    if job.training.do_predict:
        for path in sorted(job.folder.glob("predict_results*.txt")):
            yield f"Predictions:  {path}"
