"""Keep the run's random numbers its own, whatever a tracking library draws."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def untouched() -> Iterator[None]:
    """Leave the generators of python, numpy and torch as they were before.

    A library that draws a name for its run from the generator that the training draws from would
    give another training. A device's generators are nothing that trackers draw from.
    """
    python, numpys, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpys)
        torch.set_rng_state(torchs)
