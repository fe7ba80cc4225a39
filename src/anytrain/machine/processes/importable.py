"""Find out which modules a fresh process can import, and which exist in this one alone.

A module may have come here in ways that a fresh process knows nothing of: by its file's path, by
pytest, by a line of a notebook, from a folder that was the working folder once.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as registry


class Homes:
    """The modules that a pickle refers to; the contents of those that exist here alone travel."""

    def __init__(self) -> None:
        self._known: dict[str, bool] = {}
        self._registered: list[types.ModuleType] = []

    @contextmanager
    def open(self) -> Iterator[None]:
        """Let cloudpickle know of such modules inside the block, and of none afterwards."""
        try:
            yield
        finally:
            for module in self._registered:
                cloudpickle.unregister_pickle_by_value(module)

    def look(self, thing: Any) -> None:
        """Take note of where a function, a class or a module is at home."""
        if isinstance(thing, types.ModuleType):
            name = thing.__name__
        elif isinstance(thing, (types.FunctionType, type)):
            name = thing.__module__
        else:
            return
        module = sys.modules.get(name) if isinstance(name, str) else None
        if module is None or name in self._known or name == "__main__":
            return
        self._known[name] = can_import(name)
        if not self._known[name] and name not in registry.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            self._registered.append(module)


def can_import(name: str) -> bool:
    """Whether a fresh process with this one's paths would find the same module by its name."""
    path: Sequence[str] | None = None
    parts = name.split(".")
    for number in range(1, len(parts) + 1):
        part = ".".join(parts[:number])
        spec = _find(part, path)
        if spec is None:
            # What a module has made inside itself comes with it; a file of its own does not.
            file = getattr(sys.modules[name], "__file__", None)
            return number > 1 and (path is None or not str(file).endswith(".py"))
        if not _is_same(spec, sys.modules.get(part)):
            return False
        path = spec.submodule_search_locations
    return True


def _find(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Return what an import would find now, had the module not been imported yet."""
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path)
        except Exception:  # noqa: BLE001  anybody may add a finder; a broken one finds nothing
            continue
        if spec is not None:
            return spec
    return None


def _is_same(spec: ModuleSpec, module: types.ModuleType | None) -> bool:
    file = getattr(module, "__file__", None)
    if file is None or not spec.has_location or spec.origin is None:
        return True
    return bool(os.path.realpath(file) == os.path.realpath(spec.origin))
