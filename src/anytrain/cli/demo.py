"""`anytrain demo`: train a small model here and now, and show what came of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from anytrain.core import environment

if TYPE_CHECKING:
    from anytrain.recipes.demo.job import Begun, Finished, Moment, Settings

_READ_LOSS_EVERY = 20
_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", "_.:-=+*#"
_NEXT = (
    ("anytrain env", "what this machine has, what a run gets, and why"),
    (
        "anytrain launch --cpu --num_processes 2 --module anytrain demo",
        "the same run, in two processes",
    ),
)


def demo(
    epochs: int = typer.Option(8, min=1, help="How often to go through the pairs."),
    pairs: int = typer.Option(16_000, min=64, help="How many sentence pairs to learn from."),
    seed: int = typer.Option(7, min=0, help="Seed of the data, the model and the order."),
    output: Path = typer.Option(
        Path("runs/demo"), help="Where the model and its history go; an older demo is replaced."
    ),
) -> None:
    """Train a small model to tell paraphrases from look-alikes: half a minute, no network."""
    console = Console(highlight=False, soft_wrap=True, quiet=environment.read().place.rank > 0)
    console.print("Loading torch ...", style="dim")
    screen = Screen(console)
    try:
        import torch

        from anytrain.recipes.demo.job import Settings

        # Tensors this small gain little from more threads, and lose fivefold on busy cores.
        torch.set_num_threads(1)
        screen.show(Settings(epochs=epochs, pairs=pairs, seed=seed), output)
    except KeyboardInterrupt:
        console.print(f"\nStopped at step {screen.step}. Nothing was saved.")
        raise typer.Exit(130) from None


class Screen:
    """Show a run: a moving bar in a terminal, one line an epoch anywhere else."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.step = 0
        self._history: list[float] = []
        self._started = time.perf_counter()

    def show(self, settings: Settings, output: Path) -> None:
        """Run the job to its end and show it."""
        from anytrain.recipes.demo.job import Begun, Finished, train

        moments = train(settings, output)
        begun = next(moments)
        assert isinstance(begun, Begun)
        self._introduce(begun, settings)
        with self._bar(begun.num_steps) as bar:
            for moment in moments:
                if isinstance(moment, Finished):
                    bar.stop()
                    self._conclude(moment)
                else:
                    self._follow(moment, bar, settings.epochs)

    def _introduce(self, begun: Begun, settings: Settings) -> None:
        self._history.append(begun.accuracy)
        processes = "1 process" if begun.num_processes == 1 else f"{begun.num_processes} processes"
        self.console.print(
            f"Do two sentences mean the same? A transformer of {begun.num_parameters:,} "
            f"parameters learns it from {settings.pairs:,} pairs.\n"
            f"Device: {begun.device}, {processes}. Untrained, it is right on "
            f"{begun.accuracy:.1%} of the pairs held out."
        )

    @contextmanager
    def _bar(self, num_steps: int) -> Iterator[Progress]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(),
        )
        shown = self.console.is_terminal and not self.console.quiet
        with Progress(*columns, console=self.console, transient=True, disable=not shown) as bar:
            bar.add_task("training", total=num_steps, told="")
            yield bar

    def _follow(self, moment: Moment, bar: Progress, epochs: int) -> None:
        from anytrain.recipes.demo.job import Scored, Stepped

        task = bar.task_ids[0]
        if isinstance(moment, Stepped):
            self.step = moment.step
            bar.update(task, completed=moment.step)
            # Reading the loss waits for the device, so it is read now and then only.
            if not bar.disable and moment.step % _READ_LOSS_EVERY == 0:
                bar.update(task, told=f"loss {float(moment.loss):.3f}")
        elif isinstance(moment, Scored):
            self._history.append(moment.accuracy)
            said = f"epoch {moment.epoch}/{epochs}  right on {moment.accuracy:.1%}"
            self.console.print(f"{said} of the pairs held out")

    def _conclude(self, finished: Finished) -> None:
        self.console.print(
            Text.assemble(
                f"\nAccuracy {self._history[0]:.1%} -> ",
                (f"{finished.accuracy:.1%}", "bold green"),
                f"  {sparkline(self._history, self.console.encoding)}  "
                f"in {time.perf_counter() - self._started:.0f} s",
            )
        )
        for example in finished.examples:
            verdict = "the same" if example.says_same else "not the same"
            right = "" if example.says_same == example.pair.same else " (wrong)"
            self.console.print(f'  "{example.pair.first}"\n  "{example.pair.second}"')
            self.console.print(f"    -> {verdict}{right}", style="bold")
        self.console.print(f"\nResults: {finished.folder}/model.safetensors and result.json")
        self.console.print("Next:")
        for command, what in _NEXT:
            self.console.print(f"  {command}\n      {what}")


def sparkline(values: list[float], encoding: str = "utf-8") -> str:
    """Return a small curve of the values, lowest to highest.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    marks = _BLOCKS if encoding.lower().startswith("utf") else _ASCII
    low, span = min(values), max(values) - min(values) or 1.0
    return "".join(marks[round((value - low) / span * (len(marks) - 1))] for value in values)
