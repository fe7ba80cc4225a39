"""A notebook that has used CUDA already is no obstacle, and a launcher never begins to use it."""

from __future__ import annotations

import pytest

from launching import run_script

pytestmark = pytest.mark.gpu

TRAIN = """
import os
import torch
from torch import nn
from anytrain import Accelerator, notebook_launcher

def train(model):
    accelerator = Accelerator()
    here = {str(p.device) for p in model.parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    loss = model(torch.ones(2, 4, device=accelerator.device)).sum()
    accelerator.backward(loss)
    optimizer.step()
    weight = accelerator.unwrap_model(model).weight
    return here, str(accelerator.device), os.getpid(), weight.detach()

if __name__ == "__main__":
"""


def test_the_launcher_does_not_touch_the_gpu():
    script = """
    here, device, pid, weight = notebook_launcher(
        train, (nn.Linear(4, 2),), num_processes=1, start_method="spawn")
    assert (here, device) == ({"cpu"}, "cuda:0"), (here, device)
    assert pid != os.getpid()
    assert weight.device.type == "cpu"
    assert not torch.cuda.is_initialized()
"""
    run_script(TRAIN + script)


def test_a_notebook_that_has_used_the_gpu_launches_a_process_that_uses_it_too():
    script = """
    import warnings
    from anytrain.core.errors import Notice
    torch.manual_seed(0)
    model = nn.Linear(4, 2).cuda()
    before = model.weight.detach().clone()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", Notice)
        here, device, pid, weight = notebook_launcher(
            train, (model,), num_processes=1, start_method="spawn")
    assert any("cuda:0" in str(w.message) for w in said), said
    assert (here, device) == ({"cpu"}, "cuda:0"), (here, device)
    assert pid != os.getpid()
    assert torch.equal(model.weight, before)
    assert torch.allclose(weight, before.cpu() - 0.1 * 2)
"""
    run_script(TRAIN + script)


def test_a_notebook_that_has_used_the_gpu_launches_one_process_for_each_gpu_there_is():
    script = """
    torch.ones(1, device="cuda")
    count = torch.cuda.device_count()
    values = notebook_launcher(
        train, (nn.Linear(4, 2),), num_processes=count, start_method="spawn", return_all=True)
    assert sorted(device for _, device, _, _ in values) == [f"cuda:{n}" for n in range(count)]
    os.environ["ANYTRAIN_DEVICE"] = "cpu"
    values = notebook_launcher(train, (nn.Linear(4, 2),), num_processes=2, return_all=True)
    assert [device for _, device, _, _ in values] == ["cpu", "cpu"]
"""
    run_script(TRAIN + script)


def test_a_fork_is_refused_after_the_gpu_was_used_and_says_what_lives_there():
    script = """
    from anytrain.core.errors import WrongOrder
    held = torch.ones(1, device="cuda")
    try:
        notebook_launcher(train, (nn.Linear(4, 2),), num_processes=1, start_method="fork")
    except WrongOrder as error:
        assert "a GPU has been used here" in error.why, error
        assert "`held`" in error.why, error
    else:
        raise AssertionError("it forked")
"""
    run_script(TRAIN + script)


def test_a_fork_of_an_untouched_process_may_use_the_gpu():
    script = """
    here, device, pid, weight = notebook_launcher(
        train, (nn.Linear(4, 2),), num_processes=1, start_method="fork")
    assert device == "cuda:0"
    assert pid != os.getpid()
    assert not torch.cuda.is_initialized()
"""
    run_script(TRAIN + script)
