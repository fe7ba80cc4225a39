"""On a GPU too everything trains without the room of speed, and the plan says why op by op."""

from __future__ import annotations

from pathlib import Path

import pytest

from anytrain.engine.assemble import session, steps
from equivalence import twins

pytestmark = pytest.mark.gpu


def test_without_the_room_a_gpu_trains_op_by_op(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "train_dataset": twins.sentences(64),
        "max_steps": 12,
        "logging_steps": 1,
        "use_cpu": False,
    }
    both = []
    for name in ("with", "without"):
        trainer = twins.build(twins.OURS, tmp_path / name, model=twins.bert(), **settings)
        trainer.train()
        both.append([told["loss"] for told in trainer.state.log_history if "loss" in told])
        for asking in (session, steps):
            monkeypatch.setattr(asking, "fast_room", lambda: None)
    assert both[1] == pytest.approx(both[0], rel=1e-2)
    told = trainer._session.plan.step
    assert told.value == "eager" and "not installed" in told.because
