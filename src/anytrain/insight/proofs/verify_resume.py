"""Prove that a script which is killed and started again ends as one that is left alone.

The script runs once undisturbed and once with SIGKILLs at random moments, each in an empty project
folder. Its last checkpoints, and the tensor files beside them, must be the same to the last bit.
Where they differ, the losses that both have logged tell the first step at which they part.
"""

from __future__ import annotations

import csv
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anytrain.core import records
from anytrain.core.errors import BadInput
from anytrain.engine import checkpoint
from anytrain.insight.proofs.checkpoint_diff import (
    Difference,
    PartDiff,
    compare_artifacts,
    compare_checkpoints,
)
from anytrain.insight.proofs.restarts import (
    Commit,
    KillTrap,
    RestartedRun,
    TrainingScript,
    at_once,
    last_lines,
    plan,
)

Curves = dict[str, dict[int, list[float]]]
"""By "counter/name", by step, every value that was logged: a redone step may have several."""
# A Trainer's files that name its folder or the time; what they hold besides is in other parts.
_TELL_THE_TIME = ("state.json", "trainer_state.json", "training_args.json")


@dataclass(slots=True)
class Verdict:
    """What was found."""

    kills: list[int] = field(default_factory=list)
    """For each kill the step of the newest checkpoint then; 0 where there was none."""
    parts: list[PartDiff] = field(default_factory=list)
    when: list[str] = field(default_factory=list)
    """What is known about the moment at which the two runs part."""
    is_reproducible: bool | None = None
    """Whether two undisturbed runs are the same; None where that was not tried."""
    failure: str | None = None
    """Why the killed run did not get to its end, or did not resume."""

    @property
    def is_equal(self) -> bool:
        return self.failure is None and not any(part.differences for part in self.parts)

    @property
    def num_tensors(self) -> int:
        return sum(part.num_tensors for part in self.parts)

    @property
    def first(self) -> Difference | None:
        """The first value that differs, in the order of the checkpoint."""
        return next((d for part in self.parts for d in part.differences), None)

    def __str__(self) -> str:
        if self.failure is not None:
            return self.failure
        if self.is_equal:
            return (
                f"resumed equals uninterrupted: {_counted(len(self.kills), 'kill')}, "
                f"{self.num_tensors} tensors identical"
            )
        lines = ["resumed differs from uninterrupted", f"first: {self.first}"]
        lines.append(f"parts: {_listed(self.parts)}")
        lines += [f"when: {'; '.join(self.when)}"] if self.when else []
        return "\n  ".join([*lines, *_advice(self.is_reproducible)])


def verify_resume(
    script: TrainingScript,
    work: Path,
    *,
    kills: int = 3,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Run the script undisturbed and killed, below the folder `work`; return how they compare."""
    script.check()
    say("running it uninterrupted")
    whole = _undisturbed(script, work / "uninterrupted")
    say(f"it took {_took(whole)}")
    resumed, verdict = RestartedRun(script, work / "resumed"), Verdict()
    traps = plan(whole.commits, kills, random.Random(seed))
    last_step = whole.commits[-1].manifest.step
    verdict.failure = _killed_to_its_end(resumed, traps, last_step, verdict.kills, say)
    if verdict.failure is None and not verdict.kills:
        say("no kill came before its last checkpoint: trying again, with kills at once")
        resumed = RestartedRun(script, work / "resumed-again")
        traps = at_once(traps)
        verdict.failure = _killed_to_its_end(resumed, traps, last_step, verdict.kills, say)
    if verdict.failure is None and not verdict.kills:
        raise BadInput(
            f"{script.path} cannot be killed on its way.",
            why="it had saved its last checkpoint before the first kill was due: its run is too "
            "short, or its pace too uneven.",
            fix="let it train longer, or save less often near its end.",
        )
    if verdict.failure is None:
        verdict.parts = _compared(whole, resumed)
    if verdict.failure is None and not verdict.is_equal:
        verdict.when = _when(whole, resumed, verdict.kills)
        say("they differ: running it uninterrupted once more, to see whether it repeats itself")
        again = _undisturbed(script, work / "uninterrupted-again")
        verdict.is_reproducible = not any(p.differences for p in _compared(whole, again))
    return verdict


def _undisturbed(script: TrainingScript, folder: Path) -> RestartedRun:
    trial = RestartedRun(script, folder)
    code = trial.live()
    if code != 0:
        raise BadInput(
            f"{script.path} failed by itself, with exit code {code}.",
            why=f"its last lines were:\n{_tail(trial.log)}",
            fix=f"let it run to its end first; all it printed is in {trial.log}.",
        )
    if not trial.commits:
        raise BadInput(
            f"{script.path} has saved no checkpoint in {trial.project}.",
            why="what resumes is compared by its last checkpoint.",
            fix="call accelerator.save_state() with a folder below the project folder, every now "
            "and then and once at the end.",
        )
    return trial


def _killed_to_its_end(
    trial: RestartedRun,
    traps: Sequence[KillTrap],
    last_step: int,
    kills: list[int],
    say: Callable[[str], None],
) -> str | None:
    """Kill and start again until it ends; note each kill; return what kept it from its end.

    A kill after the checkpoint of the last step proves nothing, and does not count: nothing is
    left to train. A busy machine can delay one that far.
    """
    for trap in [*traps, None]:
        before, seen = trial.newest, len(trial.commits)
        code = trial.live(trap)
        new = trial.commits[seen:]
        if before is not None and new and new[0].manifest.step < before.manifest.step:
            return _began_anew(trial, before, new[0])
        if code is None:
            step = trial.newest.manifest.step if trial.newest else 0
            if step >= last_step:
                say(f"a kill came after the last checkpoint, of step {step}: it does not count")
                continue
            kills.append(step)
            say(f"kill {len(kills)} of {len(traps)}: the newest checkpoint is of step {step}")
        elif code != 0:
            return _did_not_start_again(trial, code, kills)
        else:
            break
    return None


def _compared(one: RestartedRun, other: RestartedRun) -> list[PartDiff]:
    if one.newest is None or other.newest is None:
        missing = Difference("the last checkpoint", "is missing in the second")
        return [PartDiff("checkpoint", differences=[missing])]
    first, second = (checkpoint.load(t.project / t.newest.name) for t in (one, other) if t.newest)
    return compare_checkpoints(first, second) + compare_artifacts(one.project, other.project)


def _when(one: RestartedRun, other: RestartedRun, kills: Sequence[int]) -> list[str]:
    told = [f"it was killed after the checkpoints of steps {', '.join(map(str, kills))}"]
    unlike = _first_unlike(one.commits, other.commits)
    if unlike is not None:
        step, files = unlike
        told.append(f"the checkpoint of step {step} is the first that differs ({files})")
    parting = first_divergence(read_losses(one.project), read_losses(other.project))
    return [*told, str(parting)] if parting is not None else told


def _first_unlike(one: Sequence[Commit], other: Sequence[Commit]) -> tuple[int, str] | None:
    """Return the first step whose checkpoints differ, and their files that do.

    The manifests are enough, and outlast the checkpoints: they hold every file's checksum.
    """
    mine = {(c.name, c.manifest.step): c.manifest.files for c in one}
    for commit in sorted(other, key=lambda c: c.manifest.step):
        files = mine.get((commit.name, commit.manifest.step))
        if files is not None:
            theirs = commit.manifest.files
            unlike = sorted(
                name
                for name in files
                if theirs.get(name) != files[name]
                and not (name in _TELL_THE_TIME and _TELL_THE_TIME[1] in files)
            )
            if unlike:
                return commit.manifest.step, ", ".join(unlike)
    return None


# In words.


def _began_anew(trial: RestartedRun, before: Commit, found: Commit) -> str:
    return (
        f"{trial.script.path} does not resume: it begins anew.\n"
        f"  why: there was a checkpoint of step {before.manifest.step}, and the next one that it "
        f"saved after a kill is of step {found.manifest.step}.\n"
        "  fix: call accelerator.resume() (or load_state()) after prepare(), before the loop."
    )


def _did_not_start_again(trial: RestartedRun, code: int, kills: Sequence[int]) -> str:
    return (
        f"{trial.script.path} failed when it was started again, with exit code {code}.\n"
        f"  why: after kill {len(kills)} its last lines were:\n{_tail(trial.log)}\n"
        f"  fix: all it printed is in {trial.log}; its project folder is {trial.project}."
    )


def _advice(is_reproducible: bool | None) -> list[str]:
    if is_reproducible:
        return [
            "why: two uninterrupted runs are the same, so the training depends on something that "
            "is not in the checkpoint: a moving average, a counter, a cache, an attribute.",
            "fix: give it state_dict() and load_state_dict(), and pass it to "
            "accelerator.register_for_checkpointing(); or draw it from the seed and the step.",
        ]
    return [
        "why: two uninterrupted runs differ as well, so no resume could be exact: something is "
        "drawn from the time, from secrets or from a generator that nobody seeded, or the device "
        "does not repeat its sums.",
        "fix: call set_seed() first, draw from python's, numpy's or torch's generators, and on a "
        "GPU use torch.use_deterministic_algorithms(True).",
    ]


def _listed(parts: Sequence[PartDiff]) -> str:
    unlike = [
        f"{p.name} ({len(p.differences)} of {p.num_tensors} tensors)"
        if p.num_tensors >= len(p.differences)
        else p.name
        for p in parts
        if p.differences
    ]
    same = [p.name for p in parts if not p.differences and p.name != "checkpoint"]
    return f"{', '.join(unlike)}; the same in {', '.join(same) or 'no other'}"


def _took(trial: RestartedRun) -> str:
    steps = [commit.manifest.step for commit in trial.commits]
    last = trial.commits[-1].seconds
    saves = _counted(len(steps), "checkpoint")
    return f"{last:.1f} s to its last save, of step {steps[-1]}; {saves}"


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _tail(log: Path) -> str:
    return "\n".join(f"    {line}" for line in last_lines(log))


# -- logged losses ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LossDivergence:
    """The first step at which a logged loss is not the same."""

    name: str
    step: int
    one: float
    other: float

    def __str__(self) -> str:
        return f"{self.name} parts at step {self.step}: {self.one!r} and {self.other!r}"


def read_losses(folder: Path) -> Curves:
    """Return what was logged below a folder under names with "loss" in them.

    Read are a run's own log, and the files of `log_with="jsonl"` and `log_with="csv"`.
    """
    curves: Curves = defaultdict(lambda: defaultdict(list))
    for row in _rows(folder):
        # Trackers and the run itself may count other steps.
        counted = "_step" if "_step" in row else "step"
        step = _number(row.get(counted))
        for name, value in row.items():
            loss = _number(value) if "loss" in name.lower() else None
            if step is not None and loss is not None:
                curves[f"{counted}/{name}"][int(step)].append(loss)
    return curves


def first_divergence(one: Curves, other: Curves) -> LossDivergence | None:
    """Return where the curves of two runs part first; None where they never do."""
    found = [
        LossDivergence(name.partition("/")[2], step, values[0], value)
        for name, steps in one.items()
        for step, values in steps.items()
        for value in other.get(name, {}).get(step, ())
        if repr(value) != repr(values[0])
    ]
    return min(found, key=lambda parting: parting.step, default=None)


def _rows(folder: Path) -> Iterator[Mapping[str, Any]]:
    for path in sorted(folder.rglob(records.METRICS)):
        yield from records.open_run(path.parent).metrics
    for path in sorted(folder.rglob("metrics.csv")):
        with path.open(newline="", errors="replace") as file:
            yield from csv.DictReader(file)


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
