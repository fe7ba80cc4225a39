"""Functions beside a Trainer that do as HF's do."""

from __future__ import annotations

from anytrain.compat.transformers.trainer_utils import find_executable_batch_size


def tried_sizes(search: bool) -> list[int]:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=20, auto_find_batch_size=search)
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        if search and batch_size > 14:
            raise RuntimeError("CUDA out of memory.")

    train()
    return tried


def test_a_batch_that_does_not_fit_is_tried_with_a_tenth_less() -> None:
    assert tried_sizes(search=True) == [20, 18, 16, 14]


def test_without_a_search_the_size_is_taken_as_it_is() -> None:
    assert tried_sizes(search=False) == [20]
