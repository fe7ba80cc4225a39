"""Start a part of this library under another environment's Python.

    python -P start.py MODULE FOLDER

What that environment has counts first. What it lacks is borrowed from the environment that asked,
whose path lies in the folder: this library, and what the user's script imports.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder, MetadataPathFinder
from pathlib import Path
from typing import Any

PATH = "path.json"
# Built against the torch that they were installed beside: under another one they do not load.
_TIED = frozenset(
    (
        "apex", "bitsandbytes", "deepspeed", "flash_attn", "torch_tpu", "torchaudio", "torchcodec",
        "torchtext", "torchvision", "transformer_engine", "xformers",
    )
)  # fmt: skip


class BorrowedModules(DistributionFinder):
    """A finder of modules in another environment, for those that nobody else has found."""

    def __init__(self, path: list[str]) -> None:
        self._path = path

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if path is not None or name in _TIED:  # parts of a package are found through the package
            return None
        return PathFinder.find_spec(name, self._path, target)

    def find_distributions(
        self, context: DistributionFinder.Context = DistributionFinder.Context()
    ) -> Iterable[Distribution]:
        if context.name is not None and context.name.replace("-", "_").lower() in _TIED:
            return []
        there = DistributionFinder.Context(name=context.name, path=self._path)
        return MetadataPathFinder.find_distributions(there)


def main() -> None:
    """Borrow what is missing, and let the module do what the folder asks for."""
    module, folder = sys.argv[1:]
    path = json.loads((Path(folder) / PATH).read_text(encoding="utf-8"))
    sys.meta_path.append(BorrowedModules(path))
    importlib.import_module(module).main(folder)


if __name__ == "__main__":
    main()
