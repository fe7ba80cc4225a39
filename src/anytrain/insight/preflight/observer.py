"""What preflight sees of a run, and how far it lets the run go.

A Trainer that is looked at trains two steps and evaluates one batch; nothing is written where the
real run would write.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from anytrain.engine.assemble import session as sessions
from anytrain.insight.preflight.trace import TracedJob

if TYPE_CHECKING:
    from anytrain.insight.preflight.recorder import OpRecorder
    from anytrain.insight.preflight.trace import Setting


@dataclass(slots=True)
class TraceObserver:
    """Look on at a run that is traced, and take down what it says of itself."""

    recorder: OpRecorder
    folder: str
    """Where the run may write: it is removed afterwards."""
    setting: Setting | None = None
    """What it is traced with in the place of its own; None leaves everything as it is."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Fields of the job."""
    has_begun: bool = False

    @property
    def is_watching(self) -> bool:
        """Always: nothing is trained."""
        return True

    def begin(self) -> bool:
        """Whether nobody has taken the run over so far; from here on somebody has."""
        is_first, self.has_begun = not self.has_begun, True
        return is_first

    def tell(self, **facts: Any) -> None:
        """Take down what the run says of itself, and where; what was said first stays."""
        if facts.get("output_dir") and "output_dir" not in self.facts:
            from anytrain.insight.preflight.source_lines import users_place  # loads torch

            facts["output_place"] = users_place()
        self.facts = {**facts, **self.facts}

    def end_steps(self) -> None:
        """Close the books of the steps before anything else runs."""
        self.recorder.end_steps()

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
    def job(self) -> TracedJob:
        """What is known of the job."""
        own = {} if self.setting is None else {"batch_size": self.setting.batch_size}
        return replace(TracedJob(), **{**self.facts, **own})


def present() -> TraceObserver:
    """Return who looks on at the runs of this process, which is traced."""
    found = sessions.observer()
    assert isinstance(found, TraceObserver)
    return found
