"""The way into `anytrain.fast`, the room whose speed a run may do without.

Nothing in the engine imports it. Where the folder is not there, every step runs op by op, as torch
computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import nn

from anytrain.engine.step.step import Step

if TYPE_CHECKING:
    from anytrain.engine.assemble.run import Run

UNKNOWN_LENGTH = 100
"""How many more steps a loop is taken to have that does not say."""


@dataclass(frozen=True, slots=True)
class RecordingOptions:
    """What is known of a step that may be recorded."""

    functions: tuple[Callable[..., Any], ...] = ()
    """What of the user's code computes the loss."""
    obstacle: str | None = None
    """What of the user's own code keeps it from being recorded; None where nothing does."""
    max_grad_norm: float = 0.0
    sum_up: Callable[[Any, Any], None] | None = None
    """What adds a step's loss to the meter's sums."""
    steps_left: Callable[[], float] = lambda: UNKNOWN_LENGTH
    """Asked how many calls of the step the run has left."""
    is_whole: bool = True
    """Whether one call makes one update of one optimizer, so that shortcuts may be taken."""


class FastRoom(Protocol):
    """What makes training faster and changes nothing of what is learnt."""

    def record(self, run: Run, step: Step, options: RecordingOptions) -> None:
        """Let a step be recorded and replayed, or say in the plan what stands in the way."""

    def record_calls(self, run: Run, model: nn.Module) -> None:
        """Let a model's forward and backward be recorded, or say what stands in the way."""

    def attend_quickly(self, device: torch.device) -> AbstractContextManager[None]:
        """Let transformers' models attend over short texts by a faster kernel in the block."""


def fast_room() -> FastRoom | None:
    """Return the room; None where it is not installed."""
    if find_spec("anytrain.fast") is None:
        return None
    return cast(FastRoom, import_module("anytrain.fast.room"))


def record_calls(run: Run, model: nn.Module) -> None:
    """Let the calls of a model in a user's own loop be replayed where somebody asks for that."""
    session = run.session
    if session.device.type != "cuda" or session.planned.step.value != "cuda_graph":
        return
    room = fast_room()
    if room is not None:
        room.record_calls(run, model)
