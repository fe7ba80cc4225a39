"""Which cross-entropies go through the kernels, told on a CPU with torch in the kernels' place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import torch_for_kernels
from anytrain.fast.shortcuts import loss
from anytrain.fast.shortcuts.layers import HALF, Group, Tools
from anytrain.fast.shortcuts.lazy_tensor import BrokenPromise, promises
from anytrain.fast.shortcuts.loss import losses

WORDS = 16411
NONE: Any = None
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Put torch in the kernels' place; return the widths of what came to them."""
    seen: list[int] = []

    def forward(kernels: Any, logits: Any, width: int, *rest: Any) -> Any:
        seen.append(width)
        return torch_for_kernels.loss_forward(kernels, logits, width, *rest)

    torch_for_kernels.put_in(monkeypatch)
    monkeypatch.setattr(loss, "loss_forward", forward)
    return seen


def like_transformers(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    targets = functional.pad(words, (0, 1), value=-100)[:, 1:].contiguous()
    return functional.cross_entropy(
        logits.float().view(-1, WORDS), targets.view(-1), ignore_index=-100, reduction="sum"
    )


def flat(logits: torch.Tensor) -> torch.Tensor:
    return logits.reshape(-1, WORDS)


TAKEN: dict[str, Loss] = {
    "as transformers": like_transformers,
    "the mean": lambda x, y: functional.cross_entropy(flat(x).float(), y.view(-1)),
    "a module": lambda x, y: nn.CrossEntropyLoss(ignore_index=3)(flat(x.float()), y.view(-1)),
    "smoothed by nothing": lambda x, y: functional.cross_entropy(
        flat(x), y.view(-1), weight=None, label_smoothing=0.0
    ),
    "and used elsewhere too": lambda x, y: (
        like_transformers(x, y) + x.float().logsumexp(-1).square().mean()
    ),
}
LEFT: dict[str, Loss] = {
    "smoothed": lambda x, y: functional.cross_entropy(flat(x), y.view(-1), label_smoothing=0.1),
    "weighted": lambda x, y: functional.cross_entropy(
        flat(x).float(), y.view(-1), torch.linspace(0, 1, WORDS)
    ),
    "weighted by name": lambda x, y: nn.CrossEntropyLoss(weight=torch.linspace(0, 1, WORDS))(
        flat(x).float(), y.view(-1)
    ),
    "added up, as it was once said": lambda x, y: functional.cross_entropy(
        flat(x).float(), y.view(-1), size_average=False
    ),
    "in one row": lambda x, y: functional.cross_entropy(
        x.float().view(-1).view(-1, WORDS), y.view(-1)
    ),
    "each by itself": lambda x, y: (
        functional.cross_entropy(flat(x).float(), y.view(-1), reduction="none").square().mean()
    ),
    "scaled": lambda x, y: functional.cross_entropy(flat(x.float() / 2), y.view(-1)),
    "shifted": lambda x, y: functional.cross_entropy(flat(x[:, :-1]), y[:, 1:].reshape(-1)),
    "turned": lambda x, y: functional.cross_entropy(
        x.transpose(0, 1).reshape(-1, WORDS), y.t().reshape(-1)
    ),
    "probabilities": lambda x, y: functional.cross_entropy(
        flat(x).float(), functional.one_hot(y.view(-1), WORDS).float()
    ),
    "spread out": lambda x, y: functional.cross_entropy(x.float().permute(0, 2, 1), y),
    "rounded once more": lambda x, y: like_transformers(x.half(), y),
    "in float64": lambda x, y: functional.cross_entropy(flat(x).double(), y.view(-1)),
    "written to": lambda x, y: like_transformers(x.div_(2), y),
}


def run(compute: Loss, *, by_kernels: bool) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    layer = nn.Linear(8, WORDS, bias=False)
    group = Group([layer])
    with torch.no_grad():
        for parameter, leaf, where in group.parts():
            leaf[where].copy_(parameter)
    inputs = torch.randn(2, 5, 8).to(HALF).requires_grad_()
    words = torch.randint(WORDS, (2, 5))
    words[0, 2] = 3
    tools = Tools(NONE, NONE)
    if by_kernels:
        with losses(NONE), promises():
            value = compute(group.result(0, inputs, tools), words)
            value.backward()
    else:
        value = compute(functional.linear(inputs, group.weight)[..., :WORDS], words)
        value.backward()
    grads = inputs.grad, group.weight.grad
    return value.detach(), *(g.float() for g in grads if g is not None)


@pytest.mark.parametrize("name", [*TAKEN, *LEFT])
def test_a_loss_is_torchs_whoever_computes_it(name: str, taken: list[int]) -> None:
    compute = {**TAKEN, **LEFT}[name]
    expected = run(compute, by_kernels=False)
    assert not taken
    found = run(compute, by_kernels=True)
    assert taken == ([WORDS] if name in TAKEN else [])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("write", [lambda x: x.mul_(3), lambda x: x.__setitem__((..., 0), 9.0)])
@pytest.mark.parametrize("written", ["a copy", "a view", "another view"])
def test_logits_that_are_written_to_are_refused(written: str, write: Callable[..., Any]) -> None:
    def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        copy = x.float()
        view, other = copy.view(-1, WORDS), copy.view(-1, WORDS)
        write({"a copy": copy, "a view": view, "another view": other}[written])
        return functional.cross_entropy(view, y.view(-1))

    run(compute, by_kernels=False)
    with pytest.raises(BrokenPromise, match="writes to"):
        run(compute, by_kernels=True)


def test_the_logits_of_a_head_that_is_checkpointed_by_hand_lead_back_to_it() -> None:
    layer = nn.Linear(8, WORDS, bias=False)
    group = Group([layer])
    inputs = torch.randn(2, 5, 8).to(HALF).requires_grad_()
    with losses(NONE), promises():
        logits = checkpoint(
            lambda y: group.result(0, y, Tools(NONE, NONE)), inputs, use_reentrant=True
        )
        like_transformers(logits, torch.randint(WORDS, (2, 5))).backward()
    assert inputs.grad is not None


def test_torchs_function_is_back_afterwards() -> None:
    own = functional.cross_entropy
    with pytest.raises(KeyError), losses(NONE):
        assert functional.cross_entropy is not own
        raise KeyError
    assert functional.cross_entropy is own
