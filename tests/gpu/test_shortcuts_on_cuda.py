"""Our own kernels compute what torch's do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from anytrain.fast.kernels.elementwise import (
    gate,
    gate_backward,
    rotate,
    rotate_backward,
)
from anytrain.fast.kernels.step import (
    Kernels,
    Norm,
    Sent,
    column_sums,
    gelu_backward,
    loss_forward,
    norm_backward,
    norm_forward,
    rows_added,
    scratch_for,
)
from anytrain.fast.shortcuts.adam import FusedAdam, fits
from anytrain.fast.shortcuts.bf16_weights import RoundedWeights
from anytrain.fast.shortcuts.gelu import BY_TANH, FORMS, Form
from anytrain.fast.shortcuts.layers import Sightings

pytestmark = pytest.mark.gpu
SHAPES = [(3,), (1000, 77), (16384,), (16385,), (2, 3, 5), (512, 2048), ()]


WIDTHS = (256, 384, 768, 1024, 1280, 2048, 4096)


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    kinds = [Norm(width, is_centered) for width in WIDTHS for is_centered in (True, False)]
    found = Kernels(torch.device("cuda", 0), kinds)
    assert found.are_there(), found.problem
    return found


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, device="cuda")) for shape in SHAPES]


def optimizer_of(kind: Any, held: list[nn.Parameter], rate: torch.Tensor) -> Any:
    """Return an optimizer of two groups that has made one update."""
    groups = [
        {"params": held[::2], "weight_decay": 0.1},
        {"params": held[1::2], "betas": (0.8, 0.95)},
    ]
    optimizer = kind(groups, lr=rate, fused=True)
    for parameter in held:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def update(kernels: Kernels, optimizer: Any, grads: dict[int, torch.Tensor], bound: float) -> Any:
    """Update by our kernels; return the norm they measured."""
    fused = FusedAdam(kernels, optimizer)
    ordered: list[torch.Tensor | None] = [grads[id(p)] for p, _ in fused.parameters]
    fused._gradients = ordered
    fused.settle()
    norm = fused.measure(ordered, bound)
    fused.update(torch.zeros((), device="cuda"))
    return norm


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bound", [0.0, 1.0])
def test_an_update_is_torchs(kernels: Kernels, kind: Any, dtype: Any, bound: float) -> None:
    mine, theirs = parameters(), parameters()
    rate = torch.tensor(1e-2, device="cuda")
    own, other = optimizer_of(kind, mine, rate), optimizer_of(kind, theirs, rate)
    assert fits(own)
    for step in range(5):
        grads = [(torch.randn_like(p) * (step + 1)).to(dtype) for p in mine]
        measured = update(kernels, own, {id(p): g for p, g in zip(mine, grads, strict=True)}, bound)
        for parameter, grad in zip(theirs, grads, strict=True):
            parameter.grad = grad.float()
        norm = torch.nn.utils.clip_grad_norm_(theirs, bound or float("inf"))
        other.step()
        torch.testing.assert_close(measured, norm, rtol=1e-5, atol=0)
    for one, same in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, same, rtol=1e-5, atol=1e-6)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(own.state[one][name], other.state[same][name])


def test_a_skipped_update_changes_nothing(kernels: Kernels) -> None:
    held = parameters()
    optimizer = torch.optim.AdamW(held, fused=True)
    for parameter in held:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    before = copy.deepcopy((held, optimizer.state_dict()["state"]))
    fused = FusedAdam(kernels, optimizer)
    grads = [torch.full_like(p, torch.nan) for p in held]
    fused._gradients = list(grads)
    fused.settle()
    assert torch.isnan(fused.measure(list(grads), 1.0))
    fused.update(torch.ones((), device="cuda"))
    for one, other in zip(held, before[0], strict=True):
        assert torch.equal(one, other)
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(state[name], before[1][number][name]) for name in state)


@pytest.mark.parametrize("shape", [(4096, 768), (1536, 3072), (7, 8), (100, 264), (20000, 16)])
def test_rows_add_up_always_in_the_same_order(kernels: Kernels, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape, device="cuda").bfloat16()
    scratch = scratch_for(shape[1], matrix.device)
    first = column_sums(kernels, matrix, scratch)
    expected = matrix.double().sum(0)
    torch.testing.assert_close(first.double(), expected, rtol=1e-2, atol=1e-2 * shape[0] ** 0.5)
    for _ in range(20):
        assert torch.equal(column_sums(kernels, matrix, scratch), first)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("height", [1, 101, 4096])
def test_a_layer_norm_is_torchs(kernels: Kernels, width: int, height: int) -> None:
    torch.manual_seed(0)
    inputs = (torch.randn(height, width, device="cuda") * 3 + 1).requires_grad_()
    norm = nn.LayerNorm(width).cuda()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    expected = norm(inputs)
    _, result, rounded, means, scales = norm_forward(
        kernels, inputs.detach(), norm.weight.detach(), norm.bias.detach(), norm.eps
    )
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(rounded, result.bfloat16())
    whole, half = torch.randn_like(result), torch.randn_like(result).bfloat16()
    for given in ((whole, None), (None, half), (whole, half)):
        total = sum(g.float() for g in given if g is not None)
        saved = inputs.detach(), norm.weight.detach(), means, scales
        mine = norm_backward(kernels, saved, Sent(*given))
        theirs = torch.autograd.grad(
            expected, [inputs, norm.weight, norm.bias], total, retain_graph=True
        )
        for one, other in zip(mine[:3], theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * height**0.5)


@pytest.mark.parametrize("share", [0.0, 0.1])
@pytest.mark.parametrize(
    ("height", "width"), [(1, 256), (101, 768), (4096, 1024), (101, 1280), (4096, 2048), (7, 4096)]
)
def test_a_layer_norm_of_a_sum_is_torchs(
    kernels: Kernels, height: int, width: int, share: float
) -> None:
    torch.manual_seed(0)
    half = torch.randn(height, width, device="cuda").bfloat16()
    whole, norm = torch.randn(height, width, device="cuda"), nn.LayerNorm(width).cuda()
    nn.init.normal_(norm.weight)
    added, mask = torch.native_dropout(half, share, train=True) if share else (half, None)
    own = norm.weight.detach(), norm.bias.detach()
    made = norm_forward(kernels, whole, *own, norm.eps, added)
    assert torch.equal(made.inputs, added + whole)
    read = made.inputs.clone().requires_grad_()
    expected = norm(read)
    torch.testing.assert_close(made.result, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(made.rounded, made.result.bfloat16())
    sent = Sent(torch.randn_like(whole), torch.randn_like(half), torch.randn_like(whole))
    factor = 1 / (1 - share)
    mine = norm_backward(
        kernels,
        (made.inputs, own[0], made.means, made.scales),
        sent,
        has_addend=True,
        mask=mask,
        factor=factor,
    )
    of_result = sum(g.float() for g in sent[:2] if g is not None)
    theirs = torch.autograd.grad(expected, [read, norm.weight, norm.bias], of_result)
    torch.testing.assert_close(mine.inputs, theirs[0] + sent.of_sum, rtol=1e-4, atol=1e-4)
    of_half = mine.inputs.bfloat16() if mask is None else mine.inputs.bfloat16() * mask * factor
    assert torch.equal(mine.addend, of_half)
    expected_sums = of_half.double().sum(0)
    torch.testing.assert_close(mine.addend_sums.double(), expected_sums, rtol=1e-2, atol=1e-3)
    for one, other in zip(mine[1:3], theirs[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * height**0.5)


@pytest.mark.parametrize("share", [None, 0.0, 0.1])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("height", [1, 101, 4096])
def test_an_rms_norm_is_torchs(
    kernels: Kernels, height: int, width: int, share: float | None
) -> None:
    """With a share, of a sum whose addend has gone through a dropout of it."""
    torch.manual_seed(0)
    whole, weight = torch.randn(height, width, device="cuda"), torch.randn(width, device="cuda")
    half = torch.randn(height, width, device="cuda").bfloat16()
    added, mask = (None if share is None else half), None
    if share:
        added, mask = torch.native_dropout(half, share, train=True)
    made = norm_forward(kernels, whole, weight, None, 1e-6, added)
    assert made.means is None
    assert torch.equal(made.inputs, whole if added is None else added + whole)
    read, own = made.inputs.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = nn.functional.rms_norm(read, (width,), own, 1e-6)
    torch.testing.assert_close(made.result, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(made.rounded, made.result.bfloat16())
    of_sum = None if added is None else torch.randn_like(whole)
    sent = Sent(torch.randn_like(whole), torch.randn_like(half), of_sum)
    factor = 1 / (1 - (share or 0))
    saved = made.inputs, weight, made.means, made.scales
    more: Any = {"has_addend": added is not None, "mask": mask, "factor": factor}
    mine = norm_backward(kernels, saved, sent, **more)
    of_result = sum(g.float() for g in sent[:2] if g is not None)
    theirs = torch.autograd.grad(expected, [read, own], of_result)
    of_inputs = theirs[0] if of_sum is None else theirs[0] + of_sum
    torch.testing.assert_close(mine.inputs, of_inputs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mine.weight, theirs[1], rtol=1e-4, atol=1e-4 * height**0.5)
    assert mine.bias is None
    if added is None:
        assert mine.addend is None and mine.addend_sums is None
        return
    of_half = mine.inputs.bfloat16() if mask is None else mine.inputs.bfloat16() * mask * factor
    assert torch.equal(mine.addend, of_half)
    sums = of_half.double().sum(0)
    torch.testing.assert_close(mine.addend_sums.double(), sums, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize(("height", "width"), [(1, 8), (101, 264), (8192, 5632)])
def test_a_gate_is_torchs(kernels: Kernels, height: int, width: int, joined: bool) -> None:
    torch.manual_seed(0)
    both = (4 * torch.randn(height, 2 * width, device="cuda")).bfloat16()
    both[0, :4] = torch.tensor([-200.0, -90.0, 90.0, 200.0])
    opens, values = both.split(width, 1)
    if not joined:
        opens, values = opens.contiguous(), values.contiguous()
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (opens, values)]
    expected = nn.functional.silu(leaves[0]) * leaves[1]
    made = gate(kernels, opens, values)
    torch.testing.assert_close(made, expected, rtol=8e-3, atol=1e-5)
    sent = torch.randn_like(made)
    theirs = torch.autograd.grad(expected, leaves, sent)
    mine = gate_backward(kernels, opens, values, sent)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-4)
    is_one = mine[1].data_ptr() == mine[0].data_ptr() + 2 * width
    assert (is_one and mine[0].stride(0) == 2 * width) or not joined


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize(
    ("rows", "heads", "length", "width"), [(1, 1, 1, 8), (3, 5, 33, 64), (8, 32, 1024, 128)]
)
def test_rotary_positions_are_torchs(
    kernels: Kernels, rows: int, heads: int, length: int, width: int, apart: bool
) -> None:
    """With angles for each row of the batch, or one for all."""
    torch.manual_seed(0)
    beside = torch.randn(rows, length, 2 * heads * width, device="cuda").bfloat16()
    inputs = beside[..., heads * width :].view(rows, length, heads, width).transpose(1, 2)
    angles = [torch.randn(rows if apart else 1, length, width, device="cuda") for _ in range(2)]
    leaf = inputs.detach().clone().requires_grad_()
    first, second = leaf.chunk(2, -1)
    half = torch.cat([-second, first], -1)
    expected = leaf * angles[0][:, None] + half * angles[1][:, None]
    assert torch.equal(rotate(kernels, inputs, *angles), expected)
    for sent in (torch.randn_like(expected), torch.randn_like(expected.contiguous())):
        (theirs,) = torch.autograd.grad(expected, leaf, sent, retain_graph=True)
        mine = rotate_backward(kernels, sent, *angles)
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=4e-2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(4096, 3072), (1536, 264), (7, 8), (8192, 4096)])
def test_a_gelus_way_back_is_torchs(kernels: Kernels, shape: tuple[int, int], form: Form) -> None:
    torch.manual_seed(0)
    read = (2 * torch.randn(shape, device="cuda")).bfloat16().requires_grad_()
    sent, scratch = torch.randn_like(read), scratch_for(shape[1], read.device)
    (expected,) = torch.autograd.grad(form(read), read, sent)
    by_tanh = form is BY_TANH
    first = gelu_backward(kernels, read.detach(), sent, scratch, by_tanh=by_tanh)
    torch.testing.assert_close(first[0], expected, rtol=8e-3, atol=1e-5)
    sums = first[0].double().sum(0)
    torch.testing.assert_close(first[1].double(), sums, rtol=1e-2, atol=1e-2 * shape[0] ** 0.5)
    for _ in range(5):
        again = gelu_backward(kernels, read.detach(), sent, scratch, by_tanh=by_tanh)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


class Attending(nn.Module):
    """Three layers that read one input, two that are one behind the other, and a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(64, width) for width in (256, 256, 128))
        self.norm = nn.LayerNorm(256)
        self.inner, self.outer = nn.Linear(256, 24), nn.Linear(24, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mixed = self.query(inputs) * self.key(inputs) + self.value(inputs).repeat(1, 2)
        return self.outer(self.inner(self.norm(nn.functional.gelu(mixed).float())))


def test_layers_on_rounded_weights_are_autocasts(kernels: Kernels) -> None:
    torch.manual_seed(0)
    model, inputs = Attending().cuda(), torch.randn(32, 64, device="cuda")

    def run() -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(inputs).float().square().mean()
        loss.backward()
        return loss.detach()

    sightings = Sightings(model)
    with sightings.watched():
        expected = run()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    groups = sightings.groups()
    assert sorted(len(group.layers) for group in groups) == [1, 1, 3]
    halves = RoundedWeights(kernels, model, groups)
    with halves.used():
        found = run()
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)
    for name, parameter in model.named_parameters():
        gradient = halves.gradient(parameter)
        assert gradient is not None, name
        assert gradient.shape == parameter.shape
        torch.testing.assert_close(gradient.float(), grads[name], rtol=5e-2, atol=2e-3)
    assert all("forward" not in vars(module) for module in model.modules())


class NewGELU(nn.Module):
    """A GELU written out, as language models have it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))


class Speaking(nn.Module):
    """An embedding, a layer with a GELU behind it, and a head that may share the embedding."""

    def __init__(self, *, tied: bool, biased: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(1027, 64)
        self.inner, self.act, self.outer = nn.Linear(64, 256), NewGELU(), nn.Linear(256, 64)
        self.head = nn.Linear(64, 1027, bias=biased)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.outer(self.act(self.inner(self.words(words)))))


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_a_wide_head_and_a_gelu_are_autocasts(kernels: Kernels, tied: bool, biased: bool) -> None:
    torch.manual_seed(0)
    model = Speaking(tied=tied, biased=biased).cuda()
    words = torch.randint(1027, (16, 33), device="cuda")

    def run() -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(words).float()
        loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 1027), words[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    sightings = Sightings(model)
    with sightings.watched():
        expected = run()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    groups = sightings.groups()
    assert sorted(group.width for group in groups) == [64, 256, 1088]
    halves = RoundedWeights(kernels, model, groups)
    assert [module for module, _ in halves._gelus] == [model.act]
    for _ in range(2):  # a replay finds what the first has left
        with halves.used():
            found = run()
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)
        for name, parameter in model.named_parameters():
            gradient = halves.gradient(parameter)
            assert gradient is not None, name
            assert gradient.shape == parameter.shape
            assert gradient.is_contiguous()
            torch.testing.assert_close(gradient.float(), grads[name], rtol=5e-2, atol=2e-3)
        halves.clear()
        model.zero_grad()
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("width", [50257, 32000, 16385])
def test_a_loss_over_a_vocabulary_is_torchs(
    kernels: Kernels, width: int, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, width)).cuda()
    inputs = torch.randn(4, 33, 64, device="cuda") * 5
    words = torch.randint(width, (4, 33), device="cuda")
    words[1, 5:9], words[2, 0], words[2, 1] = -100, 0, width - 1
    launched: list[str] = []
    launch = kernels.launch

    def noted(name: str, *rest: Any) -> None:
        launched.append(name)
        launch(name, *rest)

    monkeypatch.setattr(kernels, "launch", noted)

    def run() -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(inputs).float()
            loss = nn.functional.cross_entropy(
                logits.view(-1, width), words.view(-1), reduction=reduction
            )
        loss.backward()
        return loss.detach()

    sightings = Sightings(model)
    with sightings.watched():
        expected = run()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    halves = RoundedWeights(kernels, model, sightings.groups())
    with halves.used():
        found = run()
    assert launched.count("loss_forward") == launched.count("loss_backward") == 1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        gradient = halves.gradient(parameter)
        assert gradient is not None, name
        torch.testing.assert_close(
            gradient.float(), grads[name], rtol=5e-2, atol=1e-2 * float(grads[name].abs().max())
        )


def test_a_loss_without_its_class_or_with_no_number_shows(kernels: Kernels) -> None:
    logits = torch.zeros(4, 16384, dtype=torch.bfloat16, device="cuda")
    logits[1, 7], logits[2, :-1] = torch.nan, -torch.inf
    targets = torch.tensor([16384, 0, 16383, -100], device="cuda")
    losses, _ = loss_forward(kernels, logits, 16384, targets, -100)
    assert losses.isnan().tolist() == [True, True, False, False]
    assert losses[2:].tolist() == [0, 0]


LOOKED_UP = {
    "few rows": (2, 4096),
    "one number": (1, 1000),
    "a vocabulary": (30522, 4096),
    "as many as can be": (50257, 8192),
    "fewer than a block": (100, 7),
    "whole blocks of one": (3, 96),
}


@pytest.mark.parametrize(("height", "count"), LOOKED_UP.values(), ids=LOOKED_UP)
@pytest.mark.parametrize("width", [4, 384, 768, 3072])
@pytest.mark.parametrize("left_out", [-1, 0])
def test_a_tables_gradient_is_torchs_and_always_the_same(
    kernels: Kernels, height: int, count: int, width: int, left_out: int
) -> None:
    torch.manual_seed(0)
    # Some numbers come often, as in a text.
    numbers = (torch.rand(count, device="cuda").pow(3) * height).long()
    sent = torch.randn(count, width, device="cuda")
    made = rows_added(kernels, numbers, sent, height, left_out)
    backward = torch.ops.aten.embedding_dense_backward
    right = backward(sent.double(), numbers, height, left_out, False)
    torch.testing.assert_close(made.double(), right, rtol=1e-5, atol=1e-4)
    assert torch.equal(made, rows_added(kernels, numbers, sent, height, left_out))
