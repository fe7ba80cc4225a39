"""The command itself: options in, results out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

from rich.console import Console

from anytrain.core import environment
from anytrain.core.errors import AnytrainError
from anytrain.engine.assemble import session as sessions
from anytrain.recipes.glue import job
from anytrain.recipes.glue.arguments import Job, parse
from anytrain.recipes.words import notices_as_lines, told_how_to_go_on

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
        with _first_rank_speaks(rank):
            asked = _apart(parse(argv))
            checked = job.check(asked)
        with told_how_to_go_on(_how(asked)):
            outcome = job.run(checked, console.print)
    if rank == 0:
        from anytrain.recipes.glue import closing

        closing.show(console, asked, outcome)


def _preflight(argv: list[str]) -> None:
    """Trace the job as it would run without the option."""
    from anytrain.insight.preflight.command import tell

    at = argv.index(PREFLIGHT)
    behind = takewhile(lambda word: not word.startswith("--"), argv[at + 1 :])
    targets = list(behind)
    rest = argv[:at] + argv[at + 1 + len(targets) :]
    parse(rest)  # what is wrong with the options is said at once
    tell(["-m", "anytrain.recipes.glue", *rest], targets)


def _apart(asked: Job) -> Job:
    """Let a job that is only watched write where it leaves nothing behind."""
    observer = sessions.observer()
    if observer.is_watching:
        observer.tell(output_dir=str(asked.folder))
        asked.training.output_dir = observer.folder
    return asked


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
