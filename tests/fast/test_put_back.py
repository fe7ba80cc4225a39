"""A run leaves torch and transformers as it found them: to its end, failed, and a second time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from anytrain import Accelerator, TrainerCallback
from anytrain.core import patches
from anytrain.engine.assemble import session as sessions
from anytrain.fast import room
from equivalence import twins
from fast.recorded.test_recorded_trainer import Again, again, train

__all__ = ["again"]
THEIRS = ("torch", "transformers", "numpy")


def parts() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.split(".")[0] in THEIRS:
            yield name, vars(module)
    for kind in (torch.Tensor, torch.nn.Module, torch.nn.Linear, torch.nn.LayerNorm):
        yield kind.__name__, dict(vars(kind))
    yield "attention", dict(ALL_ATTENTION_FUNCTIONS)


def functions() -> dict[tuple[str, str], Any]:
    """Return every function and class of theirs by its place."""
    return {
        (place, name): value
        for place, held in parts()
        for name, value in list(held.items())
        if callable(value) and not isinstance(value, ModuleType)
    }


def changed(before: dict[tuple[str, str], Any]) -> set[tuple[str, str]]:
    now = functions()  # modules that were loaded since are no change
    return {place for place, value in before.items() if now.get(place) is not value}


class Fails(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        if state.global_step == 15:
            raise KeyError("no such row")


class Looks(TrainerCallback):
    """Note what is replaced between two steps."""

    seen: set[str] = set()

    def on_step_end(self, *given: Any, **known: Any) -> None:
        self.seen |= set(patches.in_force())


def test_a_recorded_run_leaves_other_libraries_as_they_were(tmp_path: Path, again: Again) -> None:
    train(tmp_path / "first", max_steps=2)  # torch and transformers fill caches of their own
    before, looks = functions(), Looks()
    train(tmp_path / "whole", callbacks=[looks])
    assert again.num_replayed > 25
    with pytest.raises(KeyError):
        train(tmp_path / "failed", callbacks=[Fails()])
    train(tmp_path / "second")
    assert changed(before) == set()
    assert looks.seen == set() and patches.in_force() == []


class Attention:
    """A room whose attention is another object; a CPU has none of its own."""

    record = staticmethod(room.record)

    @staticmethod
    def attend_quickly(device: Any) -> Any:
        def make() -> Any:
            own = ALL_ATTENTION_FUNCTIONS["sdpa"]
            ALL_ATTENTION_FUNCTIONS.register("sdpa", lambda *given, **more: own(*given, **more))
            return lambda: ALL_ATTENTION_FUNCTIONS.register("sdpa", own)

        return patches.shared("short attention", make)


@pytest.fixture
def _attends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        type = "cuda"

    class Session:
        device, end_step = Device(), None

    monkeypatch.setattr(sessions, "fast_room", lambda: Attention())
    own = sessions.replacements
    for user in ("anytrain.doors.trainer.preparing", "anytrain.engine.assemble.run"):
        monkeypatch.setattr(f"{user}.replacements", lambda session: own(Session()))  # type: ignore[arg-type]


@pytest.mark.usefixtures("_attends")
def test_attention_is_replaced_as_long_as_a_run_lasts(tmp_path: Path) -> None:
    own, looks = ALL_ATTENTION_FUNCTIONS["sdpa"], Looks()
    for number, callbacks in enumerate(([looks], [Fails()], [])):
        with pytest.raises(KeyError) if number == 1 else nullcontext():
            trainer = train(tmp_path / str(number), callbacks=callbacks, max_steps=16)
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
    assert looks.seen == {"short attention"}
    trainer.evaluate(twins.sentences(8))
    trainer.predict(twins.sentences(8))
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
    for _ in "ab":
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(twins.bert())
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not own
        accelerator.end_training()
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
