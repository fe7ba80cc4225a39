"""torch_tpu without a TPU: the contract with its Python side, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from anytrain.core.errors import BadInput, DeviceBroken
from anytrain.core.facts import NotFound
from anytrain.machine.backends import capabilities, probe, tpu, xla
from anytrain.machine.backends.tpu import Tpu

# torch_tpu may lie in a folder of its own (tools/tpu_env.py): only the children load it.
_FOLDER = os.environ.get("ANYTRAIN_TEST_TORCH_TPU", "")
needs_torch_tpu = pytest.mark.skipif(
    not _FOLDER and find_spec("torch_tpu") is None,
    reason="torch_tpu is not installed, and ANYTRAIN_TEST_TORCH_TPU names no folder of it",
)
without_torch_tpu = pytest.mark.skipif(
    find_spec("torch_tpu") is not None, reason="torch_tpu is installed here"
)

# The first tensor on the pretended chip would abort the process: nothing here makes one.
_PRETEND = """
import torch_tpu._internal.utils.hardware as hardware
hardware.get_tpu_device_count = lambda: 4
hardware._scan_pci_tpus = lambda: (4, hardware._V5E_TOPOLOGY)
hardware.get_tpu_device_name = lambda: "TPU v5e"
import torch_tpu._loader
torch_tpu._loader.load()
import torch
from anytrain.machine.backends import tpu
tpu.tpu_chips = lambda: ("TPU v5e",) * 4
"""


def _run(program: str, *arguments: str, **variables: str) -> str:
    env = {
        **os.environ,
        "TPU_SKIP_MDS_QUERY": "1",  # else libtpu asks a metadata server for minutes
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "PYTHONPATH": os.pathsep.join(p for p in (_FOLDER, os.environ.get("PYTHONPATH")) if p),
        **variables,
    }
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
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD")
    answer = Tpu().probe()
    assert isinstance(answer, NotFound)
    assert "/dev/vfio" in answer.fix


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
    late = RuntimeError("the TPU ran out of memory while awaiting the materialization of value")
    assert Tpu().is_out_of_memory(late)


def test_a_forked_process_is_told_to_start_a_fresh_one() -> None:
    said = "cannot access or re-initialize TPU in a forked subprocess. To use TPU with ..."
    assert "fresh processes" in (Tpu().explain(RuntimeError(said)) or "")
    assert Tpu().explain(RuntimeError("something else")) is None


def test_a_mesh_that_was_described_for_another_number_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_TPU_SLICEBUILDER_ADDRESSES", "a:1,b:2")
    with pytest.raises(BadInput, match="lists 2 of them"):
        tpu._check_addresses("a:1,b:2", 4)
    tpu._check_addresses("a:1,b:2", 2)


@needs_torch_tpu
def test_torch_tpu_answers_as_this_backend_expects() -> None:
    told = _run(
        """
import json, torch.distributed, warnings
from anytrain.engine.precision import build
from anytrain.machine.backends.tpu import Tpu
warnings.simplefilter("error")
device = torch.device("tpu", 0)
module = torch.get_device_module(device)
names, maps = hardware._PCI_DEVICE_ID_TO_NAME, hardware._TOPOLOGY_BY_TPU_PCI_DEVICE_ID
with tpu._without_stage_warnings():
    Tpu().probe(), Tpu().process_counts()  # what a launcher asks in the parent
    touched = module.is_initialized()
counters = torch.accelerator.memory_stats("tpu")
mixed = []
for name in ("bf16", "fp16"):
    with build(name, "tpu").autocast():
        assert torch.is_autocast_enabled("tpu")
        mixed.append(str(torch.get_autocast_dtype("tpu")))
try:
    refused = torch.tpu.is_available()
except RuntimeError as error:
    refused = str(error)
print(json.dumps({
    "found": Tpu().probe().num_devices,
    "counts": Tpu().process_counts(),
    "group": torch.distributed.get_default_backend_for_device("tpu"),
    "compiled": Tpu().compilations(),
    "seeds": all(hasattr(module, n) for n in ("manual_seed_all", "set_rng_state")),
    "total": tpu._total_memory(device),
    "forked": module._is_in_bad_fork(),
    "meters": all(f"allocated_bytes.all.{what}" in counters for what in ("current", "peak")),
    "mixed": mixed,
    "refused": "torch.accelerator.is_available" in refused,
    "touched": touched,
    "table": {names[number]: sorted(parts) for number, parts in maps.items()},
}))
"""
    )
    found = json.loads(told)
    table = found.pop("table")
    assert found == {
        "found": 4,
        "counts": [1, 4],
        "group": "tpu_dist",
        "compiled": 0,
        "seeds": True,
        "total": 16 * 2**30,
        "forked": False,
        "meters": True,
        "mixed": ["torch.bfloat16", "torch.float16"],
        "refused": True,
        "touched": False,
    }
    assert table == {name: sorted(counts) for name, counts in tpu._COUNTS.items()}
    assert set(table) <= set(capabilities._TPU_NAMES.values())


@needs_torch_tpu
def test_torch_tpu_describes_the_mesh_to_its_processes() -> None:
    told = json.loads(_run(tpu._ASK_LAUNCH_ENVIRONMENT, "4", TPU_WORKER_HOSTNAMES="one"))
    assert told["TORCH_TPU_TOPOLOGY"] == "2,2,1"
    assert len(told["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",")) == 4
    assert all(name.startswith("TORCH_TPU_") for name in told)


@needs_torch_tpu
def test_a_tpu_that_does_not_start_is_broken_and_says_why() -> None:
    told = _run(
        """
from anytrain.core.errors import DeviceBroken
try:
    tpu.Tpu().device(0)
except DeviceBroken as error:
    print("broken:", error.why)
"""
    )
    assert told.startswith("broken: ")
    assert "TPU initialization failed" in told
