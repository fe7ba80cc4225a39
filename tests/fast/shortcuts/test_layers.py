"""Linear layers on rounded weights whose width is rounded up, as far as a CPU shows it."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from anytrain.fast.shortcuts.layers import HALF, Group, Tools, _whole

NONE: Any = None
TOOLS = Tools(kernels=NONE, scratch=NONE)
"""A CPU has no kernels."""


def group_of(*layers: nn.Linear) -> Group:
    group = Group(list(layers))
    with torch.no_grad():
        for parameter, leaf, where in group.parts():
            leaf[where].copy_(parameter)
    return group


@pytest.mark.parametrize(
    ("width", "kept"), [(1027, 1088), (50257, 50304), (1032, 1032), (1023, 1023), (2, 2)]
)
def test_only_wide_layers_of_an_odd_width_are_widened(width: int, kept: int) -> None:
    group = group_of(nn.Linear(4, width))
    assert (group.width, tuple(group.weight.shape)) == (kept, (kept, 4))
    assert group.bias is not None and group.bias.shape == (kept,)


@pytest.mark.parametrize("shape", [(6, 16), (2, 3, 16)])
def test_a_widened_layer_computes_what_it_computed(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(16, 1027, bias=False)
    group = group_of(layer)
    inputs = torch.randn(shape).to(HALF).requires_grad_()
    found = group.result(0, inputs, TOOLS)
    weight = layer.weight.detach().to(HALF).requires_grad_()
    expected = functional.linear(inputs, weight)
    assert torch.equal(found, expected)
    given = torch.randn_like(expected)
    mine = torch.autograd.grad(found, [inputs, group.weight], given)
    theirs = torch.autograd.grad(expected, [inputs, weight], given)
    torch.testing.assert_close(mine[0], theirs[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(mine[1][:1027], theirs[1], rtol=2e-2, atol=2e-2)
    assert not mine[1][1027:].any()


def test_a_widened_layers_result_may_be_cut_into_rows_and_written_to() -> None:
    torch.manual_seed(0)
    group = group_of(nn.Linear(16, 1027, bias=False))
    inputs = torch.randn(2, 3, 16).to(HALF)
    found = group.result(0, inputs, TOOLS)
    assert found.view(-1, 1027).shape == (6, 1027)
    found /= 2
    found.float().sum().backward()
    assert group.weight.grad is not None
    assert group.weight.grad[:1027].all() and not group.weight.grad[1027:].any()


def test_layers_of_one_input_are_one_multiplication_and_nothing_of_it_is_kept() -> None:
    layers = [nn.Linear(16, 8) for _ in range(3)]
    group = group_of(*layers)
    inputs = torch.randn(4, 16).to(HALF)
    found = {number: group.result(number, inputs, TOOLS) for number in (0, 2, 1)}
    assert len({one.untyped_storage().data_ptr() for one in found.values()}) == 1
    for number, layer in enumerate(layers):
        expected = functional.linear(inputs, layer.weight.to(HALF), layer.bias.to(HALF))
        torch.testing.assert_close(found[number], expected)
    kept = weakref.ref(inputs), *map(weakref.ref, found.values())
    del inputs, found, expected
    assert all(one() is None for one in kept)


def test_a_layer_that_reads_something_else_in_between_is_computed_anew() -> None:
    group = group_of(nn.Linear(16, 8), nn.Linear(16, 8))
    one, other = torch.randn(2, 4, 16).to(HALF)
    first = group.result(0, one, TOOLS)
    assert not torch.equal(group.result(0, other, TOOLS), first)
    assert torch.equal(group.result(0, one, TOOLS), first)
    one.zero_()
    assert torch.equal(group.result(1, one, TOOLS)[0], group.layers[1].bias.to(HALF))


def test_gradients_that_lie_one_behind_the_other_are_not_copied() -> None:
    whole = torch.randn(2, 3, 12)
    parts = whole.split([4, 2, 6], -1)
    found = _whole(parts)
    assert found is not None
    assert found.data_ptr() == whole.data_ptr()
    assert torch.equal(found, whole)


def test_other_gradients_are_not_taken_for_one() -> None:
    whole = torch.randn(2, 3, 12)
    first, second, third = whole.split(4, -1)
    assert _whole((first, third, second)) is None
    assert _whole((first, second)) is None  # a part is missing
    assert _whole((first, second, third.clone())) is None
    assert _whole(tuple(whole.split(1, 1))) is None  # rows, not columns
    assert _whole(tuple(torch.randn(12).split(4))) is None
