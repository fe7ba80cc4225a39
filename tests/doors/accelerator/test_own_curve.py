"""A loop of the user's own has its loss curve in its folder, though it logs nothing."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from anytrain import Accelerator, set_seed
from anytrain.core import records
from anytrain.insight.report import watch
from anytrain.insight.report.page import page
from launching import launch


def begin(folder: Path | None, num_rows: int = 60, **given: Any) -> tuple[Any, ...]:
    set_seed(2)
    accelerator = Accelerator(cpu=True, project_dir=folder, **given)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(torch.randn(num_rows, 3)), batch_size=2, shuffle=True)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def walk(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> Iterator[float]:
    """Train for an epoch, giving each loss."""
    for (batch,) in loader:
        with accelerator.accumulate(model):
            loss = model(batch).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        yield loss.item()


def curve(folder: Path) -> dict[int, float]:
    found = records.open_run(folder).metrics
    return {entry["step"]: entry["loss"] for entry in found if "loss" in entry}


def mean(values: list[float]) -> Any:
    return pytest.approx(sum(values) / len(values), rel=1e-5)


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """The folder of a loop that has logged nothing, and its losses."""
    folder = tmp_path_factory.mktemp("silent")
    parts = begin(folder, gradient_accumulation_steps=2)
    losses = [loss for _ in range(2) for loss in walk(*parts)]
    parts[0].end_training()
    return folder, losses


def test_each_point_is_the_mean_of_the_micro_batches_since_the_last_one(
    silent: tuple[Path, list[float]],
) -> None:
    folder, losses = silent
    found = curve(folder)
    assert list(found) == [*range(1, 11), 15, 20, 30]  # an epoch ends at 15
    assert found[1] == mean(losses[:2])
    assert found[15] == mean(losses[20:30])
    assert found[20] == mean(losses[30:40])
    assert found[30] == mean(losses[40:60])


def test_reports_and_watchers_show_the_curve(silent: tuple[Path, list[float]]) -> None:
    run = records.open_run(silent[0])
    assert "figure loss" in page(run)
    told = "\n".join(watch.present(run, 100, is_ascii=True))
    assert f"loss {curve(silent[0])[30]:.4g}" in told
    assert "last logged" not in told


def test_the_end_of_a_training_brings_the_last_point(tmp_path: Path) -> None:
    parts = begin(tmp_path)
    losses = list(islice(walk(*parts), 14))
    assert list(curve(tmp_path)) == list(range(1, 11))
    parts[0].end_training()
    assert curve(tmp_path)[14] == mean(losses[10:])


def test_a_loss_of_the_users_own_is_the_one_that_is_shown(tmp_path: Path) -> None:
    parts = begin(tmp_path)
    for number, loss in enumerate(walk(*parts), 1):
        if number % 15 == 0:
            parts[0].log({"loss": -loss, "other": 1.0})
    parts[0].end_training()
    assert list(curve(tmp_path)) == [15, 30]
    assert max(curve(tmp_path).values()) < 0


def test_figures_that_are_no_loss_leave_the_curve(tmp_path: Path) -> None:
    parts = begin(tmp_path)
    for number, _ in enumerate(walk(*parts), 1):
        parts[0].log({"accuracy": 0.5}, step=1000 * number)
    parts[0].end_training()
    assert list(curve(tmp_path)) == [*range(1, 11), 20, 30]
    assert len(records.open_run(tmp_path).metrics) == 12 + 30


def test_of_two_losses_a_batch_the_mean_is_shown(tmp_path: Path) -> None:
    accelerator, model, optimizer, loader = begin(tmp_path)
    other = nn.Linear(3, 1)
    second = torch.optim.SGD(other.parameters(), lr=1e-3)
    other, second = accelerator.prepare(other, second)
    means = []
    for (batch,) in loader:
        losses = [model(batch).pow(2).mean(), other(batch).abs().mean() + 5]
        for loss, each in zip(losses, (optimizer, second), strict=True):
            accelerator.backward(loss)
            each.step()
            each.zero_grad()
        means.append(sum(loss.item() for loss in losses) / 2)
    found = curve(tmp_path)
    assert found[2] == mean(means[:1])
    assert found[20] == mean(means[5:10])


def test_a_step_of_ours_has_the_same_curve(tmp_path: Path) -> None:
    parts = begin(tmp_path / "loop")
    list(walk(*parts))
    accelerator, model, _, loader = begin(tmp_path / "step")
    step = accelerator.step(lambda model, batch: model(batch[0]).pow(2).mean())
    for batch in loader:
        step(batch)
    assert curve(tmp_path / "step") == curve(tmp_path / "loop") != {}


def test_a_run_that_goes_on_has_the_points_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    """Also where the user counts batches, and an update is two of them."""
    whole = begin(tmp_path / "whole", gradient_accumulation_steps=2)
    list(walk(*whole))
    whole[0].end_training()

    folder, batches = tmp_path / "again", 0
    first = begin(folder, gradient_accumulation_steps=2)
    for batches, _ in enumerate(walk(*first), 1):
        if first[0].sync_gradients:
            first[0].log({"batches": float(batches)}, step=batches)
        if batches == 24:
            first[0].save_state(tmp_path / "saved")
        if batches == 28:  # what comes after the save is lost
            break
    second = begin(folder, gradient_accumulation_steps=2)
    second[0].load_state(tmp_path / "saved")
    for batches, _ in enumerate(walk(*second), 25):
        if second[0].sync_gradients:
            second[0].log({"batches": float(batches)}, step=batches)
    second[0].end_training()
    assert curve(folder) == curve(tmp_path / "whole")
    logged = [entry["step"] for entry in records.open_run(folder).metrics if "batches" in entry]
    assert logged == list(range(2, 31, 2))


@pytest.mark.filterwarnings("ignore:An update was skipped")
def test_a_loss_that_is_no_number_is_a_point_and_can_be_saved(tmp_path: Path) -> None:
    accelerator, model, optimizer, _ = begin(tmp_path)
    for number in range(14):
        loss = model(torch.ones(2, 3)).pow(2).mean()
        accelerator.backward(loss * float("nan") if number in (1, 12) else loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(tmp_path / "saved")
    again = begin(tmp_path)
    again[0].load_state(tmp_path / "saved")
    found = curve(tmp_path)
    assert [step for step, loss in found.items() if not math.isnan(loss)] == [1, *range(3, 11)]
    accelerator.end_training()
    assert math.isnan(curve(tmp_path)[14])


def test_a_subclass_with_a_backward_of_its_own_takes_steps_with_it(tmp_path: Path) -> None:
    class Mine(Accelerator):
        def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
            super().backward(2 * loss, **kwargs)

    accelerator = Mine(cpu=True, project_dir=tmp_path)
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.25))
    accelerator.step(lambda model, batch: model(batch).sum())(torch.ones(1, 1))
    accelerator.end_training()
    assert model.weight.item() == 0.5
    assert curve(tmp_path) == {1: 1.0}


def test_a_new_run_in_the_folder_begins_a_new_curve(tmp_path: Path) -> None:
    for num_batches in (30, 5):
        parts = begin(tmp_path)
        list(islice(walk(*parts), num_batches))
        parts[0].end_training()
    assert list(curve(tmp_path)) == [1, 2, 3, 4, 5]


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_a_step_costs_one_sum_more_and_waits_for_nothing(tmp_path: Path) -> None:
    counted = []
    for folder in (None, tmp_path):
        accelerator, model, optimizer, _ = begin(folder)
        batch, ops = torch.randn(2, 3), _Ops()
        for _ in range(12):  # points come after each of the first ten
            accelerator.backward(model(batch).pow(2).mean())
            optimizer.step()
        with ops:
            for _ in range(5):
                accelerator.backward(model(batch).pow(2).mean())
                optimizer.step()
        counted.append(ops.names)
    without, with_curve = counted
    added = with_curve - without
    assert added["aten.add_.Tensor"] == 5
    assert sum(added.values()) == added["aten.add_.Tensor"] + added["aten.detach.default"]


RANKS = """
import sys, torch
from anytrain import Accelerator
accelerator = Accelerator(cpu=True, project_dir=sys.argv[1])
model = torch.nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
rows = torch.utils.data.TensorDataset(torch.zeros(40, 1))
loader = torch.utils.data.DataLoader(rows, batch_size=1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for number, (x,) in enumerate(loader, 1):
    loss = model(x).sum() + number + 100 * accelerator.process_index
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
accelerator.end_training()
"""


def test_the_losses_of_all_processes_are_in_the_curve(tmp_path: Path) -> None:
    launch(RANKS, 2, tmp_path)
    found = curve(tmp_path)
    assert found == {**{n: 50.0 + n for n in range(1, 11)}, 20: 65.5}
    lines = (tmp_path / records.METRICS).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(found)
