"""What is put off is what torch computes, told on a CPU with torch in the kernels' place."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torch_for_kernels
from anytrain.fast.kernels.step import Normed
from anytrain.fast.shortcuts import layers, norms
from anytrain.fast.shortcuts.lazy_tensor import BrokenPromise, LazyTensor, Result, promises, real

rounded = partial(torch_for_kernels.rounded, autocast=True)

WIDTH = 16


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Put torch in the kernels' place; return for each layer norm if it has added, too."""
    seen: list[bool] = []

    def forward(*given: Any) -> Normed:
        seen.append(len(given) > 5)
        return torch_for_kernels.norm_forward(*given)

    torch_for_kernels.put_in(monkeypatch)
    monkeypatch.setattr(norms, "norm_forward", forward)
    gc.disable()  # as it is while a step is recorded
    yield seen
    gc.enable()


class Square(torch.autograd.Function):
    """A function of the user's own, which torch calls without asking its arguments."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * given[0]


Body = Callable[["Block", torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """A layer with a dropout, a layer norm, and a body that says what happens to them."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop, self.norm, self.last = nn.Dropout(0.3), nn.LayerNorm(WIDTH), nn.Identity()
        self.act = nn.GELU("tanh")
        self._body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._body(self, x)

    def half(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.outer(self.inner(x)))


def pre(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block.half(block.norm(x)) + x


def saving_sums(context: Any, op: Any, *given: Any, **more: Any) -> CheckpointPolicy:
    is_sum = op is torch.ops.aten.add.Tensor
    return CheckpointPolicy.MUST_SAVE if is_sum else CheckpointPolicy.PREFER_RECOMPUTE


def kept_in_part(block: Block, x: torch.Tensor) -> torch.Tensor:
    """Run a block twice but for its sums, on a sum from outside."""
    return checkpoint(
        lambda y: block.norm(block.inner(y).float() * 2 + y) * (y + 3),
        block.half(x) + x,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, saving_sums),
    )


def looked_at_aside(block: Block, x: torch.Tensor) -> torch.Tensor:
    total = block.half(x) + x
    with torch.inference_mode():
        seen = float(total.mean())
    return block.norm(total) * seen


def looked_at(block: Block, x: torch.Tensor) -> torch.Tensor:
    total = block.half(x) + x
    with torch.no_grad():
        seen = total.mean()
    return block.norm(total) * seen


def after(first: Callable[[Block, torch.Tensor], Any], then: Callable[..., Any]) -> Body:
    """Return a body that does something to a tensor before a layer norm reads it."""

    def body(block: Block, x: torch.Tensor) -> torch.Tensor:
        tensor = first(block, x)
        then(tensor)
        return block.norm(tensor + x if tensor.dtype == torch.bfloat16 else tensor)

    return body


def half_of(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block.half(x)


def sum_of(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block.half(x) + x


class Tripled(torch.autograd.Function):
    """A function of the user's own that writes to what it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> torch.Tensor:
        return 3 * given[0]


FUSED: dict[str, Body] = {
    "post": lambda b, x: b.norm(b.half(x) + x),
    "the other way round": lambda b, x: b.norm(x + b.half(x)),
    "without a dropout": lambda b, x: b.norm(b.outer(b.inner(x)) + x),
    "by name": lambda b, x: b.norm(torch.add(b.half(x), x)),
    "a function's dropout": lambda b, x: b.norm(functional.dropout(b.inner(x), 0.5) + x),
    "a dropout of nothing": lambda b, x: b.norm(functional.dropout(b.inner(x), 0.0) + x),
    "a layer's result read, too": lambda b, x: b.norm((h := b.outer(x)) + x) + h.float() * 2,
    "what is dropped read, too": lambda b, x: b.norm(b.drop(h := b.outer(x)) + x) + h.float() * 2,
    "and the same through a GELU": lambda b, x: b.norm(b.act(h := b.inner(x)).float() + h),
    "a layer's result written to": lambda b, x: b.norm(functional.relu_(b.inner(x)) + x),
    "a dropped result written to": after(half_of, lambda t: t.mul_(3)),
    "a dropped result's row written to": after(half_of, lambda t: t.__setitem__(0, 0.0)),
    "a view of it written to": after(half_of, lambda t: t.view(-1).mul_(3)),
    "and then not normalized": lambda b, x: b.norm(t := b.half(x) + x).detach() * 0 + t,
    "and read": lambda b, x: b.norm(t := b.half(x) + x) + t * 2,
    "and added to": lambda b, x: b.half(b.norm(t := b.half(x) + x)) + t,
}
ALONE: dict[str, Body] = {
    "read before": lambda b, x: (t := b.half(x) + x) * 2 + b.norm(t),
    "looked at": looked_at,
    "looked at aside": looked_at_aside,
    "kept in part": kept_in_part,
    "cut": lambda b, x: b.norm((b.half(x) + x)[:, :2]),
    "joined": lambda b, x: b.norm(torch.cat([b.half(x) + x, x])),
    "spread": lambda b, x: b.norm(b.half(x) + x[:1]),
    "of two halves": lambda b, x: b.norm((b.half(x) + b.inner(x)).float()),
    "scaled": lambda b, x: b.norm(torch.add(b.half(x), x, alpha=2)),
    "an own function": lambda b, x: b.norm(Square.apply(b.half(x) + x)),
    "into a layer": lambda b, x: b.norm(b.inner(b.half(x) + x).float()),
    "behind a GELU": lambda b, x: b.norm(b.outer(b.act(b.inner(x))).float()),
    "a module with a hook": lambda b, x: b.norm(b.last(b.half(x) + x)),
    "never normalized": lambda b, x: (b.half(x) + x).square() + b.norm(x),
    "checkpointed across, twice": lambda b, x: checkpoint(
        b.norm, checkpoint(lambda y: b.half(y) + y, x, use_reentrant=False), use_reentrant=False
    ),
    "checkpointed by hand": lambda b, x: checkpoint(b.norm, b.half(x) + x, use_reentrant=True),
    "made by hand": lambda b, x: b.norm(checkpoint(b.half, x, use_reentrant=True) + x),
    "normalized by hand": lambda b, x: b.inner(checkpoint(b.norm, x, use_reentrant=True)).float(),
}


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


BROKEN: dict[str, Body] = {
    "a sum written to": after(sum_of, lambda t: t.add_(1)),
    "a sum written to by an operator": after(sum_of, lambda t: t.__iadd__(1)),
    "a sum's row written to": after(sum_of, lambda t: t.__setitem__(0, 0.0)),
    "a sum turned in place": after(sum_of, lambda t: t.unsqueeze_(0)),
    "a sum's data": after(sum_of, lambda t: t.data.mul_(3)),
    "a result's data": after(half_of, lambda t: t.data.mul_(3)),
    "a hook on a sum": after(sum_of, lambda t: t.register_hook(lambda g: g * 2)),
    "a hook on a dropped result": after(half_of, lambda t: t.register_hook(lambda g: g * 0)),
    "a gradient kept": after(sum_of, lambda t: t.retain_grad()),
    "a function that writes": lambda b, x: b.norm(Tripled.apply(b.half(x) + x)),
    "a compiled function": lambda b, x: b.norm(scripted(t := b.half(x) + x) + t),
    "one function for many": lambda b, x: b.norm(torch.vmap(torch.tanh)(t := b.half(x) + x) + t),
}
EACH: dict[str, Body] = {
    "checkpointed": lambda b, x: checkpoint(FUSED["post"], b, x, use_reentrant=False),
}


class Model(nn.Module):
    """Two blocks, and a sum over all."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(body) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x * torch.linspace(-1, 2, WIDTH)).sum()


def run(body: Body, *, puts_off: bool) -> dict[str, torch.Tensor]:
    """Return a model's result and gradients; the layers compute in bfloat16 both times."""
    torch.manual_seed(0)
    model = Model(body)
    for block in model.blocks:
        nn.init.normal_(block.norm.weight, 1)
        block.last.register_full_backward_hook(lambda module, given, sent: None)
    inputs = torch.randn(3, 4, WIDTH, requires_grad=True)
    with rounded(model, puts_off=puts_off) as halves:
        loss = model(inputs)
        loss.backward()
    grads = {name: halves.gradient(p) for name, p in model.named_parameters()}
    kept = {name: g.float() for name, g in grads.items() if g is not None}
    assert inputs.grad is not None
    return {**kept, "inputs": inputs.grad, "loss": loss.detach()}


@pytest.mark.parametrize("name", [*FUSED, *ALONE, *EACH])
def test_what_is_put_off_is_what_torch_computes(name: str, fused: list[bool]) -> None:
    body = {**FUSED, **ALONE, **EACH}[name]
    expected = run(body, puts_off=False)
    assert not any(fused)
    fused.clear()
    found = run(body, puts_off=True)
    assert found.keys() == expected.keys()
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-5, msg=f"{name} {key}")
    together = {**dict.fromkeys(FUSED, [True] * 2), **dict.fromkeys(EACH, [True] * 4)}
    assert [f for f in fused if f] == together.get(name, [])


def test_a_block_that_norms_first_is_joined_with_the_next(fused: list[bool]) -> None:
    expected = run(pre, puts_off=False)
    fused.clear()
    found = run(pre, puts_off=True)
    assert fused == [False, True]
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("post", ["inner"]),
        ("never normalized", ["inner", "outer"]),
        ("behind a GELU", ["outer"]),
        ("and the same through a GELU", ["inner"]),
        ("a layer's result read, too", ["outer"]),
        ("what is dropped read, too", ["outer"]),
    ],
)
def test_a_bias_takes_the_sum_that_is_known(
    name: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def sum_rows(matrix: torch.Tensor, tools: Any) -> torch.Tensor:
        asked.append(len(matrix))
        return matrix.sum(0)

    monkeypatch.setattr(layers, "_sum_rows", sum_rows)
    run({**FUSED, **ALONE}[name], puts_off=True)
    assert len(asked) == 2 * len(expected)


@pytest.mark.parametrize("name", BROKEN)
def test_what_a_promise_cannot_give_is_refused(name: str) -> None:
    run(BROKEN[name], puts_off=False)
    with pytest.raises(
        (BrokenPromise, RuntimeError), match=r"writes to|asks for|not computed|TorchScript"
    ):
        run(BROKEN[name], puts_off=True)


def test_a_tensor_that_outlives_the_step_is_a_plain_one() -> None:
    kept: list[torch.Tensor] = []

    def body(block: Block, x: torch.Tensor) -> torch.Tensor:
        kept.extend((half := block.half(x), half + x))
        return block.norm(x)

    run(body, puts_off=True)
    for tensor in kept:
        tensor.data.mul_(2)
        assert torch.equal(tensor + 1, tensor.detach() + 1) and tensor.grad_fn is not None


def test_what_was_written_over_in_between_is_told() -> None:
    def body(block: Block, x: torch.Tensor) -> torch.Tensor:
        around = x * 1
        total = block.half(x) + around
        around.zero_()
        return block.norm(total)

    with pytest.raises(BrokenPromise, match="written over"):
        run(body, puts_off=True)


def test_a_promise_says_what_it_will_be_and_keeps_nothing_once_kept() -> None:
    seen: list[Any] = []

    def body(block: Block, x: torch.Tensor) -> torch.Tensor:
        half = block.half(x)
        total = half + x
        assert isinstance(half, Result) and isinstance(total, LazyTensor)
        assert (total.shape, total.dtype, total.requires_grad) == (x.shape, torch.float32, True)
        assert isinstance(total, torch.Tensor) and total.dim() == 2 and hash(total) == id(total)
        assert total.promise.made is None
        seen.extend((weakref.ref(half), weakref.ref(total)))
        del half
        made = real(total)
        assert real(total) is made and type(made) is torch.Tensor
        assert seen[0]() is None
        return block.norm(total)

    model = Model(body)
    with rounded(model):
        model(torch.randn(2, WIDTH, requires_grad=True)).backward()
    assert len(seen) == 4
    assert all(one() is None for one in seen)


def test_torchs_dropout_is_back_afterwards() -> None:
    own = functional.dropout
    with pytest.raises(KeyError), promises():
        assert functional.dropout is not own
        raise KeyError
    assert functional.dropout is own
