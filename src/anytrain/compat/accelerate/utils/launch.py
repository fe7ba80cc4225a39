"""Putting launch commands together: refused by name."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from anytrain.compat.accelerate import refused

__getattr__ = refused.module_getattr(__name__)


def _filter_args(
    args: Namespace, parser: ArgumentParser, default_args: Sequence[str] = ()
) -> Namespace:
    """Return the options that a parser knows, with the values that `args` gives them."""
    known, _ = parser.parse_known_args(list(default_args))
    for name in vars(known):
        setattr(known, name, getattr(args, name, getattr(known, name)))
    return known
