"""The largest batch is the last that fits, and a trace at that very size bears it out."""

from __future__ import annotations

import dataclasses

import pytest

from anytrain.insight.preflight.batch_search import between, largest_batch
from anytrain.insight.preflight.memory import capped, fits_within
from anytrain.insight.preflight.targets import parse_target
from anytrain.insight.preflight.trace import Setting, Trace
from insight.preflight.steps import MIB, SAMPLE, step

CUDA = parse_target("cuda:h200")


class Tracer:
    """Traces that are made up, and the sizes that were asked for."""

    def __init__(self, bent_from: int | None = None) -> None:
        self.asked: list[int] = []
        self._bent_from = bent_from

    def __call__(self, setting: Setting) -> Trace:
        size = setting.batch_size
        self.asked.append(size)
        trace = step(size)
        if self._bent_from is None or size < self._bent_from:
            return trace
        held = trace.held  # from here on one tensor grows faster than the batch
        events = tuple((w, n + (size * SAMPLE if w == 3 and n else 0)) for w, n in held.events)
        return dataclasses.replace(trace, held=dataclasses.replace(held, events=events))


def largest_by_trying(limit: int, tracer: Tracer) -> int:
    sizes = range(1, 200)
    return max(
        (n for n in sizes if fits_within(tracer(Setting(n)), CUDA, capped(limit))), default=0
    )


@pytest.mark.parametrize("limit_mib", [500, 777, 1024, 2000])
def test_the_largest_batch_is_found_from_two_traces_and_proven_by_a_third(limit_mib: int) -> None:
    limit, tracer = limit_mib * MIB, Tracer()
    fit = largest_batch(tracer, CUDA, Setting(4), limit=capped(limit))
    assert fit is not None
    assert fit.largest == largest_by_trying(limit, Tracer())
    assert fit.is_proven
    assert len(tracer.asked) <= 3
    assert fit.forecast.fits


def test_no_batch_is_larger_than_the_data() -> None:
    limit = capped(2000 * MIB)
    most = largest_by_trying(limit.usable_bytes, Tracer())
    for cap in (most - 7, most, most + 7):
        fit = largest_batch(Tracer(), CUDA, Setting(4), limit=limit, most=cap)
        assert fit is not None
        assert (fit.largest, fit.is_proven) == (min(cap, most), True)


def test_where_memory_bends_the_last_word_is_a_traces() -> None:
    limit = 1500 * MIB
    fit = largest_batch(Tracer(bent_from=20), CUDA, Setting(4), limit=capped(limit))
    assert fit is not None
    assert fit.largest == largest_by_trying(limit, Tracer(bent_from=20))
    assert fits_within(Tracer(bent_from=20)(Setting(fit.largest)), CUDA, capped(limit))


class Unlike(Tracer):
    """No two steps take their memory in the same way, and the peak says too little of it."""

    def __call__(self, setting: Setting) -> Trace:
        trace = super().__call__(setting)
        size, held = setting.batch_size, trace.held
        more = tuple((10 + n, size * SAMPLE // 4) for n in range(size % 7))
        held = dataclasses.replace(held, events=(*held.events[:4], *more, *held.events[4:]))
        return dataclasses.replace(trace, held=held)


def test_steps_that_are_not_alike_cost_a_few_traces_and_no_more() -> None:
    limit, tracer = 20_000 * MIB, Unlike()
    fit = largest_batch(tracer, CUDA, Setting(4), limit=capped(limit))
    assert fit is not None
    assert fit.is_proven
    assert fits_within(Unlike()(Setting(fit.largest)), CUDA, capped(limit))
    assert len(tracer.asked) <= 11
    assert fit.largest > 0.4 * limit / SAMPLE


def test_not_even_one_sample_may_fit() -> None:
    fit = largest_batch(Tracer(), CUDA, Setting(8), limit=capped(200 * MIB))
    assert fit is not None
    assert (fit.largest, fit.micro_batch, fit.accumulation) == (0, 0, 0)
    assert fit.forecast.fits is False


def test_accumulation_keeps_the_effective_batch() -> None:
    fit = largest_batch(Tracer(), CUDA, Setting(64), accumulation=2, limit=capped(1024 * MIB))
    assert fit is not None
    assert fit.largest < 64
    assert fit.micro_batch * fit.accumulation == 128
    assert fit.micro_batch <= fit.largest


def test_a_device_of_unknown_size_has_no_largest_batch() -> None:
    assert largest_batch(Tracer(), parse_target("cuda"), Setting(4)) is None


def test_steps_that_are_not_alike_tell_nothing_of_other_sizes() -> None:
    one, two = step(4), step(8)
    longer = dataclasses.replace(
        two, held=dataclasses.replace(two.held, events=(*two.held.events, (7, 1)))
    )
    assert between(one, longer, 6) is None
    told = between(one, two, 6)
    assert told is not None
    assert told.held == step(6).held
