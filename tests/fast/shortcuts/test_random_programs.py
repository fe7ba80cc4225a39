"""Models that are put together at random learn on shortcuts as under autocast, or are refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import torch_for_kernels
from anytrain.fast.shortcuts import layers
from anytrain.fast.shortcuts.layers import Sightings
from anytrain.fast.shortcuts.refusals import BrokenPromise
from torch_for_kernels import rounded

WIDTH, WORDS, ROWS = 16, 104, 24
NEAR = 0.08
"""Of a gradient's largest value; what bfloat16 loses where gradients all but cancel."""
OPS = [
    *["layer"] * 4,
    *["norm"] * 2,
    *["sum"] * 3,
    *("gelu", "drop", "cut off", "aside", "twice", "by hand", "times", "added to", "float"),
    *("laid out anew", "written to", "two layers"),
]


class Made(nn.Module):
    """A model whose forward follows a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=n != 2) for n in range(6))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.gelu, self.drop, self.head = nn.GELU(), nn.Dropout(0.2), nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        body = self.run(self._seed, [x * 1.0])
        logits = self.head(self.run(self._seed + 7, [x * 1.0, body]))
        targets = torch.arange(ROWS) % WORDS
        loss = functional.cross_entropy(logits.float().view(-1, WORDS), targets)
        return loss + functional.mse_loss(self.norms[0](body), torch.ones_like(body))

    def run(self, seed: int, made: list[torch.Tensor], depth: int = 0) -> torch.Tensor:
        """Do some operations, each on one of the last values, and return the last one."""
        dice = random.Random(seed)
        made = list(made)
        for _ in range(dice.randint(4, 9)):
            made.append(self.step(dice, made, depth))
        return made[-1].float()

    def step(self, dice: random.Random, made: list[torch.Tensor], depth: int) -> torch.Tensor:
        op, value, other = dice.choice(OPS), dice.choice(made[-4:]), dice.choice(made)
        layer, again = dice.choice(self.layers), dice.choice(self.layers)
        norm, seed = dice.choice(self.norms), dice.randrange(10**9)
        last = made[-2:]
        plain = {
            "layer": lambda: layer(value),
            "norm": lambda: norm(value),
            "sum": lambda: value + other,
            "gelu": lambda: self.gelu(value),
            "drop": lambda: self.drop(value),
            "cut off": lambda: value.detach() + other,
            "times": lambda: value * other.tanh(),
            "added to": lambda: (other * 1).add_(value),
            "float": lambda: value.float(),
            "laid out anew": lambda: value.transpose(0, 1).contiguous().transpose(0, 1),
            "written to": lambda: layer(value).mul_(0.5),
            "two layers": lambda: layer(value) * again(value),
        }
        if op in plain:
            return plain[op]()
        if depth == 2:
            return value
        if op == "aside":
            with torch.no_grad():
                seen = self.run(seed, last, depth + 1)
            return value + seen * 0.5
        block = lambda *given: self.run(seed, list(given), depth + 1)  # noqa: E731
        found: torch.Tensor = checkpoint(block, *last, use_reentrant=op == "by hand")
        return found


def learn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x.grad = None
    model.zero_grad()
    torch.manual_seed(5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss: torch.Tensor = model(x)
    loss.backward()
    return loss.detach()


def fresh(seed: int) -> tuple[Made, torch.Tensor]:
    torch.manual_seed(seed)
    return Made(seed), torch.randn(4, ROWS // 4, WIDTH, requires_grad=True)


def difference(found: dict[str, Any], expected: dict[str, Any]) -> str | None:
    largest = max(float(g.abs().max()) for g in expected.values() if g is not None)
    for name, gradient in expected.items():
        if (found[name] is None) != (gradient is None):
            return f"{name}: {found[name]} and not {gradient}"
        if gradient is not None:
            worst = float((found[name].float() - gradient).abs().max())
            if worst > NEAR * max(float(gradient.abs().max()), 0.02 * largest):
                return f"{name}: off by {worst}"
    return None


@pytest.mark.parametrize("is_simple", [False, True])
def test_what_is_put_together_at_random_learns_as_under_autocast(
    is_simple: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_for_kernels.put_in(monkeypatch)
    monkeypatch.setattr(layers, "_VOCABULARY", WORDS)
    how = {"puts_off": not is_simple, "joined": not is_simple}
    num_refused, off = 0, {}
    for seed in range(200):
        model, x = fresh(seed)
        learn(model, x)
        expected = {"x": x.grad, **{n: p.grad for n, p in model.named_parameters()}}
        model, x = fresh(seed)
        sightings = Sightings(model)
        with sightings.watched():
            learn(model, x)
        model.zero_grad()
        try:
            with rounded(model, sightings, **how) as halves:
                learn(model, x)
        except BrokenPromise:
            num_refused += 1
            continue
        grads = {n: halves.gradient(p) for n, p in model.named_parameters()}
        told = difference({"x": x.grad, **grads}, expected)
        if told is not None:
            off[seed] = told
    assert not off
    assert num_refused < 60
