"""The allocator that is played hands out blocks as torch's own does."""

from __future__ import annotations

import random

from anytrain.insight.preflight.allocator import MIB, Allocator, play


def test_a_small_tensor_takes_a_block_of_512_bytes_of_a_segment_of_two_mib() -> None:
    played = play([(1, 4)])
    assert (played.allocated_bytes, played.reserved_bytes) == (512, 2 * MIB)


def test_a_middling_tensor_takes_a_part_of_a_segment_of_twenty_mib() -> None:
    played = play([(1, 3 * MIB), (2, 3 * MIB)])
    assert (played.allocated_bytes, played.reserved_bytes) == (6 * MIB, 20 * MIB)


def test_a_large_tensor_has_a_segment_of_its_own_in_steps_of_two_mib() -> None:
    assert play([(1, 11 * MIB)]).reserved_bytes == 12 * MIB


def test_a_rest_of_one_mib_stays_with_its_block_and_counts_as_allocated() -> None:
    assert play([(1, 11 * MIB)]).allocated_bytes == 12 * MIB
    assert play([(1, 10 * MIB + 512 * 1024)]).allocated_bytes == 10 * MIB + 512 * 1024


def test_memory_that_was_given_back_is_used_again() -> None:
    played = play([(1, 30 * MIB), (1, 0), (2, 20 * MIB), (3, 10 * MIB)])
    assert (played.allocated_bytes, played.reserved_bytes) == (30 * MIB, 30 * MIB)


def test_free_neighbours_become_one_block() -> None:
    allocator = Allocator()
    for which in range(4):
        allocator.take(which, 5 * MIB)
    for which in (1, 3, 2, 0):
        allocator.give(which)
    allocator.take(9, 20 * MIB - 512)
    assert allocator.reserved == 20 * MIB


def test_the_cache_is_given_back_before_the_memory_counts_as_full() -> None:
    events = [(1, 30 * MIB), (1, 0), (2, 40 * MIB)]
    played = play(events, limit=50 * MIB)
    assert (played.fits, played.num_flushes, played.reserved_bytes) == (True, 1, 40 * MIB)
    assert not play([*events, (3, 12 * MIB)], limit=50 * MIB).fits


def test_segments_that_are_in_use_in_part_are_not_given_back() -> None:
    held = [(1, 12 * MIB), (2, 28 * MIB), (3, 2 * MIB), (2, 0), (1, 0)]
    assert play([*held, (4, 40 * MIB)], limit=60 * MIB).fits
    split = [(1, 40 * MIB), (1, 0), (2, 12 * MIB), (3, 20 * MIB), (2, 0), (4, 30 * MIB)]
    assert not play(split, limit=60 * MIB).fits


def test_no_order_of_taking_and_giving_loses_memory() -> None:
    chance = random.Random(0)
    allocator, held = Allocator(), []
    for which in range(3000):
        if held and chance.random() < 0.5:
            allocator.give(held.pop(chance.randrange(len(held))))
        else:
            allocator.take(which, chance.choice((3, 700, 90_000, 2 * MIB, 9 * MIB, 33 * MIB)))
            held.append(which)
    for which in held:
        allocator.give(which)
    assert allocator.allocated == 0
    allocator.flush()
    assert allocator.reserved == 0
