"""One step on a device against the CPU in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from anytrain.core.errors import BadInput, BadType
from anytrain.insight.proofs.parity import compare
from anytrain.insight.proofs.torch_modes import Rounded, SameDraws


class Wrong(torch.autograd.Function):
    """A kernel that is wrong in low precision alone: forward, backward, or not at all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_off: float, backward_off: float) -> torch.Tensor:
        ctx.off = backward_off if x.dtype is torch.bfloat16 else 0.0
        return x * (1 + forward_off) if x.dtype is torch.bfloat16 else x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * (1 + ctx.off), None, None


class Op(nn.Module):
    def __init__(self, forward_off: float = 0.0, backward_off: float = 0.0) -> None:
        super().__init__()
        self.offs = (forward_off, backward_off)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Wrong.apply(x, *self.offs)


class Block(nn.Module):
    def __init__(self, op: nn.Module, glue_off: float = 0.0) -> None:
        super().__init__()
        self.dense, self.op, self.out = nn.Linear(16, 16), op, nn.Linear(16, 16)
        self.norm, self.drop = nn.LayerNorm(16), nn.Dropout(0.5)
        self.glue_off = glue_off

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.op(self.dense(x))
        y = Wrong.apply(y, self.glue_off, 0.0)
        return self.norm(x + self.drop(self.out(nn.functional.gelu(y))))


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.blocks(x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def batch() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {"x": torch.randn(8, 16, generator=draw), "labels": torch.arange(8) % 3}


def net(at: int | None = None, op: nn.Module | None = None, glue_off: float = 0.0) -> Net:
    torch.manual_seed(0)
    made = [
        Block(op if op is not None and n == at else Op(), glue_off if n == at else 0.0)
        for n in range(4)
    ]
    return Net(*made)


def test_the_cpu_equals_itself() -> None:
    found = compare(net(), batch(), device="cpu")
    assert found.is_equal
    assert found.loss == found.reference_loss
    assert found.worst is not None
    assert found.worst.error == 0.0


def test_autocast_departs_from_float32_within_its_tolerance() -> None:
    found = compare(net(), batch(), device="cpu", dtype="bf16")
    assert found.is_equal, str(found)
    assert found.worst is not None
    assert 0 < found.worst.error < found.worst.tolerance
    assert found.loss == pytest.approx(found.reference_loss, rel=0.05)


def test_what_is_allowed_follows_from_what_rounding_does() -> None:
    found = compare(net(), batch(), device="cpu", dtype="bf16")
    told = [each for each in found.compared if each.rounding]
    # The CPU's own kernels in bfloat16 depart no more than float32 that is rounded to it.
    assert len(told) > 40
    assert all(each.error < 2 * (each.rounding or 0.0) + 2**-8 for each in told)
    assert max(each.tolerance for each in told) < 0.1
    assert compare(net(), batch(), device="cpu", dtype="no").compared[0].rounding is None


@pytest.mark.parametrize(
    ("name", "dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)]
)
def test_rounding_computes_as_narrow_factors_that_are_added_up_in_float32(
    name: str, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(0)
    x, w = torch.randn(4, 64, generator=draw), torch.randn(64, 3, generator=draw)
    x, w = x.to(dtype).float(), w.to(dtype).float()
    with Rounded(name):
        found = x @ w
    assert torch.equal(found, (x @ w).to(dtype).float())


def test_rounding_leaves_masks_and_whole_numbers_and_reaches_backward() -> None:
    least = torch.tensor([torch.finfo(torch.float32).min, 1.0])
    x = torch.tensor([1.001, 2.0], requires_grad=True)
    with Rounded("bfloat16"):
        assert bool((least + 0.0).isfinite().all())
        assert (torch.arange(1000) + 1)[-1] == 1000
        (x * x * 1.001).sum().backward()
    assert torch.equal(x.grad, x.grad.bfloat16().float())


def test_tf32_keeps_ten_bits() -> None:
    with Rounded("tf32"):
        found = torch.tensor([1 + 2**-10, 1 + 2**-12, -1 - 3 * 2**-11]) * 1.0
    assert found.tolist() == [1 + 2**-10, 1.0, -1 - 2**-9]


def test_a_wrong_forward_is_named_first_and_alone() -> None:
    found = compare(net(2, Op(forward_off=0.05)), batch(), device="cpu", dtype="bf16")
    assert not found.is_equal
    assert found.first is not None
    assert (found.first.module, found.first.what) == ("blocks.2.op", "its output")
    assert {each.module for each in found.departures if not each.is_gradient} == {"blocks.2.op"}
    assert "first: blocks.2.op (Op): its output is off by" in str(found)


def test_a_wrong_backward_is_named_first() -> None:
    found = compare(net(1, Op(backward_off=0.1)), batch(), device="cpu", dtype="bf16")
    assert found.first is not None
    assert found.first.module == "blocks.1.op"
    assert found.first.what == "the gradient of its input"
    assert len(found.departures) == 1


def test_a_wrong_function_between_modules_is_named_by_the_module_that_calls_it() -> None:
    found = compare(net(3, glue_off=1.0), batch(), device="cpu", dtype="bf16")
    assert found.first is not None
    # The block's next module is given the right values, so only the wrong function is left.
    assert found.first.module.startswith("blocks.3")


def test_a_nan_departs() -> None:
    found = compare(net(0, Op(forward_off=float("nan"))), batch(), device="cpu", dtype="bf16")
    assert found.first is not None
    assert found.first.module == "blocks.0.op"
    assert "is not finite" in str(found.first)


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    compare(model, torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), device="cpu")
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert model.training


def test_outputs_without_a_loss_and_a_loss_of_ones_own_are_gone_back_from() -> None:
    model = nn.Linear(4, 2)
    x, y = torch.ones(3, 4), torch.tensor([0, 1, 0])
    assert (
        compare(model, (x,), device="cpu").num_compared == 4
    )  # output, its gradient, weight, bias

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    own = compare(model, (x, y), loss_fn, device="cpu")
    assert own.is_equal
    assert own.reference_loss == pytest.approx(loss_fn(model, (x, y)).item())


def test_a_loss_that_the_model_did_not_give_is_called_a_stand_in() -> None:
    made = compare(nn.Linear(4, 2), torch.ones(3, 4), device="cpu")
    assert made.loss_is_stand_in
    assert f"a stand-in loss made from the model's output: {made.loss:.6g}, on" in str(made)
    given = compare(net(), batch(), device="cpu")
    assert not given.loss_is_stand_in
    assert f"\n  loss {given.loss:.6g}, on the CPU" in str(given)


def test_dropout_is_left_out_wherever_it_is_written() -> None:
    x = torch.ones(4, 6)
    attention = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True)
    f = nn.functional
    with SameDraws(0):
        assert torch.equal(f.dropout(x, 0.5), x)
        assert torch.equal(nn.Dropout(0.9)(x), x)
        assert torch.equal(torch.dropout(x, 0.5, True), x)
        q = x[None, None]
        first = f.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        assert torch.equal(first, f.scaled_dot_product_attention(q, q, q, None, 0.5))
        assert torch.equal(attention(q[0], q[0], q[0])[0], attention(q[0], q[0], q[0])[0])


def test_what_is_drawn_is_the_same_each_time_and_moves_no_generator() -> None:
    def drawn() -> list[torch.Tensor]:
        with SameDraws(3):
            x = torch.zeros(5)
            return [
                torch.rand(5),
                torch.randn_like(x),
                torch.bernoulli(x + 0.5),
                x.clone().normal_(),
                torch.normal(x, 1.0),
                torch.randperm(5),
            ]

    state = torch.get_rng_state()
    one, other = drawn(), drawn()
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(one[0], one[1])
    assert torch.equal(state, torch.get_rng_state())


def test_a_batch_without_a_loss_and_an_unknown_precision_are_refused() -> None:
    with pytest.raises(BadType, match="no loss"):
        compare(nn.ReLU(), torch.ones(2), device="cpu")
    with pytest.raises(BadInput, match="Unknown precision"):
        compare(nn.Linear(1, 1), torch.ones(1, 1), device="cpu", dtype="int8")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["no", "bf16", "fp16"])
def test_cuda_equals_the_cpu(dtype: str) -> None:
    found = compare(net(), batch(), device="cuda", dtype=dtype)
    assert found.is_equal, str(found)


@pytest.mark.gpu
def test_a_wrong_op_on_cuda_is_named() -> None:
    found = compare(net(2, Op(forward_off=0.2)), batch(), device="cuda", dtype="bf16")
    assert found.first is not None
    assert found.first.module == "blocks.2.op"
