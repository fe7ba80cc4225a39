"""The default flow asks for exactly what HF's does, over a table of strategies."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import transformers.trainer_callback as theirs

from anytrain.core.events import NO_REQUESTS
from anytrain.doors.callbacks import Callbacks, DefaultFlowCallback, TrainerState

NUM_STEPS, STEPS_PER_EPOCH = 25, 10
STRATEGIES = list(itertools.product(("no", "steps", "epoch"), repeat=2))


def flow(args: Any, library: Any) -> list[tuple[bool, ...]]:
    """Return the flags after each step and epoch of a run."""
    state, control = library.TrainerState(max_steps=NUM_STEPS), library.TrainerControl()
    state.compute_steps(args, NUM_STEPS)
    callback = library.DefaultFlowCallback()
    seen = []
    for step in range(1, NUM_STEPS + 1):
        control._new_step()
        state.global_step, state.epoch = step, step / STEPS_PER_EPOCH
        callback.on_step_end(args, state, control)
        seen.append(tuple(vars(control).values()))
        if step % STEPS_PER_EPOCH == 0 or step == NUM_STEPS:
            callback.on_epoch_end(args, state, control)
            seen.append(tuple(vars(control).values()))
    return seen


@pytest.mark.parametrize(("evaluate", "save"), STRATEGIES)
@pytest.mark.parametrize("log", ["no", "steps", "epoch"])
@pytest.mark.parametrize(("interval", "delay"), [(4, 0), (0.3, 0), (7, 9), (5, 1.5)])
def test_requests_come_when_hfs_come(
    evaluate: str, save: str, log: str, interval: float, delay: float
) -> None:
    import anytrain.doors.callbacks as ours

    args = SimpleNamespace(
        logging_first_step=interval == 4,
        logging_strategy=log,
        eval_strategy=evaluate,
        save_strategy=save,
        eval_delay=delay,
        logging_steps=interval,
        eval_steps=interval,
        save_steps=interval,
    )
    assert flow(args, ours) == flow(args, theirs)


def test_a_save_interval_of_zero_saves_at_the_end_only() -> None:
    args = SimpleNamespace(
        logging_first_step=False,
        logging_strategy="no",
        eval_strategy="no",
        save_strategy="steps",
        eval_delay=0,
    )
    state = TrainerState(max_steps=3, save_steps=0)
    callbacks = Callbacks([DefaultFlowCallback])
    asked = []
    for state.global_step in (1, 2, 3):
        callbacks.tell("step_begin", args, state)
        asked.append(callbacks.tell("step_end", args, state))
    assert asked == [NO_REQUESTS, NO_REQUESTS, {"save", "stop"}]
