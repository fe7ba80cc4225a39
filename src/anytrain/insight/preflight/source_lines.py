"""Find out where an operation comes from: the module that ran it, and the user's source line.

Forward: the module by hooks, the line by the first frame outside of torch and of this library.
Backward: autograd numbers its nodes, and the table that forward has filled knows the number.
"""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import anytrain
from anytrain.insight.preflight.trace import SourcePlace

_INSIDE = tuple(f"{Path(package.__file__ or '').parent}/" for package in (torch, anytrain))
_FROZEN = ("<frozen", "<string>", "<__array_function__")
_STDLIB = f"{Path(linecache.__file__).parent}/"
_next_number: Any = vars(torch.autograd)["_get_sequence_nr"]
_ENGINE = "_engine_run_backward"
_OURS = f"{Path(anytrain.__file__).parent}/"
_WATCHING = f"{Path(__file__).parent}/"
Spot = tuple[str, CodeType | None, int, bool]
"""What a place is made of later: a module's path, a frame's code, the line, and if it was us."""
NOWHERE: Spot = ("", None, 0, False)


class SourceLines:
    """Where the run is just now."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._open: list[str] = []
        self._by_number: dict[int, Spot] = {}
        self._is_inside: dict[CodeType, str] = {}

    def know(self, model: nn.Module) -> None:
        """Learn a model's module paths; a part of a model that is known keeps its path."""
        for name, module in model.named_modules():
            self._names.setdefault(id(module), name)

    def name(self, module: nn.Module) -> str:
        return self._names.get(id(module), "")

    def enter(self, module: nn.Module) -> None:
        name = self._names.get(id(module))
        self._open.append(self._open[-1] if name is None and self._open else name or "")

    def leave(self) -> None:
        if self._open:
            self._open.pop()

    @property
    def depth(self) -> int:
        """How many modules are inside one another just now."""
        return len(self._open)

    @property
    def module(self) -> str:
        return self._open[-1] if self._open else ""

    def forget(self) -> None:
        """Drop what a step's forward has left: its nodes are gone."""
        self._by_number.clear()

    def here(self, node: Any) -> Spot:
        """Return where the operation that runs now comes from; `node` is autograd's, if any."""
        if node is None:
            spot = (self.module, *self._frame(sys._getframe(1), is_backward=False))
            # The node of an operation is made just before the operation runs.
            number = _next_number() - 1
            self._by_number.setdefault(number, spot)
            return spot
        spot = (self.module, *self._frame(sys._getframe(1), is_backward=True))
        if spot[1] is not None:  # Python runs inside backward: its own function, or forward again
            self._by_number.setdefault(_next_number() - 1, spot)
            return spot
        return self._by_number.get(node._sequence_nr(), NOWHERE)

    def maker(self) -> Spot:
        """Return the line that makes a module just now."""
        return ("", *self._frame(sys._getframe(1), is_backward=False))

    def _frame(
        self, frame: FrameType | None, *, is_backward: bool
    ) -> tuple[CodeType | None, int, bool]:
        """Return the first frame's code and line that are not torch's, ours or Python's own.

        The third value tells whether one of ours is in between.
        """
        known, ours = self._is_inside, False
        while frame is not None:
            code = frame.f_code
            inside = known.get(code)
            if inside is None:
                inside = known[code] = _inside(code.co_filename)
            if not inside:
                return code, frame.f_lineno, ours
            if is_backward and code.co_name == _ENGINE:
                return None, 0, False
            ours = ours or inside == "ours"
            frame = frame.f_back
        return None, 0, ours  # a recipe of ours runs: nobody else's line is in it

    @staticmethod
    def place(spot: Spot) -> SourcePlace:
        module, code, line, ours = spot
        if code is None:
            return SourcePlace(module=module, is_ours=ours)
        text = linecache.getline(code.co_filename, line).strip()
        return SourcePlace(module, code.co_filename, line, code.co_name, text, ours)


def users_place() -> SourcePlace | None:
    """Return the line that runs now and is neither torch's, ours nor Python's own, if any is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_inside(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    return SourceLines.place(("", frame.f_code, frame.f_lineno, False))


def is_inside(name: str) -> bool:
    """Whether a source file is torch's, this library's or Python's own."""
    if name.startswith((*_INSIDE, *_FROZEN)):
        return True
    return name.startswith(_STDLIB) and "site-packages" not in name


def _inside(name: str) -> str:
    """Return whose a source file is: "ours", "torch" (or Python's own), or "" for a user's."""
    if name.startswith(_OURS) and not name.startswith(_WATCHING):
        return "ours"
    return "torch" if is_inside(name) else ""
