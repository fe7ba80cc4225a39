"""Whether bf16 pays on this processor is measured, kept, and told."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from anytrain.core.facts import Capabilities, Gain, JobFacts
from anytrain.core.plan import Choice, Wish, Wishes, resolve
from anytrain.machine.backends import capabilities

CPU = Capabilities("cpu", "cpu", "a processor", ("float32", "bfloat16"), process_group="gloo")
AUTO = Wishes(precision=Wish("auto", "argument"))


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of figures of a machine on which nothing has run yet."""
    monkeypatch.setenv("ANYTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/machine.json"


def _precision(gain: Gain) -> Choice:
    machine = Capabilities("cpu", "cpu", "a processor", CPU.dtypes, bf16_gain=gain)
    return resolve(AUTO, machine, JobFacts(), 1).precision


def test_measuring_is_short_and_leaves_no_trace() -> None:
    generator, threads = torch.get_rng_state(), torch.get_num_threads()
    capabilities.measure_bf16_gain()  # makes the kernels
    begin = time.process_time()
    assert capabilities.measure_bf16_gain() > 0
    assert time.process_time() - begin < 1.0  # 0.2 s, where nothing disturbs it
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.get_num_threads() == threads
    with torch.inference_mode():
        assert capabilities.measure_bf16_gain(0.0) > 0


def test_a_figure_is_measured_once_and_then_taken_from_the_users_cache(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = capabilities.bf16_gain("a processor")
    assert first.factor > 0

    def again() -> float:
        raise AssertionError("measured again")

    with monkeypatch.context() as patched:
        patched.setattr(capabilities, "measure_bf16_gain", again)
        assert capabilities.bf16_gain("a processor") == first
        with pytest.raises(AssertionError, match="measured again"):
            capabilities.bf16_gain("another processor")
    capabilities.bf16_gain("another processor")
    assert len(json.loads(kept.read_text())) == 2
    assert [file.name for file in kept.parent.iterdir()] == [kept.name]


@pytest.mark.parametrize("text", ["", "[]", '{"a processor', '{"KEY": {"bf16_gain": "x"}}'])
def test_a_damaged_file_is_made_anew(kept: Path, text: str) -> None:
    kept.parent.mkdir()
    kept.write_text(text.replace("KEY", f"a processor, torch {torch.__version__}"))
    found = capabilities.bf16_gain("a processor")
    assert capabilities.bf16_gain("a processor") == found
    assert list(json.loads(kept.read_text())) == [f"a processor, torch {torch.__version__}"]


def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ANYTRAIN_CACHE", str(tmp_path / "file"))
    assert capabilities.bf16_gain("a processor").factor > 0


def test_the_plan_takes_bf16_where_it_gains_enough_and_tells_the_figure() -> None:
    fast = _precision(Gain(2.14, "2026-11-15"))
    assert fast.value == "bf16"
    assert "bf16 is 2.1 times as fast as fp32 here, measured on 2026-11-15" in fast.because
    slow = _precision(Gain(1.04, "2026-11-15"))
    assert slow.value == "no"
    assert "1.0 times" in slow.because


def test_nobody_waits_for_a_figure_that_decides_nothing() -> None:
    assert capabilities.wants_bf16_gain(AUTO, CPU)
    assert not capabilities.wants_bf16_gain(Wishes(), CPU)
    assert not capabilities.wants_bf16_gain(Wishes(precision=Wish("bf16", "argument")), CPU)
    gpu = Capabilities("cuda", "cuda:0", "a GPU", CPU.dtypes)
    assert not capabilities.wants_bf16_gain(AUTO, gpu)
    assert not capabilities.wants_bf16_gain(
        AUTO, Capabilities("cpu", "cpu", "an old one", ("float32",))
    )
