"""`anytrain bench`: train the same job with anytrain and its peers, and compare."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from anytrain.cli.options import FromFile

app = typer.Typer(
    help="Train the same job with anytrain and its peers, and compare.",
    add_completion=False,
    no_args_is_help=True,
)


@app.command(cls=FromFile)
def glue(  # noqa: PLR0913  a command has one parameter for each option
    size: str = typer.Option(
        "minilm",
        help="Model and data: tiny, minilm, bert-base, bert-large-512, gpt2-small-1024.",
    ),
    model: Path = typer.Option(None, help="Folder of a real model, in place of random weights."),
    data: Path = typer.Option(
        None, help="Folder with MRPC's train.tsv.gz and dev.tsv.gz, in place of made-up rows."
    ),
    contenders: str = typer.Option("", help="Names separated by commas; all by default."),
    seeds: int = typer.Option(1, min=1, help="How often each trains, with a seed of its own."),
    batch_size: int = typer.Option(0, "--batch_size", "--batch-size", help="Rows in a batch."),
    epochs: int = typer.Option(0, help="How often to go through the rows."),
    learning_rate: float = typer.Option(0, "--learning_rate", "--learning-rate"),
    max_steps: int = typer.Option(
        0, "--max_steps", "--max-steps", help="End every training after this many steps."
    ),
    warm_up: int = typer.Option(
        4, "--warm_up", "--warm-up", help="Steps before the timing starts."
    ),
    shapes: str = typer.Option(
        "",
        help="Measure single steps of these batches, as 32x128,32x48, or none; by default on a "
        "GPU only.",
    ),
    shape_steps: str = typer.Option(
        "30,50,30",
        "--shape_steps",
        "--shape-steps",
        help="For a measured shape: steps before the timing, timed, and under the profiler.",
    ),
    cpu: bool = typer.Option(False, "--cpu", help="Use the CPU even if there is a GPU."),
    output: Path = typer.Option(None, help="Write the report to this Markdown file."),
    as_json: Path = typer.Option(None, "--json", help="Write every number to this JSON file."),
    listed: bool = typer.Option(False, "--list", help="List the contenders and exit."),
) -> None:
    """Train one job with anytrain and its peers, side by side.

    The peers are HF Trainer, Accelerate, Lightning Fabric and a raw loop. Each trains in a process
    of its own, with the same rows, weights and settings. Peers that are not installed are named
    and left out. Options may stand in a file, which comes first, as in `bench glue run.yaml`.
    """
    from anytrain.recipes.bench import comparison, report
    from anytrain.recipes.bench.comparison import CONTENDERS, choose
    from anytrain.recipes.bench.settings import BenchSettings, check_size, read_shapes, read_steps

    console = Console(highlight=False, soft_wrap=True, markup=False)
    if listed:
        for each in CONTENDERS.values():
            missing = " (not installed)" if each.is_missing else ""
            console.print(f"{each.name:<24} {each.what}, {each.precision}, {each.padding}{missing}")
        return
    chosen = check_size(size)
    settings = BenchSettings(
        size=size,
        model=str(model) if model else None,
        data=str(data) if data else None,
        length=chosen.length,
        batch_size=batch_size or chosen.batch_size,
        epochs=epochs or chosen.epochs,
        learning_rate=learning_rate or chosen.learning_rate,
        max_steps=max_steps,
        warm_up_steps=warm_up,
        cpu=cpu,
        shapes=read_shapes(shapes),
        shape_steps=read_steps(shape_steps),
    )
    settings.check()
    wanted = choose(contenders, even=settings.is_even)

    def keep(found: comparison.Comparison) -> None:
        for path, text in ((output, report.markdown(found)), (as_json, json.dumps(asdict(found)))):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")

    with tempfile.TemporaryDirectory(prefix="anytrain-bench-") as folder:
        found = comparison.compare(settings, wanted, seeds, Path(folder), console.print, keep)
    report.show(console, found)
    for path in filter(None, (output, as_json)):
        console.print(f"Written: {path}")


@app.command()
def script(
    paths: list[Path] = typer.Argument(help="Python scripts, the one to compare with first."),
    rounds: int = typer.Option(3, min=1, help="How often each script runs."),
    number: str = typer.Option(
        "samples_per_second", help="The printed number to compare; wall time where none is printed."
    ),
    output: Path = typer.Option(None, help="Write the table to this Markdown file."),
) -> None:
    """Run scripts in turns, and compare how fast they are.

    What is compared is a number that they print, or else their time.
    """
    from anytrain.recipes.bench import scripts

    console = Console(highlight=False, soft_wrap=True, markup=False)
    head, *lines = scripts.table(scripts.compare(paths, rounds, number, console.print), number)
    shown = Table(*head)
    for line in lines:
        shown.add_row(*line)
    console.print(shown)
    if output is not None:
        written = ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines)]
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text("\n".join(written) + "\n", encoding="utf-8")
