"""Plain scripts in turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from anytrain.core.errors import BadInput
from anytrain.recipes.bench import scripts


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_printed_number_is_compared_and_the_order_turns(tmp_path: Path) -> None:
    slow = write(tmp_path, "slow.py", "print({'train_samples_per_second': 20.0, 'epoch': 3})")
    fast = write(tmp_path, "fast.py", "print('samples_per_second: 50')")
    said: list[str] = []
    found = scripts.compare([slow, fast], 2, "samples_per_second", said.append)
    assert [line.split(":")[0].rsplit("/")[-1] for line in said] == [
        "slow.py",
        "fast.py",
        "fast.py",
        "slow.py",
    ]
    head, first, second = scripts.table(found, "samples_per_second")
    assert head[1] == "samples_per_second"
    assert first[-1] == "1.00"
    assert second[1] == "50"
    assert second[-1] == "2.50"


def test_times_are_compared_where_one_prints_no_number(tmp_path: Path) -> None:
    quiet = write(tmp_path, "quiet.py", "")
    slow = write(tmp_path, "slow.py", "import time; time.sleep(3); print('samples_per_second 9')")
    head, _, second = scripts.table(
        scripts.compare([quiet, slow], 1, "samples_per_second", lambda _: None), "x"
    )
    assert head[1] == "seconds"
    assert float(second[-1]) < 1


def test_a_script_that_fails_or_is_absent_is_told(tmp_path: Path) -> None:
    bad = write(tmp_path, "bad.py", "raise SystemExit('no luck')")
    with pytest.raises(BadInput, match="no luck"):
        scripts.compare([bad], 1, "x", lambda _: None)
    with pytest.raises(BadInput, match=r"absent\.py"):
        scripts.compare([tmp_path / "absent.py"], 1, "x", lambda _: None)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("samples_per_second 3\nsamples_per_second=4.5", 4.5),
        ("{'eval_samples_per_second': 1.2e3}", 1200.0),
        ("samples_per_second is unknown", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_name_is_read(text: str, number: float | None) -> None:
    assert scripts.number_in(text, "samples_per_second") == number
