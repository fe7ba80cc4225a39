"""A run goes on with the optimizer that was saved, or says at once that it is another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anytrain import Accelerator
from anytrain.core.errors import CheckpointError
from anytrain.engine.checkpoint import manifest
from anytrain.engine.optim.adafactor import Adafactor


class AdamWOfOurs(torch.optim.AdamW):
    """A user's own class, with the options of the one it is made of."""


def step(kind: Any, load: Path | None = None, save: Path | None = None, **options: Any) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 1)
    given = {"lr": None if kind is Adafactor else 0.1, **options}
    model, optimizer = accelerator.prepare(model, kind(model.parameters(), **given))
    if load is not None:
        accelerator.load_state(str(load))
    accelerator.backward(model(torch.ones(2, 3)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if save is not None:
        accelerator.save_state(str(save))
    accelerator.free_memory()


def forget_kinds(folder: Path) -> None:
    """Make of a checkpoint one that was written before kinds were noted."""
    found = manifest.read(folder)
    del found.meta["optimizers"]
    (folder / manifest.MANIFEST).write_bytes(manifest.to_bytes(found))


@pytest.mark.parametrize("is_noted", [True, False])
@pytest.mark.parametrize(
    ("saved", "now"),
    [
        (torch.optim.AdamW, torch.optim.SGD),
        (torch.optim.AdamW, torch.optim.RMSprop),
        (torch.optim.AdamW, torch.optim.Adagrad),
        (torch.optim.AdamW, Adafactor),
        (torch.optim.SGD, torch.optim.AdamW),
    ],
)
def test_another_optimizer_is_refused_when_its_state_is_loaded(
    tmp_path: Path, saved: Any, now: Any, is_noted: bool
) -> None:
    step(saved, save=tmp_path / "c")
    if not is_noted:
        forget_kinds(tmp_path / "c")
    with pytest.raises(CheckpointError, match=f"this run's is {now.__name__}") as refused:
        step(now, load=tmp_path / "c")
    theirs = saved.__name__ if is_noted else "of another kind"
    assert f"its optimizer is {theirs}" in refused.value.what


def test_an_optimizer_with_other_state_and_like_options_is_refused(tmp_path: Path) -> None:
    step(torch.optim.AdamW, save=tmp_path / "c")
    with pytest.raises(CheckpointError, match="AdamW, this run's is Adamax"):
        step(torch.optim.Adamax, load=tmp_path / "c")


@pytest.mark.parametrize(
    ("now", "options"),
    [
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"amsgrad": False, "maximize": False}),
        (AdamWOfOurs, {}),
    ],
)
@pytest.mark.parametrize("is_noted", [True, False])
def test_an_optimizer_that_reads_the_state_goes_on_with_it(
    tmp_path: Path, now: Any, options: dict[str, Any], is_noted: bool
) -> None:
    step(torch.optim.AdamW, save=tmp_path / "c")
    if not is_noted:
        forget_kinds(tmp_path / "c")
    step(now, load=tmp_path / "c", **options)
