"""A value outside its table is named on a GPU too, where torch ends all work on the device.

Each case has a process of its own: after such an error a GPU does nothing more for it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
BAD = 173
"""The sample that is wrong, of 256: with batches of 4 in order it comes in step 44."""

PROGRAM = """
import sys
sys.path[:0] = ["tests/doors/trainer", "tests"]
import torch
from torch.utils.data import IterableDataset
from test_bad_inputs import Learnt, Words
from anytrain import Trainer, TrainingArguments

case, engine, folder = sys.argv[1:]

def texts(length=6, **wrong):
    found = [{"input_ids": [1 + n % 40] * length, "labels": n % 2} for n in range(256)]
    found[BAD].update(wrong)
    return found

class Stream(IterableDataset):
    def __iter__(self):
        return iter(texts(labels=7))

class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)

long = {"input_ids": [1] * 20}
model, data, asked = {
    "label": (Words, texts(labels=7), {}),
    "negative label": (Words, texts(labels=-1), {}),
    "label in bf16": (Words, texts(labels=7), {"bf16": True}),
    "label in an accumulated step": (Words, texts(labels=7), {"gradient_accumulation_steps": 2}),
    "label of a stream": (Words, Stream(), {}),
    "label from a worker": (Words, texts(labels=7), {"dataloader_num_workers": 1}),
    "token id": (Words, texts(input_ids=[1, 2, 3, 99, 4, 5]), {}),
    "position": (Words, texts(20), {}),
    "position of a parameter": (Learnt, texts(20), {}),
    "evaluated label": (Words, texts(), {
        "eval_strategy": "steps", "eval_steps": 20,
    }),
}[case]
args = TrainingArguments(
    folder, per_device_train_batch_size=4, max_steps=60, logging_steps=1000, save_strategy="no",
    step_engine=engine, report_to=[], disable_tqdm=True, **asked,
)
kind = Trainer if isinstance(data, IterableDataset) else InOrder
trainer = kind(model(), args, train_dataset=data, eval_dataset=texts(labels=7))
assert args.device.type == "cuda"
try:
    trainer.train()
except IndexError as error:
    print("engine", trainer.accelerator.plan.step.value)
    print(error)
else:
    print("nothing was said")
""".replace("BAD", str(BAD))

LABEL = rf"step 44: 'labels' of sample {BAD} is 7, and the model has 2 classes \(0 to 1\)"
TABLE = r"holds 99, and words \(Embedding\) has 50 rows \(0 to 49\)"
LONG = r"Cannot compute step 1: 'input_ids' of sample \d+ has 20 positions, and"
SAID = {
    "label": LABEL,
    "negative label": rf"step 44: 'labels' of sample {BAD} is -1, and the model has 2 classes",
    "label in bf16": LABEL,
    "label in an accumulated step": LABEL.replace("44", "22"),
    "label of a stream": r"step 44: 'labels' of row 1 of batch 43 is 7",
    "label from a worker": LABEL,
    "token id": rf"step 44: 'input_ids' of sample {BAD} {TABLE}",
    "position": rf"{LONG} places \(Embedding\) has 16",
    "position of a parameter": rf"{LONG} Learnt has 16",
    "evaluated label": rf"Cannot evaluate: 'labels' of sample {BAD} is 7",
}
CASES = [(case, engine) for engine in ("eager", "cuda_graph") for case in SAID]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """What each case ends with; all of them run beside one another."""
    folder = tmp_path_factory.mktemp("runs")

    def run(number: int) -> str:
        words = [sys.executable, "-c", PROGRAM, *CASES[number], str(folder / str(number))]
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
        return done.stdout + ("" if done.returncode == 0 else done.stderr)

    with ThreadPoolExecutor(8) as pool:
        return dict(zip(CASES, pool.map(run, range(len(CASES))), strict=True))


@pytest.mark.parametrize(("case", "engine"), CASES)
def test_a_value_outside_its_table_is_named(
    said: dict[tuple[str, str], str], case: str, engine: str
) -> None:
    found = said[case, engine]
    assert re.search(SAID[case], found), found
    assert f"engine {engine}" in found
