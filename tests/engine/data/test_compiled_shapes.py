"""New shapes are known, told of once, and waited for with a word."""

from __future__ import annotations

import copy
import io
import pickle
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from anytrain import Accelerator
from anytrain.core.errors import Notice
from anytrain.engine.data.compiled_shapes import Graphs, Heartbeat, LoaderShapes, shapes_of
from anytrain.engine.data.padding import ToBuckets
from anytrain.machine.backends import probe
from anytrain.machine.backends.fake import Fake


def texts(rows: int, width: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(rows, width) for name in ("input_ids", "attention_mask")}


def quiet(count: Callable[[], int]) -> Graphs:
    return Graphs(count, heartbeat=Heartbeat(lambda line: None, first_s=100.0))


@contextmanager
def no_notice() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)
        yield


def test_a_shape_that_comes_late_is_told_once_with_both_shapes_and_counted() -> None:
    graphs = quiet(lambda: 4)
    seen = LoaderShapes(graphs)
    with no_notice():
        for _ in range(3):
            seen.sees(texts(32, 64))
    told = (
        r"batch tensor 'input_ids' is 32x61, was 32x64: it compiles again \(graph 1\); "
        r"new too: 'attention_mask'.*or to a few"
    )
    with pytest.warns(Notice, match=told):
        seen.sees(texts(32, 61))
    with no_notice():
        seen.sees(texts(32, 61))
        seen.sees(texts(32, 60))
    assert graphs.late == {"input_ids": 2, "attention_mask": 2}
    seen.done()


def test_a_last_batch_that_is_small_has_a_remedy_of_its_own() -> None:
    seen = LoaderShapes(quiet(lambda: 0))
    for _ in range(3):
        seen.sees(texts(32, 64))
    with pytest.warns(Notice, match=r"is 5x64, was 32x64.*drop_last=True"):
        seen.sees(texts(5, 64), is_last=True)
    seen.done()


def test_a_small_batch_in_the_middle_is_no_last_one() -> None:
    seen = LoaderShapes(quiet(lambda: 0))
    for _ in range(3):
        seen.sees(texts(32, 64))
    with pytest.warns(Notice, match="is 5x64, was 32x64.*Give every batch the same number of rows"):
        seen.sees(texts(5, 64))
    seen.done()


def test_graphs_that_no_shape_explains_are_told_once() -> None:
    compiled = [0]
    graphs = quiet(lambda: compiled[0])
    train, held_out = LoaderShapes(graphs), LoaderShapes(graphs)

    def step(shapes: LoaderShapes, new: int) -> None:
        shapes.done()
        shapes.sees(texts(8, 4))
        compiled[0] += new

    with no_notice():
        for _ in range(4):  # the first two steps compile, and so does what follows once or twice
            step(train, 1)
        for _ in range(2):
            step(held_out, 1)  # an evaluation inside a training step
        held_out.done()
        step(train, 0)
    with pytest.warns(Notice, match=r"3 batches of known shapes were compiled for \(7 graphs"):
        for _ in range(2):
            step(train, 1)
    with no_notice():
        for _ in range(4):
            step(train, 1)
        train.done()


def test_a_word_is_said_only_while_a_graph_is_cut() -> None:
    lines: list[str] = []
    spoke = threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        spoke.set()

    graphs = Graphs(lambda: 0, heartbeat=Heartbeat(say, first_s=0.02))
    seen = LoaderShapes(graphs)
    cut = graphs.watched(lambda: spoke.wait(240))
    seen.sees(texts(2, 2))
    cut()
    told = len(lines)
    assert told > 0
    time.sleep(0.1)  # the loop does something else
    assert len(lines) == told
    seen.done()
    graphs.watched(lambda: time.sleep(0.1))()
    assert len(lines) == told


def test_the_first_batches_and_the_lengths_of_buckets_are_expected() -> None:
    graphs = quiet(lambda: 0)
    seen = LoaderShapes(graphs, ToBuckets(lambda rows: rows, (16, 32, 64), rows=8))
    with no_notice():
        for width in (64, 32, 32, 16, 64):
            seen.sees(texts(8, width))
        LoaderShapes(graphs).sees(texts(3, 5))  # another loader's first: it compiles anyway
    with pytest.warns(Notice, match="3x16"):
        seen.sees(texts(3, 16))
    seen.done()


def test_a_long_compile_is_told_while_it_lasts_and_no_longer() -> None:
    lines: list[str] = []
    spoke = threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        spoke.set()

    graphs = Graphs(lambda: 7, heartbeat=Heartbeat(say, first_s=0.01))
    seen = LoaderShapes(graphs)
    seen.sees(texts(2, 2))
    assert spoke.wait(240)
    seen.done()
    assert re.fullmatch(r"compiling graph 1, \d s so far", lines[0])
    for _ in range(3):
        seen.sees(texts(2, 2))
        seen.done()
    spoke.clear()
    seen.sees(texts(2, 2))  # known, and no longer among the first: nothing compiles
    assert not spoke.wait(0.1)


def test_the_line_goes_where_the_bars_let_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    graphs = Graphs(lambda: 0)
    graphs._heartbeat._first_s = 0.01
    graphs.begin()
    deadline = time.monotonic() + 240
    while not stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    graphs.end()
    assert re.match(r"anytrain: compiling graph 1, \d s so far\n", stream.getvalue())


def test_only_the_main_rank_speaks() -> None:
    graphs = Graphs(lambda: 0, is_main=False, heartbeat=Heartbeat(pytest.fail, first_s=0.001))
    seen = LoaderShapes(graphs)
    with no_notice():
        for width in (4, 4, 4, 3):
            seen.sees(texts(2, width))
    time.sleep(0.02)
    assert graphs.late == {"input_ids": 1, "attention_mask": 1}


def test_the_batches_of_a_step_are_waited_for_together() -> None:
    began: list[str] = []

    class Noted(Heartbeat):
        def begin(self, what: str) -> None:
            began.append(what)

    seen = LoaderShapes(Graphs(lambda: 0, heartbeat=Noted(pytest.fail)), each=4)
    for _ in range(12):  # three steps of four: the first two compile
        seen.sees(texts(2, 4))
    assert len(began) == 8


def test_names_of_tensors_follow_the_batchs_structure() -> None:
    assert dict(shapes_of([torch.zeros(2), (torch.zeros(3, 1),)])) == {"0": (2,), "1.0": (3, 1)}
    assert dict(shapes_of(torch.zeros(2))) == {"batch": (2,)}
    assert dict(shapes_of("text")) == {}


def test_a_copied_loader_watches_nothing() -> None:
    assert pickle.loads(pickle.dumps(LoaderShapes(quiet(lambda: 0)))) is None


@pytest.fixture
def graphs_of_a_fake(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Have a stand-in that claims to compile taken; add to the list to compile a graph."""
    compiled: list[None] = [None]  # one from before the run
    backend = Fake(compiled=lambda: len(compiled))
    monkeypatch.setattr(probe, "choose", lambda asked: backend)
    return compiled


def loader(num: int, size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader([torch.ones(3)] * num, batch_size=size, **options)


def test_a_prepared_loader_tells_of_its_last_batch(graphs_of_a_fake: list[None]) -> None:
    accelerator = Accelerator()
    prepared = accelerator.prepare(loader(11, 2))
    with pytest.warns(Notice, match=r"batch tensor 'batch' is 1x3, was 2x3: it .*\(graph 3\)"):
        for number, _ in enumerate(prepared):
            if number < 2:
                graphs_of_a_fake.append(None)
    graphs = accelerator._run.session.graphs
    assert graphs is not None
    assert graphs.num_compiled == 2
    with no_notice():
        assert len(list(prepared)) == 6


@pytest.mark.usefixtures("graphs_of_a_fake")
def test_an_accelerator_can_be_copied_where_graphs_are_counted() -> None:
    assert copy.deepcopy(Accelerator())._run.session.graphs is not None


def test_prepare_tells_of_a_loader_with_another_batch_size(graphs_of_a_fake: list[None]) -> None:
    accelerator = Accelerator()
    with no_notice():
        accelerator.prepare(loader(8, 4), loader(4, 4))
    with pytest.warns(Notice, match="batches of 2, the first one of 4: fake compiles a graph for"):
        accelerator.prepare(loader(8, 2))


def test_nothing_is_watched_where_nothing_compiles() -> None:
    accelerator = Accelerator(cpu=True)
    with no_notice():
        first, second = accelerator.prepare(loader(11, 2), loader(5, 3))
        assert len(list(first)) == 6
    assert accelerator._run.session.graphs is None
    assert second.walk.shapes is None
