"""On a GPU, the repeated block is compiled beside the training and swapped into recorded steps."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from anytrain.doors.callbacks import TrainerCallback
from anytrain.engine.step.regional import regional
from equivalence import twins

pytestmark = pytest.mark.gpu


class Waiting(TrainerCallback):
    """Hold the training at a log until the block is compiled: this run is too short for it."""

    trainer: Any = None

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        """Wait where compiling has begun."""
        region = self.trainer._regions._tier.region if self.trainer._regions else None
        ends = time.monotonic() + 200
        while region is not None and region._rehearsal is not None and time.monotonic() < ends:
            if region.ready() is not None or region.is_off:
                return
            time.sleep(0.2)


def train(folder: Path, engine: str, wait: bool) -> twins.Ran:
    """Train without dropout: compiled code draws other masks."""
    waiting = Waiting()
    trainer_class, arguments, _ = twins.parts(twins.OURS)
    given = arguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        max_steps=60,
        logging_steps=10,
        learning_rate=1e-3,
        step_engine=engine,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = trainer_class(
        twins.bert(num_hidden_layers=4, hidden_size=64, intermediate_size=128),
        given,
        train_dataset=twins.sentences(256),
        callbacks=[waiting] if wait else [],
    )
    waiting.trainer = trainer
    return twins.Ran(trainer, trainer.train(), folder, [])


def test_compiled_blocks_are_swapped_into_recorded_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(regional, "repays", lambda *given: True)
    monkeypatch.setattr(regional, "_SLOWER", 1000.0)  # so small a model is not worth compiling
    plain = train(tmp_path / "plain", "cuda_graph", wait=False)
    swapped = train(tmp_path / "swapped", "auto", wait=True)
    told = [revision.because for revision in swapped.trainer._session.revisions]
    assert any("4 x BertLayer run compiled" in each for each in told), told
    last = swapped.trainer._session.plan.step
    assert last.value == "cuda_graph", last
    twins.assert_same_history(swapped.history, plain.history, rtol=2e-2)
    layers = swapped.trainer.model.bert.encoder.layer
    assert all(layer._compiled_call_impl is None for layer in layers)
