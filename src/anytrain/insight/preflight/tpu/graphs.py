"""What travels between the processes: the graphs of a step, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Alias(NamedTuple):
    """A result that takes the place of what it was computed from."""

    argument: int
    result: int


@dataclass(frozen=True, slots=True)
class Graph:
    """A part of a step that runs without the host, in the compiler's language."""

    module: bytes
    """StableHLO as portable bytes; weights are arguments, never constants."""
    aliases: tuple[Alias, ...]
    split: tuple[int, ...]
    """Arguments whose rows are dealt to the chips; each chip has the others whole."""
    beside_bytes: int
    """What the device holds meanwhile and this part does not touch."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The graphs of one training step, once the optimizer has its state."""

    graphs: tuple[Graph, ...]
    batch_size: int = 0
    """Rows for each chip."""
    precision: str = ""
    seconds: float = 0.0
    failure: str = ""
    """Why there are none; empty where there are."""


@dataclass(frozen=True, slots=True)
class Built:
    """What the compiler says of one graph, for one chip."""

    argument_bytes: int
    result_bytes: int
    alias_bytes: int
    """How much of the results lies where arguments lay."""
    scratch_bytes: int
    code_bytes: int
    seconds: float
    num_exchanges: int = 0
    """How often the chips wait for each other."""
    failure: str = ""
    """The compiler's words where it made no program."""

    @property
    def needed_bytes(self) -> int:
        """What the chip must hold while the graph runs."""
        results = self.result_bytes - self.alias_bytes
        return self.argument_bytes + results + self.scratch_bytes + self.code_bytes
