"""The device itself: its group of one, its full memory, its seeds."""

from __future__ import annotations

import subprocess

import torch
import torch.distributed as dist

from anytrain.doors.trainer.outputs import set_seed
from anytrain.machine.backends import probe
from anytrain.machine.parallel import torch_dist
from launching import run_script

_FULL = """
import os
import torch
from anytrain.machine.backends import probe
backend = probe.get("xla")
device = backend.device(0)
try:
    huge = torch.zeros(2**46, dtype=torch.uint8, device=device) + 1
    backend.synchronize(device)
except RuntimeError as error:
    print(backend.is_out_of_memory(error), backend.explain(error), flush=True)
os._exit(0)  # the runtime raises it once more at the end
"""


_TOO_LATE = """
import torch
torch.ones(1, requires_grad=True).sum().backward()
from anytrain import Accelerator
try:
    Accelerator()
except RuntimeError as error:
    print(error)
"""


def test_a_backward_pass_before_the_runtime_is_named_as_what_went_wrong() -> None:
    told = run_script(_TOO_LATE, env={"PJRT_DEVICE": "CPU", "ANYTRAIN_DEVICE": "xla"})
    assert "a backward pass ran here before torch_xla was started" in told.stdout


def test_a_group_of_one_process_carries_the_devices_tensors() -> None:
    device = probe.get("xla").device(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = torch_dist.make_xla_group()
    assert dist.get_backend(group) == "xla"
    value = torch.arange(3.0).to(device)
    dist.all_reduce(value, group=group)
    joined = torch.zeros(3).to(device)
    dist.all_gather_into_tensor(joined, value, group=group)
    assert joined.cpu().tolist() == [0.0, 1.0, 2.0]


def test_a_full_memory_is_recognised_and_explained() -> None:
    told: subprocess.CompletedProcess[str] = run_script(_FULL, env={"PJRT_DEVICE": "CPU"})
    assert told.stdout.startswith("True Out of memory on the XLA device")


def test_a_seed_reaches_the_device() -> None:
    device = probe.get("xla").device(0)
    set_seed(7)
    first = torch.rand(4, device=device).cpu()
    set_seed(7)
    assert torch.equal(torch.rand(4, device=device).cpu(), first)
    set_seed(8)
    assert not torch.equal(torch.rand(4, device=device).cpu(), first)
