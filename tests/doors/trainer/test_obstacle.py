"""What of a subclass keeps a step from being recorded is named with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anytrain import Trainer, TrainingArguments
from equivalence import twins


class Mine(Trainer):
    def training_step(self, *given: Any, **more: Any) -> Any:
        return super().training_step(*given, **more)


def test_a_training_step_of_ones_own_is_named_with_file_and_line(tmp_path: Path) -> None:
    trainer = Mine(twins.bert(), TrainingArguments(str(tmp_path), report_to=[]))
    assert "test_obstacle.py line " in str(trainer._obstacle())
    plain = Trainer(twins.bert(), TrainingArguments(str(tmp_path), report_to=[]))
    assert plain._obstacle() is None
