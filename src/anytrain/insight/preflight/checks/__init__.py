"""The questions that are asked of a trace, one a file.

A file here has one function, `check(trace, target)`, which yields what it finds; its name is the
finding's kind. Adding a question adds a file. None loads torch before it is asked.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from anytrain.insight.preflight.findings import SEVERITIES, Finding
from anytrain.insight.preflight.targets import Target
from anytrain.insight.preflight.trace import Trace


def names() -> tuple[str, ...]:
    """Return the questions by name.

    >>> "host_reads" in names()
    True
    """
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name[0] != "_"))


def ask_all(trace: Trace, target: Target) -> list[Finding]:
    """Return the answers to every question, the gravest first."""
    questions = [import_module(f"{__name__}.{name}").check for name in names()]
    found: list[Finding] = [finding for check in questions for finding in check(trace, target)]
    return sorted(found, key=lambda each: (SEVERITIES.index(each.severity), -each.per_step))
