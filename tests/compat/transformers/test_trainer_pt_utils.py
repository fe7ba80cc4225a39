"""Functions over the arrays of a Trainer that do as HF's do."""

from __future__ import annotations

import torch

from anytrain.compat.accelerate import PartialState
from anytrain.compat.transformers.trainer_pt_utils import nested_gather
from anytrain.compat.transformers.training_args import ParallelMode
from launching import launch


def test_alone_what_is_gathered_is_what_was_given() -> None:
    PartialState(cpu=True)
    tensors = {"loss": torch.tensor(3.0), "more": [torch.ones(2)]}
    assert nested_gather(tensors, ParallelMode.NOT_PARALLEL) is tensors
    assert nested_gather(None, ParallelMode.NOT_PARALLEL) is None


GATHERED = """
import torch
from anytrain.compat.accelerate import PartialState
from anytrain.compat.transformers.trainer_pt_utils import nested_gather
from anytrain.compat.transformers.training_args import ParallelMode

rank = PartialState(cpu=True).process_index
tensors = {"loss": torch.tensor(float(rank)), "more": [torch.full((2,), rank)]}
found = nested_gather(tensors, ParallelMode.DISTRIBUTED)
print(rank, found["loss"].tolist(), found["more"][0].tolist())
"""


def test_several_processes_gather_nested_values_one_behind_the_other() -> None:
    said = launch(GATHERED, 2).stdout.splitlines()
    assert sorted(said) == [f"{rank} [0.0, 1.0] [0, 0, 1, 1]" for rank in (0, 1)]
