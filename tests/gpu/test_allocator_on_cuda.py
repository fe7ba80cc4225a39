"""The allocator that a forecast plays is the one that torch has on a GPU, block by block."""

from __future__ import annotations

import random

import pytest
import torch

from anytrain.insight.preflight.allocator import MIB, Event, play

pytestmark = pytest.mark.gpu
_SIZES = (40, 3000, 700_000, MIB + 5, 3 * MIB, 9 * MIB, 10 * MIB, 21 * MIB + 7, 64 * MIB)


def some_events(seed: int) -> list[Event]:
    """Return memory taken and given back, in sizes unlike each other.

    Of two free blocks of one size torch takes the one at the lower address, and where segments lie
    is the driver's choice: it must not matter here.
    """
    chance, held = random.Random(seed), []
    events: list[Event] = []
    for which in range(400):
        if held and chance.random() < 0.48:
            events.append((held.pop(chance.randrange(len(held))), 0))
        else:
            held.append(which)
            events.append((which, int(chance.choice(_SIZES) * chance.uniform(0.7, 1.4))))
    return events


@pytest.fixture
def empty_gpu() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if torch.cuda.memory_reserved():
        pytest.skip("an earlier test of this process still holds memory of the GPU")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.usefixtures("empty_gpu")
def test_blocks_and_segments_are_torchs_own(seed: int) -> None:
    held: dict[int, torch.Tensor] = {}
    events = some_events(seed)
    for which, size in events:
        if size:
            held[which] = torch.empty(size, dtype=torch.uint8, device="cuda")
        else:
            del held[which]
    played = play(events)
    assert played.allocated_bytes == torch.cuda.max_memory_allocated()
    assert played.reserved_bytes == torch.cuda.max_memory_reserved()


@pytest.mark.usefixtures("empty_gpu")
def test_the_memory_is_full_where_it_was_said_to_be() -> None:
    events, held = some_events(0), {}
    most = play(events).allocated_bytes
    limit = next(cap for cap in range(most, 2 * most, MIB) if play(events, cap).fits) - MIB
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((limit + 1) / whole)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            for which, size in events:
                if size:
                    held[which] = torch.empty(size, dtype=torch.uint8, device="cuda")
                else:
                    del held[which]
    finally:
        held.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
