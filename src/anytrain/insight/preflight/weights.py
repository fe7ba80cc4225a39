"""Open files of weights without reading them: a header tells names, shapes and dtypes.

Only safetensors has such a header. Other formats are read as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from anytrain.engine.checkpoint.tensors import DTYPES
from anytrain.insight.preflight.claimed_ops import LARGE

_SMALL = 2**12
"""Elements below which a tensor is read."""


class _Slice:
    """A tensor of a file, of which nothing was read."""

    def __init__(self, name: str, given: Any, file: Any) -> None:
        self._name, self._given, self._file = name, given, file

    def get_shape(self) -> list[int]:
        """Return its shape."""
        shape: list[int] = self._given.get_shape()
        return shape

    def get_dtype(self) -> str:
        """Return the header's name of its dtype."""
        name: str = self._given.get_dtype()
        return name

    def whole(self) -> torch.Tensor:
        """Return it: a small one as it is, another without data."""
        shape, dtype = self.get_shape(), DTYPES.get(self.get_dtype())
        if dtype is None or not dtype.is_floating_point or math.prod(shape) < _SMALL:
            found: torch.Tensor = self._file.get_tensor(self._name)
            return found
        return torch.empty(LARGE, dtype=dtype).new_empty(shape)  # like one without data

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.whole()[index]


class _File:
    """A file of weights with the face of safetensors' own."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> _File:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_slice(self, name: str) -> _Slice:
        """Return a tensor that can be cut."""
        return _Slice(name, self._file.get_slice(name), self._file)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor."""
        return self.get_slice(name).whole()


@contextmanager
def unread() -> Iterator[None]:
    """Let the block open files of weights without reading them."""
    try:
        import safetensors
        import safetensors.torch as files
    except ImportError:
        yield
        return
    open_file = safetensors.safe_open

    def safe_open(filename: Any, framework: str = "pt", *args: Any, **kwargs: Any) -> Any:
        if framework not in ("pt", "torch", "pytorch"):
            return open_file(filename, framework, *args, **kwargs)
        return _File(open_file(filename, framework))

    def load_file(filename: Any, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        with safe_open(filename) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no dict

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(safetensors, "safe_open", safe_open))
        for name, own in (("safe_open", safe_open), ("load_file", load_file)):
            if hasattr(files, name):
                stack.enter_context(mock.patch.object(files, name, own))
        yield
