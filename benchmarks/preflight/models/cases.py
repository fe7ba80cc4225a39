"""What a planted case is: a small training, and where its one defect lies, if it has one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from anytrain import Accelerator

MARK = "# planted"


@dataclass(frozen=True)
class Case:
    """A training, and what a preflight has to say of it."""

    name: str
    train: Callable[[], None]
    kind: str = ""
    """The question that finds the defect; empty for a clean training."""
    target: str = ""
    file: str = ""
    line: int = 0
    """Where the defect is; 0 where it is no matter of a line: so many processes are asked for."""
    num_processes: int = 1
    targets: tuple[str, ...] = ("mps:16GB", "cuda:24GB", "tpu:v5e")
    """Where a clean training is tried."""


DEFECTS: list[Case] = []
CLEAN: list[Case] = []


def planted(kind: str, target: str, num_processes: int = 1) -> Callable[[Any], Any]:
    """Count a function as a training with one defect, at the line that ends in the mark."""

    def note(function: Callable[[], None]) -> Callable[[], None]:
        lines, first = inspect.getsourcelines(function)
        marked = [first + n for n, text in enumerate(lines) if MARK in text]
        file = inspect.getsourcefile(function) or ""
        line = marked[0] if marked else 0
        name = function.__name__
        DEFECTS.append(Case(name, function, kind, target, file, line, num_processes))
        return function

    return note


def clean(*targets: str) -> Callable[[Any], Any]:
    """Count a function as a training without a defect: on these targets, or everywhere."""

    def note(function: Callable[[], None]) -> Callable[[], None]:
        case = Case(function.__name__, function)
        CLEAN.append(replace(case, targets=targets) if targets else case)
        return function

    return note


class Rows(torch.utils.data.Dataset[Any]):
    """Samples that are made alike: a tensor of each shape, and a label."""

    def __init__(self, *shapes: tuple[int, ...], num: int = 16, classes: int = 4) -> None:
        self.shapes, self.num, self.classes = shapes, num, classes

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        draw = torch.Generator().manual_seed(index)
        made = [torch.rand(shape, generator=draw) for shape in self.shapes]
        return (*made, index % self.classes)


class Tokens(torch.utils.data.Dataset[Any]):
    """Sentences of one length, and a label."""

    def __init__(self, length: int = 12, words: int = 50, num: int = 16) -> None:
        self.length, self.words, self.num = length, words, num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        draw = torch.Generator().manual_seed(index)
        return torch.randint(1, self.words, (self.length,), generator=draw), index % 4


def fit(
    model: nn.Module,
    data: Any,
    *,
    loss_of: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    clip: float | None = None,
    schedule: bool = False,
    **settings: Any,
) -> None:
    """Train as a user's own loop does; nothing in it waits for the device."""
    accelerator = Accelerator(**settings)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = data if isinstance(data, DataLoader) else DataLoader(data, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10) if schedule else None
    for batch in loader:
        with accelerator.accumulate(model):
            loss = (loss_of or classify)(model, batch)
            accelerator.backward(loss)
            if clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if steps is not None:
                steps.step()
            optimizer.zero_grad()


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the cross entropy of a model that gives one row of scores a sample."""
    *inputs, labels = batch
    return nn.functional.cross_entropy(model(*inputs), labels)
