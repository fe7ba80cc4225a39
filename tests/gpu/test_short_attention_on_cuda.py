"""Our attention over short texts is torch's, to rounding, with the values that it drops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from anytrain.fast.kernels.short_attention import (
    ShortAttention,
    Wanted,
    attend,
    fits,
    shared_masks,
)

pytestmark = pytest.mark.gpu

LENGTHS = [(2, 2), (5, 5), (8, 8), (17, 17), (48, 48), (56, 56), (64, 64), (72, 72), (104, 104)]
LENGTHS += [(128, 128), (127, 127), (16, 128), (128, 16), (3, 100), (97, 40)]


@pytest.fixture(scope="module")
def kernels() -> ShortAttention:
    found = ShortAttention(torch.device("cuda", 0))
    assert found.are_there(), found.problem
    return found


def tensors(rows: int, heads: int, queries: int, keys: int, width: int) -> list[torch.Tensor]:
    """Return queries, keys and values as models make them: heads side by side."""
    shapes = [(rows, length, heads, width) for length in (queries, keys, keys)]
    return [torch.randn(shape, device="cuda").bfloat16().transpose(1, 2) for shape in shapes]


def kept_of(words: torch.Tensor, keys: int) -> torch.Tensor:
    """Return which scores were kept, from the kernel's bits."""
    key = torch.arange(keys, device=words.device)
    of_key = words[..., key % 8 // 2].long() >> (key // 8 * 2 + key % 2)
    return (of_key & 1).bool()


def exact(given: list[Any], mask: Any, wanted: Wanted, kept: Any) -> torch.Tensor:
    """Attend in float64."""
    query, key, value = given
    scores = query @ key.transpose(-1, -2) * wanted.scale
    if wanted.is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    shares = scores.softmax(-1).nan_to_num()
    if kept is not None:
        shares = shares * kept * (65536 / (65536 - wanted.dropped))
    return shares @ value


def off(ours: torch.Tensor, right: torch.Tensor) -> float:
    """Return how far two tensors are apart, as a share of their size."""
    return float((ours.detach().double() - right.detach()).norm() / right.detach().norm())


def compare(kernels: ShortAttention, given: Any, mask: Any, wanted: Wanted) -> list[float]:
    """Return how far the result and the gradients are off."""
    ours = [tensor.detach().requires_grad_() for tensor in given]
    made = attend(kernels, tuple(ours), mask, wanted)
    sent = torch.randn_like(made)
    saved = made.grad_fn.saved_tensors
    kept = kept_of(saved[-1], given[1].shape[2]) if wanted.dropped else None
    gradients = torch.autograd.grad(made, ours, sent)
    double = [tensor.detach().double().requires_grad_() for tensor in given]
    right = exact(double, mask, wanted, kept)
    expected = torch.autograd.grad(right, double, sent.double())
    return [off(a, b) for a, b in zip((made, *gradients), (right, *expected), strict=True)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("seen", ["all", "causal", "whole mask", "keys", "heads"])
def test_results_and_gradients_are_those_of_float64(
    kernels: ShortAttention, lengths: tuple[int, int], width: int, dropout: float, seen: str
) -> None:
    torch.manual_seed(0)
    rows, heads, (queries, keys) = 3, 5, lengths
    mask: Any = {
        "whole mask": lambda: torch.rand(rows, 1, queries, keys, device="cuda") < 0.7,
        "keys": lambda: (torch.rand(rows, keys, device="cuda") < 0.7)[:, None, None],
        "heads": lambda: torch.rand(1, heads, queries, keys, device="cuda") < 0.3,
    }.get(seen, lambda: None)()
    wanted = Wanted(dropout, seen == "causal", width**-0.5)
    if mask is not None:
        mask[..., :2] = True  # with one key alone the scores' gradients are zero
    given = tensors(rows, heads, queries, keys, width)
    assert fits(*given, mask)
    assert max(compare(kernels, given, mask, wanted)) < 1e-2


def test_one_key_gets_its_value_and_no_score_a_gradient(kernels: ShortAttention) -> None:
    given = [tensor.requires_grad_() for tensor in tensors(2, 3, 1, 1, 64)]
    made = attend(kernels, tuple(given), None, Wanted(0.0, False, 0.125))
    assert torch.equal(made, given[2])
    gradients = torch.autograd.grad(made.sum(), given)
    assert gradients[0].abs().max() < 1e-2
    assert gradients[1].abs().max() < 1e-2
    assert torch.equal(gradients[2], torch.ones_like(made))


def test_a_query_that_sees_nothing_gets_zeros_and_sends_none(kernels: ShortAttention) -> None:
    given = tensors(2, 3, 20, 20, 32)
    mask = torch.ones(2, 1, 20, 20, dtype=torch.bool, device="cuda")
    mask[0, :, 7] = False
    mask[1] = False
    ours = [tensor.requires_grad_() for tensor in given]
    made = attend(kernels, tuple(ours), mask, Wanted(0.0, False, 1.0))
    assert not made[0, :, 7].any()
    assert not made[1].any()
    for gradient in torch.autograd.grad(made.sum(), ours):
        assert gradient.isfinite().all()
        assert not gradient[1].any()


@pytest.mark.parametrize("scale", [1e-3, -0.3, 4.0])
def test_any_scale_is_taken(kernels: ShortAttention, scale: float) -> None:
    torch.manual_seed(0)
    given = tensors(2, 3, 40, 40, 64)
    assert max(compare(kernels, given, None, Wanted(0.0, False, scale))[:2]) < 2e-2


def test_as_many_are_dropped_as_asked_for_and_others_each_time(kernels: ShortAttention) -> None:
    given = tuple(t.requires_grad_() for t in tensors(8, 12, 128, 128, 64))
    bits = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        for _ in range(2):
            made = attend(kernels, given, None, Wanted(0.1, False, 0.125))
            bits.append(kept_of(made.grad_fn.saved_tensors[-1], 128))
    first, second, again, *_, other = bits
    for each in bits:
        assert 1 - each.float().mean().item() == pytest.approx(0.1, abs=1e-3)
    assert torch.equal(first, again)
    for one, two in (
        (first, second),
        (first, other),
        (first[0], first[1]),
        (first[:, 0], first[:, 1]),
    ):
        assert (one != two).float().mean().item() == pytest.approx(0.18, abs=5e-3)
    for axis in (-1, -2):  # no pattern along keys or queries
        assert (1 - first.float()).mean(axis).std() < 0.04


def test_parts_of_one_tensor_get_parts_of_one_gradient(kernels: ShortAttention) -> None:
    whole = torch.randn(4, 48, 3 * 12 * 64, device="cuda").bfloat16().requires_grad_()
    parts = [part.unflatten(-1, (12, 64)).transpose(1, 2) for part in whole.split(768, -1)]
    made = attend(kernels, tuple(parts), None, Wanted(0.0, False, 0.125))
    gradients = made.grad_fn.apply(torch.ones_like(made))[:3]
    places = [gradient.data_ptr() - gradients[0].data_ptr() for gradient in gradients]
    assert places == [0, 768 * 2, 2 * 768 * 2]


def test_rows_that_cannot_be_read_at_once_are_copied(kernels: ShortAttention) -> None:
    torch.manual_seed(0)
    odd = [torch.randn(2, 3, 40, 33, device="cuda").bfloat16()[..., 1:] for _ in range(3)]
    wanted = Wanted(0.0, False, 0.2)
    assert max(compare(kernels, odd, None, wanted)) < 1e-2
    turned = [torch.randn(2, 3, 32, 40, device="cuda").bfloat16().mT for _ in range(3)]
    assert max(compare(kernels, turned, None, wanted)) < 1e-2


def test_layers_share_a_masks_bits_until_it_is_written_to(kernels: ShortAttention) -> None:
    torch.manual_seed(0)
    given, wanted = tuple(tensors(2, 3, 40, 40, 32)), Wanted(0.0, False, 0.2)
    mask = torch.rand(2, 1, 40, 40, device="cuda") < 0.5
    with shared_masks():
        first = attend(kernels, given, mask, wanted)
        assert torch.equal(first, attend(kernels, given, mask, wanted))
        mask.logical_not_()
        other = attend(kernels, given, mask, wanted)
    assert not torch.equal(first, other)
    assert torch.equal(other, attend(kernels, given, mask, wanted))


def test_a_result_may_be_written_to_where_nothing_before_it_is_learnt(
    kernels: ShortAttention,
) -> None:
    given, gate = tuple(tensors(2, 3, 40, 40, 32)), torch.full((1,), 2.0, device="cuda")
    made = attend(kernels, given, None, Wanted(0.0, False, 0.2))
    made.mul_(gate.bfloat16().requires_grad_())
    made.sum().backward()


def test_it_is_recorded_and_draws_anew_at_each_replay(kernels: ShortAttention) -> None:
    given = tuple(tensors(2, 3, 40, 40, 32))
    wanted = Wanted(0.5, False, 0.2)
    attend(kernels, given, None, wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = attend(kernels, given, None, wanted)
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        for _ in range(2):
            graph.replay()
            found.append(made.clone())
    torch.manual_seed(3)
    directly = attend(kernels, given, None, wanted)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[0], directly)
    assert not torch.equal(found[0], found[1])
