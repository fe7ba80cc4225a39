"""`anytrain demo`: train a small model here and now, and show what came of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from anytrain.cli.options import FromFile, started_as
from anytrain.core import environment

if TYPE_CHECKING:
    from anytrain.recipes.demo.job import DemoResult

_NEXT = (
    (
        "anytrain glue --model_name_or_path google-bert/bert-base-cased --task_name mrpc \\\n"
        "    --do_train --do_eval --max_seq_length 128 --per_device_train_batch_size 32 \\\n"
        "    --learning_rate 2e-5 --num_train_epochs 3 --output_dir runs/mrpc",
        "the real thing: a pretrained BERT on a GLUE task\n"
        "      (needs pip install -e '.[text,report]' in the checkout)",
    ),
    ("anytrain env", "what this machine has, what a run gets, and why"),
    (
        "anytrain launch --cpu --num_processes 2 --module anytrain demo",
        "the same run, in two processes",
    ),
)


def demo(
    epochs: int = typer.Option(6, min=1, help="How often to go through the pairs."),
    pairs: int = typer.Option(16_000, min=64, help="How many sentence pairs to learn from."),
    seed: int = typer.Option(7, min=0, help="Seed of the data, the model and the order."),
    output: Path = typer.Option(
        Path("runs/demo"), help="Where the results go; a finished older demo is replaced."
    ),
    resume_from_checkpoint: str = typer.Option(
        None,
        "--resume_from_checkpoint",
        "--resume-from-checkpoint",
        help="Go on from this checkpoint; auto: from the newest whole one, or from the start.",
        show_default=False,
    ),
) -> None:
    """Train a small BERT to tell paraphrases from look-alikes: a minute, no network.

    A demo that was stopped goes on where it was when it is started again. Options may stand in a
    file, which comes first, as in `anytrain demo run.yaml --epochs 2`.
    """
    quiet = environment.read().place.rank > 0
    console = Console(highlight=False, soft_wrap=True, markup=False, quiet=quiet)
    console.print("Loading torch ...", style="dim")
    began = time.perf_counter()
    import torch

    from anytrain.recipes.demo.job import DemoSettings, train
    from anytrain.recipes.messages import notices_as_lines, says_how_to_resume

    # Tensors this small gain little from more threads, and lose fivefold on busy cores.
    torch.set_num_threads(1)
    with notices_as_lines(), says_how_to_resume():
        settings = DemoSettings(epochs=epochs, pairs=pairs, seed=seed)
        finished = train(settings, output, console.print, resume_from_checkpoint)
    _conclude(console, finished, output, time.perf_counter() - began)


demo.command_class = FromFile  # type: ignore[attr-defined]  # read by main


def _conclude(console: Console, finished: DemoResult, output: Path, took_s: float) -> None:
    from anytrain.engine.recording.small_charts import curve

    console.print()
    console.print(
        curve(
            finished.history,
            title="right on pairs held out",
            x_label="epoch",
            width=min(console.width, 60),
            height=6,
            encoding=console.encoding,
        )
    )
    console.print(
        Text.assemble(
            f"\nAccuracy {finished.history[0][1]:.1%} -> ",
            (f"{finished.accuracy:.1%}", "bold green"),
            f"  in {took_s:.0f} s",
        )
    )
    for example in finished.examples:
        verdict = "the same" if example.says_same else "not the same"
        right = "" if example.says_same == example.pair.same else " (wrong)"
        console.print(f'  "{example.pair.first}"\n  "{example.pair.second}"')
        console.print(f"    -> {verdict}{right}", style="bold")
    console.print(
        f"\nResults: {output}/result.json, the model in model.safetensors, every number in "
        "metrics.jsonl"
    )
    if not console.quiet:  # one process of several
        console.print(_report(output))
    console.print("Next:")
    for command, what in _NEXT:
        console.print(f"  {command.replace('anytrain', started_as(), 1)}\n      {what}")


def _report(output: Path) -> str:
    """Write the run's report; return where it is, or how to get one."""
    from anytrain.core.errors import BadInput
    from anytrain.doors.reading import write

    try:
        return f"Report: {write(output)[0]}, to open in a browser"
    except BadInput:  # what draws its charts is an extra
        install = "pip install -e '.[report]' in the checkout"
        return f"Report: {install}, then {started_as()} report {output}"
