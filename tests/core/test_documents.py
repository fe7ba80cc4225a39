"""Texts that no parser takes are a ValueError in plain words, whatever the parser raises."""

from __future__ import annotations

import pytest

from anytrain.core import documents

DEEP = "[" * 5000
LONG = "9" * 5000


@pytest.mark.parametrize("read", [documents.from_json, documents.from_yaml])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (DEEP + "]" * 5000, "nested too deeply"),
        (LONG, "a number of more than 4300 digits"),
        ('{"a": ', "."),
    ],
)
def test_what_cannot_be_read_is_a_value_error(read, text, words):  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=words) as told:
        read(text)
    assert type(told.value) is ValueError
    assert len(str(told.value).splitlines()) == 1
    assert len(str(told.value)) < 300


def test_keys_that_cannot_be_looked_up_are_a_value_error() -> None:
    with pytest.raises(ValueError, match="unhashable"):
        documents.from_yaml("? {a: 1}\n: 2")


@pytest.mark.parametrize("text", ["0x" + "f" * 5000, "0b" + "1" * 20_000, "1:" * 9000 + "1"])
def test_a_number_that_python_would_not_write_down_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="a number of more than 4300 digits"):
        documents.from_yaml(f"steps: {text}")
    assert documents.from_yaml("steps: [0x10, 1:30, -7]") == {"steps": [16, 90, -7]}
