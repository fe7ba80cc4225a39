"""torch_tpu without a TPU: the contract with its Python side, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from anytrain.core.errors import DeviceBroken
from anytrain.core.facts import NotFound
from anytrain.machine.backends import probe, tpu, xla
from anytrain.machine.backends.tpu import Tpu

needs_torch_tpu = pytest.mark.skipif(
    find_spec("torch_tpu") is None, reason="torch_tpu is not installed"
)
without_torch_tpu = pytest.mark.skipif(
    find_spec("torch_tpu") is not None, reason="torch_tpu is installed here"
)

# The first tensor on the pretended chip would abort the process: nothing here makes one.
_PRETEND = """
import torch_tpu._internal.utils.hardware as hardware
hardware.get_tpu_device_count = lambda: 4
hardware._scan_pci_tpus = lambda: (4, hardware._V5E_TOPOLOGY)
import torch_tpu._loader
torch_tpu._loader.load()
from anytrain.machine.backends import tpu
tpu.tpu_chips = lambda: ("TPU v5e",) * 4
"""


def _run(program: str, *arguments: str) -> str:
    env = {**os.environ, "TPU_SKIP_MDS_QUERY": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    ran = subprocess.run(
        [sys.executable, "-c", _PRETEND + program, *arguments],
        capture_output=True,
        text=True,
        env=env,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout.strip().splitlines()[-1]


@without_torch_tpu
def test_a_chip_that_no_library_serves_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "tpu_chips", lambda: ("TPU v5e",) * 4)
    monkeypatch.setattr(tpu, "find_spec", lambda name: None)
    with pytest.raises(DeviceBroken, match="TPU v5e is here, but torch_tpu is not installed"):
        probe.choose(None)


@without_torch_tpu
def test_a_chip_that_torch_xla_may_serve_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "tpu_chips", lambda: ("TPU v5e",))
    monkeypatch.setattr(tpu, "find_spec", lambda name: object() if name == "torch_xla" else None)
    answer = Tpu().probe()
    assert isinstance(answer, NotFound)
    assert not answer.broken


def test_a_chip_that_torch_tpu_did_not_load_for_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "tpu_chips", lambda: ("TPU v6e",))
    monkeypatch.setattr(tpu, "find_spec", lambda name: object())
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    answer = Tpu().probe()
    assert isinstance(answer, NotFound)
    assert answer.broken
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in answer.because


@pytest.mark.parametrize(
    ("chips", "counts"),
    [
        (("TPU v5e",) * 4, (1, 4)),
        (("TPU v6e",) * 8, (1, 4, 8)),
        (("TPU v4",) * 4, (1, 2, 4)),
        (("TPU v7",) * 4, (2, 4)),
    ],
)
def test_process_counts_are_whole_parts_of_the_board(
    monkeypatch: pytest.MonkeyPatch, chips: tuple[str, ...], counts: tuple[int, ...]
) -> None:
    monkeypatch.setattr(tpu, "tpu_chips", lambda: chips)
    monkeypatch.setattr(tpu.torch.accelerator, "device_count", lambda: len(chips))
    assert Tpu().process_counts() == counts


def test_a_full_tpu_is_recognised_by_its_runtimes_word() -> None:
    full = RuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm")
    assert Tpu().is_out_of_memory(full)
    assert "smaller batch" in (Tpu().explain(full) or "")
    assert xla.Xla().is_out_of_memory(full)


@needs_torch_tpu
def test_torch_answers_for_a_tpu_as_this_backend_expects() -> None:
    told = _run(
        """
import json, torch, torch.distributed
from anytrain.machine.backends.tpu import Tpu
answer = Tpu().probe()
module = torch.get_device_module(torch.device("tpu"))
print(json.dumps({
    "found": answer.num_devices,
    "counts": Tpu().process_counts(),
    "group": torch.distributed.get_default_backend_for_device("tpu"),
    "compiled": Tpu().compilations(),
    "seeds": all(hasattr(module, n) for n in ("manual_seed_all", "set_rng_state")),
}))
"""
    )
    expected = {"found": 4, "counts": [1, 4], "group": "tpu_dist", "compiled": 0, "seeds": True}
    assert json.loads(told) == expected


@needs_torch_tpu
def test_torch_tpu_describes_the_mesh_to_its_processes() -> None:
    told = json.loads(_run(tpu._ASK_LAUNCH_ENVIRONMENT, "4"))
    assert told["TORCH_TPU_TOPOLOGY"] == "2,2,1"
    assert len(told["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",")) == 4
