"""What the kernels are told of places and steps is where their tensors lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from anytrain.fast.kernels import elementwise as kernels_of
from anytrain.fast.kernels.elementwise import (
    can_gate,
    can_rotate,
    gate,
    gate_backward,
    rotate,
    rotate_backward,
)


class Host:
    """Runs by torch what the kernels would run, on what they would be told."""

    def launch(self, name: str, grid: tuple[int, int], args: list[Any]) -> None:
        assert grid[0] * 256 >= next(arg for arg in args if isinstance(arg, int))
        getattr(self, name)(*args)

    def gate(
        self, opens: Any, values: Any, made: Any, count: int, width: int, one: int, two: int
    ) -> None:
        shape = 8 * count // width, width
        product = functional.silu(opens.as_strided(shape, (one, 1)))
        made.as_strided(shape, (width, 1)).copy_(product * values.as_strided(shape, (two, 1)))

    def gate_backward(
        self, opens: Any, values: Any, sent: Any, of_opens: Any, of_values: Any, *told: int
    ) -> None:
        count, width, one, two, step = told
        shape = 8 * count // width, width
        opens, values = opens.as_strided(shape, (one, 1)), values.as_strided(shape, (two, 1))
        sent = sent.as_strided(shape, (width, 1))
        slopes = torch.ops.aten.silu_backward(sent * values, opens)
        of_opens.as_strided(shape, (step, 1)).copy_(slopes)
        of_values.as_strided(shape, (step, 1)).copy_(sent * functional.silu(opens))

    def rotate(self, *args: Any) -> None:
        self._turn(1, *args)

    def rotate_backward(self, *args: Any) -> None:
        self._turn(-1, *args)

    def _turn(self, sign: int, read: Any, cosines: Any, sines: Any, made: Any, *told: int) -> None:
        count, width, heads, length, *steps = told
        rows = 8 * count // (width * heads * length)
        x = read.as_strided((rows, heads, length, width), (*steps[:3], 1)).float()
        angles = [
            a.as_strided((rows, length, width), (*steps[3:], 1))[:, None] for a in (cosines, sines)
        ]
        first, second = x.chunk(2, -1)
        if sign > 0:
            turned = x * angles[0] + torch.cat([-second, first], -1) * angles[1]
        else:
            one, two = (x * angles[1]).chunk(2, -1)
            turned = x * angles[0] + torch.cat([two, -one], -1)
        made.as_strided((rows, length, heads, width), made.stride()).copy_(turned.transpose(1, 2))


HOST: Any = Host()


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_of, "_is_there", lambda tensor: tensor.numel() > 0)


@pytest.mark.parametrize("joined", [True, False])
def test_a_gate_reads_and_writes_rows_where_they_lie(joined: bool) -> None:
    both = torch.randn(5, 32).bfloat16()
    opens, values = both.split(16, -1)
    if not joined:
        opens, values = opens.contiguous(), values.contiguous()
    assert can_gate(opens) and can_gate(values)
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (opens, values)]
    expected = functional.silu(leaves[0]) * leaves[1]
    made = gate(HOST, opens, values)
    assert torch.equal(made, expected)
    sent = torch.randn_like(made)
    found = gate_backward(HOST, opens, values, sent)
    for mine, theirs in zip(found, torch.autograd.grad(expected, leaves, sent), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert (found[1].data_ptr() - found[0].data_ptr() == 32) is joined or not joined


def test_rows_that_lie_otherwise_are_not_read() -> None:
    whole = torch.randn(4, 3, 32).bfloat16()
    assert not can_gate(whole[0].t())
    assert not can_gate(whole[0, :, ::2])
    assert not can_gate(whole[0, :, :12])
    assert not can_rotate(whole[:, None, :, :12])
    assert can_rotate(whole[:, None, :, 16:])


@pytest.mark.parametrize("apart", [True, False])
def test_rotary_positions_are_read_and_written_where_they_lie(apart: bool) -> None:
    beside = torch.randn(2, 5, 3 * 16 + 8).bfloat16()
    inputs = beside[..., 8:].view(2, 5, 3, 16).transpose(1, 2)
    angles = [torch.randn(2 if apart else 1, 5, 16) for _ in range(2)]
    leaf = inputs.detach().clone().requires_grad_()
    first, second = leaf.chunk(2, -1)
    expected = leaf * angles[0][:, None] + torch.cat([-second, first], -1) * angles[1][:, None]
    made = rotate(HOST, inputs, *angles)
    torch.testing.assert_close(made, expected)
    for sent in (torch.randn_like(expected), torch.randn(2, 5, 3, 16).transpose(1, 2)):
        (theirs,) = torch.autograd.grad(expected, leaf, sent, retain_graph=True)
        mine = rotate_backward(HOST, sent, *angles)
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=4e-2)
