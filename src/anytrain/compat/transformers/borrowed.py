"""Modules of another library under a name of ours.

`import ours.models.bert` gives the very module `theirs.models.bert`: its classes exist once, so
`isinstance` agrees whichever name was imported. Modules that ours has itself come first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module, util
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _Loan:
    """Import a module of theirs; load no second copy of it."""

    def __init__(self, theirs: str) -> None:
        self.theirs = theirs
        self.spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return their module."""
        module = import_module(self.theirs)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing: it has run. Give it back the spec that importing has replaced."""
        module.__spec__ = self.spec


class _Lender:
    """Find modules below our name among those below theirs."""

    def __init__(self, ours: str, theirs: str) -> None:
        self.ours, self.theirs = ours, theirs

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to import one of their modules, None for names that are not below ours."""
        if not name.startswith(f"{self.ours}.") or self._is_ours(name):
            return None
        theirs = self.theirs + name.removeprefix(self.ours)
        if util.find_spec(theirs) is None:
            return None
        return ModuleSpec(name, _Loan(theirs))  # type: ignore[arg-type]  # a loader by its methods

    def _is_ours(self, name: str) -> bool:
        """Whether the file of a module, or of the package it is in, is ours."""
        first = name.removeprefix(f"{self.ours}.").partition(".")[0]
        package = sys.modules[self.ours]
        return PathFinder.find_spec(f"{self.ours}.{first}", package.__path__) is not None


def lend(ours: str, theirs: str) -> None:
    """Let modules below `theirs` be imported below `ours`, where ours has none of that name."""
    known = (finder for finder in sys.meta_path if isinstance(finder, _Lender))
    if not any(finder.ours == ours for finder in known):
        # First in line: a lent package has a path, along which its modules would load again.
        sys.meta_path.insert(0, _Lender(ours, theirs))
