"""Compare versions of libraries."""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any

import torch
from torch.torch_version import TorchVersion

from anytrain.compat.accelerate.utils.constants import STR_OPERATION_TO_FUNC
from anytrain.core.errors import BadInput

__all__ = ["compare_versions", "is_torch_version"]


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Compare an installed library's version, or a version itself, with another.

    >>> compare_versions("torch", ">=", "2.0")
    True
    """
    if operation not in STR_OPERATION_TO_FUNC:
        raise BadInput(
            f"Cannot compare versions by {operation!r}.",
            why=f"the known operations are {', '.join(STR_OPERATION_TO_FUNC)}.",
            fix='pass one of them, such as ">=".',
        )
    found = library_or_version
    if isinstance(found, str) and not isinstance(found, TorchVersion):
        found = importlib.metadata.version(found)
    # torch's own version type compares as packaging's does, and packaging is no dependency.
    return bool(STR_OPERATION_TO_FUNC[operation](TorchVersion(str(found)), requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare torch's version, such as `is_torch_version(">=", "2.4")`.

    A nightly build or a release candidate counts as its release.
    """
    release = re.match(r"[0-9.]+", torch.__version__)
    return compare_versions(
        TorchVersion(release[0] if release else torch.__version__), operation, version
    )
