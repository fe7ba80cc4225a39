from __future__ import annotations

from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anytrain.engine.recording.trackers.general import as_numbers, flatten, settings


def test_tensors_and_numpy_scalars_become_python_numbers() -> None:
    plain = as_numbers(
        {
            "loss": torch.tensor(0.5, requires_grad=True),
            "half": torch.tensor(1.5, dtype=torch.bfloat16),
            "one": torch.tensor([3]),
            "good": torch.tensor(True),
            "f32": np.float32(0.25),
            "zero": np.array(7),
            "group": {"deep": torch.tensor(2.0)},
        }
    )
    assert plain == {
        "loss": 0.5,
        "half": 1.5,
        "one": 3,
        "good": True,
        "f32": 0.25,
        "zero": 7,
        "group": {"deep": 2.0},
    }
    assert [type(plain[k]) for k in ("loss", "one", "good", "f32", "zero")] == [
        float,
        int,
        bool,
        float,
        int,
    ]


def test_the_same_tensor_under_two_names_is_read_for_both() -> None:
    loss = torch.tensor(4.0)
    assert as_numbers({"a": loss, "b": loss}) == {"a": 4.0, "b": 4.0}


def test_what_is_no_number_passes_as_it_is() -> None:
    vector, note = torch.ones(2), object()
    plain = as_numbers({"v": vector, "n": note, "s": "text", "none": None, 3: 1})
    assert plain["v"] is vector and plain["n"] is note
    assert plain["s"] == "text" and plain["none"] is None and plain["3"] == 1


def test_a_tensor_without_a_value_is_left_alone() -> None:
    ghost = torch.empty((), device="meta")
    assert as_numbers({"ghost": ghost})["ghost"] is ghost


class _Stacks(TorchDispatchMode):
    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.num += func is torch.ops.aten.stack.default
        # What .item() and .tolist() of a lone scalar call: a wait for the device.
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_many_tensors_are_read_together() -> None:
    values = {f"m{i}": torch.tensor(float(i)) for i in range(5)}
    with _Stacks() as seen:
        plain = as_numbers(values)
    assert seen.num == 1
    assert plain == {f"m{i}": float(i) for i in range(5)}


@pytest.mark.gpu
def test_values_on_a_gpu_are_read_together() -> None:
    values = {"a": torch.tensor(1.0, device="cuda"), "b": torch.tensor(2.0, device="cuda")}
    assert as_numbers(values) == {"a": 1.0, "b": 2.0}


def test_flattening_joins_names_with_a_slash() -> None:
    assert flatten({"a": {"b": {"c": 1}}, "d": 2}) == {"a/b/c": 1, "d": 2}


def test_settings_hold_only_what_every_library_stores() -> None:
    class Color(Enum):
        RED = 1

    config = {
        "lr": np.float64(0.1),
        "path": Path("runs"),
        "color": Color.RED,
        "betas": (0.9, {"x": torch.float16}),
        "none": None,
        "model": {"layers": torch.tensor(2)},
    }
    assert settings(config) == {
        "lr": 0.1,
        "path": "runs",
        "color": "Color.RED",
        "betas": [0.9, {"x": "torch.float16"}],
        "none": None,
        "model": {"layers": 2},
    }
