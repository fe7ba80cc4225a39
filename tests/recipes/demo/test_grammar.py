"""The demo's data can be learnt, and not by counting words."""

from __future__ import annotations

from collections import Counter

from anytrain.recipes.demo.data import LONGEST, PADDING, PairSet, make_pairs, vocabulary

PAIRS = make_pairs(4000, seed=3)


def test_a_seed_always_gives_the_same_pairs() -> None:
    assert make_pairs(50, seed=3) == PAIRS[:50]
    assert make_pairs(50, seed=4) != PAIRS[:50]


def test_half_of_the_pairs_are_paraphrases() -> None:
    assert sum(pair.same for pair in PAIRS) == len(PAIRS) / 2


def test_every_kind_of_difference_is_there() -> None:
    counts = Counter(pair.difference for pair in PAIRS if not pair.same)
    assert set(counts) == {"roles", "denial", "count", "person", "deed", "time"}
    assert min(counts.values()) > 100


def test_counting_common_words_does_not_tell_them_apart() -> None:
    overlap = [len({*p.first.split()} & {*p.second.split()}) for p in PAIRS]
    best = max(
        sum((count >= limit) == pair.same for count, pair in zip(overlap, PAIRS, strict=True))
        for limit in range(LONGEST)
    )
    assert max(best, len(PAIRS) - best) / len(PAIRS) < 0.6


def test_swapped_roles_use_the_words_of_a_paraphrase() -> None:
    """Only order and grammar tell: 'two cooks called 1 kid', '1 kid called two cooks'."""
    swapped = [pair for pair in PAIRS if pair.difference == "roles"]
    assert any(sorted(p.first.split()) == sorted(p.second.split()) for p in swapped)
    assert all(p.first != p.second for p in swapped)


def test_every_word_is_in_the_vocabulary_and_every_sentence_fits() -> None:
    rows = PairSet(PAIRS)
    assert len(rows) == len(PAIRS)
    assert {w for p in PAIRS for s in (p.first, p.second) for w in s.split()} == {*vocabulary()}
    lengths = (rows.first != PADDING).sum(dim=1)
    assert lengths.tolist() == [1 + len(pair.first.split()) for pair in PAIRS]
