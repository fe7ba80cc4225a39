"""Recurrent layers on claimed devices: with data on the CPU, and with packed sequences."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from anytrain.insight.preflight.checks import host_reads, shapes
from anytrain.insight.preflight.script import trace_here
from anytrain.insight.preflight.targets import parse_target
from anytrain.insight.preflight.trace import Trace

WIDTH = 6
LENGTHS = (2, 6, 3, 5)
KINDS = ["cuda", "mps", "cpu"]


def traced(
    kind: str, make: Callable[[], nn.Module], step: Callable[[nn.Module], torch.Tensor]
) -> Trace:
    """Return the trace of a new model that is trained by a step's loss."""

    def work() -> None:
        placed = make().to(kind)
        optimizer = torch.optim.AdamW(placed.parameters())
        for _ in range(3):
            step(placed).backward()
            optimizer.step()
            optimizer.zero_grad()

    return trace_here(parse_target(kind), work)


class Tagger(nn.Module):
    """Tags each word of sentences of several lengths."""

    def __init__(self, read: Callable[[torch.Tensor], Any], *, is_sorted: bool = False) -> None:
        super().__init__()
        self.read, self.is_sorted = read, is_sorted
        self.emb = nn.Embedding(100, 16)
        self.rnn = nn.LSTM(16, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 5)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return a tag's scores for each word."""
        packed = pack_padded_sequence(
            self.emb(ids), self.read(lengths), batch_first=True, enforce_sorted=self.is_sorted
        )
        hidden, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        out: torch.Tensor = self.head(hidden)
        return out


def tag(kind: str, lengths: tuple[int, ...]) -> Callable[[nn.Module], torch.Tensor]:
    """Return a step whose loss leaves out what is only padding."""

    def step(model: nn.Module) -> torch.Tensor:
        counts = torch.tensor(lengths)
        ids = (torch.arange(WIDTH) < counts[:, None]).long().to(kind)
        scores, mask = model(ids, counts.to(kind)), ids != 0
        assert scores.shape == (*ids.shape, 5)
        return F.cross_entropy(scores[mask], ids[mask])

    return step


@pytest.mark.parametrize("lengths", [LENGTHS, (WIDTH,)])
@pytest.mark.parametrize("read", [torch.Tensor.cpu, torch.Tensor.tolist])
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_are_packed_and_padded_again(kind, read, lengths):
    trace = traced(kind, lambda: Tagger(read), tag(kind, lengths))
    assert trace.failure == ""
    assert trace.parts["updates"] == 2
    assert trace.held.peak_bytes > 2 * trace.held.by_owner["parameters"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_that_the_data_sort_are_taken_as_sorted(kind):
    lengths = tuple(sorted(LENGTHS, reverse=True))
    trace = traced(kind, lambda: Tagger(torch.Tensor.cpu, is_sorted=True), tag(kind, lengths))
    assert trace.failure == ""


def rows_packed(trace: Trace) -> int:
    """Return how many rows the packed words have."""
    (packed,) = [op for op in trace.ops if op.name == "_pack_padded_sequence"]
    return packed.outputs[0].shape[0]


def test_sequences_are_as_long_as_known_or_as_can_be():
    read = traced("cuda", lambda: Tagger(lambda given: given.cpu()), tag("cuda", LENGTHS))
    told = traced("cuda", lambda: Tagger(lambda given: list(LENGTHS)), tag("cuda", LENGTHS))
    assert rows_packed(read) == len(LENGTHS) * WIDTH
    assert rows_packed(told) == sum(LENGTHS)


def test_lengths_on_the_device_fail_as_they_do_there():
    trace = traced("cuda", lambda: Tagger(lambda given: given), tag("cuda", LENGTHS))
    assert "'lengths' argument should be a 1D CPU int64 tensor" in trace.failure
    assert "cuda" in trace.failure and "meta" not in trace.failure


def test_reading_the_lengths_is_a_wait_at_its_line():
    target = parse_target("cuda")
    trace = traced("cuda", lambda: Tagger(lambda given: given.cpu()), tag("cuda", LENGTHS))
    waits = [found for found in host_reads.check(trace, target) if found.place.file == __file__]
    lines = {found.place.text for found in waits}
    assert {found.severity for found in waits} == {"warning"}
    assert any("given.cpu()" in line for line in lines)
    # The order of the words goes back to the host, too.
    assert any("pad_packed_sequence(" in line for line in lines)
    # Where the host waits nothing is recorded, so no shape costs a recording.
    assert list(shapes.check(trace, target)) == []


def test_lengths_known_to_the_host_are_no_wait_but_a_shape_of_their_own():
    def step(placed: nn.Module) -> torch.Tensor:
        ids = torch.ones(len(LENGTHS), WIDTH, dtype=torch.long).to("mps")
        out: torch.Tensor = placed(ids, ids).sum()
        return out

    trace = traced("mps", lambda: Tagger(lambda given: list(LENGTHS)), step)
    (found,) = shapes.check(trace, parse_target("mps"))
    lines, first = inspect.getsourcelines(Tagger.forward)
    assert first < found.place.line < first + len(lines)
    assert found.per_step == 1


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(4, 8, batch_first=True),
    "projected": lambda: nn.LSTM(4, 8, proj_size=3),
    "gru": lambda: nn.GRU(4, 8, 2, bidirectional=True),
    "tanh": lambda: nn.RNN(4, 8),
    "relu": lambda: nn.RNN(4, 8, nonlinearity="relu"),
    "lstm cell": lambda: nn.LSTMCell(4, 8),
    "gru cell": lambda: nn.GRUCell(4, 8),
    "tanh cell": lambda: nn.RNNCell(4, 8),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYERS)
def test_every_recurrent_layer_goes_through(name, kind):
    shape = (3, 4) if name.endswith("cell") else (3, 5, 4)

    def step(model: nn.Module) -> torch.Tensor:
        out = model(torch.randn(shape).to(kind))
        found: torch.Tensor = (out[0] if isinstance(out, tuple) else out).sum()
        return found

    trace = traced(kind, LAYERS[name], step)
    assert trace.failure == ""
    assert trace.parts["updates"] == 2


def test_data_that_were_not_sent_to_the_device_are_refused():
    trace = traced(
        "cuda", lambda: nn.LSTM(4, 8), lambda model: model(torch.randn(3, 5, 4))[0].sum()
    )
    assert "same device" in trace.failure
    assert "meta" not in trace.failure
