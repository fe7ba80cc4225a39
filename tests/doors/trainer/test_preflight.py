"""Trainer.preflight() and Accelerator.preflight(), and a forecast that turns out wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anytrain import (
    Accelerator,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from anytrain.core import records
from anytrain.core.errors import Notice, WrongOrder
from anytrain.insight.preflight.report import FILE


class Model(nn.Module):
    """A regression that asks for a decomposition, and whose memory holds so many rows."""

    def __init__(self, most: int = 100) -> None:
        super().__init__()
        self.linear, self.most = nn.Linear(4, 2), most

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if len(x) > self.most:
            raise RuntimeError("DefaultCPUAllocator: not enough memory")
        logits = self.linear(x)
        if self.most == 100:
            torch.linalg.eigh(logits.T @ logits)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def trainer(folder: Path, most: int = 100, **given: Any) -> Trainer:
    rows = [{"x": torch.full((4,), float(n)), "labels": n % 2} for n in range(16)]
    args = TrainingArguments(
        str(folder), max_steps=2, per_device_train_batch_size=8, report_to=[], use_cpu=True, **given
    )
    return Trainer(Model(most), args, train_dataset=rows)


def test_a_trainer_tells_what_awaits_it_and_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "0")  # else it hangs on who loaded torch
    made = trainer(tmp_path / "run")
    before = [p.clone() for p in made.model.parameters()]
    report = made.preflight("mps:16GB", quick=True)
    (outlook,) = report.outlooks
    assert outlook.verdict == "fails, fits"
    (found,) = [each for each in outlook.findings if each.kind == "kernels"]
    assert found.place is not None
    assert found.place.file == __file__
    assert found.place.text == "torch.linalg.eigh(logits.T @ logits)"
    assert all(torch.equal(a, b) for a, b in zip(before, made.model.parameters(), strict=True))
    assert json.loads((tmp_path / "run" / FILE).read_text())["mps"]["fits"] is True
    assert made.train().global_step == 2


def test_a_step_of_several_batches_is_told_whole(tmp_path: Path) -> None:
    found = {}
    for number in (1, 2):
        made = trainer(tmp_path, most=99, gradient_accumulation_steps=number)
        (found[number],) = made.preflight("cuda:24GB").outlooks
    assert found[2].job.accumulation == 2
    assert (found[2].fits[0].micro_batch, found[2].fits[0].accumulation) == (16, 1)
    one, two = found[1].time, found[2].time
    assert one is not None
    assert two is not None
    assert two.num_kernels > 1.3 * one.num_kernels
    assert two.samples_per_s * two.step_s == pytest.approx(2 * 8)
    ahead = [p.num_bytes for o in found.values() for p in o.memory.parts if "ahead" in p.name]
    assert ahead[0] == ahead[1] > 0


def test_an_accelerator_tells_what_awaits_a_step(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    model = nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    batch = (torch.ones(4, 4), torch.tensor([0, 1, 0, 1]))

    def step(batch: Any) -> None:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        if loss.item() < 100:
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    before = model.weight.detach().clone()
    report = accelerator.preflight(step, batch, ["cuda:24GB", "mps:16GB"])
    assert [o.verdict for o in report.outlooks] == ["runs, fits"] * 2
    (found,) = report.outlooks[0].findings
    assert (found.kind, found.severity) == ("host_reads", "warning")
    assert found.place is not None
    assert found.place.text == "if loss.item() < 100:"
    assert report.outlooks[0].fits[0].largest > 1000
    assert torch.equal(before, model.weight)
    assert model.weight.device.type == "cpu"


@pytest.mark.parametrize("target", [(), "cpu:4GB"])
def test_a_cpu_is_a_target_like_others(tmp_path: Path, target: Any) -> None:
    made = trainer(tmp_path, most=99)
    for is_trained in (False, True):
        if is_trained:
            made.train()
        (outlook,) = made.preflight(target, quick=True).outlooks
        assert outlook.verdict == "runs, fits"
        assert outlook.job.num_parameters == 10
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def step(batch: Any) -> None:
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()

    (outlook,) = accelerator.preflight(step, torch.ones(4, 4), target, quick=True).outlooks
    assert outlook.verdict == "runs, fits"
    assert outlook.memory is not None
    assert outlook.memory.peak_bytes > 4 * 10


def test_a_step_needs_something_prepared() -> None:
    with pytest.raises(WrongOrder, match="Nothing was prepared"):
        Accelerator(cpu=True).preflight(lambda batch: None, torch.ones(2))


@pytest.mark.parametrize("is_foretold", [True, False])
def test_a_full_memory_is_recorded_beside_what_was_foretold(
    tmp_path: Path, is_foretold: bool
) -> None:
    if is_foretold:
        told = {"target": "cpu", "batch_size": 8, "needed_bytes": 2**30, "fits": True}
        (tmp_path / FILE).write_text(json.dumps({"cpu": told}))
    made = trainer(tmp_path, most=4, auto_find_batch_size=True)
    with pytest.warns(Notice, match="computed in 2 parts"):
        made.train()
    value, because = records.read(tmp_path)[-1].choice("batch")
    assert value == "in 2 parts"
    assert because.startswith("the memory was full with a batch of 8")
    missed = "a preflight had foretold 1.00 GiB, and that a batch fits cpu"
    assert because.endswith(missed) == is_foretold


class Reads(TrainerCallback):
    """A callback that checks what the arguments say, and asks for what it likes."""

    def _take(self, event: str, args: Any) -> None:
        names = ("eval_strategy", "save_strategy", "logging_strategy", "load_best_model_at_end")
        read = [getattr(args, name) for name in (*names, "metric_for_best_model", "report_to")]
        if [str(each) for each in read[:3]] != ["steps"] * 3 or read[3:] != [True, "loss", ["csv"]]:
            raise ValueError(f"{event} saw {read}")
        if not args.eval_on_start or args.eval_steps != 1:
            raise ValueError(f"{event} saw other evaluations")

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._take("init_end", args)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._take("train_begin", args)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._take("step_begin", args)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._take("step_end", args)
        control.should_save = control.should_evaluate = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise ValueError("a rehearsal saves nothing")


def test_callbacks_see_the_users_own_arguments_in_a_preflight(tmp_path: Path) -> None:
    rows = [{"x": torch.full((4,), float(n)), "labels": n % 2} for n in range(16)]
    args = TrainingArguments(
        str(tmp_path / "run"),
        max_steps=5,
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
        save_steps=1,
        logging_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        report_to=["csv"],
        use_cpu=True,
    )
    made = Trainer(
        Model(99),
        args,
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=[EarlyStoppingCallback(2), Reads()],
    )
    (outlook,) = made.preflight("cuda:24GB", quick=True).outlooks
    assert outlook.verdict == "runs, fits"
    assert [each.name for each in (tmp_path / "run").iterdir()] == [FILE]


def test_a_training_shorter_than_a_rehearsal_is_foretold_with_its_strategies(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    rows = [{"x": torch.full((4,), float(n)), "labels": n % 2} for n in range(16)]
    args = TrainingArguments(
        str(tmp_path / "run"),
        max_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        use_cpu=True,
    )
    made = Trainer(Model(99), args, train_dataset=rows, eval_dataset=rows)
    (outlook,) = made.preflight("cuda:24GB", quick=True).outlooks
    assert outlook.verdict.startswith("runs, ")  # one step alone tells nothing of the memory
    assert not list((tmp_path / "run").iterdir())
    assert not [each for each in recwarn if issubclass(each.category, Notice)]
