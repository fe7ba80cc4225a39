"""What a function's bytecode tells of it."""

from __future__ import annotations

import math

from anytrain.core import bytecode


class Scaled:
    """A class with a method that takes attributes of its own, of an argument and of a module."""

    factor = 2

    def call(self, row: list[float]) -> list[float]:
        row.sort()
        return [self.factor * math.sqrt(value) for value in row]


def around() -> object:
    filled = 1

    def inner() -> object:
        return filled, unfilled

    found = bytecode.enclosed(inner), [bytecode.content(cell) for cell in inner.__closure__ or ()]
    unfilled = 2
    return *found, unfilled


def test_names_are_read_in_what_is_written_inside_too() -> None:
    assert {"sqrt", "math", "factor", "sort"} <= bytecode.names(Scaled.call)
    assert "math" in bytecode.globals_of(Scaled.call)
    assert "sort" not in bytecode.globals_of(Scaled.call)


def test_attributes_of_self_are_those_of_the_first_argument() -> None:
    assert list(bytecode.attributes_of_self(Scaled.call)) == ["factor"]


def test_a_variable_without_a_value_is_left_out() -> None:
    assert around() == ({"filled": 1}, [1, None], 2)
