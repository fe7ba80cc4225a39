"""Whole proofs, on a script that saves with the store alone: it starts quickly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from anytrain.core.errors import BadInput
from anytrain.insight.proofs.restarts import TrainingScript
from anytrain.insight.proofs.verify_resume import Verdict, verify_resume

TRAIN = """
import json, secrets, sys, time
from pathlib import Path
import torch
from anytrain.engine.checkpoint import Snapshot, Store

out, mistake = Path(sys.argv[1]), sys.argv[2]
if mistake == "fails":
    sys.exit("the data is not there")
store = Store(out / "checkpoints")
weight, moment, step, average, seen = torch.zeros(4, 4), torch.zeros(4, 4), 0, torch.zeros(4), 0
newest = store.newest_whole()
if newest.path is not None and mistake != "anew":
    if mistake == "fails again":
        sys.exit("cannot do this twice")
    loaded = store.load(newest)
    weight, step = loaded.model()["weight"], loaded.step
    if mistake not in ("moment", "uneven"):
        moment = loaded.part("optimizer")["state"][0]["exp_avg"]
while step < 12:
    step, seen = step + 1, seen + 1
    gradient = torch.randn(4, 4, generator=torch.Generator().manual_seed(step)) - weight
    if mistake == "counter":
        gradient = gradient * (1 + seen / 100)
    if mistake == "secrets":
        gradient = gradient + secrets.randbelow(1000) / 1000
    moment = 0.9 * moment + gradient
    weight = weight + 0.1 * moment
    average = 0.9 * average + 0.1 * weight[0]
    with (out / "metrics.jsonl").open("a") as log:
        print(json.dumps({"_step": step, "loss": float(gradient.norm())}), file=log)
    is_slow = mistake == "uneven" and step == 5 and "uninterrupted" in str(out)
    time.sleep(8 if is_slow else 0.3 if step > 10 else 0.02)  # the last save comes well after
    if step % 2 == 0 and mistake != "nothing":
        optimizer = {"state": {0: {"exp_avg": moment}}, "param_groups": [{"params": [0]}]}
        parts = {"optimizer": optimizer}
        store.save(f"step-{step}", Snapshot(step=step, models=[{"weight": weight}], parts=parts))
if mistake == "average":
    torch.save({"average": average}, out / "average.pt")
"""


def proof(
    folder: Path,
    mistake: str,
    kills: int = 1,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Verdict:
    script = folder / "train.py"
    script.write_text(TRAIN)
    job = TrainingScript(str(script), ("{project}", mistake))
    return verify_resume(job, folder / "work", kills=kills, seed=seed, say=say)


def test_a_script_that_resumes_exactly_passes(tmp_path: Path) -> None:
    verdict = proof(tmp_path, "none", kills=2)
    assert verdict.is_equal
    assert str(verdict) == "resumed equals uninterrupted: 2 kills, 2 tensors identical"


def test_something_that_was_not_saved_is_caught_and_the_step_named(tmp_path: Path) -> None:
    verdict = proof(tmp_path, "counter")
    assert not verdict.is_equal and verdict.is_reproducible
    killed = verdict.kills[0]
    told = str(verdict)
    assert "first: weight weight differs in 16 of 16 values; first at [0, 0]: " in told
    assert "parts: model (1 of 1 tensors), optimizer (1 of 1 tensors)" in told
    assert f"loss parts at step {killed + 1}: " in told
    assert f"the checkpoint of step {killed + 2} is the first that differs" in told
    assert "register_for_checkpointing" in told


def test_what_no_seed_rules_is_told_from_what_is_not_saved(tmp_path: Path) -> None:
    verdict = proof(tmp_path, "secrets")
    assert not verdict.is_equal and verdict.is_reproducible is False
    assert "loss parts at step 1: " in str(verdict)
    assert "two uninterrupted runs differ as well" in str(verdict)


def test_an_average_beside_the_checkpoints_is_compared(tmp_path: Path) -> None:
    verdict = proof(tmp_path, "average")
    assert not verdict.is_equal and verdict.is_reproducible
    assert str(verdict.first).startswith("average.pt['average'] differs in 4 of 4 values")
    assert "the same in model, optimizer" in str(verdict)


def test_a_script_that_begins_anew_does_not_pass(tmp_path: Path) -> None:
    verdict = proof(tmp_path, "anew")
    assert not verdict.is_equal
    assert "does not resume: it begins anew" in str(verdict)


def test_a_script_that_cannot_start_again_is_shown_with_its_last_lines(tmp_path: Path) -> None:
    verdict = proof(tmp_path, "fails again")
    assert not verdict.is_equal
    assert "failed when it was started again, with exit code 1" in str(verdict)
    assert "    cannot do this twice" in str(verdict)


def test_a_kill_after_the_last_checkpoint_does_not_count(tmp_path: Path) -> None:
    told: list[str] = []
    verdict = proof(tmp_path, "uneven", seed=1, say=told.append)
    assert "no kill came before its last checkpoint: trying again, with kills at once" in told
    assert verdict.kills and max(verdict.kills) < 12
    assert not verdict.is_equal and verdict.is_reproducible


@pytest.mark.parametrize(
    ("mistake", "what"), [("fails", "failed by itself"), ("nothing", "saved no checkpoint")]
)
def test_a_script_that_proves_nothing_is_refused(tmp_path: Path, mistake: str, what: str) -> None:
    with pytest.raises(BadInput, match=what):
        proof(tmp_path, mistake)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_many_kills_of_a_script_that_resumes_exactly(tmp_path: Path, seed: int) -> None:
    assert proof(tmp_path, "none", kills=10, seed=seed).is_equal


@pytest.mark.full
def test_a_part_that_is_saved_and_not_loaded_is_caught(tmp_path: Path) -> None:
    verdict = proof(tmp_path, "moment")
    assert not verdict.is_equal and verdict.is_reproducible


TRAINER = """
import sys
import torch
from torch import nn
from anytrain import Trainer, TrainingArguments, get_last_checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 2))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


torch.manual_seed(0)
rows = [{"x": torch.randn(8), "labels": i % 2} for i in range(128)]
asked = TrainingArguments(
    sys.argv[1], per_device_train_batch_size=4, num_train_epochs=2, save_steps=5, logging_steps=3,
    eval_strategy="steps", eval_steps=5, load_best_model_at_end=True, use_cpu=True,
)
trainer = Trainer(Net(), asked, train_dataset=rows, eval_dataset=rows[:20])
trainer.train(resume_from_checkpoint=get_last_checkpoint(sys.argv[1]))
trainer.save_model()
"""


@pytest.mark.full
@pytest.mark.parametrize("num_processes", [None, 2])
def test_a_script_with_a_trainer_resumes_exactly(tmp_path: Path, num_processes: int | None) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINER)
    job = TrainingScript(str(script), ("{project}",), num_processes=num_processes)
    assert verify_resume(job, tmp_path / "work", kills=2, seed=0).is_equal
