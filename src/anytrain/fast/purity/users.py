"""Which code and which objects are the user's own, and which a library's."""

from __future__ import annotations

import sys
import sysconfig
from functools import lru_cache
from typing import Any

_LIBRARIES = ("torch", "transformers", "peft", "anytrain", "timm", "diffusers", "torchvision")
_STANDARD = sysconfig.get_path("stdlib")


def is_library(module: str | None) -> bool:
    """Whether a module of this name is no user's."""
    return (module or "").split(".")[0] in _LIBRARIES


def is_installed(place: str) -> bool:
    """Whether a file of this path came with Python or with a package."""
    return "site-packages" in place or "dist-packages" in place or place.startswith(_STANDARD)


@lru_cache(maxsize=4096)
def is_users_class(kind: Any) -> bool:
    """Whether the user has written a class."""
    if kind.__module__ == "builtins" or is_library(kind.__module__):
        return False
    return not is_installed(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


def is_users(value: Any) -> bool:
    """Whether it is an object of a class that the user has written."""
    kind: Any = type(value)
    return is_users_class(kind)
