"""mps on Linux: choice, refusals and messages. What needs a Mac is listed in docs/testing.md."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from anytrain.core import environment
from anytrain.core.errors import BadInput, DeviceBroken, Notice
from anytrain.core.facts import Found, NotFound
from anytrain.core.plan import Wish, Wishes
from anytrain.machine.backends import mps, probe
from anytrain.machine.backends.mps import Mps

# The words of torch 2.13 (aten/src/ATen/mps/MPSFallback.mm).
MISSING = (
    "The operator 'aten::linalg_eigh' is not currently implemented for the MPS device. If you "
    "want this op to be considered for addition please comment on ... As a temporary fix, you "
    "can set the environment variable `PYTORCH_ENABLE_MPS_FALLBACK=1` to use the CPU as a "
    "fallback for this op."
)


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the process believe that it runs on a Mac."""

    def become(version: str, built: bool = True, there: bool = True, chip: str = "arm64") -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        # In that file alone: psutil, imported meanwhile, must go on seeing the real platform.
        monkeypatch.setattr(mps, "sys", SimpleNamespace(platform="darwin"))
        monkeypatch.setattr(platform, "machine", lambda: chip)
        monkeypatch.setattr(platform, "mac_ver", lambda: (version, ("", "", ""), chip))
        monkeypatch.setattr(torch.backends.mps, "is_built", lambda: built)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: there)
        monkeypatch.setattr(mps, "chip", lambda: "Apple M2 Pro")

    return become


@pytest.mark.parametrize("version", ["12.3", "12.3.1", "13.0", "14.5", "26.0.1"])
def test_a_mac_with_apple_silicon_gets_mps_without_naming_it(
    mac: Callable[..., None], version: str
) -> None:
    mac(version)
    answer = Mps().probe()
    assert answer == Found(f"Apple M2 Pro, macOS {version}", 1)
    assert probe.choose(None).name == "mps"


@pytest.mark.parametrize("version", ["11.7.10", "12.0", "12.2.1"])
def test_an_old_macos_is_named_with_the_one_that_is_needed(
    mac: Callable[..., None], version: str
) -> None:
    mac(version)
    with pytest.raises(DeviceBroken) as caught:
        probe.choose(None)
    assert f"macOS {version} is too old: mps needs macOS 12.3 or newer" in caught.value.why
    assert "update macOS" in caught.value.fix
    assert "ANYTRAIN_DEVICE=cpu" in caught.value.fix
    assert probe.choose(Wish("cpu", "argument")).name == "cpu"


def test_a_torch_without_mps_on_a_mac_is_broken_and_says_so(mac: Callable[..., None]) -> None:
    mac("14.5", built=False, there=False)
    answer = Mps().probe()
    assert isinstance(answer, NotFound)
    assert answer.broken
    assert "built without mps" in answer.because


def test_a_mac_without_a_metal_device_is_broken_and_says_so(mac: Callable[..., None]) -> None:
    mac("14.5", there=False)
    answer = Mps().probe()
    assert isinstance(answer, NotFound)
    assert answer.broken
    assert "no Metal device" in answer.because


def test_an_intel_mac_has_no_mps_and_nothing_is_broken(mac: Callable[..., None]) -> None:
    mac("13.6", chip="x86_64")
    answer = Mps().probe()
    assert isinstance(answer, NotFound)
    assert not answer.broken


def test_one_process_and_one_device_are_all_there_is() -> None:
    assert Mps().process_group is None
    assert Mps().process_counts() == (1,)
    with pytest.raises(BadInput, match="one GPU"):
        Mps().device(1)
    with pytest.raises(BadInput, match="one GPU"):
        Mps(1).device(0)


def test_float64_is_cast_at_placement_and_told_once() -> None:
    mps._tell_narrowed.cache_clear()
    stand_in = torch.device("cpu")
    wide = torch.tensor([0.5, 2.0], dtype=torch.float64)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            placed = Mps().place(wide, stand_in, non_blocking=True)
    assert placed.dtype is torch.float32
    assert placed.tolist() == [0.5, 2.0]
    assert wide.dtype is torch.float64
    assert [w.category for w in told] == [Notice]
    assert "mps has no float64" in str(told[0].message)


def test_other_dtypes_are_placed_as_they_are_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            assert Mps().place(torch.ones(2, dtype=dtype), torch.device("cpu"), True).dtype is dtype


def test_children_are_launched_with_the_fallback_unless_the_user_said_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(environment.MPS_FALLBACK, raising=False)
    assert Mps().launch_environment(1, Wishes()) == {environment.MPS_FALLBACK: "1"}
    monkeypatch.setenv(environment.MPS_FALLBACK, "0")
    assert Mps().launch_environment(1, Wishes()) == {}


@pytest.mark.parametrize("value", [None, "1"])
def test_a_missing_op_says_that_torch_came_first(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.setattr(environment, "_torch_came_first", True)
    monkeypatch.delenv(environment.MPS_FALLBACK, raising=False)
    if value:
        monkeypatch.setenv(environment.MPS_FALLBACK, value)
    text = Mps().explain(NotImplementedError(MISSING))
    assert text is not None
    assert "aten::linalg_eigh" in text
    assert "torch was imported before anytrain" in text
    assert "Import anytrain before torch" in text


def test_a_missing_op_says_that_the_user_switched_the_fallback_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "_torch_came_first", True)
    monkeypatch.setenv(environment.MPS_FALLBACK, "0")
    text = Mps().explain(NotImplementedError(MISSING))
    assert text is not None
    assert "PYTORCH_ENABLE_MPS_FALLBACK=0 forbids" in text


def test_any_other_error_of_mps_comes_as_a_block_to_paste(mac: Callable[..., None]) -> None:
    mac("14.5")

    def forward(hidden: torch.Tensor) -> None:
        raise RuntimeError("MPS: aten::foo.out failed\nwith more lines")

    with pytest.raises(RuntimeError) as caught:
        forward(torch.ones(8, 128, dtype=torch.bfloat16))
    text = Mps().explain(caught.value)
    assert text is not None
    assert text.count("```") == 2
    for part in (
        "error: RuntimeError: MPS: aten::foo.out failed",
        "op: aten::foo.out",
        "tensor: hidden bfloat16 [8, 128] on cpu",
        f"torch: {torch.__version__}",
        "macOS: 14.5 on Apple M2 Pro",
    ):
        assert part in text


def test_an_error_without_an_op_shows_the_line_that_failed(mac: Callable[..., None]) -> None:
    mac("14.5")

    def attend() -> None:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    with pytest.raises(TypeError) as caught:
        attend()
    text = Mps().explain(caught.value)
    assert text is not None
    assert "op: in attend: raise TypeError" in text


def test_errors_that_do_not_speak_of_mps_are_left_alone() -> None:
    assert Mps().explain(RuntimeError("shapes do not match")) is None
    assert Mps().explain(KeyError("mps")) is None
    assert Mps().explain(BadInput("mps", why="mps", fix="mps")) is None


def test_out_of_memory_is_told_from_other_errors() -> None:
    full = RuntimeError("MPS backend out of memory (MPS allocated: 17.00 GB, max allowed: 18 GB)")
    assert Mps().is_out_of_memory(full)
    assert not Mps().is_out_of_memory(RuntimeError("MPS: something else"))


_FALLBACKS = """
import warnings
warnings.simplefilter("ignore")
import torch
from anytrain.machine.backends.mps import show_fallback_once
show_fallback_once()
show_fallback_once()
assert torch.is_warn_always_enabled()
def fall(op):
    warnings.warn(f"The operator 'aten::{op}' is not currently supported on the MPS backend and "
                  "will fall back to run on the CPU. This may have performance implications.")
for _ in range(3):
    fall("linalg_svd")
    fall("col2im")
fall("linalg_svd")
warnings.warn("something else")
"""


def test_each_op_that_falls_back_is_shown_once_and_never_swallowed() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _FALLBACKS], capture_output=True, text=True, check=True, timeout=280
    )
    assert ran.stderr.count("'aten::linalg_svd'") == 1
    assert ran.stderr.count("'aten::col2im'") == 1
    assert "something else" not in ran.stderr


@pytest.mark.parametrize(
    ("imports", "exported", "value"),
    [
        ("import anytrain, torch", None, "on"),
        ("import anytrain, torch", "0", "off"),
        ("import torch, anytrain", None, "off"),
    ],
)
def test_the_fallback_counts_only_if_it_is_set_before_torch_is_loaded(
    imports: str, exported: str | None, value: str
) -> None:
    # Only the name of the platform is changed, and put back before torch looks at it.
    program = f"""
import sys
import {"torch" if imports.startswith("import torch") else "os"}
real, sys.platform = sys.platform, "darwin"
import anytrain
sys.platform = real
import torch
from anytrain.core import environment
choice = environment.mps_fallback()
print(choice.value, "|", choice.because)
"""
    env = {n: v for n, v in os.environ.items() if n != environment.MPS_FALLBACK}
    if exported is not None:
        env[environment.MPS_FALLBACK] = exported
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=env,
        timeout=280,
    )
    told, because = ran.stdout.strip().split(" | ")
    assert told == value
    assert because
