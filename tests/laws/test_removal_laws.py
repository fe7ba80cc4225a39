"""Whatever a run is told to keep, it removes nothing outside of its own folder.

Another run's folder lies beside: the run goes on from its checkpoint, its best checkpoint may lie
there, and a link in the run's own folder leads to it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from anytrain import Accelerator, ProjectConfiguration, Trainer, TrainerCallback, TrainingArguments
from anytrain.cli.main import app
from anytrain.recipes import folder as recipes_folder


class Point(nn.Module):
    """One number, drawn to the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(()))

    def forward(self, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.at - labels) ** 2).mean(), "at": self.at.expand(len(labels))}


def trained(root: Path, scores: list[float], epochs: int, resume: Any = None, **given: Any) -> Any:
    """Train 4 steps an epoch, saved and evaluated at the end of each."""
    coming = iter(scores)
    rows = [{"labels": float(i)} for i in range(8)]
    keeps: dict[str, Any] = {"metric_for_best_model": "score", "save_total_limit": 1, **given}
    arguments = TrainingArguments(
        str(root),
        num_train_epochs=epochs,
        per_device_train_batch_size=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
        **keeps,
    )
    trainer = Trainer(
        Point(),
        arguments,
        train_dataset=rows,
        eval_dataset=rows,
        compute_metrics=lambda _: {"score": next(coming)},
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that keeps all of its checkpoints, 4 to 16, of which 8 is the best."""
    root = tmp_path_factory.mktemp("finished") / "A"
    trained(root, [0.1, 0.9, 0.5, 0.4], 4, save_total_limit=None)
    assert (root / "checkpoint-8").is_dir()
    return root


def resumed(a: Path, b: Path, **given: Any) -> None:
    trained(b, [0.3, 0.2], 6, resume=str(a / "checkpoint-16"), **given)


def overwriting(a: Path, b: Path) -> None:
    trained(b, [0.3], 1, overwrite_output_dir=True)


def named_by_a_callback(a: Path, b: Path) -> None:
    """The best checkpoint's path may be any, as it comes from a document or from a user."""
    trainer = trained(b, [0.3, 0.2], 2)
    trainer.state.best_model_checkpoint = str(a / "checkpoint-8")
    trainer.args.num_train_epochs = 3
    trainer.compute_metrics = lambda _: {"score": 0.1}
    trainer.train(resume_from_checkpoint=True)


def own_loop(a: Path, b: Path) -> None:
    naming = ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(project_dir=str(b), project_config=naming)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.ones(4, 1)))
    for _ in loader:
        accelerator.save_state()
    theirs = a / "checkpoint_0"
    shutil.copytree(accelerator.save_state(), theirs)
    held = sorted(os.walk(theirs))
    accelerator.load_state(str(theirs))
    accelerator.save_state()
    accelerator.end_training()
    assert sorted(os.walk(theirs)) == held
    shutil.rmtree(theirs)


def pruned(a: Path, b: Path) -> None:
    trained(b, [0.3, 0.2], 2, save_total_limit=None)
    said = CliRunner().invoke(app, ["checkpoint", "prune", str(b), "--keep-last", "1", "--yes"])
    assert said.exit_code == 0, said.output


def started_anew(a: Path, b: Path) -> None:
    trained(b, [0.3, 0.2], 2)
    recipes_folder.remove_own(b)


WAYS: dict[str, Callable[[Path, Path], None]] = {
    "limit 1, best elsewhere": resumed,
    "limit 1, best elsewhere, loaded": lambda a, b: resumed(a, b, load_best_model_at_end=True),
    "limit 2": lambda a, b: resumed(a, b, save_total_limit=2),
    "limit 1 without a metric": lambda a, b: resumed(a, b, metric_for_best_model=None),
    "overwrite_output_dir": overwriting,
    "a path from outside": named_by_a_callback,
    "total_limit of a loop": own_loop,
    "prune": pruned,
    "a recipe that starts anew": started_anew,
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_removed_outside_of_a_runs_own_folder(
    finished: Path, tmp_path: Path, way: str
) -> None:
    a, b = tmp_path / "A", tmp_path / "B"
    shutil.copytree(finished, a)
    b.mkdir()
    # Under a name that a run gives, as somebody would make who wants to save room.
    (b / "checkpoint-2").symlink_to(a / "checkpoint-4")
    before = sorted(os.walk(a)), sorted(os.walk(finished))  # its checkpoints name the latter
    WAYS[way](a, b)
    assert (sorted(os.walk(a)), sorted(os.walk(finished))) == before
    assert (b / "checkpoint-2").is_symlink()


def test_a_run_whose_best_checkpoint_lies_elsewhere_keeps_its_newest(
    finished: Path, tmp_path: Path
) -> None:
    trainer = trained(tmp_path, [0.3, 0.2], 6, resume=str(finished / "checkpoint-16"))
    assert trainer.state.best_model_checkpoint == str(finished / "checkpoint-8")
    assert [found.name for found in tmp_path.glob("checkpoint-*")] == ["checkpoint-24"]


def test_a_best_checkpoint_that_is_none_takes_no_other_with_it(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()

    class Names(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            state.best_model_checkpoint, state.best_global_step = str(tmp_path / "pictures"), 3

    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, save_steps=2, save_total_limit=1, report_to="none"
    )
    Trainer(Point(), arguments, train_dataset=[{"labels": 1.0}], callbacks=[Names()]).train()
    assert [found.name for found in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
