"""Read native_functions.yaml: torch's operations and the devices each has a kernel for.

Line by line, since a YAML parser takes seconds for what is needed of its 16,000 lines.
"""

from __future__ import annotations

from typing import NamedTuple


class Native(NamedTuple):
    """One operation of ATen."""

    keys: frozenset[str]
    """What its kernels are registered for: CPU, MPS, CompositeExplicitAutograd, ..."""
    delegate: str | None
    """The out= sibling that holds its kernels, for a structured functional operation."""


def read(text: str) -> dict[str, Native]:
    """Return every operation by name, such as "add.Tensor"."""
    entries = ("\n" + text).split("\n- func:")[1:]
    return {entry.split("(", 1)[0].strip(): _native(entry) for entry in entries}


def _native(entry: str) -> Native:
    keys: set[str] = set()
    delegate, dispatches, listing = None, False, False
    for line in entry.split("\n")[1:]:
        bare = line.strip()
        if not bare or bare.startswith("#"):
            continue
        name, _, value = bare.partition(":")
        if listing and line.startswith("    "):
            keys.update(key.strip() for key in name.split(","))
            continue
        listing = name == "dispatch"
        dispatches = dispatches or listing
        if name == "structured_delegate":
            delegate = value.partition("#")[0].strip()
    if not dispatches and delegate is None:
        # What registers nothing decomposes, on every device and before autograd.
        keys.add("CompositeImplicitAutograd")
    return Native(frozenset(keys), delegate)
