"""What a step with shortcuts cannot give is refused: it would be silently another gradient."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_for_kernels
from anytrain.fast.shortcuts.layers import Sightings
from anytrain.fast.shortcuts.refusals import BrokenPromise
from torch_for_kernels import rounded

WIDTH = 16


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_for_kernels.put_in(monkeypatch)


def size(y: torch.Tensor) -> torch.Tensor:
    return y.float().square().mean()


Body = Callable[["Model", torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """Two layers, a norm and a GELU, and a body that says what becomes of them."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDTH), nn.GELU()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self._body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._body(self, x)


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x.grad = None
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss: torch.Tensor = model(x)
    loss.backward()
    return loss.detach()


def inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(4, WIDTH, requires_grad=True)


def plain(body: Body) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x = Model(body), inputs()
    step(model, x)  # as it is watched before it is recorded
    found = step(model, x)
    return {"loss": found, "x": x.grad, **{n: p.grad for n, p in model.named_parameters()}}


def shortened(body: Body, *, is_simple: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x = Model(body), inputs()
    sightings = Sightings(model)
    with sightings.watched():
        step(model, x)
    model.zero_grad()
    how = {"puts_off": not is_simple, "joined": not is_simple}
    with rounded(model, sightings, **how) as halves:
        found = step(model, x)
    grads = {n: halves.gradient(p) for n, p in model.named_parameters()}
    return {"loss": found, "x": x.grad, **grads}


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        assert (found[name] is None) == (value is None), name
        if value is not None:
            torch.testing.assert_close(found[name].float(), value.float(), rtol=0.05, atol=1e-3)


def penalty(model: Model, x: torch.Tensor) -> torch.Tensor:
    y = model.b(model.act(model.a(x)))
    (slope,) = torch.autograd.grad(y.float().sum(), x, create_graph=True)
    return size(y) + 10 * size(slope)


def of_a_norm(model: Model, x: torch.Tensor) -> torch.Tensor:
    h = model.norm(x)
    loss = size(model.a(h)) + size(h)
    (slope,) = torch.autograd.grad(loss, h, retain_graph=True)
    return loss * slope.norm().detach()


def of_a_weight(model: Model, x: torch.Tensor) -> torch.Tensor:
    loss = size(model.a(x)) + model.a.weight.square().sum()
    (slope,) = torch.autograd.grad(loss, model.a.weight, retain_graph=True)
    return loss * slope.norm().detach()


def hooked(model: Model, x: torch.Tensor) -> torch.Tensor:
    h = model.norm(x)
    h.register_hook(lambda gradient: 2 * gradient)
    return size(model.a(h)) + size(h)


def kept(model: Model, x: torch.Tensor) -> torch.Tensor:
    h = model.norm(x)
    h.retain_grad()
    return size(model.a(h)) + size(h)


def frozen_for_a_part(model: Model, x: torch.Tensor) -> torch.Tensor:
    fake = model.b(x)
    model.a.requires_grad_(False)
    y = model.a(fake)
    model.a.requires_grad_(True)
    return size(y) - size(model.a(fake.detach()))


def called_with_others(model: Model, x: torch.Tensor) -> torch.Tensor:
    others = {name: 2 * p.detach() for name, p in model.a.named_parameters()}
    return size(model.b(x) - torch.func.functional_call(model.a, others, (x,)))


def updated(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model.a.weight.mul_(1.5)
        target = model.a(x)
    return size(model.b(x.sin()) - target)


def moved(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.a.weight.data = 1.5 * model.a.weight.data
    return size(model.a(x) + model.b(x.sin()))


class ByHand(torch.autograd.Function):
    """Checkpointing as diffusion models write it: gradients of weights are asked for on the way."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: torch.Tensor, *weights: torch.Tensor) -> Any:
        ctx.run, ctx.x, ctx.weights = run, x, weights
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            made = ctx.run(x)
        asked = (x, *ctx.weights)
        return None, *torch.autograd.grad(made, asked, given, allow_unused=True)


def made_by_hand(model: Model, x: torch.Tensor) -> torch.Tensor:
    weights = tuple(model.parameters())
    return size(ByHand.apply(lambda x: model.b(model.act(model.a(x))), x, *weights))


REFUSED: dict[str, tuple[Body, str]] = {
    "a gradient penalty": (penalty, "asks for gradients"),
    "a gradient with respect to a norm's result": (of_a_norm, "asks for gradients"),
    "a gradient with respect to a weight": (of_a_weight, "asks for gradients"),
    "a hook on a norm's result": (hooked, "register_hook"),
    "a norm's gradient kept": (kept, "retain_grad"),
    "a layer frozen for a part": (frozen_for_a_part, "changed or replaced"),
    "a layer called with other weights": (called_with_others, "changed or replaced"),
    "weights updated in the step": (updated, "changed or replaced"),
    "weights moved in the step": (moved, "changed or replaced"),
    "checkpointing by hand": (made_by_hand, "asks for"),
}


@pytest.mark.parametrize("is_simple", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_what_shortcuts_cannot_give_is_refused(name: str, is_simple: bool) -> None:
    body, word = REFUSED[name]
    with pytest.raises(BrokenPromise, match=word):
        shortened(body, is_simple=is_simple)


def test_a_gradient_of_a_gradient_is_refused_wherever_it_is_asked_for() -> None:
    grad = torch.autograd.graph._engine_run_backward  # type: ignore[attr-defined]  # around ours

    def body(model: Model, x: torch.Tensor) -> torch.Tensor:
        total = model.a(x).float().sum()
        (slope,) = grad((total,), (torch.ones(()),), True, True, (x,), False, accumulate_grad=False)
        return size(slope)

    with pytest.raises(BrokenPromise, match="gradient of a gradient"):
        shortened(body)


def test_the_backward_pass_is_the_steps_own_in_whichever_thread_it_runs() -> None:
    backward, failed = torch.Tensor.backward, list[BaseException]()

    def elsewhere(loss: torch.Tensor) -> None:
        def run() -> None:
            try:
                backward(loss)
            except BrokenPromise as error:
                failed.append(error)

        thread = threading.Thread(target=run)  # as torch does it on a GPU
        thread.start()
        thread.join()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", elsewhere)
        shortened(made_by_hand)
    assert [type(error) for error in failed] == [BrokenPromise]


def test_another_thread_may_ask_for_gradients_meanwhile() -> None:
    found: list[torch.Tensor] = []

    def ask() -> None:
        x = torch.ones((), requires_grad=True)
        found.extend(torch.autograd.grad(x * 3, x))

    def body(model: Model, x: torch.Tensor) -> torch.Tensor:
        found.clear()
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return size(model.a(x))

    shortened(body)
    assert [float(gradient) for gradient in found] == [3.0]


def target_of_a_twin(model: Model, x: torch.Tensor) -> torch.Tensor:
    h = model.norm(x)
    with torch.no_grad():
        target = model.a(h)
    return size(model.b(h) - target)


def detached_between(model: Model, x: torch.Tensor) -> torch.Tensor:
    h = model.norm(x)
    y = model.a(h)
    h.detach_()
    return size(y) + size(model.b(h))


def begun_anew(model: Model, x: torch.Tensor) -> torch.Tensor:
    h = model.norm(x)
    y = model.a(h)
    h.detach_().requires_grad_()
    return size(y) + size(model.b(h))


def unused(model: Model, x: torch.Tensor) -> torch.Tensor:
    h = model.norm(x)
    model.a(h)
    return size(model.b(h))


APART: dict[str, Body] = {
    "a target by a layer's twin": target_of_a_twin,
    "detached between two layers": detached_between,
    "begun anew between two layers": begun_anew,
    "a result that nobody reads": unused,
}
"""What joined layers cannot give, but layers by themselves can."""


@pytest.mark.parametrize("name", APART)
def test_what_joined_layers_cannot_give_each_alone_gives(name: str) -> None:
    with pytest.raises(BrokenPromise, match="gets no gradient"):
        shortened(APART[name])
    assert_close(shortened(APART[name], is_simple=True), plain(APART[name]))


def copied(model: Model, x: torch.Tensor) -> torch.Tensor:
    teacher = copy.deepcopy(model.a)
    with torch.no_grad():
        teacher.weight.mul_(3)
        target = teacher(x)
    return size(model.b(x.cos()) - target)


def not_wanted(function: Callable[[Model, torch.Tensor], torch.Tensor]) -> Body:
    """Return a body in which checkpointing by hand sends no gradient to what a function made."""

    def body(model: Model, x: torch.Tensor) -> torch.Tensor:
        made = function(model, x)
        run = lambda x, made: model.b(x.sin()) + made.detach()  # noqa: E731
        return size(checkpoint(run, x, made, use_reentrant=True))

    return body


GIVEN: dict[str, Body] = {
    "a layer's copy": copied,
    "inputs by name": lambda m, x: size(m.a(input=m.norm(input=x))),
    "no gradient for a layer": not_wanted(lambda m, x: m.a(x)),
    "no gradient for a norm": not_wanted(lambda m, x: m.norm(x)),
    "no gradient for a norm of a sum": not_wanted(lambda m, x: m.norm(m.a(x) + x)),
    "no gradient for a sum": not_wanted(lambda m, x: m.a(x) + x),
    "no gradient for a GELU": not_wanted(lambda m, x: m.act(m.a(x))),
    "detached in place": lambda m, x: size(m.a(m.norm(x).detach_())) + size(x),
}


@pytest.mark.parametrize("is_simple", [False, True])
@pytest.mark.parametrize("name", GIVEN)
def test_the_rest_is_what_torch_computes(name: str, is_simple: bool) -> None:
    assert_close(shortened(GIVEN[name], is_simple=is_simple), plain(GIVEN[name]))


def test_torchs_own_are_back_afterwards() -> None:
    names = ("register_hook", "retain_grad")
    before = [getattr(torch.Tensor, name) for name in names], torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    shortened(GIVEN["inputs by name"])
    after = [getattr(torch.Tensor, name) for name in names], torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    assert before == after
    assert "retain_grad" not in vars(torch.Tensor)
