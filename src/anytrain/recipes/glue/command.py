"""The command itself: options in, results out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from anytrain.core import environment
from anytrain.core.errors import AnytrainError
from anytrain.recipes.glue import job
from anytrain.recipes.glue.arguments import Job, parse
from anytrain.recipes.words import notices_as_lines, told_how_to_go_on

_PATIENCE_S = 5.0


def run(argv: Sequence[str]) -> None:
    """Do what the options ask for; errors are raised, and nothing is loaded before they are."""
    rank = environment.read().place.rank
    console = Console(highlight=False, soft_wrap=True, markup=False, quiet=rank > 0)
    with notices_as_lines():
        with _first_rank_speaks(rank):
            asked = parse(argv)
            checked = job.check(asked)
        with told_how_to_go_on(_how(asked)):
            outcome = job.run(checked, console.print)
    if rank == 0:
        from anytrain.recipes.glue import closing

        closing.show(console, asked, outcome)


def _how(asked: Job) -> str:
    """Return what continues this job once it has been stopped."""
    if asked.training.do_train and asked.training.overwrite_output_dir:
        return "the same command without --overwrite_output_dir"
    return "the same command"


@contextmanager
def _first_rank_speaks(rank: int) -> Iterator[None]:
    """Let rank 0 say what every rank finds; the launcher ends the others once it has left.

    A rank that is still here after a while found something that rank 0 did not.
    """
    try:
        yield
    except AnytrainError:
        if rank > 0:
            time.sleep(_PATIENCE_S)
        raise
