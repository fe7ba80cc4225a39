"""What a user may hand to a Trainer by mistake, and what is said then: which sample, which column,
what would be right. All that is asked here is in `str(error)`, as other tools print it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from anytrain import Trainer, TrainingArguments
from anytrain.core.errors import NotFinite

pytestmark = pytest.mark.filterwarnings("ignore:An update was skipped")
BAD = 13
"""The sample that is wrong where one is."""


class Words(nn.Module):
    """50 token ids, 16 positions and 2 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 4), nn.Embedding(16, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, input_ids: Any, labels: Any = None) -> dict[str, Any]:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        logits = self.head((self.words(input_ids) + self.places(places)).mean(1))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Learnt(Words):
    """Its positions are a parameter that is added, so a long text makes sizes that differ."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(16, 4))

    def forward(self, input_ids: Any, labels: Any = None) -> dict[str, Any]:
        hidden = self.words(input_ids) + self.positions[: input_ids.shape[1]]
        return {"loss": nn.functional.cross_entropy(self.head(hidden.mean(1)), labels)}


class Begun(Words):
    """Its table has two rows before the first position's, and positions are gathered, as RoBERTa's.

    So a text may have 14 tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kinds", torch.zeros(1, 16, dtype=torch.long))

    def forward(self, input_ids: Any, labels: Any = None) -> dict[str, Any]:
        places = torch.arange(2, 2 + input_ids.shape[1]).expand_as(input_ids)
        kinds = self.kinds.expand(len(input_ids), -1).gather(1, places)
        return super().forward(input_ids + kinds, labels)


class Features(nn.Module):
    """4 features and 2 classes."""

    def __init__(self, *, gives_loss: bool = True) -> None:
        super().__init__()
        self.inner, self.gives_loss = nn.Linear(4, 2), gives_loss

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        logits = self.inner(x)
        loss = {"loss": nn.functional.cross_entropy(logits, labels)} if self.gives_loss else {}
        return {**loss, "logits": logits}


def texts(length: int = 6, **wrong: Any) -> list[dict[str, Any]]:
    """Return right samples, one of which has other values where some are given."""
    found = [{"input_ids": [1 + n % 40] * length, "labels": n % 2} for n in range(24)]
    found[BAD] = {**found[BAD], **wrong}
    return found


def alike(**sample: Any) -> list[dict[str, Any]]:
    return [dict(sample) for _ in range(24)]


class Breaks(Dataset[Any]):
    """Does something at one sample."""

    def __init__(self, what: Callable[[], Any]) -> None:
        self.what = what

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return self.what() if index == BAD else {"x": torch.ones(4), "labels": index % 2}


class Stream(IterableDataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


def lacks() -> Any:
    return {}["text"]


def no_file() -> Any:
    return open("/no/such/picture.png")


def exits() -> None:
    os._exit(9)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def nothing(samples: Any) -> None:
    return None


def a_list(samples: Any) -> Any:
    return [torch.tensor(sample["x"]) for sample in samples]


def divides(prediction: Any) -> Any:
    return 1 / 0


SAMPLE = rf"samples? (\d+, )*{BAD}\b"
MADE_OF = rf"made of {SAMPLE}"
TABLE = rf"'input_ids' of sample {BAD} holds 99, and words \(Embedding\) has 50 rows \(0 to 49\)"
CLASSES = r"the model has 2 classes \(0 to 1\)"
LONG = r"Cannot compute step 1: 'input_ids' of sample \d+ has 20 positions, and"
FLOATS = r"batch: x int64 \(4, 4\).*step 1.*inner: Linear.*test_bad_inputs.*convert the column"
EVALUATED = {"eval_dataset": texts(labels=7), "eval_strategy": "steps", "eval_steps": 2}
MEASURED = {**EVALUATED, "eval_dataset": texts(), "compute_metrics": divides}
LABEL = rf"'labels' of sample {BAD} is 7, and {CLASSES}.*in Words.forward.*num_labels=8"
ONE = {"dataloader_num_workers": 1}

CASES: dict[str, tuple[type[Exception], str, Any, Any, dict[str, Any]]] = {
    # name: (error, what is said, model, data set, arguments)
    "wrong key": (
        TypeError,
        r"Features.forward needs 'x'.*dropped features, text.*the model takes x, labels",
        Features,
        alike(features=[1.0, 2, 3, 4], text="a", labels=0),
        {},
    ),
    "wrong key in a stream": (
        TypeError,
        r"Features.forward needs 'x'.*dropped features, which it does not take.*takes x, labels",
        Features,
        Stream(alike(features=[1.0, 2, 3, 4], labels=0)),
        {},
    ),
    "a text too long for places that begin later": (
        IndexError,
        r"'input_ids' of sample \d+ has 15 positions, and Begun has 14.*max_length=14",
        Begun,
        texts(15, input_ids=[1] * 15),
        {},
    ),
    "no key that is known": (
        ValueError,
        r"No column .* reaches Features.*forward takes x, labels\.",
        Features,
        alike(features=[1.0], target=0),
        {},
    ),
    "a key too many": (
        TypeError,
        r"Features.forward does not take 'mask'",
        Features,
        alike(x=[1.0, 2, 3, 4], mask=[1], labels=0),
        {"remove_unused_columns": False},
    ),
    "no labels that forward needs": (
        TypeError,
        r"needs 'labels', which the batch does not have",
        Features,
        alike(x=[1.0, 2, 3, 4]),
        {},
    ),
    "no labels, no loss": (
        ValueError,
        r"did not return a loss.*keys logits.*given input_ids",
        Words,
        alike(input_ids=[1, 2]),
        {},
    ),
    "labels of another name, no loss": (
        ValueError,
        r"did not return a loss.*given input_ids \(dropped target, which it does not take\)",
        Words,
        alike(input_ids=[1, 2], target=0),
        {},
    ),
    "no loss": (
        ValueError,
        r"did not return a loss.*keys logits",
        lambda: Features(gives_loss=False),
        alike(x=[1.0, 2, 3, 4], labels=0),
        {},
    ),
    "wrong shape": (
        RuntimeError,
        r"x float32 \(4, 5\), labels int64 \(4,\), of samples.*step 1.*inner: Linear\(in_f",
        Features,
        alike(x=[1.0, 2, 3, 4, 5], labels=0),
        {},
    ),
    "labels of a wrong shape": (
        RuntimeError,
        r"labels int64 \(4, 3\).*one class for each sample",
        Features,
        alike(x=[1.0, 2, 3, 4], labels=[0, 1, 0]),
        {},
    ),
    "labels that are floats": (
        RuntimeError,
        r"labels float32 \(4,\).*convert the column",
        Features,
        alike(x=[1.0, 2, 3, 4], labels=0.5),
        {},
    ),
    "features that are whole numbers": (
        RuntimeError,
        FLOATS,
        Features,
        alike(x=[1, 2, 3, 4], labels=0),
        {},
    ),
    "token ids that are floats": (
        RuntimeError,
        r"input_ids float32 \(4, 3\).*words: Embedding\(50, 4\).*whole numbers",
        Words,
        alike(input_ids=[1.0, 2, 3], labels=0),
        {},
    ),
    "a label too large": (IndexError, rf"step [1-6]: {LABEL}", Words, texts(labels=7), {}),
    "a label below 0": (IndexError, rf"is -1, and {CLASSES}", Words, texts(labels=-1), {}),
    "a label of a stream": (
        IndexError,
        r"step 4: 'labels' of row 1 of batch 3 is 7",
        Words,
        Stream(texts(labels=7)),
        {},
    ),
    "a label in a step of several batches": (
        IndexError,
        LABEL,
        Words,
        texts(labels=7),
        {"gradient_accumulation_steps": 3, "max_steps": 2},
    ),
    "a token id too large": (IndexError, TABLE, Words, texts(input_ids=[1, 2, 3, 99, 4, 5]), {}),
    "a text too long": (IndexError, rf"{LONG} places \(Embedding\) has 16", Words, texts(20), {}),
    "a text longer than a parameter": (IndexError, rf"{LONG} Learnt has 16", Learnt, texts(20), {}),
    "an evaluation's label": (IndexError, rf"Cannot evaluate: {LABEL}", Words, texts(), EVALUATED),
    "no data": (ValueError, r"empty data set", Features, [], {}),
    "an empty sample": (ValueError, MADE_OF, Features, Breaks(dict), {}),
    "an empty row": (ValueError, rf"lengths \(.*\b0\b.*{MADE_OF}", Words, texts(input_ids=[]), {}),
    "rows of two lengths": (
        ValueError,
        rf"different lengths.*{MADE_OF}",
        Words,
        texts(input_ids=[1, 2]),
        {},
    ),
    "rows of two lengths, in a worker": (
        ValueError,
        rf"\ACannot collate 'input_ids'.*{MADE_OF}",
        Words,
        texts(input_ids=[1, 2]),
        ONE,
    ),
    "a sample of None": (ValueError, rf"is None.*{MADE_OF}", Features, Breaks(lambda: None), {}),
    "a sample that raises": (
        KeyError,
        rf"\A'text'\nRaised by .*sample {BAD}",
        Features,
        Breaks(lacks),
        {},
    ),
    "a sample that raises, in a worker": (
        KeyError,
        rf"KeyError: 'text'.*{SAMPLE}",
        Features,
        Breaks(lacks),
        ONE,
    ),
    "a sample without its file": (
        OSError,
        rf"sample {BAD}.*picture",
        Features,
        Breaks(no_file),
        {},
    ),
    "a worker that exits": (
        RuntimeError,
        rf"exit code 9 while it loaded {SAMPLE}",
        Features,
        Breaks(exits),
        ONE,
    ),
    "a worker that is killed": (
        RuntimeError,
        rf"SIGKILL.*while it loaded {SAMPLE}",
        Features,
        Breaks(is_killed),
        ONE,
    ),
    "a collator that returns nothing": (
        ValueError,
        r"batch without a tensor: the data_collator returned a NoneType",
        Features,
        alike(x=[1.0, 2, 3, 4], labels=0),
        {"data_collator": nothing},
    ),
    "a collator that returns a list": (
        ValueError,
        r"the data_collator returned a list of \d+, the first a tensor.*by their place",
        Features,
        alike(x=[1.0, 2, 3, 4], labels=0),
        {"data_collator": a_list},
    ),
    "metrics that raise": (
        ZeroDivisionError,
        r"Raised by compute_metrics",
        Words,
        texts(),
        MEASURED,
    ),
    "a negative batch size": (
        ValueError,
        r"per_device_train_batch_size=-4",
        Features,
        alike(x=[1.0, 2, 3, 4], labels=0),
        {"per_device_train_batch_size": -4},
    ),
    "only losses that are no number": (
        NotFinite,
        r"all of the last 6 steps were left out",
        Features,
        alike(x=[float("nan")] * 4, labels=0),
        {"on_nonfinite": "skip"},
    ),
}
GIVEN = ("eval_dataset", "compute_metrics", "data_collator")


def train(folder: Path, model: nn.Module, data: Any, **asked: Any) -> Any:
    given = {name: asked.pop(name) for name in GIVEN if name in asked}
    settings = {
        "per_device_train_batch_size": 4,
        "max_steps": 6,
        "disable_tqdm": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1000,
        "use_cpu": True,
        **asked,
    }
    trainer = Trainer(
        model, TrainingArguments(str(folder), **settings), train_dataset=data, **given
    )
    return trainer.train()


@pytest.mark.parametrize("name", CASES)
def test_a_bad_input_is_named(name: str, tmp_path: Path) -> None:
    error, said, model, data, asked = CASES[name]
    with pytest.raises(error) as raised:
        train(tmp_path, model(), data, **asked)
    assert re.search(said, str(raised.value), re.DOTALL), str(raised.value)


def test_columns_that_an_evaluation_left_out_are_named(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True)
    data = alike(features=[1.0, 2, 3, 4], labels=0)
    trainer = Trainer(Features(), arguments, eval_dataset=data)
    with pytest.raises(TypeError, match="dropped features, which it does not take"):
        trainer.evaluate()


def test_a_run_that_skipped_some_steps_tells_the_mean_of_the_others(tmp_path: Path) -> None:
    data = alike(x=[1.0, 2, 3, 4], labels=0)
    data[BAD] = {"x": [float("nan")] * 4, "labels": 0}
    done = train(tmp_path, Features(), data, on_nonfinite="skip")
    assert 0 < done.training_loss < 10
