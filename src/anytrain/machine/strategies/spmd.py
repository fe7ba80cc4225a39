"""One process has all devices, and torch_xla's compiler splits each batch over them.

The backend's lane marks the rows of a batch (`machine/backends/xla.py`); each device has all the
weights, and the compiler puts the sums of gradients into the step's graph.
"""

from __future__ import annotations

from anytrain.machine.strategies.solo import Solo


class Spmd(Solo):
    """Train as one process does; the compiler shares the work."""

    name = "spmd"
