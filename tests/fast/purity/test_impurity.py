from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from anytrain.fast.purity.impurity import impurity, model_impurity
from anytrain.fast.purity.lookups import settings

seen: list[Any] = []
logger = logging.getLogger(__name__)


def clean(outputs: Any, labels: Any) -> Any:
    parts = []
    for row in outputs:
        parts.append(row.exp().log())
    return torch.log(torch.stack(parts)).add(1).mean() + labels.sum()


def collects(outputs: Any, labels: Any) -> Any:
    seen.append(outputs.detach())
    return outputs.mean()


def prints(outputs: Any, labels: Any) -> Any:
    print("step")
    return outputs.mean()


def logs(outputs: Any, labels: Any) -> Any:
    logger.info("a step")
    return outputs.mean()


def helps(outputs: Any, labels: Any) -> Any:
    return collects(outputs, labels)


def files_in_the_model(model: Any, batch: Any) -> Any:
    model.kept["last"] = batch
    return model(batch)


def lists_in_the_model(model: Any, batch: Any) -> Any:
    model.losses.append(batch)
    return model(batch)


def counter() -> Any:
    count = 0

    def loss(outputs: Any, labels: Any) -> Any:
        nonlocal count
        count += 1
        return outputs.mean()

    return loss


class Callable:
    def __call__(self, outputs: Any, labels: Any) -> Any:
        self.seen = outputs
        return outputs.mean()


class Counting:
    def __init__(self) -> None:
        self.calls = 0
        self.kept: dict[str, Any] = {}
        self.teacher = nn.Linear(2, 2)
        self.weight = 0.5

    def files(self, outputs: Any) -> Any:
        self.kept["last"] = outputs
        return outputs.mean()

    def lists(self, outputs: Any) -> Any:
        self.kept["all"].append(outputs)
        return outputs.mean()

    def by_epoch(self, outputs: Any) -> Any:
        return outputs.mean() * (1.0 if self.state.epoch < 1 else 0.5)

    def distils(self, outputs: Any) -> Any:
        return self.part(outputs) * 2

    def part(self, outputs: Any) -> Any:
        return self.weight * self.teacher(outputs).mean()

    def loss(self, outputs: Any) -> Any:
        self.calls += 1
        return outputs.mean()

    def scheduled(self, state: Any) -> Any:
        return 1.0 if state.global_step < 10 else 0.5

    def outer(self, outputs: Any) -> Any:
        return self.loss(outputs)

    def fine(self, outputs: Any) -> Any:
        return outputs.mean() * self.calls


def test_a_function_that_only_computes_is_clean():
    assert impurity(clean) is None
    assert impurity(Counting().fine) is None
    assert impurity(torch.nn.functional.cross_entropy) is None


@pytest.mark.parametrize(
    ("function", "word"),
    [
        (collects, "seen.append"),
        (prints, "prints"),
        (logs, "tells somebody"),
        (Counting().loss, "self.calls += 1"),
        (Counting().scheduled, "global_step"),
        (Counting().outer, "self.calls += 1"),
        (Counting().files, "writes into"),
        (Counting().lists, "adds to"),
        (Counting().by_epoch, "'epoch'"),
        (helps, "seen.append"),
        (files_in_the_model, "writes into"),
        (lists_in_the_model, "adds to"),
        (counter(), "'count'"),
        (Callable(), "'seen'"),
        (partial(collects, labels=None), "seen.append"),
    ],
)
def test_a_line_that_does_more_than_compute_is_named(function, word):
    told = impurity(function)
    assert told is not None
    assert word in told
    assert "test_impurity.py line" in told


def test_what_a_loss_looks_up_is_read_anew_each_time():
    counting = Counting()
    assert impurity(counting.distils) is None
    read = settings(counting.distils)
    first = read()
    assert read() == first
    counting.weight = 0.25
    second = read()
    assert second != first
    counting.teacher = nn.Linear(2, 2)
    assert read() != second


class Clean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for layer in self.layers:
            x = layer(x)
            kept.append(x)
        return torch.stack(kept).sum(0)


class Remembering(Clean):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x
        return super().forward(x)


def test_a_model_that_keeps_an_attribute_is_found():
    assert model_impurity(Clean()) is None
    assert "keeps 'last' for later" in str(model_impurity(nn.Sequential(Remembering())))


def test_a_users_hook_is_found_and_a_librarys_is_not():
    model = Clean()
    handle = model.layers[0].register_forward_hook(lambda module, inputs, output: None)
    assert "the hook" in str(model_impurity(model))
    handle.remove()
    assert model_impurity(model) is None


def test_a_hook_on_a_parameter_is_found():
    model = Clean()
    model.layers[0].weight.register_hook(lambda grad: None)
    assert "layers.0.weight" in str(model_impurity(model))
