"""Every planted defect is found at its line, and a clean training raises no alarm."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "preflight"
sys.path.insert(0, str(BENCHMARK))

import planted  # noqa: E402

# A few of them; `make test-full` and the benchmark try all.
QUICK = {
    "eigenvalues",
    "a_mask_that_selects",
    "dropout_that_is_drawn_again",
    "float16_with_its_scale",
}


def marked(cases: list[Any]) -> list[Any]:
    return [
        pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.full)
        for case in cases
    ]


def test_there_are_thirty_of_each() -> None:
    assert (len(planted.DEFECTS), len(planted.CLEAN)) == (30, 30)
    assert {case.name for case in (*planted.DEFECTS, *planted.CLEAN)} >= QUICK


@pytest.mark.parametrize("case", marked(planted.DEFECTS))
def test_a_defect_is_found_at_its_line(case: Any) -> None:
    seen = planted.look(case, case.target)
    assert planted.is_found(case, seen), (seen.failure, seen.findings)


@pytest.mark.parametrize("case", marked(planted.CLEAN))
def test_a_clean_training_raises_no_alarm(case: Any) -> None:
    for word in case.targets:
        seen = planted.look(case, word)
        assert not seen.failure
        assert not seen.errors
