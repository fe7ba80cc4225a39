"""A folder of checkpoints: what is saved comes back, and failures are values."""

from __future__ import annotations

import base64
import errno
import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anytrain.core.errors import BadInput, CheckpointError
from anytrain.engine.checkpoint import (
    Saved,
    SaveFailed,
    Snapshot,
    Store,
    catalog,
    files,
    load,
    locks,
    save,
)
from checkpoints import fingerprint, hidden, same_bits, small_run


def saved(outcome: Saved | SaveFailed) -> Saved:
    assert isinstance(outcome, Saved), str(outcome)
    return outcome


def failed(outcome: Saved | SaveFailed) -> SaveFailed:
    assert isinstance(outcome, SaveFailed), str(outcome)
    return outcome


def test_a_run_comes_back_as_it_was(tmp_path: Path) -> None:
    run, store = small_run(seed=1), Store(tmp_path / "runs")
    outcome = saved(store.save("step-2", run.snapshot(2)))
    expected = random.random(), np.random.rand(), torch.rand(1)
    assert outcome.path == tmp_path / "runs" / "step-2"

    other = small_run(seed=9)
    loaded = store.load("step-2")
    loaded.load_model(other.model)
    other.optimizer.load_state_dict(loaded.part("optimizer"))
    other.scheduler.load_state_dict(loaded.part("scheduler"))
    rng = loaded.rank_part("rng", 0)
    random.setstate(rng["python"])
    np.random.set_state(rng["numpy"])
    torch.set_rng_state(rng["torch"])

    assert (random.random(), np.random.rand(), torch.rand(1)) == expected
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[name], tensor)
    theirs, ours = other.optimizer.state_dict(), run.optimizer.state_dict()
    assert same_bits(theirs, ours)
    assert loaded.part("counters") == {"step": 2, "seen": (2, {"epoch": 0})}
    assert (loaded.step, loaded.world_size, loaded.metrics) == (2, 1, {"loss": 1 / 3})
    assert loaded.meta == {"plan": {"precision": "no"}}


def test_the_newest_is_the_last_that_was_committed(tmp_path: Path) -> None:
    run, store = small_run(), Store(tmp_path)
    for name in ("b", "a", "c"):
        saved(store.save(name, run.snapshot(5)))
    assert store.newest_whole().path == tmp_path / "c"
    saved(store.save("a", run.snapshot(1)))
    assert store.newest_whole().path == tmp_path / "a"
    assert [entry.name for entry in store.entries()] == ["a", "c", "b"]


def test_a_clock_set_back_does_not_make_the_newest_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = small_run(), Store(tmp_path)
    saved(store.save("before", run.snapshot(1)))
    monkeypatch.setattr(time, "time_ns", lambda: 1000)
    saved(store.save("after", run.snapshot(2)))
    assert store.newest_whole().path == tmp_path / "after"


def test_an_empty_store_has_no_newest_and_says_so(tmp_path: Path) -> None:
    store = Store(tmp_path / "nothing")
    newest = store.newest_whole()
    assert newest.path is None
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        store.load(newest)
    with pytest.raises(CheckpointError, match="Can't find a valid checkpoint at"):
        store.load("step-1")


def test_a_part_that_is_missing_is_an_error_that_names_those_there_are(tmp_path: Path) -> None:
    store = Store(tmp_path)
    saved(store.save("x", small_run().snapshot(1)))
    loaded = store.load("x")
    with pytest.raises(CheckpointError, match=r"no part 'ema'(.|\n)*optimizer, scheduler"):
        loaded.part("ema")
    with pytest.raises(CheckpointError, match="no model 1"):
        loaded.model(1)
    with pytest.raises(CheckpointError, match="written by 1 rank,"):
        loaded.rank_part("rng", 1)
    with pytest.raises(CheckpointError, match="its ranks hold rng"):
        loaded.rank_part("position", 0)


def test_saving_and_loading_a_folder_anywhere(tmp_path: Path) -> None:
    run = small_run()
    path = tmp_path / "a" / "b" / "mine"
    assert saved(save(path, run.snapshot(3))).path == path
    assert load(str(path)).step == 3


# Overwriting.


@pytest.mark.parametrize("can_swap", [True, False])
def test_a_checkpoint_of_the_same_name_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_swap: bool
) -> None:
    if not can_swap:
        monkeypatch.setattr(files, "swap_names", lambda one, other: False)
    store = Store(tmp_path)
    saved(store.save("same", small_run(1).snapshot(1, parts={"old": {"a": 1}})))
    saved(store.save("same", small_run(2).snapshot(2)))
    loaded = store.load("same")
    assert loaded.step == 2
    assert "old" not in loaded.part_names
    assert not (tmp_path / "same" / "old.json").exists()
    assert hidden(tmp_path) == []


def test_what_others_put_beside_a_checkpoint_outlives_its_replacement(tmp_path: Path) -> None:
    store = Store(tmp_path)
    saved(store.save("same", small_run().snapshot(1)))
    (tmp_path / "same" / "tokenizer").mkdir()
    (tmp_path / "same" / "tokenizer" / "vocab.txt").write_text("words")
    (tmp_path / "same" / "notes.md").write_text("mine")
    for step in (2, 3):
        saved(store.save("same", small_run().snapshot(step)))
    assert (tmp_path / "same" / "notes.md").read_text() == "mine"
    assert (tmp_path / "same" / "tokenizer" / "vocab.txt").read_text() == "words"
    assert store.load("same").step == 3
    assert "notes.md" not in store.load("same").manifest.files


def test_a_damaged_checkpoint_can_be_saved_over(tmp_path: Path) -> None:
    store = Store(tmp_path)
    saved(store.save("same", small_run().snapshot(1)))
    (tmp_path / "same" / "manifest.json").write_text("garbage")
    saved(store.save("same", small_run().snapshot(2)))
    assert store.load("same").step == 2


def test_an_empty_folder_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    saved(Store(tmp_path).save("here", small_run().snapshot(1)))
    assert load(tmp_path / "here").step == 1


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_no_checkpoint_is_never_destroyed(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "here"
    if kind == "file":
        target.write_text("mine")
    elif kind == "link":
        (tmp_path / "elsewhere").mkdir()
        target.symlink_to(tmp_path / "elsewhere")
    else:
        target.mkdir()
        (target / "log.txt").write_text("mine")
    outcome = failed(Store(tmp_path).save("here", small_run().snapshot(1)))
    assert outcome.kind == "occupied"
    assert target.is_symlink() or (target if kind == "file" else target / "log.txt").exists()
    assert hidden(tmp_path) == []


# What a save refuses.


def test_a_value_that_no_file_can_hold_stops_the_save_and_leaves_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    bad = Snapshot(step=1, parts={"scheduler": {"lr_lambdas": [len]}})
    with pytest.raises(CheckpointError, match=r"scheduler\['lr_lambdas'\]\[0\]"):
        store.save("x", bad)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", ".hidden", "a\0b", "a\\b"])
def test_a_name_that_is_no_plain_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="Cannot name a checkpoint"):
        Store(tmp_path).save(name, small_run().snapshot(1))


@pytest.mark.parametrize("parts", [{"../x": 1}, {"": 1}, {".x": 1}, {"a/b": 1}])
def test_a_part_whose_name_is_no_file_name_is_refused(tmp_path: Path, parts: Any) -> None:
    with pytest.raises(BadInput, match="Cannot name a part"):
        Store(tmp_path).save("x", Snapshot(step=1, parts=parts))


LARGE = torch.ones(1 << 20)


@pytest.mark.parametrize(
    "parts", [{"a": LARGE, "A": LARGE}, {"model": LARGE}, {"state": LARGE, "b": torch.ones(1)}]
)
def test_two_parts_that_would_share_a_file_are_refused(tmp_path: Path, parts: Any) -> None:
    with pytest.raises(BadInput, match="would be written to"):
        Store(tmp_path).save("x", Snapshot(step=1, models=[nn.Linear(1, 1)], parts=parts))


def test_two_parts_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="would be written to 'rng-rank0'"):
        parts = {"parts": {"rng-rank0": 1}, "rank_parts": {"rng": 2}}
        Store(tmp_path).save("x", Snapshot(step=1, **parts))


# Poison.


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_weights_that_are_not_finite_are_never_committed(
    tmp_path: Path, value: float, dtype: torch.dtype
) -> None:
    store, run = Store(tmp_path), small_run()
    saved(store.save("good", run.snapshot(1)))
    run.model.to(dtype)
    with torch.no_grad():
        run.model[2].weight[1, 3] = value
    outcome = failed(store.save("bad", run.snapshot(2)))
    assert outcome.kind == "nonfinite"
    assert "2.weight" in outcome.why
    assert store.newest_whole().path == tmp_path / "good"
    assert hidden(tmp_path) == []


def test_an_optimizer_that_is_not_finite_is_never_committed(tmp_path: Path) -> None:
    run = small_run()
    state = next(iter(run.optimizer.state.values()))
    state["exp_avg_sq"][0] = torch.inf
    outcome = failed(Store(tmp_path).save("bad", run.snapshot(2)))
    assert (outcome.kind, "exp_avg_sq" in outcome.why) == ("nonfinite", True)


def test_infinities_where_they_belong_are_saved(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    parts = {"scheduler": {"best": float("inf"), "history": torch.tensor([torch.nan])}}
    saved(Store(tmp_path).save("x", Snapshot(step=1, models=[model], parts=parts)))
    assert load(tmp_path / "x").model()["mask"][1] == -torch.inf
    model.mask[0] = torch.nan
    assert failed(Store(tmp_path).save("y", Snapshot(step=1, models=[model]))).kind == "nonfinite"


def test_the_parts_that_must_be_finite_can_be_named(tmp_path: Path) -> None:
    poisoned = {"ema": {"w": torch.tensor([torch.nan])}, "optimizer": torch.tensor([torch.inf])}
    snapshot = Snapshot(step=1, parts=poisoned, finite=["ema"])
    assert "ema/w (in state.safetensors)" in failed(Store(tmp_path).save("x", snapshot)).why
    saved(Store(tmp_path).save("x", Snapshot(step=1, parts=poisoned, finite=[])))


# Room.


def test_a_save_without_room_fails_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, run = Store(tmp_path), small_run()
    saved(store.save("good", run.snapshot(1)))
    monkeypatch.setattr(files, "free_bytes", lambda path: 1000)
    monkeypatch.setattr(files, "write_file", None)
    outcome = failed(store.save("late", run.snapshot(2)))
    assert outcome.kind == "space"
    assert "1,000 left" in outcome.why
    assert hidden(tmp_path) == []
    monkeypatch.undo()
    saved(store.save("late", run.snapshot(2)))


def test_a_save_that_fits_is_made_on_a_small_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, run = Store(tmp_path), small_run()
    monkeypatch.setattr(files, "free_bytes", lambda path: 1 << 18)
    assert saved(store.save("small", run.snapshot(1))).num_bytes < 1 << 18


def test_what_a_save_needs_is_what_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, run = Store(tmp_path), small_run()
    size = saved(store.save("good", run.snapshot(1))).num_bytes
    monkeypatch.setattr(files, "free_bytes", lambda path: 1000)
    said = failed(store.save("late", run.snapshot(2))).why
    assert said.endswith(f"and {tmp_path} has 1,000 left.")
    told = int(said.split()[2].replace(",", ""))
    assert 0.5 * size < told <= size


def test_a_limit_on_the_size_of_files_is_not_called_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object, **more: object) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(files, "write_file", refuse)
    outcome = failed(Store(tmp_path).save("large", small_run().snapshot(1)))
    assert "No room" not in outcome.what
    assert "File too large" in outcome.why
    assert "ulimit -f" in outcome.fix
    assert "free some space" not in outcome.fix


def test_a_folder_that_cannot_be_written_is_a_failure_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = failed(Store(tmp_path / "file" / "runs").save("x", small_run().snapshot(1)))
    assert outcome.kind == "disk"


# Hooks.


def test_what_a_hook_writes_is_committed_and_checked_with_the_rest(tmp_path: Path) -> None:
    store, run = Store(tmp_path), small_run()

    def snapshot(folder: Path) -> Snapshot:
        (folder / "unet").mkdir()
        (folder / "unet" / "weights.bin").write_bytes(b"own")
        return run.snapshot(1)

    saved(store.save("x", snapshot))
    assert (tmp_path / "x" / "unet" / "weights.bin").read_bytes() == b"own"
    assert catalog.verify(tmp_path / "x") == []
    (tmp_path / "x" / "unet" / "weights.bin").write_bytes(b"owm")
    assert [problem.file for problem in catalog.verify(tmp_path / "x")] == ["unet/weights.bin"]


def test_a_hook_that_leaves_a_link_is_refused(tmp_path: Path) -> None:
    def snapshot(folder: Path) -> Snapshot:
        (folder / "secret").symlink_to("/etc/hostname")
        return Snapshot(step=1)

    outcome = failed(Store(tmp_path).save("x", snapshot))
    assert "symbolic link" in outcome.why
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_hook_that_raises_leaves_nothing_behind(
    tmp_path: Path, error: type[BaseException]
) -> None:
    def snapshot(folder: Path) -> Snapshot:
        (folder / "half").write_text("half")
        raise error("enough")

    with pytest.raises(error):
        Store(tmp_path).save("x", snapshot)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_while_writing_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    saved(store.save("good", small_run().snapshot(1)))

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "sync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.save("x", small_run().snapshot(2))
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


# Leftovers.


def _abandoned(root: Path, pid: int, started: int, name: str = "x") -> Path:
    place = locks.hidden_name(name, "saving").split("-")[1]
    left = root / f".{name}.saving-{place}-{pid}-{started}-0"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    return left


def test_what_a_dead_process_left_is_cleared_by_the_next_save(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = _abandoned(tmp_path, dead.pid, int(time.time()))
    reused = _abandoned(tmp_path, os.getpid(), 12345)  # another process had our number once
    saved(Store(tmp_path).save("y", small_run().snapshot(1)))
    assert not left.exists()
    assert not reused.exists()


def test_what_a_live_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    code = "import sys; print('up', flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as live:
        live.stdout.readline()
        started = locks._started(live.pid)
        held = _abandoned(tmp_path, live.pid, started)
        saved(Store(tmp_path).save("y", small_run().snapshot(1)))
        assert held.exists()
        live.stdin.close()
    saved(Store(tmp_path).save("z", small_run().snapshot(1)))
    assert not held.exists()


def test_another_machines_folder_is_cleared_only_when_long_unchanged(tmp_path: Path) -> None:
    left = tmp_path / f".x.saving-{'0' * 12}-{os.getpid()}-1-0"
    left.mkdir()
    saved(Store(tmp_path).save("y", small_run().snapshot(1)))
    assert left.exists()
    long_ago = time.time() - locks.ABANDONED_S - 10
    os.utime(left, (long_ago, long_ago))
    saved(Store(tmp_path).save("z", small_run().snapshot(1)))
    assert not left.exists()


def test_folders_of_other_names_are_never_cleared(tmp_path: Path) -> None:
    for name in (".git", ".x.saving", ".x.saving-abc", f".{socket.gethostname()}"):
        (tmp_path / name).mkdir()
    saved(Store(tmp_path).save("y", small_run().snapshot(1)))
    assert len(hidden(tmp_path)) == 4


def test_a_checkpoint_stranded_between_two_renames_is_found_and_put_back(tmp_path: Path) -> None:
    store = Store(tmp_path)
    saved(store.save("same", small_run().snapshot(4)))
    whole = fingerprint(store.load("same"))
    place = locks.hidden_name("same", "replaced").split("-")[1]
    stranded = tmp_path / f".same.replaced-{place}-1-12345-0"
    (tmp_path / "same").rename(stranded)
    assert store.newest_whole().path == stranded
    assert fingerprint(store.load("same")) == whole
    saved(store.save("other", small_run().snapshot(5)))
    assert not stranded.exists()
    assert fingerprint(store.load("same")) == whole


def test_a_checkpoint_of_the_first_format_is_read_to_the_bit(tmp_path: Path) -> None:
    """Each of its parts has files of its own."""

    class Own(nn.Linear):
        def set_extra_state(self, state: dict[str, int]) -> None:
            self.calls = state["calls"]

        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 0}

    kept = json.loads(Path(__file__).with_name("format_1.json").read_text())
    for name, text in kept.items():
        (tmp_path / name).write_bytes(base64.b64decode(text))
    loaded, model = load(tmp_path), Own(2, 2)
    assert (loaded.step, loaded.metrics["loss"]) == (5, 0.5)
    loaded.load_model(model)
    torch.manual_seed(0)
    assert torch.equal(model.weight, nn.Linear(2, 2).weight)
    assert model.calls == 3
    state = loaded.part("optimizer")
    assert torch.equal(state["state"][0]["exp_avg"], torch.arange(4.0))
    assert state["lr"] == (0.1, None)
    assert loaded.part("counters") == {"seen": 7}
    assert torch.equal(loaded.rank_part("rng", 0)["torch"], torch.arange(3))


def test_a_small_run_is_a_few_files(tmp_path: Path) -> None:
    """Each costs a wait for the disk."""
    saved = Store(tmp_path).save("a", small_run().snapshot(1))
    assert isinstance(saved, Saved)
    assert sorted(path.name for path in saved.path.iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
        "state.safetensors",
    ]
