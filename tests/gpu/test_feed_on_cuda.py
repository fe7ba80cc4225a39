"""Batches reach a GPU whole, beside what it computes, and nobody waits for them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from anytrain import Accelerator

pytestmark = pytest.mark.gpu

NUMBERS = 1 << 20  # 4 MiB a batch


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def batches(count: int, numbers: int = NUMBERS, pinned: bool = False) -> list[torch.Tensor]:
    made = [torch.full((numbers,), float(n + 1)) for n in range(count)]
    return [each.pin_memory() for each in made] if pinned else made


def prepared(data: list[torch.Tensor], **options: Any) -> tuple[Accelerator, Any]:
    accelerator = Accelerator()
    return accelerator, accelerator.prepare(DataLoader(data, batch_size=None, **options))


@pytest.mark.parametrize("options", [{}, {"pin_memory": True}, {"num_workers": 2}], ids=str)
def test_batches_are_whole_while_their_memory_is_used_again(options: dict[str, Any]) -> None:
    _, loader = prepared(batches(60), **options)
    found = []
    for batch in loader:
        torch.cuda._sleep(2_000_000)  # about a millisecond: the host is far ahead
        lowest, highest = batch.min(), batch.max()
        del batch
        torch.zeros(NUMBERS, device="cuda").add_(1)  # takes the memory that was let go of
        found.append(torch.stack([lowest, highest]))
    assert torch.stack(found).tolist() == [[n + 1.0, n + 1.0] for n in range(60)]


class Collecting(Dataset[torch.Tensor]):
    """Rows whose worker collects garbage at each of them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        gc.collect()
        return torch.tensor(index)


def test_a_worker_outlives_the_garbage_of_its_parent() -> None:
    accelerator = Accelerator()
    gc.collect()
    gc.disable()  # so that the worker is the first to find it
    try:
        for _ in range(3):
            pinned = batches(1, pinned=True)
            with torch.cuda.stream(torch.cuda.Stream()):
                pinned[0].to("cuda", non_blocking=True)
            pinned.append(pinned)  # type: ignore[arg-type]
        del pinned
        loader = accelerator.prepare(DataLoader(Collecting(), batch_size=None, num_workers=1))
        assert [int(row) for row in loader] == list(range(8))
    finally:
        gc.enable()


def test_in_deterministic_mode_new_memory_is_filled_before_the_copy_not_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    data = [dict.fromkeys("abcd", each) for each in batches(30, pinned=True)]
    _, loader = prepared(data)  # type: ignore[arg-type]
    found = []
    torch.use_deterministic_algorithms(True)
    try:
        for batch in loader:
            torch.cuda._sleep(2_000_000)
            found.append(torch.stack([part.max() for part in batch.values()]))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.stack(found).tolist() == [[n + 1.0] * 4 for n in range(30)]


def test_a_walk_left_early_leaves_no_copy_to_spoil_other_memory() -> None:
    _, loader = prepared(batches(8, pinned=True))
    for _ in range(30):
        for _ in loader:
            torch.cuda._sleep(2_000_000)
            break
        mine = [torch.zeros(NUMBERS, device="cuda") for _ in range(4)]
        torch.cuda._sleep(2_000_000)
        assert [float(each.abs().max()) for each in mine] == [0.0] * 4


def test_the_host_never_waits_for_a_copy() -> None:
    _, loader = prepared(batches(20))
    for _ in range(2):
        with no_waiting():
            for batch in loader:
                batch.mul_(2)


def test_memory_in_use_stays_small_however_far_ahead_the_host_is() -> None:
    _, loader = prepared(batches(100, pinned=True))
    for _ in loader:
        break
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for batch in loader:
        torch.cuda._sleep(2_000_000)
        batch.mul_(2)
    assert torch.cuda.max_memory_allocated() - before <= 5 * 4 * NUMBERS


def _milliseconds(loader: Any) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for batch in loader:
        torch.cuda._sleep(6_000_000)
        batch[:1].mul_(2)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def test_copies_run_while_the_device_computes() -> None:
    data = batches(24, numbers=16 * NUMBERS, pinned=True)  # 64 MiB each
    _, loader = prepared(data)
    on_device = [torch.zeros(1, device="cuda")] * len(data)
    _milliseconds(loader)
    computing = min(_milliseconds(on_device) for _ in range(3))
    together = min(_milliseconds(loader) for _ in range(3))
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for each in data:
        each.to("cuda", non_blocking=True)
    end.record()
    torch.cuda.synchronize()
    alone = begin.elapsed_time(end)
    print(f"computing {computing:.1f} ms, copies {alone:.1f} ms, together {together:.1f} ms")
    assert alone > 0.2 * computing  # else there is nothing to hide
    assert together < computing + 0.4 * alone


def test_a_tokenizers_batch_is_sent_like_any_other() -> None:
    from transformers import BatchEncoding

    rows = [BatchEncoding({"input_ids": torch.full((4, 8), n), "names": ["a"]}) for n in range(5)]
    _, loader = prepared(rows, collate_fn=lambda batch: batch)  # type: ignore[arg-type]
    with no_waiting():
        seen = list(loader)
    assert all(type(batch) is BatchEncoding and batch["names"] == ["a"] for batch in seen)
    assert [int(batch["input_ids"].max()) for batch in seen] == list(range(5))
