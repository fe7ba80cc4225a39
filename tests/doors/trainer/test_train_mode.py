"""A model trains at every step, whatever somebody has done to it between two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from equivalence import twins

MOMENTS = ("train_begin", "epoch_begin", "step_begin", "step_end", "log", "save", "evaluate")


class Noted(nn.Module):
    """A regression that notes in which mode it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.modes = nn.Linear(1, 1), []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        made = self.linear(x)
        if torch.is_grad_enabled():
            self.modes.append(self.training)
        return {"loss": (made - labels).square().mean(), "logits": made}


def trained(library: str, folder: Path, moment: str | None) -> Any:
    """Train with evaluations and saves, and with a callback that forgets what it did."""
    _, _, callback = twins.parts(library)

    def forget(self: Any, *given: Any, model: Any = None, **known: Any) -> None:
        model.eval()

    kind = type("Forgetful", (callback,), {f"on_{moment}": forget} if moment else {})
    rows = [{"x": torch.ones(1), "labels": torch.ones(1)}] * 24
    trainer = twins.build(
        library,
        folder,
        model=Noted(),
        train_dataset=rows,
        eval_dataset=rows[:4],
        callbacks=[kind()],
        max_steps=6,
        logging_steps=2,
        save_strategy="steps",
        save_steps=3,
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("library", twins.LIBRARIES)
@pytest.mark.parametrize("moment", MOMENTS)
def test_every_step_is_trained_on(library: str, moment: str, tmp_path: Path) -> None:
    assert trained(library, tmp_path, moment).model.modes == [True] * 6


@pytest.mark.parametrize("library", twins.LIBRARIES)
def test_what_was_evaluated_last_stays_so(library: str, tmp_path: Path) -> None:
    trainer = trained(library, tmp_path, None)
    assert not trainer.model.training


@pytest.mark.parametrize("library", twins.LIBRARIES)
def test_a_training_step_by_hand_trains(library: str, tmp_path: Path) -> None:
    trainer = trained(library, tmp_path, None)
    trainer.model.eval()
    batch = {"x": torch.ones(2, 1), "labels": torch.ones(2, 1)}
    trainer.training_step(trainer.model, batch)
    assert trainer.model.modes[-1] and trainer.model.training
