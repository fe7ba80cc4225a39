"""Read JSON and YAML that others wrote: what is wrong with a text is a ValueError of few words.

The parsers have errors of their own kinds for a text that nests more deeply than Python's stack, or
that holds a number of thousands of digits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

_DEEP = "it is nested too deeply to be read"


def from_json(text: str | bytes) -> Any:
    """Return what a JSON text holds.

    >>> from_json('{"steps": [1, 2]}')
    {'steps': [1, 2]}
    """
    return _read(json.loads, text, json.JSONDecodeError)


def from_yaml(text: str) -> Any:
    """Return what a YAML text holds, made of plain values alone."""
    import yaml

    return _read(partial(yaml.load, Loader=_loader()), text, yaml.YAMLError)


@cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML's own, without the integers that Python refuses to write down again."""

        def construct_yaml_int(self, node: Any) -> int:
            value: int = super().construct_yaml_int(node)
            str(value)  # of a hexadecimal one, reading it has no limit
            return value

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    return Loader


def _read(parse: Callable[..., Any], text: str | bytes, error: type[Exception]) -> Any:
    try:
        return parse(text)
    except RecursionError:
        raise ValueError(_DEEP) from None
    except (error, UnicodeError) as wrong:
        raise ValueError(" ".join(str(wrong).split())) from None
    except ValueError as wrong:
        raise ValueError(_value_words(wrong)) from None
    except (TypeError, OverflowError) as wrong:  # YAML's keys must be values that can be looked up
        raise ValueError(" ".join(str(wrong).split())) from None


def _value_words(error: ValueError) -> str:
    if "integer string conversion" in str(error):
        return f"it holds a number of more than {sys.get_int_max_str_digits()} digits"
    return str(error)
