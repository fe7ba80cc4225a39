"""Whether a run on a Mac will send operations without a kernel to the CPU.

libtorch reads PYTORCH_ENABLE_MPS_FALLBACK when it is loaded. `import anytrain` sets it there, so it
depends on which of the two a script imports first.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from anytrain.core import environment

# Libraries that scripts import early, and that load no torch by being imported.
_WITHOUT_TORCH = frozenset({"numpy", "pandas", "scipy", "sklearn", "yaml", "tqdm", "rich", "typer"})


def is_on(command: Sequence[str]) -> bool:
    """Tell it of a script, or of a module after "-m", with its arguments."""
    told = environment.variable(environment.MPS_FALLBACK)
    if told in ("", "0"):
        return False
    # On a Mac this very process has set it, by importing anytrain; it says nothing of the script.
    if told is not None and sys.platform != "darwin":
        return True
    if tuple(command[:1]) == ("-m",):
        return command[1].partition(".")[0] == "anytrain"
    try:
        tree = ast.parse(Path(command[0]).read_bytes())
    except (OSError, SyntaxError, IndexError):
        return False
    return next(_loads_torch_after_us(tree), False)


def is_on_here() -> bool:
    """Tell it of this process, were it started on a Mac."""
    told = environment.variable(environment.MPS_FALLBACK)
    return not environment.torch_came_first() if told is None else told not in ("", "0")


def _loads_torch_after_us(tree: ast.Module) -> Iterator[bool]:
    """Yield at each import that decides whether anytrain comes first."""
    for statement in tree.body:
        for root in _roots(statement):
            if root == "anytrain":
                yield True
            elif root not in sys.stdlib_module_names and root not in _WITHOUT_TORCH:
                yield False


def _roots(statement: ast.stmt) -> list[str]:
    # What is imported inside of functions, or in a `try`, runs later or may not.
    if isinstance(statement, ast.Import):
        return [name.name.partition(".")[0] for name in statement.names]
    if isinstance(statement, ast.ImportFrom):
        return [(statement.module or "").partition(".")[0]]
    return []
