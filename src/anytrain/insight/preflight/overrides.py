"""Trace a run in another setting than its own: batch size, precision, activation checkpointing.

Nothing of the script is changed. Batches are made longer or shorter where they are handed out,
the plan is decided with another wish, and a model's repeated blocks are checkpointed when it is
first called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn

from anytrain.core.plan import Wish
from anytrain.engine.assemble import session as sessions
from anytrain.engine.step.activations import Activations
from anytrain.engine.tree import map_tensors, num_rows
from anytrain.insight.preflight.batches import Setting


@contextmanager
def planned(setting: Setting | None) -> Iterator[None]:
    """Let the block's sessions compute in the setting's precision."""
    if setting is None:
        yield
        return
    resolve: Any = vars(sessions)["resolve"]
    wish = Wish(setting.precision, "preflight")

    def resolved(wishes: Any, *facts: Any) -> Any:
        return resolve(replace(wishes, precision=wish), *facts)

    with mock.patch.object(sessions, "resolve", resolved):
        yield


def sized(batch: Any, setting: Setting | None) -> Any:
    """Return a batch of the setting's size; what is in it does not matter."""
    rows = None if setting is None else num_rows(batch)
    if setting is None or rows is None or rows == setting.batch_size:
        return batch
    wanted = setting.batch_size

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 or tensor.size(0) != rows:
            return tensor
        if wanted <= rows:
            return tensor[:wanted].clone()
        return tensor.new_zeros((wanted, *tensor.shape[1:]))

    return map_tensors(resize, batch)


def checkpoint(model: nn.Module) -> bool:
    """Checkpoint every repeated block of a model; False where it has none."""
    activations = Activations(model)
    while activations.fewer():
        pass
    return activations.num_blocks > 0
