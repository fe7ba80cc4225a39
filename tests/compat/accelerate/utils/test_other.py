"""Odds and ends: files, ports, names, wrapped and compiled models, versions, options."""

from __future__ import annotations

import logging
import os
import platform
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import nn

from anytrain.compat.accelerate import Accelerator, PartialState
from anytrain.compat.accelerate.utils import (
    DynamoBackend,
    PrecisionType,
    ProfileKwargs,
    TorchDynamoPlugin,
    clear_environment,
    compare_versions,
    find_executable_batch_size,
    imports,
    is_torch_version,
    memory,
    other,
    set_seed,
    synchronize_rng_state,
)
from anytrain.core.errors import BadInput, NothingFits, Unsupported


def test_an_object_is_written_and_read_back(tmp_path: Path) -> None:
    PartialState(cpu=True)
    for name, safe in (("a.pt", False), ("a.safetensors", True)):
        other.save({"x": torch.ones(2)}, tmp_path / name, safe_serialization=safe)
        assert (tmp_path / name).exists()
    assert other.load(tmp_path / "a.pt")["x"].tolist() == [1.0, 1.0]
    with (tmp_path / "open.pt").open("wb") as file:
        other.save([1, 2], file)
    assert other.load(tmp_path / "open.pt") == [1, 2]
    other.wait_for_everyone()


def test_a_shared_tensor_is_written_once_and_named(caplog: pytest.LogCaptureFixture) -> None:
    PartialState(cpu=True)
    shared = torch.ones(2, 2)
    with caplog.at_level(logging.WARNING):
        kept = other.clean_state_dict_for_safetensors({"a": shared, "b": shared, "c": "text"})
    assert list(kept) == ["a", "c"]
    assert "b (saved as a)" in caplog.text


def test_a_model_is_taken_out_of_its_wrappers() -> None:
    PartialState(cpu=True)
    model = nn.Linear(2, 2)
    wrapped = nn.DataParallel(model)
    assert other.extract_model_from_parallel(wrapped) is model
    compiled = torch.compile(wrapped)
    assert other.extract_model_from_parallel(compiled, keep_torch_compile=False) is model
    kept = other.extract_model_from_parallel(torch.compile(nn.DataParallel(model)))
    assert kept._orig_mod is model
    assert other.is_compiled_module(kept)
    outer = nn.Sequential(nn.DataParallel(model))
    assert other.extract_model_from_parallel(outer, recursive=True)[0] is model


def test_repeated_blocks_are_compiled_one_by_one() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model.head = nn.Linear(2, 1)
    twin = other.compile_regions(model, backend="eager")
    assert twin._orig_mod is model
    assert twin.blocks[0]._orig_mod is model.blocks[0]
    assert twin.head._orig_mod is model.head
    assert other.has_compiled_regions(twin)
    assert not other.has_compiled_regions(model)
    assert torch.equal(twin.head(torch.ones(1, 2)), model.head(torch.ones(1, 2)))


def test_small_questions_have_answers() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    assert other.get_pretty_name(model) == "Sequential"
    assert other.get_pretty_name(len) == "len"
    assert other.merge_dicts({"a": {"x": 1}, "b": 2}, {"a": {"y": 3}}) == {
        "a": {"y": 3, "x": 1},
        "b": 2,
    }
    assert other.recursive_getattr(model, "0.weight") is model[0].weight
    assert other.convert_bytes(3 * 1024**2) == "3.0 MB"
    assert other.get_module_children_bottom_up(model) == [model[0], model]
    assert other.get_module_children_bottom_up(model, return_fqns=True)[0][0] == "0"
    assert not other.model_has_dtensor(model)
    assert other.get_model_tp_size(model) is None
    model.config = SimpleNamespace(distributed_config={"tp_size": 8})
    assert other.get_model_tp_size(model) == 8


def test_a_port_is_in_use_while_somebody_listens() -> None:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        server.listen()
        port = server.getsockname()[1]
        assert other.is_port_in_use(port)
    assert not other.is_port_in_use(port)
    assert other.get_free_port() > 0


@pytest.mark.parametrize(("release", "said"), [("5.4.0-35", True), ("6.1.0", False)])
def test_an_old_kernel_is_warned_of(
    release: str, said: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    PartialState(cpu=True)
    monkeypatch.setattr(platform, "uname", lambda: SimpleNamespace(system="Linux", release=release))
    other.check_os_kernel()
    assert ("5.5.0" in caplog.text) is said


def test_a_launch_file_is_written_where_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYTRAIN_DEVICE", "cpu")
    path = tmp_path / "new" / "launch.yaml"
    assert other.write_basic_config("bf16", path) == path
    told = yaml.safe_load(path.read_text())
    assert told["mixed_precision"] == "bf16"
    assert other.write_basic_config("bf16", path) is False
    with pytest.raises(BadInput, match="where"):
        other.write_basic_config()


def test_a_batch_that_does_not_fit_is_tried_with_a_tenth_less() -> None:
    tried = []

    @find_executable_batch_size(starting_batch_size=20)
    def train(size: int) -> int:
        tried.append(size)
        if size > 14:
            raise RuntimeError("CUDA out of memory.")
        return size

    assert train() == 14
    assert tried == [20, 18, 16, 14]
    assert memory.should_reduce_batch_size(RuntimeError("out of memory"))
    memory.clear_device_cache(garbage_collection=True)
    with pytest.raises(NothingFits):
        find_executable_batch_size(lambda size: size, starting_batch_size=0)()


def test_versions_are_compared() -> None:
    assert is_torch_version(">=", "2.0")
    assert not is_torch_version("<", "2.0.0")
    assert compare_versions("torch", "!=", "1.0")
    with pytest.raises(BadInput, match="~="):
        compare_versions("torch", "~=", "2")


def test_what_anytrain_does_not_do_is_not_available() -> None:
    assert not imports.is_deepspeed_available()
    assert not imports.is_npu_available(check_device=True)
    assert not imports.is_fp8_available()
    assert imports.is_pytest_available()
    assert imports.is_numpy_available("1.20")
    assert imports.is_weights_only_available()
    assert imports.is_torch_distributed_available()


def test_a_function_that_needs_another_engine_refuses_when_called() -> None:
    @imports.deepspeed_required
    def shard() -> None:
        raise AssertionError

    @imports.torchao_required
    def to_fp8() -> None:
        raise AssertionError

    for function in (shard, to_fp8):
        with pytest.raises(Unsupported, match=function.__name__):
            function()


def test_the_compilers_options_come_from_hfs_variables() -> None:
    with clear_environment():
        assert TorchDynamoPlugin().to_kwargs() == {}
        os.environ.update(ACCELERATE_DYNAMO_BACKEND="eager", ACCELERATE_DYNAMO_USE_DYNAMIC="1")
        plugin = TorchDynamoPlugin()
    assert plugin.backend is DynamoBackend.EAGER
    assert plugin.to_kwargs() == {"backend": "eager", "dynamic": True}
    with pytest.raises(Unsupported, match="regions"):
        TorchDynamoPlugin(use_regional_compilation=True)


def test_a_word_is_in_its_enum() -> None:
    assert "bf16" in PrecisionType
    assert "bf17" not in PrecisionType
    assert PrecisionType.list() == ["no", "fp8", "fp16", "bf16"]


def test_a_profiler_can_be_built_from_its_options() -> None:
    Accelerator(cpu=True)
    with ProfileKwargs(activities=["cpu"]).build() as profiler:
        torch.ones(1).sum()
    assert profiler.key_averages()


def test_seeds_are_shared() -> None:
    PartialState(cpu=True)
    set_seed(7)
    first = torch.rand(1)
    set_seed(7)
    synchronize_rng_state("torch")
    assert torch.rand(1) == first
