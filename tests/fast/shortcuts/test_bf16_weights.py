"""What layers on rounded weights hold on to, told on a CPU with torch in the kernels' place."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_for_kernels
from anytrain.fast.shortcuts import layers
from anytrain.fast.shortcuts.layers import Sightings
from anytrain.fast.shortcuts.refusals import BrokenPromise

rounded = partial(torch_for_kernels.rounded, autocast=True)


class Block(nn.Module):
    """Two layers that read one input, and one that reads theirs."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()
        self.left, self.right, self.out = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self._kept = kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = x.float() * 2
        mixed = self.left(whole) * self.right(whole)
        self._kept.append(weakref.ref(whole))
        return x + self.out(mixed.tanh()).float()


class Two(nn.Module):
    """Two of them, checkpointed or not."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.kept: list[Any] = []
        self.blocks = nn.ModuleList(Block(self.kept) for _ in range(2))
        self._checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self._checkpointed else block(x)
        return x.square().sum()


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch_for_kernels.put_in(monkeypatch)
    gc.disable()  # as it is while a step is recorded
    yield
    gc.enable()


@pytest.mark.parametrize("checkpointed", [True, False])
def test_a_blocks_activations_go_with_it(checkpointed: bool) -> None:
    model = Two(checkpointed=checkpointed)
    sightings = Sightings(model)
    inputs = torch.randn(4, 8, requires_grad=True)
    with sightings.watched():
        model(inputs).backward()
        assert all(whole() is None for whole in model.kept)
    model.kept.clear()
    with rounded(model, sightings):
        model(inputs).backward()
        assert len(model.kept) == (4 if checkpointed else 2)
        assert all(whole() is None for whole in model.kept)


def notes(monkeypatch: pytest.MonkeyPatch, note: Callable[[torch.Tensor], None]) -> None:
    """Have noted what each layer reads."""
    result = layers.Group.result

    def noted(self: Any, number: int, read: torch.Tensor, tools: Any) -> torch.Tensor:
        note(read)
        return result(self, number, read, tools)

    monkeypatch.setattr(layers.Group, "result", noted)


@pytest.mark.parametrize("checkpointed", [True, False])
def test_layers_of_one_input_share_what_is_rounded(
    checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Two(checkpointed=checkpointed)
    for block in model.blocks:
        block.left.bias = nn.Parameter(torch.zeros(8))  # so that they are not one multiplication
    sightings = Sightings(model)
    inputs = torch.randn(4, 8, requires_grad=True)
    with sightings.watched():
        model(inputs).backward()
    assert [len(group.layers) for group in sightings.groups()] == [1] * 6
    seen: list[torch.Tensor] = []
    notes(monkeypatch, seen.append)
    with rounded(model, sightings):
        model(inputs)
    assert [one is other for one, other in zip(seen, seen[1:], strict=False)] == [
        *(True, False, False),
        *(True, False),
    ]


@pytest.mark.parametrize("by_hand", [True, False])
def test_of_what_checkpointed_blocks_read_only_the_last_stays_rounded(
    by_hand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their inputs stay until they run again; what was rounded of them would stay as long."""
    model = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
    seen: list[Any] = []
    notes(monkeypatch, lambda read: seen.append(weakref.ref(read)))
    with rounded(model):
        x = torch.randn(4, 8, requires_grad=True)
        for layer in model:
            x = checkpoint(lambda y, of=layer: of(y).float(), x, use_reentrant=by_hand)
        assert [read() is not None for read in seen] == [False, False, False, True]


def test_what_was_rounded_without_gradients_has_one_when_it_is_wanted() -> None:
    layer = nn.Linear(8, 8, bias=False)
    inputs = torch.randn(4, 8, requires_grad=True)
    with rounded(layer):
        with torch.no_grad():
            layer(inputs)
        layer(inputs).float().sum().backward()
    assert inputs.grad is not None


def test_joined_layers_of_which_one_gets_no_gradient_are_refused_and_alone_are_not() -> None:
    left, right = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    model = nn.ModuleList([left, right])
    sightings = Sightings(model)
    inputs = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    with sightings.watched(), torch.autocast("cpu", dtype=torch.bfloat16):
        left(inputs), right(inputs)
    assert [len(group.layers) for group in sightings.groups()] == [2]
    with rounded(model, sightings), pytest.raises(BrokenPromise, match="gets no gradient"):
        with torch.no_grad():
            left(inputs)
        right(inputs).float().sum().backward()
    with rounded(model, sightings, joined=False) as halves:
        with torch.no_grad():
            left(inputs)
        right(inputs).float().sum().backward()
    assert inputs.grad is not None
    assert halves.gradient(left.weight) is None
    assert halves.gradient(right.weight) is not None


def test_what_was_written_to_is_rounded_anew() -> None:
    layer = nn.Linear(8, 8, bias=False)
    model = nn.Sequential(layer)
    sightings = Sightings(model)
    inputs = torch.randn(4, 8)
    with sightings.watched():
        model(inputs)
    with rounded(model, sightings):
        before = model(inputs)
        inputs.mul_(2)
        torch.testing.assert_close(model(inputs), 2 * before)
