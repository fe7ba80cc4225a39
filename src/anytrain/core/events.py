"""What happens in a run, and what a callback may ask for.

An `Event` is a fact that nobody can change. A callback answers with the set of its requests;
it never touches the loop's own state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

Request = Literal["log", "evaluate", "save", "stop_epoch", "stop"]

EventKind = Literal[
    "init_end",
    "train_begin",
    "train_end",
    "epoch_begin",
    "epoch_end",
    "step_begin",
    "substep_end",
    "pre_optimizer_step",
    "optimizer_step",
    "step_end",
    "evaluate",
    "predict",
    "save",
    "log",
    "prediction_step",
    "push_begin",
]

REQUESTS: tuple[Request, ...] = get_args(Request)
EVENT_KINDS: tuple[EventKind, ...] = get_args(EventKind)
NO_REQUESTS: frozenset[Request] = frozenset()
INSIDE_A_STEP: frozenset[EventKind] = frozenset(
    ("substep_end", "pre_optimizer_step", "optimizer_step")
)
"""Events in the middle of an optimizer step."""


@dataclass(frozen=True, slots=True)
class Event:
    """One moment of a run: its kind, where the run stands, and the values known there."""

    kind: EventKind
    step: int
    epoch: float
    max_steps: int
    values: Mapping[str, Any] = field(default_factory=dict)


class Watcher(Protocol):
    """A callback of the house: told what happened, it returns what it asks for.

    It is told of every event but those in the middle of a step. One that wants others, or
    fewer, names them in an attribute `watches`.
    """

    def after(self, event: Event) -> frozenset[Request]:
        """Return the requests this event gives rise to; an empty set asks for nothing."""
        ...
