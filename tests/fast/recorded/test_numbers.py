"""Numbers that a recorded step writes down are made on the device, scripted functions' too."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anytrain.fast.recorded.numbers import as_written, numbers_on_device


class Operations(TorchDispatchMode):
    """Note which of torch's operations run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


SOURCE = """
import torch
from torch import nn

@torch.jit.script
def bucketed(positions, size: int):
    return torch.tensor(size - 1).type_as(positions)

def by_sign(x):
    return x * 2 if x.sum() > 0 else x * -100

traced = torch.jit.trace(by_sign, torch.ones(2))

@torch.jit.script
def told_apart(x):
    return x * 2 if torch.jit.is_scripting() else x * 3

class Lazy:
    def __getattr__(self, name):
        raise RuntimeError("imported too early")

lazy = Lazy()

class Model(nn.Module):
    def forward(self, positions):
        return bucketed(positions, 5)
"""


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[ModuleType]:
    (tmp_path / "scripted_model.py").write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("scripted_model", tmp_path / "scripted_model.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize(
    ("where", "dtype"),
    [
        ({"device": "meta"}, torch.float32),
        ({"device": "meta", "dtype": torch.float16}, torch.float16),
        ({"tensor": torch.zeros(3, device="meta", dtype=torch.int64)}, torch.int64),
    ],
)
def test_a_number_is_made_where_it_is_sent(where: dict[str, Any], dtype: torch.dtype) -> None:
    with numbers_on_device(), Operations() as operations:
        found = torch.tensor(2.5).to(**where)
    assert (found.device.type, found.dtype, found.shape) == ("meta", dtype, ())
    assert "_to_copy" not in operations.names


def test_a_number_on_the_host_is_a_tensor_like_all_others() -> None:
    with numbers_on_device():
        number = torch.tensor(2.5)
        assert torch.equal(number * torch.ones(2), torch.full((2,), 2.5))
        assert type(number + 1) is torch.Tensor
        assert torch.equal(torch.where(torch.ones(1) > 0, number, 0.0), torch.full((1,), 2.5))
        assert number.to(torch.float64).dtype is torch.float64
        number.add_(1)
        assert number.item() == 3.5
        number.requires_grad_()
        assert number.requires_grad
        assert number.to("meta", copy=True).device.type == "meta"
    assert type(torch.tensor(2.5)) is torch.Tensor


def test_scripted_functions_of_a_models_file_run_as_they_are_written(scripted: ModuleType) -> None:
    model, own = scripted.Model(), scripted.bucketed
    positions = torch.zeros(3, device="meta", dtype=torch.int64)
    with as_written(model), numbers_on_device():
        assert scripted.bucketed is not own
        assert model(positions).device.type == "meta"
        assert model(torch.zeros(3)).item() == 4.0
    assert scripted.bucketed is own


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_functions_whose_code_is_another_one_stay_as_they_are(scripted: ModuleType) -> None:
    own = scripted.traced, scripted.told_apart
    with as_written(scripted.Model()):
        assert (scripted.traced, scripted.told_apart) == own


def test_a_number_of_numpys_keeps_its_precision() -> None:
    with numbers_on_device():
        assert torch.tensor(np.float64(2.5), device="cpu").dtype is torch.float64
