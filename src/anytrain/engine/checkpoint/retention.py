"""Which checkpoints to keep."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from anytrain.core.errors import BadInput
from anytrain.engine.checkpoint.catalog import Entry, entries, newest_whole, wrong_size

_RUNS_NAME = re.compile(r"(checkpoint|step)[-_]\d+")


@dataclass(frozen=True, slots=True)
class Retention:
    """Keep the newest, the best, and every Nth; the default keeps everything.

    `keep_last` counts the newest. `metric` keeps the `keep_best` best by that metric as well,
    greater or lower being better. `keep_every` keeps each whose step it divides, for good.
    """

    keep_last: int | None = None
    metric: str | None = None
    greater_is_better: bool = False
    keep_best: int = 1
    keep_every: int | None = None
    best_counts: bool = False
    """Whether the best ones are counted among `keep_last`; the newest always stays."""
    known_best: Callable[[], str | None] | None = None
    """Names the best one where the run knows it better than the files, which an evaluation after
    the save does not reach."""

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_best", "keep_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadInput(
                    f"Cannot use {name}={value}.",
                    why="the newest whole checkpoint and the best one are never removed.",
                    fix=f"pass {name}=1 or more, or leave it out to keep everything.",
                )


def is_runs_own(path: Path) -> bool:
    """Whether a run has made a checkpoint under this name: copies of it have their owner's.

    >>> [is_runs_own(Path(name)) for name in ("checkpoint-7", "step-000012", "checkpoint-7-copy")]
    [True, True, False]
    """
    return _RUNS_NAME.fullmatch(path.name) is not None and not path.is_symlink()


def doomed(found: Sequence[Entry], rule: Retention) -> list[Entry]:
    """Return the checkpoints that the rule lets go, oldest first.

    Only whole ones count, and only whole ones go: a damaged one is left for its owner to see. So is
    what has a name that no run gives, or is a link.
    """
    if rule.keep_last is None:
        return []
    whole = [e for e in found if is_runs_own(e.path) and wrong_size(e) is None]
    kept = {entry.path for entry in best(whole, rule)}
    room = max(1, rule.keep_last - len(kept)) if rule.best_counts else rule.keep_last
    newest = [entry for entry in whole if not rule.best_counts or entry.path not in kept]
    kept |= {entry.path for entry in newest[:room]}
    kept |= {entry.path for entry in whole[:1]}
    return [e for e in reversed(whole) if e.path not in kept and not _is_milestone(e, rule)]


def prunable(root: Path, rule: Retention) -> list[Entry]:
    """Return what the rule lets go in a folder, sparing the newest whose every byte checks."""
    spared = newest_whole(root).path
    return [entry for entry in doomed(entries(root), rule) if entry.path != spared]


def best(found: Sequence[Entry], rule: Retention) -> list[Entry]:
    """Return the best checkpoints by the rule's metric, best first; a NaN is never best."""
    if rule.known_best is not None:
        name = rule.known_best()
        return [entry for entry in found if entry.path.name == name]
    if rule.metric is None:
        return []
    scored = [(_score(entry, rule.metric), entry) for entry in found]
    valid = [(score, entry) for score, entry in scored if not math.isnan(score)]
    valid.sort(key=lambda pair: -pair[0] if rule.greater_is_better else pair[0])
    return [entry for _, entry in valid[: rule.keep_best]]


def _score(entry: Entry, metric: str) -> float:
    return entry.manifest.metrics.get(metric, math.nan) if entry.manifest else math.nan


def _is_milestone(entry: Entry, rule: Retention) -> bool:
    if rule.keep_every is None or entry.manifest is None:
        return False
    return entry.manifest.step % rule.keep_every == 0
