"""A model's tensors: named, weighed, moved one by one, and loaded from files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from anytrain.compat.accelerate import Accelerator
from anytrain.compat.accelerate.utils import CustomDtype, modeling
from anytrain.core.errors import BadInput, Unsupported


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def test_tensors_are_named_parameters_first() -> None:
    names = [name for name, _ in modeling.named_module_tensors(Net().norm)]
    assert names == ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    kept = modeling.named_module_tensors(Net(), recurse=True, remove_non_persistent=True)
    assert "scratch" not in dict(kept)
    outer = nn.Sequential(Net())
    assert modeling.get_non_persistent_buffers(outer, recurse=True, fqns=True) == {"0.scratch"}


def test_sizes_add_up_from_the_leaves() -> None:
    sizes = modeling.compute_module_sizes(Net())
    assert sizes["first"] == 4 * (12 + 4)
    assert sizes[""] == sizes["first"] + sizes["norm"] + sizes["scratch"]
    halved = modeling.compute_module_sizes(Net(), dtype="float16")
    assert halved["first"] == sizes["first"] / 2
    assert halved["norm.num_batches_tracked"] == 8
    special = modeling.compute_module_sizes(Net(), special_dtypes={"first.weight": torch.float64})
    assert special["first.weight"] == 96
    assert modeling.compute_module_total_buffer_size(Net()) == 4 * (4 + 4 + 2) + 8
    assert modeling.calculate_maximum_sizes(nn.Sequential(Net(), nn.Linear(9, 9)))[1] == (
        360,
        ["Linear"],
    )


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.bool, 1 / 8), (torch.bfloat16, 2), (torch.float8_e5m2, 1), (CustomDtype.INT4, 0.5)],
)
def test_a_number_has_a_size(dtype: object, size: float) -> None:
    assert modeling.dtype_byte_size(dtype) == size


@pytest.mark.parametrize(("text", "size"), [("5MB", 5_000_000), ("8Kb", 1000), (7, 7)])
def test_sizes_are_read(text: str | int, size: int) -> None:
    assert modeling.convert_file_size_to_int(text) == size


@pytest.mark.parametrize("text", ["5", "five", -1, "-1GB"])
def test_what_is_no_size_is_refused(text: str | int) -> None:
    with pytest.raises(ValueError, match="size"):
        modeling.convert_file_size_to_int(text)


def test_tied_parameters_are_found_and_tied_again() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    tied = modeling.find_tied_parameters(model)
    assert tied == [["0.weight", "1.weight"]]
    model[1].weight = nn.Parameter(torch.zeros(2, 2))
    modeling.retie_parameters(model, tied)
    assert model[1].weight is model[0].weight
    storage = modeling.id_tensor_storage
    assert storage(model[0].weight) == storage(model[1].weight) != storage(model[0].bias)


def test_one_tensor_is_moved_or_replaced() -> None:
    model = Net()
    modeling.set_module_tensor_to_device(model, "first.weight", "meta")
    assert model.first.weight.is_meta
    with pytest.raises(BadInput, match="meta"):
        modeling.set_module_tensor_to_device(model, "first.weight", "cpu")
    value = torch.ones(4, 3)
    modeling.set_module_tensor_to_device(model, "first.weight", "cpu", value, dtype=torch.float16)
    assert isinstance(model.first.weight, nn.Parameter)
    assert model.first.weight.dtype == torch.float16
    modeling.set_module_tensor_to_device(model, "norm.running_mean", "meta")
    assert model.norm.running_mean.is_meta
    for name, wrong in (("first.bias", torch.ones(3)), ("first.nothing", None)):
        with pytest.raises(ValueError, match=name.rpartition(".")[2]):
            modeling.set_module_tensor_to_device(model, name, "cpu", wrong)


def test_a_module_is_on_a_device_for_a_block() -> None:
    layer = nn.Linear(1, 1)
    with modeling.align_module_device(layer):
        assert not layer.weight.is_meta
    assert not modeling.has_offloaded_params(layer)
    assert not modeling.is_peft_model(layer)
    assert modeling.check_device_same(torch.device("cuda"), torch.device("cuda:0"))
    assert not modeling.check_device_same(torch.device("cuda:1"), torch.device("cpu"))


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("shard", ["10GB", 40])
def test_saved_weights_are_loaded_from_their_folder(
    safe: bool, shard: int | str, tmp_path: Path
) -> None:
    source, model = Net(), Net()
    Accelerator(cpu=True).save_model(
        source, tmp_path, max_shard_size=shard, safe_serialization=safe
    )
    modeling.load_checkpoint_in_model(model, tmp_path)
    assert torch.equal(model.first.weight, source.first.weight)


def test_weights_that_fit_nothing_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save({**Net().state_dict(), "extra": torch.ones(1)}, tmp_path / "some.bin")
    for device_map in (None, {"": "cpu"}):
        modeling.load_checkpoint_in_model(Net(), tmp_path / "some.bin", device_map=device_map)
        assert "extra" in caplog.text
        with pytest.raises(RuntimeError, match="extra"):
            modeling.load_checkpoint_in_model(
                Net(), tmp_path / "some.bin", device_map=device_map, strict=True
            )


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(BadInput, match="Cannot load weights"):
            modeling.load_checkpoint_in_model(Net(), place)
    with pytest.raises(Unsupported, match="device_map"):
        modeling.load_checkpoint_in_model(Net(), tmp_path, device_map={"first": "cpu"})


def test_an_index_cannot_point_out_of_its_folder(tmp_path: Path) -> None:
    outside = tmp_path / "outside.bin"
    torch.save(Net().state_dict(), outside)
    inside = tmp_path / "folder"
    inside.mkdir()
    (inside / "a.index.json").write_text(json.dumps({"weight_map": {"x": "../outside.bin"}}))
    with pytest.raises(FileNotFoundError):
        modeling.load_checkpoint_in_model(Net(), inside)


def test_a_pickle_in_a_weight_file_does_not_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self):
            return Path(tmp_path / "ran").touch, ()

    torch.save({"x": Bomb()}, tmp_path / "bad.bin")
    with pytest.raises(Exception, match="weights_only"):  # noqa: B017, PT011 -- torch's own error
        modeling.load_state_dict(tmp_path / "bad.bin")
    assert not (tmp_path / "ran").exists()


def test_the_runs_precision_is_what_the_context_computes_in() -> None:
    Accelerator(cpu=True, mixed_precision="bf16")
    with modeling.get_mixed_precision_context_manager(native_amp=True):
        assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == torch.bfloat16
    with modeling.get_mixed_precision_context_manager():
        assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == torch.float32
    assert isinstance(modeling.get_grad_scaler(init_scale=4.0), torch.amp.GradScaler)
