from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from anytrain.engine.recording.disk import append, to_json


def test_a_line_torn_by_a_crash_stays_alone(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    append(file, "first")
    with file.open("a") as torn:
        torn.write("half a li")
    append(file, "third")
    assert file.read_text().splitlines() == ["first", "half a li", "third"]


def test_json_is_valid_for_numbers_that_json_lacks() -> None:
    values = {"a": math.nan, "b": [-math.inf], "c": torch.tensor([1.0, math.nan])}
    back = json.loads(to_json(values), parse_constant=_refuse)
    assert math.isnan(float(back["a"])) and float(back["b"][0]) == -math.inf
    assert back["c"] == [1.0, "NaN"]


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_json_writes_what_it_cannot_hold_as_text() -> None:
    assert json.loads(to_json({"dtype": torch.float16})) == {"dtype": "torch.float16"}
