"""Skips for what a machine lacks, and the rule that CI may lack no tool.

A missing device is a fair reason to skip anywhere. A missing program or package is fair on a
user's machine only: with ANYTRAIN_REQUIRE_TOOLS=1 such a skip fails.
"""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest

_ABSENT = "tool absent: "
# What pytest.importorskip says.
_NOT_IMPORTED = "could not import "


def tool(name: str) -> str:
    """Return where the command lies, or the name of a module that is there; skip otherwise."""
    found = shutil.which(name)
    if found is not None:
        return found
    if name.isidentifier() and importlib.util.find_spec(name) is not None:
        return name
    pytest.skip(f"{_ABSENT}{name}")


def refuse_absent_tool(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip for want of a tool into a failure, where tools are required."""
    if os.environ.get("ANYTRAIN_REQUIRE_TOOLS") != "1" or report.outcome != "skipped":
        return
    if not isinstance(report.longrepr, tuple):
        return
    path, line, said = report.longrepr
    reason = said.removeprefix("Skipped: ")
    if reason.startswith((_ABSENT, _NOT_IMPORTED)):
        report.outcome = "failed"
        report.longrepr = f"{path}:{line}: {reason} (ANYTRAIN_REQUIRE_TOOLS=1: install it)"
