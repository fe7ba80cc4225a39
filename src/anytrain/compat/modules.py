"""Modules under another library's names: what is refused in them, and those without a file.

A script that only imports a refused name, or asks `isinstance` of it, runs. Using it is refused.

A module that holds nothing but refused names and names from elsewhere is a row of a table, and has
no file. What is not in the table may be lent by the other library: `import ours.models.bert` gives
the very module `theirs.models.bert`. Its classes exist once, so `isinstance` agrees whichever name
was imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, util
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NoReturn

from anytrain.core.errors import Unsupported


@dataclass(frozen=True, slots=True)
class Family:
    """Names that are refused for one reason, by the module that their library keeps them in."""

    why: str
    fix: str
    names: dict[str, str]


class Refusal(type):
    """The type of a name that is there and cannot be used."""

    family: Family

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: this is not done here."""
        raise refusal(cls.__name__, cls.family)

    def __getitem__(cls, key: Any) -> NoReturn:
        """Refuse: some of these names are tables."""
        raise refusal(cls.__name__, cls.family)


def refusal(name: str, family: Family) -> Unsupported:
    """Return the error for a name of a family."""
    return Unsupported(f"anytrain does not support {name}.", why=family.why, fix=family.fix)


def placeholder(name: str, module: str, family: Family) -> Refusal:
    """Return the class without instances that stands for a refused name."""
    body = {"__module__": module, "__doc__": f"Refused: {family.why}", "family": family}
    return Refusal(name, (), body)


def refused(families: Sequence[Family], module: str) -> dict[str, Family]:
    """Return what is refused in one of the other library's modules."""
    return {name: family for family in families for name in family.names.get(module, "").split()}


class _TableLoader:
    """Make a module all of whose names are looked up in a table; those given, at once."""

    def __init__(self, getattr_of: Callable[[str], Callable[[str], Any]], names: str) -> None:
        self.getattr_of, self.names = getattr_of, names.split()

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its names."""
        module.__doc__ = "Names of another library's that are refused, or come from elsewhere."
        lookup = module.__dict__["__getattr__"] = self.getattr_of(module.__name__)
        module.__dict__.update({name: lookup(name) for name in self.names})


class _LendingLoader:
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


@dataclass(frozen=True, slots=True)
class _Finder:
    """Find modules below a package of ours that have no file there."""

    ours: str
    table: Mapping[str, str]
    getattr_of: Callable[[str], Callable[[str], Any]]
    theirs: str | None

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to make or lend a module, None for names that are not below ours."""
        if not name.startswith(f"{self.ours}."):
            return None
        inner = name.removeprefix(f"{self.ours}.")
        loader: Any = self._loader(inner)
        return None if loader is None else ModuleSpec(name, loader)

    def _loader(self, inner: str) -> _TableLoader | _LendingLoader | None:
        if inner in self.table:
            return _TableLoader(self.getattr_of, self.table[inner])
        if self.theirs is None or self._has_file(inner.partition(".")[0]):
            return None
        theirs = f"{self.theirs}.{inner}"
        return None if util.find_spec(theirs) is None else _LendingLoader(theirs)

    def _has_file(self, inner: str) -> bool:
        package = sys.modules[self.ours]
        return PathFinder.find_spec(f"{self.ours}.{inner}", package.__path__) is not None


def serve(
    ours: str,
    table: Mapping[str, str],
    getattr_of: Callable[[str], Callable[[str], Any]],
    lends: str | None = None,
) -> None:
    """Let the table's modules, and those of a library that is lent, be imported below `ours`.

    `table` has the names that a module has from the start, `getattr_of` returns its `__getattr__`.
    """
    known = (finder for finder in sys.meta_path if isinstance(finder, _Finder))
    if not any(finder.ours == ours for finder in known):
        # First in line: a lent package has a path, along which its modules would load again.
        sys.meta_path.insert(0, _Finder(ours, table, getattr_of, lends))
