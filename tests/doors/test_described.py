"""What a Trainer, an Accelerator and a Plan say where somebody looks at one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from anytrain import Accelerator, Trainer, TrainingArguments


def rows(text: str) -> dict[str, str]:
    found = {}
    for line in text.splitlines()[1:]:
        name, value = line.split(maxsplit=1)
        found[name] = value
    return found


def test_an_accelerator_says_what_it_runs_on_and_what_it_has(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path, gradient_accumulation_steps=4)
    assert rows(repr(accelerator))["model"] == "none yet"
    accelerator.prepare(nn.Linear(3, 1), nn.Linear(1, 1))
    told = rows(repr(accelerator))
    assert repr(accelerator).splitlines()[0] == "Accelerator"
    assert told == {
        "model": "Linear with 4 parameters, Linear with 2 parameters",
        "device": "cpu",
        "precision": "float32",
        "strategy": "solo: 1 process",
        "step": "eager, 4 batches an update",
        "updates": "0 so far",
        "folder": str(tmp_path),
        "reasons": "in .plan",
    }
    shown = accelerator._repr_html_()
    assert shown is not None
    assert "<b>Accelerator</b><table>" in shown
    assert "nothing is recorded" in repr(Accelerator(cpu=True))


def test_a_trainer_says_the_same_of_its_run(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", max_steps=9)
    trainer = Trainer(nn.Linear(3, 1), arguments, train_dataset=[torch.ones(3)] * 1024)
    told = rows(repr(trainer))
    assert told["model"] == "Linear with 4 parameters"
    assert told["data"] == "1,024 rows, batches of 8 a process"
    assert told["folder"] == str(tmp_path)
    assert rows(repr(trainer.accelerator))["folder"] == "its Trainer's"


def test_a_plan_shows_each_choice_with_its_reason() -> None:
    plan = Accelerator(cpu=True).plan
    lines = repr(plan).splitlines()
    assert [line.split()[0] for line in lines] == ["Plan", *plan.reasons()]
    assert lines[1].split(maxsplit=2) == ["device", "cpu", "argument cpu=True"]
    assert "<td" in plan._repr_html_()


def test_what_is_only_half_made_can_be_looked_at() -> None:
    assert "Accelerator object at" in repr(Accelerator.__new__(Accelerator))
    assert Trainer.__new__(Trainer)._repr_html_() is None
