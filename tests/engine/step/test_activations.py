"""Fewer activations are kept, level by level, and what a step learns stays the same to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from anytrain.engine.step.activations import Activations, Fit
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


class Full(RuntimeError):
    """What a full memory raises here."""


def fit(model: nn.Module, **given: Any) -> Fit:
    return Fit(
        Activations(model),
        lambda error: isinstance(error, Full),
        release=lambda: None,
        keep_rng=lambda: (lambda state: lambda: torch.set_rng_state(state))(torch.get_rng_state()),
        **given,
    )


def test_work_runs_again_until_it_fits_from_the_same_random_numbers() -> None:
    model, told, drawn = stack(4), [], []
    fitting = fit(model, changed=lambda: told.append(fitting.activations.num_checkpointed))

    def work() -> torch.Tensor:
        drawn.append(torch.rand(()))
        if fitting.activations.num_checkpointed < 4:
            raise Full
        return drawn[-1]

    cleared: list[int] = []
    assert fitting.run(work, lambda: cleared.append(1)) is drawn[-1]
    assert told == [2, 4] and len(cleared) == 2
    assert len({float(each) for each in drawn}) == 1


def test_a_memory_that_stays_full_and_other_errors_come_through() -> None:
    def raises(error: Exception) -> Callable[[], torch.Tensor]:
        def work() -> torch.Tensor:
            raise error

        return work

    fitting = fit(stack(4))
    with pytest.raises(Full):
        fitting.run(raises(Full()), lambda: None)
    fitting = fit(stack(4))
    with pytest.raises(ValueError, match="shape"):
        fitting.run(raises(ValueError("shape")), lambda: None)
    assert fitting.activations.num_checkpointed == 0


def test_recorded_work_is_left_alone() -> None:
    fitting = fit(stack(4), is_recorded=lambda: True)

    def work() -> torch.Tensor:
        raise Full

    with pytest.raises(Full):
        fitting.run(work, lambda: None)
    assert fitting.activations.num_checkpointed == 0
