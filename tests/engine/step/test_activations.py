"""Fewer activations are kept, level by level, and what a step learns stays the same to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from anytrain.engine.step.activations import Activations
from engine.step.test_blocks import stack


def held_bytes(run: Callable[[], Any]) -> int:
    """Return how much a forward keeps for backward."""
    held: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(held.values())


def gradients(model: nn.Module, x: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    after = torch.rand(3)  # the stream goes on where it would have
    return [loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)], after


def test_each_level_keeps_less_and_gives_the_same_bits_with_dropout() -> None:
    model, x = stack(6), torch.randn(64, 8)
    activations = Activations(model)
    plain, drawn = gradients(model, x)
    kept = [held_bytes(lambda: model(x))]
    while activations.fewer():
        found, then = gradients(model, x)
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
        assert torch.equal(drawn, then)
        kept.append(held_bytes(lambda: model(x)))
    assert len(kept) == 3 and kept[0] > kept[1] > kept[2]
    activations.restore()
    assert held_bytes(lambda: model(x)) == kept[0]
    assert activations.num_checkpointed == 0


def test_a_cache_among_the_arguments_is_not_filled_twice() -> None:
    class Caching(nn.Linear):
        def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
            cache.append(x)
            return super().forward(x)

    class Cache:
        filled = 0

        def append(self, value: Any) -> None:
            self.filled += 1

    blocks = nn.ModuleList(Caching(4, 4) for _ in range(3))
    activations = Activations(nn.Sequential(blocks))
    activations.fewer(), activations.fewer()
    cache = Cache()
    blocks[0](torch.ones(1, 4), cache).sum().backward()
    assert cache.filled == 1
