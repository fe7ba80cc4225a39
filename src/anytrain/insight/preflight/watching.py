"""The run that is being watched in this process, if one is.

The doors look here: a Trainer that is watched trains two steps and evaluates one, and writes
nothing where the real run would write.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from anytrain.insight.preflight.traced import Job

if TYPE_CHECKING:
    from anytrain.insight.preflight.batches import Setting
    from anytrain.insight.preflight.recorder import Recorder


@dataclass(slots=True)
class Observer:
    """What watches a run, and what the run has said of itself."""

    recorder: Recorder
    folder: str
    """Where the run may write: it is removed afterwards."""
    setting: Setting | None = None
    """What it is traced with in the place of its own; None leaves everything as it is."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Fields of the job."""
    has_begun: bool = False

    def begin(self) -> bool:
        """Whether nobody has taken the run over so far; from here on somebody has."""
        is_first, self.has_begun = not self.has_begun, True
        return is_first

    def tell(self, **facts: Any) -> None:
        """Take down what the run says of itself, and where; what was said first stays."""
        if facts.get("output_dir") and "output_dir" not in self.facts:
            from anytrain.insight.preflight.places import users_place  # loads torch

            facts["output_place"] = users_place()
        self.facts = {**facts, **self.facts}

    def leave(self) -> None:
        """Everything was seen: leave the user's script."""
        self.recorder.end_steps()
        self.recorder.leave()

    def skips_save(self) -> bool:
        """Whether a save is left out, as all are once the training has begun; leave at the last."""
        if self.recorder.has_seen_all:
            self.leave()
        return self.recorder.phase != "make"

    @property
    def job(self) -> Job:
        """What is known of the job."""
        own = {} if self.setting is None else {"batch_size": self.setting.batch_size}
        return replace(Job(), **{**self.facts, **own})


_current: Observer | None = None


def watching() -> Observer | None:
    """Return what watches this process; None in a real run."""
    return _current


def skips_save() -> bool:
    """Whether whoever is about to write must not: this process is watched."""
    return _current is not None and _current.skips_save()


def watch(found: Observer | None) -> None:
    """Let the doors know that this process is watched."""
    global _current
    _current = found


def run_facts(run: Any) -> dict[str, Any]:
    """Return what a run says of the job."""
    session = run.session
    return {
        "precision": session.plan.precision.value,
        "accumulation": session.cursor.accumulation.num_steps,
        "scales_gradients": session.precision.scale is not None,
        "finds_unused": bool(run.options.ddp.get("find_unused_parameters", False)),
    }
