"""A real notebook that has used the GPU already launches processes that use it, again and again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")

from jupyter_kernel import Kernel

pytestmark = pytest.mark.gpu

MODEL = """
import os
import torch
from torch import nn
from anytrain import Accelerator, notebook_launcher

torch.manual_seed(0)
model = nn.Linear(4, 2).cuda()
before = model(torch.ones(1, 4, device="cuda")).sum().item()
assert torch.cuda.is_initialized()
"""
TRAINING = """
def training_function(model):
    accelerator = Accelerator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    loss = model(torch.ones(2, 4, device=accelerator.device)).sum()
    accelerator.backward(loss)
    optimizer.step()
    accelerator.print(f"{accelerator.num_processes} on {accelerator.device}")
    return os.getpid(), str(accelerator.device), loss.item()
"""
LAUNCH = """
pid, device, loss = notebook_launcher(training_function, (model,), {options})
assert device == "cuda:0", device
assert {is_here}, (pid, os.getpid())
assert abs(loss - 2 * before) < 1e-4, (loss, before)
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    made = Kernel({})
    try:
        for cell in (MODEL, TRAINING):
            shown = made.run(cell)
            assert shown.error is None, shown.traceback
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("time", ["first", "second"])
def test_a_notebook_that_has_used_the_gpu_launches(kernel: Kernel, time: str) -> None:
    shown = kernel.run(
        LAUNCH.format(options="num_processes=1, start_method='spawn'", is_here="pid != os.getpid()")
    )
    assert shown.error is None, shown.traceback
    assert "1 on cuda:0" in shown.stdout


def test_the_guides_call_takes_all_gpus_there_are(kernel: Kernel) -> None:
    shown = kernel.run(
        "import copy  # with one GPU the notebook's own process trains what it is given\n"
        "values = notebook_launcher(training_function, (copy.deepcopy(model),), return_all=True)\n"
        "assert len(values) == torch.cuda.device_count(), values"
    )
    assert shown.error is None, shown.traceback
    assert "on cuda:0" in shown.stdout


def test_a_fork_is_refused_there(kernel: Kernel) -> None:
    shown = kernel.run(
        "notebook_launcher(training_function, (model,), num_processes=2, start_method='fork')"
    )
    assert shown.error is not None
    assert "fork" in shown.traceback and "CUDA" in shown.traceback.upper()


def test_an_error_in_the_launched_process_is_the_notebooks(kernel: Kernel) -> None:
    cell = """
def broken(model):
    Accelerator()
    raise KeyError("in the launched process")
notebook_launcher(broken, (model,), num_processes=1, start_method="spawn")
"""
    shown = kernel.run(cell)
    assert shown.error == "KeyError"
    assert "in the launched process" in shown.traceback


def test_the_notebook_goes_on_with_its_own_gpu(kernel: Kernel) -> None:
    shown = kernel.run(
        "assert model(torch.ones(1, 4, device='cuda')).sum().item() == before\nprint('goes on')"
    )
    assert shown.error is None, shown.traceback
    assert "goes on" in shown.stdout
