"""Unpickle without touching what this process has defined itself.

cloudpickle knows a class of a notebook again when it comes back from a child, and then writes
the child's attributes and methods over the notebook's own. Here such a class is left alone.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from cloudpickle import cloudpickle


class Unpickler(pickle.Unpickler):
    """An unpickler that leaves the classes alone that were known before it began."""

    def __init__(self, file: Any, *, buffers: Iterable[Any] | None = None) -> None:
        super().__init__(file, buffers=buffers)
        self.made: list[Any] = []
        """The functions and classes that came by value."""
        with cloudpickle._DYNAMIC_CLASS_TRACKER_LOCK:
            # Held, so that none of their numbers is given to a new one meanwhile.
            self._held = list(cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS)
        self._before = {id(known) for known in self._held}

    def find_class(self, module: str, name: str) -> Any:
        """Return what the pickle names, but our own way to fill in a class or a function."""
        found = super().find_class(module, name)
        if module.startswith("cloudpickle") and name in ("_class_setstate", "_function_setstate"):
            return partial(self._fill, found)
        return found

    def settle(self) -> None:
        """Let `__main__` have the notebook's functions and classes, as it does in the notebook.

        So they can be pickled by name, as `torch.save(model)` and forked pools do.
        """
        main = vars(sys.modules["__main__"])
        for thing in self.made:
            if thing.__module__ == "__main__" and thing.__qualname__.isidentifier():
                main[thing.__qualname__] = thing

    def _fill(self, fill: Callable[[Any, Any], Any], thing: Any, state: Any) -> Any:
        self.made.append(thing)
        return thing if id(thing) in self._before else fill(thing, state)
