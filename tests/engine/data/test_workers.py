"""Workers come where loading holds a run up, load the same, and go where they do no good."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Subset,
    get_worker_info,
)

from anytrain.core.plan import wish
from anytrain.engine.assemble import loaders
from anytrain.engine.assemble.loaders import LoaderOptions, prepare_loader
from anytrain.engine.assemble.session import Session, session
from anytrain.engine.data import workers
from anytrain.engine.data.prefetch import Waits
from anytrain.engine.data.workers import PATIENCE_S, AutoWorkers, obstacle, wanted
from launching import run_script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")


class Slow(Dataset):  # type: ignore[type-arg]
    """Samples that take a while and hold noise; `fails` is one that workers cannot load."""

    loads_alike = True

    def __init__(self, seconds: float = 0.001, fails: int = -1, count: int = 120) -> None:
        self.seconds, self.fails, self.count = seconds, fails, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, float, int]:
        time.sleep(self.seconds)
        if get_worker_info() is not None and index == self.fails:
            os._exit(9)
        return index, torch.rand(()).item(), os.getpid()


@pytest.fixture
def easily(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a short wait be enough, and cores be there."""
    monkeypatch.setattr(workers, "_LEAST_SAVED_S", 0.01)
    monkeypatch.setattr(workers, "_NO_GAIN", 1e9)
    monkeypatch.setattr(loaders, "cores_each", lambda num_ranks: 4)


def walked(
    data: Dataset[Any],
    *,
    auto: bool,
    epochs: int = 3,
    step: Callable[[int], object] = bool,
) -> tuple[list[Any], Session]:
    """Return what the epochs' batches held, with who loaded them; the model draws in between."""
    torch.manual_seed(1)
    run = session(_cpu())
    loader = prepare_loader(
        DataLoader(data, batch_size=4, shuffle=True), run, LoaderOptions(), place=True,
        auto_workers=auto,
    )  # fmt: skip
    seen: list[Any] = []
    for _ in range(epochs):
        own = os.getpid()
        batches = []
        for index, noise, process in loader:
            here = set(process.tolist()) == {own}
            step(process[0].item())
            batches.append((index.tolist(), noise.tolist(), torch.rand(()).item(), here))
        seen.append(batches)
    return seen, run


def _cpu() -> Any:
    from anytrain.core.plan import Wishes

    return Wishes(device=wish("cpu", "argument"))


def content(epochs: list[Any]) -> list[Any]:
    return [[batch[:3] for batch in batches] for batches in epochs]


@pytest.mark.usefixtures("easily")
def test_a_slow_dataset_gets_workers_at_the_next_epoch_and_nothing_else_changes() -> None:
    alone, _ = walked(Slow(), auto=False)
    seen, run = walked(Slow(), auto=True)
    assert content(seen) == content(alone)
    assert [all(batch[3] for batch in batches) for batches in seen] == [True, False, False]
    (revision,) = run.revisions
    assert revision.choice == "workers"
    assert revision.value == run.plan.workers.value == "3"
    assert "a batch were spent loading it" in revision.because


@pytest.mark.usefixtures("easily")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_workers_that_die_are_replaced_by_this_process() -> None:
    alone, _ = walked(Slow(), auto=False)
    seen, run = walked(Slow(fails=50), auto=True)
    assert content(seen) == content(alone)
    assert all(batch[3] for batch in seen[2])
    assert [revision.value for revision in run.revisions] == ["3", "0"]
    assert "workers failed" in run.plan.workers.because


@pytest.mark.usefixtures("easily")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_worker_that_is_killed_in_the_middle_of_a_step_does_not_end_it() -> None:
    alone, _ = walked(Slow(), auto=False)
    killed: list[int] = []

    def step(process: int) -> None:
        if process != os.getpid() and not killed:
            killed.append(process)
            os.kill(process, signal.SIGKILL)
            time.sleep(0.5)  # torch would raise here, in the user's step

    seen, run = walked(Slow(), auto=True, step=step)
    assert content(seen) == content(alone)
    assert killed
    assert [revision.value for revision in run.revisions] == ["3", "0"]
    assert f"workers failed: DataLoader worker (pid {killed[0]})" in run.plan.workers.because


def test_workers_that_do_not_help_are_sent_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_LEAST_SAVED_S", 0.01)
    monkeypatch.setattr(workers, "_NO_GAIN", 0.0)
    monkeypatch.setattr(loaders, "cores_each", lambda num_ranks: 4)
    seen, run = walked(Slow(), auto=True, epochs=4)
    assert [all(b[3] for b in batches) for batches in seen] == [True, False, True, True]
    assert "with 3 workers, and" in run.plan.workers.because


def test_a_quick_dataset_and_a_small_machine_stay_as_they_are() -> None:
    seen, run = walked(Slow(seconds=0), auto=True)
    assert all(batch[3] for batches in seen for batch in batches)
    assert run.revisions == []
    assert wanted(waited(0.02, 0.03), num_cores=2) is None


def waited(wait: float, period: float) -> Waits:
    waits = Waits()
    waits._periods, waits.total = [period] * 100, wait * 100
    return waits


def test_the_number_follows_from_wait_and_step() -> None:
    def number(wait: float, period: float, num_cores: int = 16) -> int | None:
        found = wanted(waited(wait, period), num_cores)
        return None if found is None else found[0]

    assert number(0.02, 0.06) == 2
    assert number(0.04, 0.05) == 5
    assert number(0.05, 0.05) == 8
    assert number(0.05, 0.05, num_cores=4) == 3
    assert number(0.02, 0.5) is None  # 4 % of the step
    assert number(0.0005, 0.001) is None  # bringing it over would take as long


class OnDisk(Slow):
    """Samples of a file that is opened at the first one, and again in an unpickled copy."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.file = path, None
        path.write_bytes(b"".join(index.to_bytes(64, "little") for index in range(self.count)))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "file": None}

    def __getitem__(self, index: int) -> tuple[int, float, int]:
        super().__getitem__(index)
        self.file = self.file or self.path.open("rb", buffering=0)
        self.file.seek(64 * index)
        time.sleep(0.001)  # long enough for another process to move the place in the file
        return int.from_bytes(self.file.read(64), "little"), 0.0, os.getpid()


@pytest.mark.usefixtures("easily")
def test_a_file_that_is_open_is_not_read_by_several_processes(tmp_path: Path) -> None:
    data = OnDisk(tmp_path / "rows")
    seen, run = walked(data, auto=True)
    for batches in seen:
        assert sorted(index for batch in batches for index in batch[0]) == list(range(120))
    assert all(batch[3] for batches in seen for batch in batches)
    (revision,) = run.revisions
    assert revision.value == "0"
    assert "but OnDisk may load something else in another process" in revision.because


class Scaled:
    """A collator with something to turn in the middle of an epoch."""

    loads_alike = True

    def __init__(self) -> None:
        self.factor = 1

    def __call__(self, rows: list[Any]) -> tuple[list[int], set[int]]:
        return [row[0] * self.factor for row in rows], {row[2] for row in rows}


@pytest.mark.usefixtures("easily")
def test_what_is_changed_inside_an_epoch_counts_from_the_same_batch_on() -> None:
    def seen(auto: bool) -> tuple[list[Any], list[bool], Session]:
        torch.manual_seed(1)
        run, scaled = session(_cpu()), Scaled()
        loader = prepare_loader(
            DataLoader(Slow(), batch_size=4, shuffle=True, collate_fn=scaled), run,
            LoaderOptions(), place=True, auto_workers=auto,
        )  # fmt: skip
        found, here = [], []
        for _ in range(3):
            for number, (values, processes) in enumerate(loader):
                found.append(values)
                here.append(processes == {os.getpid()})
                scaled.factor += number == 10
        return found, here, run

    alone, _, _ = seen(auto=False)
    found, here, run = seen(auto=True)
    assert found == alone
    assert not any(here[30:40])
    assert all(here[45:])
    assert [revision.value for revision in run.revisions] == ["3", "0"]
    assert "Scaled was changed in the middle of an epoch" in run.plan.workers.because


def _judged(data: Any, sampler: Any = None, collate: Any = None) -> str | None:
    order = sampler or BatchSampler(RandomSampler(data), 2, drop_last=False)
    return obstacle(DataLoader(data, batch_sampler=order, collate_fn=collate), order)


def test_what_workers_might_not_do_alike_is_named() -> None:
    class Own(RandomSampler):
        pass

    class Child(Slow):
        pass

    data = Slow()
    assert _judged(data) is None
    assert _judged(ConcatDataset([Subset(data, [1, 2]), data])) is None
    assert "the order comes from a Own" in str(_judged(data, BatchSampler(Own(data), 2, False)))
    assert "Child may load" in str(_judged(Subset(Child(), [0])))
    assert "list may load" in str(_judged([1, 2, 3]))
    assert "<lambda> may load" in str(_judged(data, collate=lambda rows: rows))


def test_tables_and_collators_of_known_libraries_are_loaded_alike() -> None:
    datasets = pytest.importorskip("datasets")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import (
        DataCollatorForLanguageModeling,
        DataCollatorWithPadding,
        PreTrainedTokenizerFast,
    )

    words = Tokenizer(WordLevel({"[PAD]": 0, "[MASK]": 1, "a": 2}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", mask_token="[MASK]"
    )
    rows = datasets.Dataset.from_dict({"input_ids": [[2, 2], [2]]})
    pad = DataCollatorWithPadding(tokenizer)
    assert _judged(rows, collate=pad) is None
    assert _judged(rows.with_format("torch"), collate=pad) is None
    assert "Dataset may load" in str(_judged(rows.with_transform(dict), collate=pad))
    mask = DataCollatorForLanguageModeling(tokenizer, seed=3)
    assert _judged(rows, collate=mask) is None
    mask([rows[0]])  # it draws from a generator of its own from now on
    assert "DataCollatorForLanguageModeling may load" in str(_judged(rows, collate=mask))


def test_an_obstacle_is_told_once() -> None:
    told: list[tuple[str, str]] = []
    auto = AutoWorkers(8, lambda value, because: told.append((value, because)))
    loader: DataLoader[Any] = DataLoader([1], collate_fn=lambda rows: rows)
    for _ in range(3):
        auto.waits._periods, auto.waits.total = [0.05] * 100, 2.0
        assert auto.choose(loader, loader.batch_sampler) == 0
    assert len(told) == 1
    assert "20.0 ms of 50.0 ms a batch were spent loading it, but list may load" in told[0][1]


HALF_READ = """
import time
import torch
from torch.utils.data import DataLoader, TensorDataset
from anytrain import Accelerator

rows = TensorDataset(torch.randn(256, 3))
loader = Accelerator().prepare(DataLoader(rows, batch_size=16, num_workers=2))
batches = iter(loader)
next(batches)
print(time.monotonic(), flush=True)
"""


def test_a_script_that_ends_with_an_epoch_half_read_ends_at_once() -> None:
    read = float(run_script(HALF_READ).stdout)
    assert time.monotonic() - read < PATIENCE_S - 5
