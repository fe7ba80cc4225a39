"""A parameter stays the object that it is when its model moves to torch_xla's device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from anytrain import Accelerator
from xla_runs import rows

Make = Callable[[Any], Optimizer]


def _model(width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))


def _loader() -> Any:
    return DataLoader([(row["x"], row["labels"]) for row in rows()], batch_size=8)


def _losses(make: Make, *, cpu: bool, before: Callable[[nn.Module, Any], None]) -> list[float]:
    """Train four steps; `before` is told the model and the optimizer before they are prepared."""
    accelerator, model = Accelerator(cpu=cpu), _model()
    optimizer: Any = make(model.parameters())
    before(model, optimizer)
    prepared: Any
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, _loader())
    losses = []
    for _, (x, labels) in zip(range(4), loader, strict=False):

        def closure(x: Any = x, labels: Any = labels) -> Any:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(prepared(x), labels)
            accelerator.backward(loss)
            return loss

        if isinstance(optimizer.optimizer, torch.optim.LBFGS):  # it needs the gradient anew
            losses.append(optimizer.step(closure).detach())
        else:
            losses.append(closure().detach())
            optimizer.step()
    return [float(loss) for loss in losses]


def _nothing(model: nn.Module, optimizer: Any) -> None:
    """Leave both as they are."""


def _with_state(model: nn.Module, optimizer: Any) -> None:
    """Let the optimizer remember a hundred steps."""
    for parameter in model.parameters():
        moments = {name: torch.full_like(parameter, 0.5) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(100.0), **moments}


_kept: list[Any] = []


def _looked_at(model: nn.Module, optimizer: Any) -> None:
    """Let the optimizer remember, and a weak reference look at a parameter."""
    _with_state(model, optimizer)
    _kept.append(weakref.ref(next(model.parameters())))


@pytest.mark.parametrize(
    ("make", "before"),
    [
        (lambda params: torch.optim.AdamW(params, lr=1e-2), _with_state),
        (lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True), _with_state),
        (lambda params: torch.optim.AdamW(params, lr=1e-2), _looked_at),
        (lambda params: torch.optim.Adagrad(params, lr=1e-2), _nothing),
        (lambda params: torch.optim.LBFGS(params, lr=1e-2, max_iter=2), _nothing),
    ],
    ids=["adamw", "foreach", "weakly referenced", "adagrad", "lbfgs"],
)
def test_what_an_optimizer_remembers_before_prepare_counts(
    make: Make, before: Callable[[nn.Module, Any], None]
) -> None:
    ours = _losses(make, cpu=False, before=before)
    assert ours == pytest.approx(_losses(make, cpu=True, before=before), abs=1e-4)


def test_a_list_of_parameters_taken_before_prepare_is_still_the_models() -> None:
    accelerator, model = Accelerator(), _model()
    taken = list(model.parameters())
    optimizer: Any = torch.optim.SGD(taken, lr=1.0)
    prepared: Any
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, _loader())
    assert all(old is new for old, new in zip(taken, model.parameters(), strict=True))
    x, labels = next(iter(loader))
    accelerator.backward(nn.functional.cross_entropy(prepared(x), labels))
    norm = accelerator.clip_grad_norm_(taken, 1e-3)
    assert norm is not None
    assert float(norm) > 0
    grads = [parameter.grad for parameter in taken if parameter.grad is not None]
    assert float(torch.stack([grad.norm() for grad in grads]).norm()) <= 1.1e-3


def test_hooks_of_a_parameter_go_with_it() -> None:
    accelerator, model = Accelerator(), nn.Linear(4, 2)
    seen: list[str] = []
    handle = model.weight.register_hook(lambda grad: seen.append("gradient"))
    model.bias.register_post_accumulate_grad_hook(lambda parameter: seen.append("summed"))
    prepared: Any = accelerator.prepare(model)
    x = torch.ones(2, 4).to(accelerator.device)
    accelerator.backward(prepared(x).sum())
    assert sorted(seen) == ["gradient", "summed"]
    handle.remove()
    accelerator.backward(prepared(x).sum())
    assert sorted(seen) == ["gradient", "summed", "summed"]
