"""Verdicts: a few numbers a sample, joined over batches and ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from anytrain.engine.recording import evaluation
from anytrain.engine.recording.evaluation import RankVerdicts, Verdicts, join, kind_of

WHOLE = torch.int64


def looked(*batches: tuple[Any, Any], rows: int = 0, **options: Any) -> Verdicts:
    made = Verdicts(**options)
    for scores, labels in batches:
        made.look(scores, labels)
        made.end_batch(rows)
    return made


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(
    ("scores", "labels", "kind"),
    [
        (torch.zeros(4, 3), torch.zeros(4, dtype=WHOLE), "classification"),
        (torch.zeros(4, 3), torch.zeros(4, dtype=torch.bool), "classification"),
        (torch.zeros(4, 5, 3), torch.zeros(4, 5, dtype=WHOLE), "tokens"),
        (torch.zeros(4), torch.zeros(4), "regression"),
        (torch.zeros(4, 1), torch.zeros(4, 1), "regression"),
        (torch.zeros(4, 3), torch.zeros(4, 3), None),  # several labels a sample
        (torch.zeros(4, 1), torch.zeros(4, dtype=WHOLE), None),
        (torch.zeros(4, 6, 3), torch.zeros(4, 5, dtype=WHOLE), None),
        (torch.zeros(4, dtype=WHOLE), torch.zeros(4, dtype=WHOLE), None),
        (torch.tensor(0.0), torch.tensor(0.0), None),
        (None, torch.zeros(4), None),
        (torch.zeros(4, 3), None, None),
        ({"a": torch.zeros(4)}, torch.zeros(4), None),
    ],
)
def test_the_kind_is_told_by_types_and_shapes(scores: Any, labels: Any, kind: Any) -> None:
    assert kind_of(scores, labels) == kind


def test_of_several_outputs_the_first_are_the_scores() -> None:
    scores, labels = draw(4, 3), torch.arange(4) % 3
    share = looked(((scores, draw(4, 9)), labels)).share()
    assert share is not None
    assert share.rows[1].tolist() == scores.argmax(-1).tolist()
    np.testing.assert_allclose(share.rows[2], scores.softmax(-1).max(-1).values, rtol=1e-6)


def test_half_precision_is_judged_in_single() -> None:
    scores, labels = draw(64, 3).bfloat16(), torch.arange(64) % 3
    share = looked((scores, labels)).share()
    assert share is not None
    np.testing.assert_allclose(share.rows[2], scores.float().softmax(-1).max(-1).values, rtol=1e-6)


def test_rows_that_were_added_are_cut_off_and_a_batch_predicted_twice_counts_once() -> None:
    made, scores, labels = Verdicts(), draw(4, 5, 3), torch.zeros(4, 5, dtype=WHOLE)
    made.look(scores, labels)
    made.look(scores[:3], labels[:3])
    made.end_batch(2)
    share = made.share()
    assert share is not None and share.supports is not None
    assert share.rows.shape == (4, 2)
    assert share.supports.tolist() == [15, 0, 0]


def test_what_cannot_be_judged_ends_the_looking() -> None:
    labels = torch.zeros(4, dtype=WHOLE)
    for made in (
        looked((draw(4, 3), labels), (draw(4, 2), labels)),
        looked((draw(4, 5, 51), torch.zeros(4, 5, dtype=WHOLE))),
        looked((draw(4, 5, 3), torch.zeros(4, 5, dtype=WHOLE)), shifted=True),
        looked((draw(4, 3), labels), is_looking=False),
    ):
        assert not made.is_looking
        assert made.share() is None
        assert made.failure is None


def test_a_failure_is_kept_and_not_raised() -> None:
    class Odd(torch.Tensor):
        def is_floating_point(self) -> bool:
            raise RuntimeError("no such thing here")

    made = looked((torch.zeros(2, 2).as_subclass(Odd), torch.zeros(2)))
    assert made.share() is None
    assert made.failure == "RuntimeError: no such thing here"


def test_a_set_that_is_too_long_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "MOST_ROWS", 9)
    batch = draw(4, 3), torch.arange(4) % 3
    share = looked(batch, batch, batch).share()
    assert share is not None
    assert share.is_cut
    assert share.rows.shape[1] == 8


def test_ranks_are_joined_round_by_round() -> None:
    def one(sizes: tuple[int, ...], values: list[int]) -> RankVerdicts:
        rows = np.array([values, values], np.float32)
        return RankVerdicts("regression", 0, rows, sizes, samples=tuple(values))

    joined = join([one((2, 2), [0, 1, 4, 5]), one((2, 1), [2, 3, 6]), one((0, 0), [])])
    assert joined is not None
    assert joined.rows[0].tolist() == list(range(7))
    assert joined.samples == tuple(range(7))
    assert joined.sizes == (4, 3)
    assert join([None, None]) is None
    other = RankVerdicts("classification", 2, np.zeros((3, 1), np.float32), (1,))
    assert join([one((1,), [0]), other]) is None


def test_a_rank_without_a_row_of_the_last_round_keeps_its_place() -> None:
    made = looked((draw(2, 3), torch.zeros(2, dtype=WHOLE)))
    made.end_batch(0)
    share = made.share(lambda number: [7, 8, 9][number : number + 1])
    assert share is not None
    assert share.sizes == (2, 0)
    assert share.samples == (7, None)


def test_many_small_batches_take_no_longer_each() -> None:
    class Uncounted(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError("every batch went through all the others")

    verdicts = Verdicts()
    verdicts._sizes = Uncounted()
    for _ in range(3):
        verdicts.look(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))
        verdicts.end_batch(1)


def test_tokens_are_counted_exactly_under_a_callers_autocast() -> None:
    scores, labels = torch.zeros(2, 600, 3), torch.zeros(2, 600, dtype=torch.int64)
    verdicts = Verdicts()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        verdicts.look(scores, labels)
        verdicts.end_batch(2)
    share = verdicts.share()
    assert share is not None and share.table is not None
    assert share.table[0].tolist() == [1200, 0, 0]


def test_of_several_kinds_of_labels_nothing_is_told() -> None:
    verdicts = Verdicts()
    places = torch.zeros(4, dtype=torch.int64)
    verdicts.look((torch.zeros(4, 8), torch.zeros(4, 8)), (places, places))
    verdicts.end_batch(4)
    assert (verdicts.share(), verdicts.failure) == (None, None)
