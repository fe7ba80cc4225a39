"""Data sets are told apart without asking for a row."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from anytrain.engine.data.columns import Table
from anytrain.engine.recording.fingerprint import describe


def rows(size: int = 200, change: int | None = None) -> list[dict[str, Any]]:
    made = [{"text": f"row {n}", "x": torch.full((4,), float(n)), "y": n % 2} for n in range(size)]
    if change is not None:
        made[change]["text"] = "another"
    return made


class Untouchable(Dataset[Any]):
    """A data set whose rows nobody may ask for."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a row was asked for")


ALIKE: dict[str, Any] = {
    "rows": lambda change: rows(change=change),
    "tensors": lambda change: TensorDataset(torch.arange(600.0) + (0 if change is None else 1)),
    "arrays": lambda change: Untouchable(np.arange(90) + (0 if change is None else 1)),
    "columns": lambda change: Table({"x": [1, 2, 3 if change is None else 4], "y": "abc"}),
    "texts": lambda change: Untouchable([f"a {n} {change}" for n in range(50)]),
    "part": lambda change: Subset(Untouchable(rows()), [1, 2, 3 if change is None else 4]),
    "joined": lambda change: ConcatDataset([Untouchable(rows()), Untouchable(rows(7, change))]),
    "half": lambda change: Untouchable(torch.full((3 if change is None else 4,), 1.0).bfloat16()),
}


@pytest.mark.parametrize("kind", ALIKE)
def test_equal_data_is_alike_and_changed_data_is_not(kind: str) -> None:
    first, again, changed = (describe(ALIKE[kind](change)) for change in (None, None, 0))
    assert first == again
    assert first["fingerprint"] is not None or kind == "half"
    assert first != changed


def test_what_is_told_of_a_table() -> None:
    found = describe(Table({"x": [1, 2, 3], "labels": [0, 1, 0]}))
    assert (found["num_rows"], found["columns"]) == (3, ["x", "labels"])
    assert found["kind"] == "anytrain.engine.data.columns.Table"
    assert describe(rows(3))["columns"] == ["text", "x", "y"]


def test_a_table_of_the_library_is_told_by_its_rows_wherever_they_lie(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"x": [[1, 2], [3]], "y": ["a", "b"], "z": [{"u": [0.5], "v": "w"}] * 2}
    made = datasets.Dataset.from_dict(rows)
    made.save_to_disk(str(tmp_path / "kept"))
    again = datasets.load_from_disk(str(tmp_path / "kept"))
    mapped = made.map(lambda row: row, load_from_cache_file=False, new_fingerprint="another")
    turned = made.select([1, 0]).select([1, 0])
    found = describe(made)
    assert found["columns"] == ["x", "y", "z"] and found["fingerprint"]
    for same in (again, mapped, turned, made.with_format("torch")):
        assert describe(same) == found
    for name, value in (("x", [[1, 2], [4]]), ("z", [{"u": [0.5], "v": "w"}, {"u": [], "v": "w"}])):
        changed = datasets.Dataset.from_dict({**rows, name: value})
        assert describe(changed)["fingerprint"] != found["fingerprint"]
    assert describe(made.select([0]))["fingerprint"] != found["fingerprint"]


class Kept(Dataset[Any]):
    """Rows that were made, or read from a file of an earlier run; it notes which."""

    def __init__(self, rows: Any, **notes: Any) -> None:
        self.rows, self.scale = rows, 2.0
        for name, value in notes.items():
            setattr(self, name, value)

    @property
    def source(self) -> Any:
        return self.rows

    def _row(self, index: int) -> Any:
        raise AssertionError(f"{self.source[index] * self.scale} was asked for")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self._row(index)


def test_what_a_data_set_notes_beside_its_rows_is_no_content(tmp_path: Path) -> None:
    values = np.arange(90.0)
    np.save(tmp_path / "rows.npy", values)
    fresh = Kept(values, was_cached=False, took=3.5, path=None)
    cached = Kept(np.load(tmp_path / "rows.npy", mmap_mode="r"), was_cached=True, path="rows.npy")
    assert describe(fresh) == describe(cached)
    assert describe(fresh)["fingerprint"]
    cached.scale = 3.0
    assert describe(fresh)["fingerprint"] != describe(cached)["fingerprint"]


def test_a_data_set_that_could_read_any_attribute_is_told_by_all_of_them() -> None:
    class Any_(Kept):
        def __getitem__(self, index: int) -> Any:
            return getattr(self, f"part{index}")

    one, other = Any_([1], part0=1), Any_([1], part0=2)
    assert describe(one)["fingerprint"] != describe(other)["fingerprint"]


def test_a_stream_is_not_touched() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("somebody asked")

    found = describe(Stream())
    assert (found["num_rows"], found["fingerprint"]) == (None, None)


def test_no_random_state_moves() -> None:
    def states() -> list[Any]:
        return [
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
        ]

    before = states()
    describe(Untouchable(rows()))
    assert states() == before


def test_much_data_takes_no_time() -> None:
    tokens = list(range(512))
    many = Untouchable([{"input_ids": tokens, "more": dict.fromkeys(range(50), tokens)}] * 100_000)
    many.data[0]["by_name"] = {f"{n}": n for n in range(200_000)}
    took = []
    for _ in range(5):
        began = time.perf_counter()
        assert describe(many)["fingerprint"] is not None
        took.append(time.perf_counter() - began)
    assert min(took) < 1, "15 ms on an idle machine"


class Odd(Dataset[Any]):
    """A data set whose attributes are no use to anybody else."""

    def __init__(self) -> None:
        self.column_names = np.array(["x", "labels"])
        self.names = {"caf\udce9.png": 1}

    @property
    def columns(self) -> Any:
        raise RuntimeError("reads the whole file")

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["held"][name]

    def __len__(self) -> int:
        raise RuntimeError("nobody knows")


def test_a_data_set_that_fails_is_described_as_far_as_it_goes() -> None:
    found = describe(Odd())
    assert found["kind"].endswith(".Odd")
    assert (found["num_rows"], found["columns"]) == (None, ["x", "labels"])
    assert found["fingerprint"]
