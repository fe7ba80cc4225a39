"""Run a user's script inside this process, as if it were the program itself."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path


def run_program(command: Sequence[str]) -> None:
    """Run a script, or a module after "-m", with its arguments."""
    is_module = command[0] == "-m"
    name, *rest = command[1:] if is_module else command
    sys.argv = [name, *rest]
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, str(Path(name).resolve().parent))
    runpy.run_path(name, run_name="__main__")
