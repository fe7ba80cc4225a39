"""Saving behind the loop."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from anytrain.core.errors import CheckpointError, PeerLost
from anytrain.engine.checkpoint import Saved, SaveFailed, Snapshot, Store, Writer, files, load
from anytrain.engine.checkpoint.store import over_board
from anytrain.machine.parallel.world import LocalBoard, Solo
from checkpoints import fingerprint, hidden, small_run


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold every write back until the event is set."""
    event = threading.Event()

    def slow(descriptor: int, data: memoryview) -> int:
        event.wait(240)
        return os.write(descriptor, data)

    monkeypatch.setattr(files, "write", slow)
    return event


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path, gate: threading.Event) -> None:
    run, store = small_run(), Store(tmp_path)
    gate.set()
    store.save("before", run.snapshot(1))
    gate.clear()
    writer = Writer(store)
    writer.begin("behind", run.snapshot(1))
    assert writer.poll() is None
    with torch.no_grad():  # the loop goes on
        for tensor in run.model.state_dict().values():
            tensor.fill_(7)
        for state in run.optimizer.state.values():
            state["exp_avg"].fill_(7)
    gate.set()
    assert [type(outcome) for outcome in writer.finish()] == [Saved]
    assert fingerprint(load(tmp_path / "behind")) == fingerprint(load(tmp_path / "before"))


def test_a_second_save_waits_for_the_first(tmp_path: Path, gate: threading.Event) -> None:
    run, writer = small_run(), Writer(Store(tmp_path))
    writer.begin("a", run.snapshot(1))
    threading.Timer(0.2, gate.set).start()
    writer.begin("b", run.snapshot(2))
    first = writer.poll()
    assert isinstance(first, Saved)
    assert first.step == 1
    assert [outcome.path.name for outcome in writer.finish()] == ["b"]
    assert writer.finish() == []


def test_memory_of_the_save_before_is_used_again(tmp_path: Path) -> None:
    run, writer = small_run(), Writer(Store(tmp_path))
    writer.begin("a", run.snapshot(1))
    writer.finish()
    before = {key: tensor.data_ptr() for key, tensor in writer._staged.items()}
    with torch.no_grad():
        run.model[0].weight.add_(1)
    writer.begin("b", run.snapshot(2))
    writer.finish()
    after = {key: tensor.data_ptr() for key, tensor in writer._staged.items()}
    same = [key for key in before if before[key] == after.get(key)]
    assert len(same) >= len(before) - 4  # the generators' bytes are made anew
    assert torch.equal(load(tmp_path / "b").model()["0.weight"], run.model[0].weight)


def test_a_failure_shows_at_the_next_poll_and_the_loop_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, writer = small_run(), Writer(Store(tmp_path))

    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "write", full)
        writer.begin("a", run.snapshot(1))
        (outcome,) = writer.finish()
    assert isinstance(outcome, SaveFailed)
    assert outcome.kind == "space"
    assert hidden(tmp_path) == []
    writer.begin("b", run.snapshot(2))
    assert isinstance(writer.finish()[0], Saved)


def test_no_room_shows_at_the_next_poll_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "free_bytes", lambda path: 0)
    writer = Writer(Store(tmp_path))
    writer.begin("a", small_run().snapshot(1))
    assert isinstance(writer.poll(), SaveFailed)


def test_an_error_nobody_expected_is_raised_in_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(descriptor: int, data: memoryview) -> int:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(files, "write", broken)
    writer = Writer(Store(tmp_path))
    writer.begin("a", small_run().snapshot(1))
    with pytest.raises(ZeroDivisionError):
        writer.finish()
    assert hidden(tmp_path) == []


def test_a_value_that_no_file_can_hold_is_refused_at_the_call(tmp_path: Path) -> None:
    writer = Writer(Store(tmp_path))
    with pytest.raises(CheckpointError):
        writer.begin("a", Snapshot(step=1, parts={"x": len}))
    assert writer.finish() == []
    assert list(tmp_path.iterdir()) == []


def test_poison_is_found_behind_the_loop(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[0, 0] = torch.nan
    writer = Writer(Store(tmp_path))
    writer.begin("a", Snapshot(step=1, models=[model]))
    (outcome,) = writer.finish()
    assert isinstance(outcome, SaveFailed)
    assert outcome.kind == "nonfinite"


def test_an_interrupt_while_copying_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    writer = Writer(Store(tmp_path), synchronize=interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.begin("a", small_run().snapshot(1))
    assert writer.finish() == []
    assert list(tmp_path.iterdir()) == []


def test_the_device_is_waited_for_before_the_loop_goes_on(tmp_path: Path) -> None:
    waited = []
    writer = Writer(Store(tmp_path), synchronize=lambda: waited.append(1))
    writer.begin("a", small_run().snapshot(1))
    assert waited == [1]
    writer.finish()


class Pair(Solo):
    """One rank of two that share a board."""

    size = 2

    def __init__(self, rank: int, board: LocalBoard) -> None:
        self.rank, self.board = rank, board


def test_ranks_meet_on_the_board_and_a_missing_one_is_named() -> None:
    board = LocalBoard()
    exchanges = [over_board(Pair(rank, board), "save-1", 5) for rank in (0, 1)]
    found: list[object] = []
    other = threading.Thread(target=lambda: found.append(exchanges[1]("written", {"a": [1]})))
    other.start()
    assert exchanges[0]("written", {"b": None}) == [{"b": None}, {"a": [1]}]
    other.join()
    assert found == [[{"b": None}, {"a": [1]}]]
    began = time.monotonic()
    with pytest.raises(PeerLost, match="Rank 1 did not report"):
        over_board(Pair(0, LocalBoard()), "save-2", 0.1)("written", {})
    assert time.monotonic() - began < 240


@pytest.mark.gpu
def test_device_tensors_are_copied_once_and_saved_exactly(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(700, 900, device="cuda")
    view = torch.randn(64, 32, device="cuda").t()
    writer = Writer(Store(tmp_path), synchronize=torch.cuda.synchronize)
    for step in (1, 2):
        expected = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
        seen = view.cpu().clone()
        writer.begin(f"step-{step}", Snapshot(step=step, models=[model], parts={"view": view}))
        assert all(tensor.device.type == "cpu" for tensor in writer._staged.values())
        with torch.no_grad():  # the loop goes on before the files are written
            model.weight.add_(1)
            view.mul_(2)
        assert [type(outcome) for outcome in writer.finish()] == [Saved]
        loaded = load(tmp_path / f"step-{step}")
        assert all(torch.equal(loaded.model()[name], expected[name]) for name in expected)
        assert torch.equal(loaded.part("view"), seen)
    assert all(t.is_pinned() for t in writer._staged.values() if t.numel() > 1)


@pytest.mark.gpu
def test_poison_on_a_device_is_found(tmp_path: Path) -> None:
    model = nn.Linear(3, 3, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        model.bias[1] = torch.inf
    outcome = Store(tmp_path).save("x", Snapshot(step=1, models=[model]))
    assert isinstance(outcome, SaveFailed)
    assert "bias" in outcome.why
