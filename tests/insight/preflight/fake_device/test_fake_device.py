"""A claimed device, in this process: defects at their lines, memory as it really is."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from anytrain.insight.preflight.script import trace_here
from anytrain.insight.preflight.targets import parse_target
from anytrain.insight.preflight.trace import Setting, Trace

KINDS = ["mps", "cuda", "xla"]


class Planted(nn.Module):
    """One defect a line."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(100, 16, max_norm=1.0)
        self.pool = nn.FractionalMaxPool2d(2, output_size=3)
        self.head = nn.Linear(16, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Compute something of no use."""
        hidden = self.emb(ids)
        values = torch.linalg.eigh(hidden.transpose(1, 2) @ hidden)[0]
        grid = torch.linspace(0, 1, 16, dtype=torch.float64, device=hidden.device).float()
        scale = hidden.abs().max().item()
        picked = hidden[hidden > 0]
        image = self.pool(hidden.view(8, 1, 8, 16))
        out: torch.Tensor = self.head(hidden.mean(1) * grid) * scale
        return out.sum() + values.sum() + picked.sum() + image.sum()


def train(make: Callable[[], nn.Module], kind: str, *shape: int) -> Callable[[], None]:
    """Return a plain loop of three steps; the third is never reached."""

    def work() -> None:
        model = make().to(kind)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.randint(0, 100, shape).to(kind)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        raise AssertionError("the loop should have been left")

    return work


def traced(work: Callable[[], Any], kind: str, setting: Setting | None = None) -> Trace:
    """Return the trace of some work that does not fail."""
    trace = trace_here(parse_target(kind), work, setting)
    assert trace.failure == ""
    return trace


@pytest.mark.parametrize("kind", ["mps", "cuda"])
def test_planted_defects_are_found_at_their_lines(kind):
    trace = traced(train(Planted, kind, 8, 8), kind)
    lines, first = inspect.getsourcelines(Planted)
    for name, phase, text in (
        ("embedding_renorm_", "forward", "self.emb(ids)"),
        ("_linalg_eigh", "forward", "torch.linalg.eigh"),
        ("linspace", "forward", "torch.linspace"),
        ("_local_scalar_dense", "forward", ".item()"),
        ("index.Tensor", "forward", "hidden[hidden > 0]"),
        ("fractional_max_pool2d_backward", "backward", "self.pool(hidden"),
    ):
        found = [op for op in trace.ops if op.name == name and op.phase == phase]
        assert [op.place.file for op in found] == [__file__], name
        line = first + next(number for number, line in enumerate(lines) if text in line)
        assert found[0].place.line == line, name
    dynamic = next(op for op in trace.ops if op.name == "index.Tensor")
    assert (dynamic.host_read, dynamic.is_dynamic) == ("boolean mask", True)


class Small(nn.Module):
    """A classifier of words with attention written out."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(2000, 96)
        self.blocks = nn.ModuleList(nn.Linear(96, 96 * 3) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(96) for _ in range(3))
        self.head = nn.Linear(96, 2000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of telling each word by itself."""
        hidden = self.emb(ids)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            query, key, value = block(norm(hidden)).chunk(3, -1)
            weights = (query @ key.transpose(1, 2)).softmax(-1)
            hidden = hidden + F.dropout(weights @ value, 0.1)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


def steps_of(device: str) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """Return a model, its optimizer, and what trains a step."""
    model = Small().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        model(torch.randint(0, 2000, (4, 64)).to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def real_peak() -> int:
    """Return what a second step on this machine's CPU holds at its peak."""
    model, optimizer, step = steps_of("cpu")
    step()
    gc.collect()
    state = [value for kept in optimizer.state.values() for value in kept.values()]
    held = sum(t.numel() * t.element_size() for t in (*model.parameters(), *state))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return held + peak


def test_the_peak_is_that_of_the_real_allocator():
    def work() -> None:
        _, _, step = steps_of("mps")
        for _ in range(3):
            step()

    trace = traced(work, "mps")
    real = real_peak()
    # Kernels of the CPU take a few bytes for themselves: 467 of 540 MiB on a BERT of 6 layers.
    assert trace.held.peak_bytes == pytest.approx(real, rel=0.001)
    assert sum(trace.held.by_owner.values()) == trace.held.peak_bytes
    assert trace.held.by_owner["parameters"] == 4 * trace.job.num_parameters
    assert max(moment.total_bytes for moment in trace.held.timeline) == trace.held.peak_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_that_asks_is_told_of_the_device(kind):
    def work() -> None:
        x = torch.zeros(2, 3, device=kind)
        assert x.device.type == kind and not x.is_cpu and not x.is_meta
        assert (x + 1).device == x.device and x.new_ones(2).device == x.device
        assert x.cpu().device.type == "cpu" and x.sum().item() == 1.0
        assert torch.zeros((), device=kind).item() == 0.0
        assert (x > 0).nonzero().shape == (6, 2)
        assert f"{x}" and x.tolist()[1][2] == 1.0
        assert torch.empty(4096, 4096).device.type == "cpu"
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(2, 3)
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()
        train(nn.Identity, kind)
        train(lambda: nn.Embedding(100, 4), kind, 3)()

    traced(work, kind)


def test_large_weights_take_no_memory_and_data_stay_real():
    def work() -> None:
        assert torch.randperm(1000).sort()[0].tolist() == list(range(1000))
        model = nn.Embedding(2**20, 2**14)  # 64 GiB
        model.to("mps")
        train(lambda: model, "mps", 3)()

    trace = traced(work, "mps")
    assert trace.held.by_owner["parameters"] == 2**36


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_blocks_that_are_computed_again_keep_less_and_are_named(is_checkpointed):
    def make() -> nn.Module:
        blocks = [
            nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.5), nn.Linear(64, 64))
            for _ in range(4)
        ]
        return nn.Sequential(nn.Embedding(100, 64), *blocks)

    setting = Setting(batch_size=8, is_checkpointed=is_checkpointed)
    trace = traced(train(make, "mps", 64, 64), "mps", setting)
    assert trace.job.checkpointed_modules == (("4", "3", "2", "1") if is_checkpointed else ())
    assert bool(trace.job.draws_in_checkpointed) == is_checkpointed
    whole = traced(train(make, "mps", 64, 64), "mps")
    assert (trace.held.peak_bytes < whole.held.peak_bytes) == is_checkpointed


def test_a_scaler_of_the_scripts_own_finds_no_infinity_and_updates():
    def work() -> None:
        model = nn.Linear(4, 4).to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(3):
            with torch.autocast("cuda"):
                loss = model(torch.ones(2, 4).to("cuda")).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    trace = traced(work, "cuda")
    assert trace.parts["updates"] == 2
    assert any(op.host_read == "item" for op in trace.ops)


@pytest.mark.full
def test_seven_billion_parameters_are_traced_on_a_laptop():
    transformers = pytest.importorskip("transformers")

    def work() -> None:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig()).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(3):
            ids = torch.randint(0, 100, (1, 256)).to("cuda")
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    trace = traced(work, "cuda")
    assert trace.job.num_parameters > 6.7e9
    assert trace.trace_s < 600  # of the wall: a machine may be busy


class Attention(nn.Module):
    """Attention as torch has it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend to itself."""
        out: torch.Tensor = self.inner(x, x, x, need_weights=False)[0]
        return out


class Spoken(nn.Module):
    """A loss that is told lengths on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of two sentences."""
        words = torch.ones(2, 5, dtype=torch.long, device=x.device)
        lengths = torch.tensor([30, 30]), torch.tensor([5, 5])
        return F.ctc_loss(self.head(x).log_softmax(-1), words, *lengths)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lstm": (lambda: nn.LSTM(32, 64, 2, bidirectional=True), (4, 10, 32)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 32, 7, 2), nn.BatchNorm2d(32), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)
        ),
        (4, 3, 64, 64),
    ),
    "attention": (Attention, (2, 16, 64)),
    "speech": (Spoken, (30, 2, 16)),
}


@pytest.mark.parametrize("kind", ["mps", "cuda"])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_many_kinds_go_through(name, kind):
    make, shape = MODELS[name]

    def work() -> None:
        model = make().to(kind)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            out = model(torch.randn(*shape).to(kind))
            (out[0] if isinstance(out, tuple) else out).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    trace = traced(work, kind)
    assert trace.parts["updates"] == 2
    assert sum(op.flops for op in trace.ops) > 0


def test_a_default_device_may_be_claimed():
    def work() -> None:
        torch.set_default_device("cuda")
        model = nn.Linear(512, 512)
        assert torch.get_default_device().type == model.weight.device.type == "cuda"
        assert torch.ones(3).device.type == "cuda"
        torch.set_default_device(None)
        assert torch.ones(3).device.type == "cpu"
        train(lambda: nn.Embedding(100, 4), "cuda", 3)()

    traced(work, "cuda")
