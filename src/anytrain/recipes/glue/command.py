"""The command itself: options in, results out."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from anytrain.core import environment
from anytrain.recipes.glue import job
from anytrain.recipes.glue.arguments import parse
from anytrain.recipes.words import notices_as_lines


def run(argv: Sequence[str]) -> None:
    """Do what the options ask for; errors are raised, and nothing is loaded before they are."""
    rank = environment.read().place.rank
    console = Console(highlight=False, soft_wrap=True, markup=False, quiet=rank > 0)
    with notices_as_lines():
        asked = parse(argv)
        checked = job.check(asked)
        outcome = job.run(checked, console.print)
    if rank == 0:
        from anytrain.recipes.glue import closing

        closing.show(console, asked, outcome)
