from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from anytrain.core.errors import BadInput, DeviceBroken, WrongOrder
from anytrain.core.facts import Found, NotFound
from anytrain.core.plan import Wish
from anytrain.machine.backends import cuda, probe
from anytrain.machine.backends.cuda import Cuda

GPU = torch.device("cuda", 0)
without_gpu = pytest.mark.skipif(
    torch.cuda.device_count() > 0, reason="torch sees a GPU here, so none can be missing"
)


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a program of that name first on the path."""

    def install(body: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return install


LISTING = 'echo "GPU 0: NVIDIA H100 PCIe (UUID: GPU-1234)"'


@without_gpu
def test_a_gpu_that_torch_cannot_use_is_broken_and_named(
    nvidia_smi: Callable[[str], None],
) -> None:
    nvidia_smi(LISTING)
    answer = Cuda().probe()
    assert isinstance(answer, NotFound)
    assert answer.broken
    assert "NVIDIA H100 PCIe is here" in answer.because
    assert "UUID" not in answer.because
    with pytest.raises(DeviceBroken, match="ANYTRAIN_DEVICE=cpu"):
        probe.choose(None)
    assert probe.choose(Wish("cpu", "argument")).name == "cpu"


@without_gpu
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")
def test_a_gpu_under_a_torch_without_cuda_asks_for_another_build(
    nvidia_smi: Callable[[str], None],
) -> None:
    nvidia_smi(LISTING)
    answer = Cuda().probe()
    assert isinstance(answer, NotFound)
    assert "built without CUDA" in answer.because
    assert "install a CUDA build of torch" in answer.fix


@without_gpu
@pytest.mark.parametrize("body", ["echo 'driver not loaded' >&2; exit 9", "true", "exit 127"])
def test_a_driver_program_without_a_gpu_breaks_nothing(
    nvidia_smi: Callable[[str], None], body: str
) -> None:
    nvidia_smi(body)
    answer = Cuda().probe()
    assert isinstance(answer, NotFound)
    assert not answer.broken


@pytest.mark.parametrize("hidden", ["", "-1", " ", "NoDevFiles"])
def test_a_hidden_gpu_is_not_found_and_not_broken(
    nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    nvidia_smi(LISTING)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    answer = Cuda().probe()
    assert isinstance(answer, NotFound)
    assert not answer.broken
    assert "CUDA_VISIBLE_DEVICES" in answer.because


def test_each_rank_gets_its_own_gpu_or_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr(cuda, "_count", lambda: (2, ""))
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert Cuda().device(1) == torch.device("cuda", 1)
    assert Cuda(1).device(0) == torch.device("cuda", 1)
    assert taken == [torch.device("cuda", 1)] * 2
    with pytest.raises(BadInput, match=r"sees 2 GPU\(s\)"):
        Cuda().device(2)
    assert Cuda().process_counts() == (1, 2)
    assert Cuda(1).process_counts() == (1,)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match="2 processes the device cuda:1"):
        Cuda(1).device(0)


def test_a_task_that_srun_shows_one_gpu_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_count", lambda: (1, ""))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name, value in {"STEP_ID": "0", "PROCID": "3", "NTASKS": "4", "LOCALID": "3"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert Cuda().device(3) == GPU


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (RuntimeError("The NVIDIA driver on your system is too old"), DeviceBroken),
        (AssertionError("Torch not compiled with CUDA enabled"), DeviceBroken),
        (RuntimeError("Cannot re-initialize CUDA in forked subprocess. Use spawn"), WrongOrder),
    ],
)
def test_a_gpu_that_does_not_start_is_an_error_of_ours(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, expected: type[Exception]
) -> None:
    def fail(device: torch.device) -> None:
        raise raised

    monkeypatch.setattr(cuda, "_count", lambda: (1, ""))
    monkeypatch.setattr(torch.cuda, "set_device", fail)
    with pytest.raises(expected):
        Cuda().device(0)


def test_an_assert_on_the_device_is_explained() -> None:
    text = Cuda().explain(RuntimeError("CUDA error: device-side assert triggered"))
    assert text is not None
    assert "label or token id" in text


@pytest.mark.gpu
def test_the_gpu_is_the_automatic_choice_and_computes_in_all_dtypes() -> None:
    chosen = probe.choose(None)
    assert chosen.name == "cuda"
    facts = chosen.capabilities(chosen.device(0))
    assert {"float32", "float16", "float64"} <= set(facts.dtypes)
    assert facts.scales_gradients
    assert facts.fuses_optimizer
    assert facts.memory_bytes is not None
    assert facts.memory_bytes > 2**30


_PROBE_THEN_FORK = """
import os, torch
from anytrain.machine.backends import probe
chosen = probe.choose(None)
probe.survey()
assert chosen.name == "cuda", chosen
assert not torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    device = chosen.device(0)
    ok = float(torch.ones(4, device=device).sum()) == 4
    os._exit(0 if ok else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
"""


@pytest.mark.gpu
def test_a_forked_child_can_use_the_gpu_after_its_parent_has_probed() -> None:
    subprocess.run([sys.executable, "-c", _PROBE_THEN_FORK], check=True, timeout=200)


_USE_THEN_FORK = """
import os, torch
from anytrain.core.errors import WrongOrder
from anytrain.machine.backends.cuda import Cuda
torch.ones(1, device=Cuda().device(0))
child = os.fork()
if child == 0:
    try:
        Cuda().device(0)
    except WrongOrder:
        os._exit(0)
    os._exit(1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
"""


@pytest.mark.gpu
def test_a_fork_after_cuda_was_used_is_refused_with_the_reason() -> None:
    subprocess.run([sys.executable, "-c", _USE_THEN_FORK], check=True, timeout=200)


@pytest.mark.gpu
def test_out_of_gpu_memory_is_explained_in_three_lines_and_released() -> None:
    backend = Cuda()
    device = backend.device(0)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**44, dtype=torch.uint8, device=device)
    text = backend.explain(caught.value)
    assert text is not None
    assert len(text.splitlines()) == 3
    assert "asked for" in text
    kept = torch.empty(2**26, dtype=torch.uint8, device=device)
    assert (backend.memory(device).used_bytes or 0) >= 2**26
    before = torch.cuda.memory_reserved(device)
    del kept
    backend.release()
    assert torch.cuda.memory_reserved(device) < before


@pytest.mark.gpu
def test_a_pinned_batch_arrives_whole() -> None:
    backend = Cuda()
    device = backend.device(0)
    source = torch.arange(2**20).pin_memory()
    assert torch.equal(backend.place(source, device, False).cpu(), source)


@pytest.mark.gpu
def test_process_counts_go_up_to_one_per_gpu() -> None:
    answer = Cuda().probe()
    assert isinstance(answer, Found)
    assert Cuda().process_counts() == tuple(range(1, answer.num_devices + 1))
    with pytest.raises(BadInput):
        Cuda().device(answer.num_devices)
