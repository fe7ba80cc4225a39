"""A Trainer whose steps are recorded, with a recorder that runs its work again at each replay.

So all rules of recording run without a GPU; what only a real graph shows is in tests/gpu.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anytrain import Trainer, TrainerCallback
from anytrain.engine.assemble import run as preparing, steps
from anytrain.engine.step.guard import DeviceGuard
from anytrain.fast import room
from anytrain.fast.recorded import recordings
from anytrain.fast.recorded.cuda_graph import Draws
from equivalence import twins


class Again:
    """Replay by running the work once more, as if it were being recorded."""

    problem = None

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = self.num_watched = 0

    @contextmanager
    def watching(self) -> Iterator[Draws]:
        self.num_watched += 1
        yield Draws()

    def record(self, work: Any, draws: Any) -> Any:
        self.num_recorded += 1
        outputs = _Outputs()

        def replay() -> None:
            self.num_replayed += 1
            outputs.made = work()

        return replay, outputs

    def release(self) -> None:
        pass

    renew = release

    def is_current(self) -> bool:
        return True


class _Outputs:
    """What the last replay has made."""

    made: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.made, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.made)


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> Again:
    recorder = Again()

    monkeypatch.setattr(recordings, "_is_elsewhere", lambda tensor: False)
    monkeypatch.setattr(room, "CudaGraphs", lambda device: recorder)
    monkeypatch.setattr(steps, "_record", room.record)
    monkeypatch.setattr(steps, "_reads_at_once", lambda run, optimizer: False)
    monkeypatch.setattr(
        preparing, "guard_for", lambda optimizer, session: DeviceGuard(session.device)
    )
    return recorder


SCALES = SimpleNamespace(loss=1.0)


class Scaled(Trainer):
    """A Trainer whose loss looks up a value elsewhere."""

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **more: Any) -> Any:
        return model(**inputs).loss * SCALES.loss


class Raises(TrainerCallback):
    """Change that value in the middle of a run."""

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        SCALES.loss = 3.0 if state.global_step >= 20 else 1.0


def train(folder: Path, **given: Any) -> Any:
    settings = {
        "train_dataset": twins.sentences(64),
        "learning_rate": 1e-3,
        "max_steps": 40,
        "logging_steps": 1,
        "per_device_train_batch_size": 8,
        "optim": "adamw_torch_fused",
    }
    SCALES.loss = 1.0
    trainer = twins.build(twins.OURS, folder, model=twins.bert(), **{**settings, **given})
    trainer.train()
    return trainer


def test_the_first_two_steps_are_watched_and_all_others_replayed(
    tmp_path: Path, again: Again
) -> None:
    train(tmp_path)
    assert (again.num_watched, again.num_recorded, again.num_replayed) == (2, 1, 38)


@pytest.mark.parametrize(
    ("given", "num_recorded"),
    [
        ({}, 1),
        ({"gradient_accumulation_steps": 2}, 1),
        ({"eval_strategy": "steps", "eval_steps": 5, "eval_dataset": twins.sentences(16)}, 1),
        ({"kind": lambda made: Scaled, "callbacks": [Raises()], "max_steps": 100}, 2),
    ],
    ids=["plain", "accumulated", "evaluated", "a value that changes"],
)
def test_a_recorded_run_is_the_run_op_by_op(
    tmp_path: Path, given: dict[str, Any], num_recorded: int, request: pytest.FixtureRequest
) -> None:
    plain = train(tmp_path / "plain", **given)
    recorder = request.getfixturevalue("again")
    same = train(tmp_path / "recorded", **given)
    assert recorder.num_recorded == num_recorded
    assert recorder.num_replayed > 25
    for one, other in zip(plain.state.log_history, same.state.log_history, strict=True):
        if "loss" in one:
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-4), one
