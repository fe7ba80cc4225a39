"""The repeated block is compiled once, beside the training, and swapped in only where it pays."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anytrain.engine.step.blocks import BlockCall
from anytrain.engine.step.regional import regional, rehearsal
from anytrain.engine.step.regional.example import CannotTell, note
from anytrain.engine.step.regional.expectation import Expectation, Memory, repays
from anytrain.engine.step.regional.regional import Region, RegionalTier
from anytrain.machine.parallel.world import Solo

CPU = torch.device("cpu")


class Block(nn.Module):
    """A block with dropout."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, scale: float = 1.0, mask: Any = None) -> torch.Tensor:
        x = x if mask is None else x * mask
        return x + scale * self.drop(torch.tanh(self.linear(x)))


class Model(nn.Module):
    """Four blocks and a head."""

    def __init__(self, number: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(number))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.head.weight.sum()  # every block's input wants a gradient
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def step(model: nn.Module, rows: int) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(rows)
    loss = model(torch.linspace(-1, 1, rows * 8).reshape(rows, 8))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def noted(model: nn.Module) -> Region:
    region = Region(model, CPU)
    step(model, 8)
    step(model, 6)
    return region


# -- what a call is ---------------------------------------------------------------------------


def test_made_up_arguments_are_like_the_noted_ones() -> None:
    masks = (torch.ones(1, 5, dtype=torch.bool), torch.zeros(2, 5, dtype=torch.long))
    given = torch.randn(5, 2, requires_grad=True).t()
    wide = torch.randn(1, 3).expand(4, 3)
    example = note((given, masks, wide), {"scale": 0.5, "cache": None}, CPU)
    args, kwargs = example.make(CPU)
    assert args[0].shape == (2, 5) and args[0].stride() == (1, 2) and args[0].requires_grad
    assert [m.dtype for m in args[1]] == [torch.bool, torch.long] and isinstance(args[1], tuple)
    assert args[1][0].all() and not args[1][1].any()
    assert args[2].stride() == (0, 1)
    assert kwargs == {"scale": 0.5, "cache": None}
    assert note(args, kwargs, CPU) == example


def test_sizes_are_no_part_of_a_kind_of_call_and_values_are() -> None:
    def kind(rows: int, scale: float = 1.0, **grad: bool) -> Any:
        return note((torch.zeros(rows, 8, **grad), scale), {}, CPU).kind  # type: ignore[arg-type]

    assert kind(2) == kind(3)
    assert kind(2) != kind(2, 0.5)
    assert kind(2) != kind(2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert note((), {}, CPU).autocast is torch.bfloat16
    assert note((), {}, CPU).autocast is None


def test_an_object_that_keeps_something_cannot_be_made_up() -> None:
    with pytest.raises(CannotTell, match="given a set"):
        note((set(),), {}, CPU)


# -- which blocks -----------------------------------------------------------------------------


def test_noting_ends_by_itself_and_leaves_no_hook() -> None:
    model = Model()
    region = noted(model)
    assert region.is_noted and not any(block._forward_pre_hooks for block in model.blocks)


def test_only_blocks_that_are_alike_share_a_compilation() -> None:
    model = Model(5)
    model.blocks[0].linear.weight.requires_grad_(False)
    region = noted(model)
    region.choose()
    assert region._chosen == tuple(model.blocks[1:])
    assert [example.args[0].shape for example in region._examples] == [(8, 8), (6, 8)]


@pytest.mark.parametrize(
    ("spoil", "because"),
    [
        (lambda model: model.blocks[1].linear.register_forward_hook(print), "there are hooks"),
        (lambda model: model.blocks[1].linear.weight.register_hook(print), "there are hooks"),
        (lambda model: setattr(model.blocks[1], "forward", print), "has replaced the forward"),
        (lambda model: model.blocks[1:].apply(lambda m: m.compile(backend="eager")), "repeats no"),
    ],
    ids=["hook", "gradient hook", "forward", "compiled"],
)
def test_what_stands_in_the_way_is_said(spoil: Any, because: str) -> None:
    model = Model()
    spoil(model)
    region = Region(model, CPU)
    assert region.is_off and because in region.because
    assert not model.blocks[0]._forward_pre_hooks


def test_a_block_that_is_given_a_cache_is_left_alone() -> None:
    model = Model()
    region = Region(model, CPU)
    with pytest.raises(TypeError):
        model.blocks[0](torch.ones(1, 8), 1.0, object())
    assert region.is_off and "made-up inputs: it is given a object" in region.because
    step(model, 4)


# -- whether it repays ------------------------------------------------------------------------


def test_compiling_repays_only_where_much_is_left() -> None:
    expected = Expectation(compile_s=10, gain=0.1, stall_s=2)
    assert not repays(100, 0.1, expected)
    assert not repays(299, 0.1, expected)
    assert repays(301, 0.1, expected)
    assert not repays(10**6, 0.1, Expectation(10, gain=-0.1, stall_s=2))


def test_what_an_earlier_run_found_is_expected_of_the_next(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "new")
    assert memory.read("a") == Expectation()
    memory.write("a", Expectation(5.0, 0.2, 1.0))
    memory.write("b", Expectation(6.0, 0.3, 1.0))
    assert Memory(tmp_path / "new").read("a") == Expectation(5.0, 0.2, 1.0)
    (tmp_path / "new" / "regions.json").write_text("{torn")
    assert memory.read("a") == Expectation()


def test_a_short_run_compiles_nothing(tmp_path: Path) -> None:
    model = Model()
    tier = RegionalTier(noted(model), Solo(), tmp_path)
    assert not any(tier.tend(steps_left, 0.01) for steps_left in (200, 100, 0))
    assert tier.region._rehearsal is None and not tier.region.is_off


# -- compiled ---------------------------------------------------------------------------------


def test_compiled_blocks_compute_the_same_and_go_back() -> None:
    model = Model()
    region = noted(model)
    region.choose()
    eager = {rows: step(model, rows) for rows in (8, 6, 5)}
    stream = torch.get_rng_state()
    before = [parameter.grad for parameter in model.parameters()]
    region.install()
    assert region.is_installed, region.because
    assert torch.equal(stream, torch.get_rng_state())
    assert all(p.grad is b for p, b in zip(model.parameters(), before, strict=True))
    for rows, expected in eager.items():
        for found, known in zip(step(model, rows), expected, strict=True):
            torch.testing.assert_close(found, known)
    model(torch.ones(3, 8)).backward()  # onto the gradients that are there
    model.eval()
    with torch.no_grad():
        model(torch.ones(3, 8))
    assert rehearsal.num_compiled(Block) == 1 and not region.was_compiled_again()
    region.remove("enough")
    assert all(block._compiled_call_impl is None for block in model.blocks)


@pytest.mark.full
def test_a_block_is_compiled_beside_the_training_and_found_in_the_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr(regional, "_SHARE_OF_BLOCKS", 0.0)  # a CPU gains nothing from it
    torch._dynamo.reset()
    model = Model()
    tier = RegionalTier(noted(model), Solo(), tmp_path)
    expected = step(model, 8)
    assert not tier.tend(10**6, 1.0)
    assert "being compiled in the background" in tier.because
    ends = time.monotonic() + 250
    while tier.region.ready() is None and not tier.region.is_off and time.monotonic() < ends:
        time.sleep(0.2)
    assert not tier.region.is_off, tier.because
    counters.clear()
    tier._expected = Expectation(0.0, 0.0, stall_s=-1.0)
    assert tier.tend(10**6, 1.0)
    assert counters["inductor"]["fxgraph_cache_miss"] == 0
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert isinstance(model.blocks[0]._compiled_call_impl, BlockCall)
    for found, known in zip(step(model, 8), expected, strict=True):
        torch.testing.assert_close(found, known)
    assert tier._memory.read(tier.region.key).compile_s > 0
    assert not tier.tend(10**6, 5.0)  # the swap itself is in it
    assert tier.tend(10**6, 5.0) and "slower" in tier.because
    assert not tier.tend(10**6, 1.0)


@pytest.mark.full
def test_what_cannot_be_compiled_is_said_and_harms_nothing(tmp_path: Path) -> None:
    class Local(Block):
        def forward(self, x: torch.Tensor, scale: float = 1.0, mask: Any = None) -> torch.Tensor:
            if x.is_leaf:
                raise ValueError("only a real model's values will do")
            return super().forward(x)

    model = Model()
    for block in model.blocks:
        block.__class__ = Local
    region = noted(model)
    region.choose()
    region.prepare()
    ends = time.monotonic() + 250
    while region.ready() is None and not region.is_off and time.monotonic() < ends:
        time.sleep(0.2)
    assert region.is_off and "was not compiled" in region.because
    step(model, 8)
