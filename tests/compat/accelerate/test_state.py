"""The states: views of the current run, with the habits of HF's shared objects."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from anytrain.compat.accelerate import Accelerator, DistributedType
from anytrain.compat.accelerate.state import (
    AcceleratorState,
    GradientState,
    PartialState,
    ThreadLocalSharedDict,
    do_nothing,
    is_initialized,
)
from anytrain.core.errors import RunIsOver


def test_a_reset_state_says_what_happened() -> None:
    state = PartialState(cpu=True)
    assert state.num_processes == 1
    state._reset_state()
    with pytest.raises(AttributeError, match="PartialState._reset_state"):
        _ = state.num_processes
    assert not is_initialized()


def test_a_name_that_no_state_has_is_an_ordinary_mistake() -> None:
    with pytest.raises(AttributeError, match="'PartialState' object has no attribute") as caught:
        _ = PartialState(cpu=True).nothing_like_it
    assert not isinstance(caught.value, RunIsOver)


def test_an_accelerator_whose_state_was_reset_refuses_to_go_on() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.state._reset_state()
    for use in (
        lambda: accelerator.num_processes,
        lambda: accelerator.device,
        lambda: accelerator.prepare(nn.Linear(1, 1)),
    ):
        with pytest.raises(RunIsOver, match="AcceleratorState._reset_state"):
            use()
    assert accelerator.is_main_process  # HF keeps the process's own state


def test_a_new_run_is_not_touched_by_the_reset_of_another() -> None:
    Accelerator(cpu=True)
    AcceleratorState._reset_state(True)
    assert Accelerator(cpu=True).num_processes == 1


def test_what_is_put_on_a_state_stays_there() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.state.mine = 3
    assert accelerator.state.mine == 3
    accelerator.state.distributed_type = DistributedType.FSDP
    assert accelerator.distributed_type == DistributedType.FSDP


def test_the_shared_dict_is_empty_before_a_run_and_tells_of_it_afterwards() -> None:
    assert PartialState._shared_state == GradientState._shared_state == {}
    Accelerator(cpu=True)
    assert AcceleratorState._shared_state["_cpu"] is True
    assert AcceleratorState._shared_state["device"] == torch.device("cpu")


def test_debug_mode_is_switched_for_every_view() -> None:
    state = PartialState(cpu=True)
    state.debug = True
    assert AcceleratorState().debug


def test_a_shared_dict_by_thread_is_a_dict_on_the_class() -> None:
    class Holder:
        shared = ThreadLocalSharedDict()

    Holder.shared["a"] = 1
    assert Holder().shared == {"a": 1}
    assert do_nothing(1, two=2) is None
