"""However a training is taken up again, an epoch has each of its samples once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from laws.chains import Chain, Life, check_epochs, live, own_loop, trainer
from laws.crew import Crew


def drawn(seed: int) -> tuple[Chain, list[Life], object]:
    """Return a random chain of lives, and how they are lived."""
    draw = random.Random(seed)
    is_trainer = draw.random() < 0.6
    chain = Chain(
        seed,
        draw.choice([50, 64, 97]),
        draw.choice(["map", "map", "map", "stream", "sized", "placed"]),
        draw.choice(["shuffled", "shuffled", "in order", "by length", "buckets"]),
        drop_last=draw.random() < 0.25,
        split=draw.random() < 0.2,
        dispatch=draw.random() < 0.3,
        epochs=draw.choice([1, 2, 2, 3, 1.5]) if is_trainer else draw.choice([1, 2]),
        max_steps=draw.choice([-1, -1, -1, 25]) if is_trainer else -1,
    )
    if chain.data == "map" and is_trainer and draw.random() < 0.15:
        chain = replace(chain, order="rebalanced", split=False, dispatch=False)
    if chain.data in ("stream", "placed") and is_trainer:
        chain = replace(chain, max_steps=25)
    likely = {"map": 0.1, "placed": 0.0}.get(chain.data, 0.3)
    if draw.random() < likely:
        chain = replace(chain, workers=2)
    lives = []
    for _ in range(draw.randint(2, 4)):
        ranks = draw.randint(1, 4)
        size = draw.randint(1, 3) * ranks if chain.split else draw.randint(1, 6)
        lives.append(Life(ranks, size, draw.randint(1, 3), draw.randint(1, 9)))
    lives[-1] = replace(lives[-1], stop=None)
    return chain, lives, trainer if is_trainer else own_loop


def check(seed: int) -> None:
    chain, lives, lived = drawn(seed)
    told = f"seed {seed}: {lived.__name__} {chain} {lives}"
    print(told)
    saved, seen = None, []
    for life in lives:
        found = live(chain, life, lived, saved)
        seen.append((life, found))
        saved = found.state
        if found.is_over:
            break
    last = seen[-1][1]
    assert last.is_over, told
    check_epochs(chain, seen)
    if last.progress is not None:
        progress = last.progress
        assert progress.step == progress.max_steps, (told, progress)
        is_whole = chain.max_steps < 0 and chain.epochs == int(chain.epochs)
        if is_whole and not chain.counts_short:
            assert progress.epochs == chain.epochs, (told, progress)


@pytest.mark.parametrize("seed", range(6))
def test_a_chain_of_lives_sees_each_sample_once_an_epoch(seed: int) -> None:
    check(seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 300))
def test_many_chains_of_lives_see_each_sample_once_an_epoch(seed: int) -> None:
    check(seed)


def cut_in_two(seed: int) -> None:
    """A life that is cut and gone on with alike deals what it deals in one piece."""
    chain, lives, lived = drawn(seed)
    first = live(chain, lives[0], lived, None)
    if first.is_over:
        return
    second = replace(lives[-1], stop=None)
    whole = live(chain, second, lived, first.state)
    part = live(chain, replace(second, stop=3), lived, first.state)
    if part.is_over:
        return
    rest = live(chain, second, lived, part.state)
    assert part.rounds + rest.rounds == whole.rounds
    if whole.progress is not None:
        assert rest.progress == whole.progress


@pytest.mark.parametrize("seed", range(4))
def test_a_life_that_is_cut_in_two_is_one(seed: int) -> None:
    cut_in_two(seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_lives_that_are_cut_in_two_are_one(seed: int) -> None:
    cut_in_two(seed)


def test_the_last_short_turns_of_a_streams_workers_are_taken_up_once() -> None:
    # Each of the two workers has five samples: a turn of four and one of a single sample.
    chain = Chain(5, 10, "sized", workers=2, epochs=1)
    for stop in (2, 3, 4):
        first = live(chain, Life(stop=stop), own_loop, None)
        rest = live(chain, Life(), own_loop, first.state)
        came = [n for seen in (first, rest) for epoch, each, _ in seen.rounds for n in each]
        assert sorted(came) == list(range(10)), stop


def test_two_changes_within_a_streams_last_turns_repeat_nothing() -> None:
    chain = Chain(1345, 64, "sized", workers=2, epochs=1)
    lives = [Life(3, 5, stop=3), Life(3, 2, stop=3), Life(3, 2)]
    saved, came = None, []
    for life in lives:
        found = live(chain, life, trainer, saved)
        saved, came = found.state, came + [n for _, each, _ in found.rounds for n in each]
    assert sorted(came) == list(range(64))


# -- in processes of their own ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """Four processes that live one life after the other."""
    found = Crew(4)
    yield found
    found.close()


def trained(
    crew: Crew, folder: Path, samples: int, lives: list[tuple[int, int, int, int | None]]
) -> None:
    """Train an epoch in these lives; check what came, and what the learning rate did."""
    seen: Counter[int] = Counter()
    most, last, steps, before = 0, {}, 0, None
    for ranks, size, accumulation, stop in lives:
        life = {"batch_size": size, "accumulation": accumulation, "stop": stop}
        life |= {"folder": str(folder), "samples": samples, "num_train_epochs": 1}
        told = crew.live(ranks, "trainer", **life)
        seen.update(n for rank in told for batch in rank["seen"] for n in batch)
        last, most = told[0], ranks * size - 1
        # A life's first step has the rate that the life before had for it; then it falls to 0 at
        # what is this life's end.
        ends = [before or last["max_steps"]] + [last["max_steps"]] * (last["step"] - steps - 1)
        expected = [1e-3 * (1 - (steps + i) / end) for i, end in enumerate(ends)]
        assert last["rates"] == pytest.approx(expected)
        steps, before = last["step"], last["max_steps"]
        if steps == before:
            break
    assert sorted(seen) == list(range(samples)), "some never came"
    assert seen.total() - samples <= most, "more came twice than fill the last round"
    assert (last["step"], last["epoch"]) == (last["max_steps"], 1.0)


def test_processes_in_other_numbers_train_on_each_sample_once(crew: Crew, tmp_path: Path) -> None:
    trained(crew, tmp_path / "1-2-4", 64, [(1, 4, 2, 5), (2, 4, 2, 1), (4, 4, 2, None)])
    trained(crew, tmp_path / "3-1-2", 50, [(3, 4, 1, 2), (1, 4, 2, 1), (2, 5, 1, None)])


@pytest.mark.full
@pytest.mark.parametrize("seed", range(12))
def test_processes_in_any_numbers_train_on_each_sample_once(
    crew: Crew, tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    lives: list[Any] = [
        (draw.randint(1, 4), draw.randint(1, 6), draw.randint(1, 3), draw.randint(1, 4))
        for _ in range(3)
    ]
    print(f"seed {seed}: {lives}")
    trained(crew, tmp_path, draw.choice([50, 64, 97]), [*lives, (*lives[-1][:3], None)])


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_stop_in_an_accumulated_step_loses_no_sample_and_repeats_none(
    crew: Crew, tmp_path: Path, alone: bool
) -> None:
    # Each sample moves a weight of its own, by its share of the step that it was trained in.
    lives = [(2, 2, 3, 4), (3, 2, 2, 3), (1, 7, 1, None)]
    for ranks, size, accumulation, stop in lives:
        life = {"batch_size": size, "accumulation": accumulation, "stop": stop}
        given = {"folder": str(tmp_path), "samples": 48, "alone": alone}
        told = crew.live(ranks, "own_loop", **given, **life)[0]
    shares = Counter(round(-moved, 4) for moved in told["moved"])
    if alone:  # steps that were stopped in their middle were begun again
        assert shares == {round(1 / 12, 4): 24, round(1 / 7, 4): 21, round(1 / 3, 4): 3}
    else:
        assert shares == {round(1 / 12, 4): 34, round(1 / 7, 4): 14}
