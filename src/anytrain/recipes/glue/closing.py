"""The last words of a job: its results, where they lie, and how to use the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from anytrain.recipes.glue.arguments import Job
from anytrain.recipes.glue.job import Outcome

_NOT_SHOWN = ("_runtime", "_per_second", "_flos", "_steps", "epoch")


def show(console: Console, job: Job, outcome: Outcome) -> None:
    """Print a table of the results and what can be done with them."""
    shown = dict(_scores(outcome.metrics))
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
        pair = '{"text": "...", "text_pair": "..."}' if outcome.pairs else '"..."'
        console.print("Use it:")
        console.print("  from transformers import pipeline")
        console.print(f'  pipeline("text-classification", "{job.folder}")({pair})')


def _scores(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in metrics.items():
        if not any(name.removesuffix("_mm").endswith(ending) for ending in _NOT_SHOWN):
            yield name, f"{value:.4f}" if isinstance(value, float) else f"{value:,}"


def _places(job: Job) -> Iterator[str]:
    if job.training.do_train:
        yield f"Model:        {job.folder}"
    if job.training.do_train or job.training.do_eval:
        yield f"Results:      {job.folder}/all_results.json"
    if job.training.do_predict:
        for path in sorted(job.folder.glob("predict_results*.txt")):
            yield f"Predictions:  {path}"
