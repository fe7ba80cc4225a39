from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anytrain import Accelerator
from anytrain.engine.checkpoint import Snapshot, load, save
from anytrain.insight.proofs.checkpoint_diff import (
    compare_checkpoints,
    compare_states,
    parameter_names,
)
from checkpoints import small_run


def told(one: Any, other: Any) -> list[str]:
    return [str(difference) for difference in compare_states("state", one, other).differences]


def test_the_same_values_do_not_differ() -> None:
    state = {"a": [torch.randn(2), (1, None)], 3: np.arange(4), "nan": float("nan")}
    assert told(state, state) == []
    assert compare_states("state", state, state).num_tensors == 2


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4), "state is float32[2, 3] and float32[2, 4]"),
        (torch.zeros(2), torch.zeros(2).double(), "state is float32[2] and float64[2]"),
        (torch.zeros(()), torch.ones(()), "state differs in 1 of 1 values; 0.0 and 1.0"),
        ({"a": 1}, {"a": 2}, "state['a'] is 1 and 2"),
        ({"a": 1}, {}, "state['a'] is missing in the second"),
        ({}, {"a": 1}, "state['a'] is missing in the first"),
        ([1, 2], [1], "state has 2 and 1 items"),
        ((1, [2, 3]), (1, [2, 4]), "state[1][1] is 3 and 4"),
        ({"a": 1}, {"a": "1"}, "state['a'] is 1 and '1'"),
        (np.array([1, 2, 3]), np.array([1, 5, 6]), "state differs in 2 of 3 values; first at [1]"),
    ],
)
def test_a_difference_is_named_by_its_path(one: Any, other: Any, said: str) -> None:
    assert told(one, other) == [said]


def test_what_a_history_tells_of_the_clock_and_its_folder_is_no_difference() -> None:
    def state(seconds: float, folder: str, loss: float) -> dict[str, Any]:
        history = [{"eval_loss": loss, "eval_runtime": seconds, "eval_steps_per_second": seconds}]
        return {"log_history": history, "best_model_checkpoint": f"{folder}/checkpoint-5"}

    assert told(state(1.0, "/one", 0.5), state(2.0, "/other", 0.5)) == []
    assert told(state(1.0, "/one", 0.5), state(1.0, "/one", 0.6)) != []


def test_a_tensor_says_how_many_values_and_where_first() -> None:
    one, other = torch.zeros(64, 64), torch.zeros(64, 64)
    other[0, 5], other[3, 3], other[63, 0] = 0.5, 1, 2
    (said,) = told({"w": one}, {"w": other})
    assert said == "state['w'] differs in 3 of 4096 values; first at [0, 5]: 0.0 and 0.5"


def test_a_sign_of_zero_and_a_nan_count_to_the_last_bit() -> None:
    assert told(torch.tensor([0.0]), torch.tensor([-0.0])) != []
    assert told(0.0, -0.0) == ["state is 0.0 and -0.0"]
    assert told(torch.tensor([float("nan")]), torch.tensor([float("nan")])) == []


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int8, torch.complex64])
def test_any_dtype_is_compared(dtype: torch.dtype) -> None:
    one, other = torch.zeros(3).to(dtype), torch.zeros(3).to(dtype)
    assert told(one, other) == []
    other[2] = 1
    assert "differs in 1 of 3 values; first at [2]" in told(one, other)[0]


def test_two_checkpoints_are_compared_part_by_part(tmp_path: Path) -> None:
    run = small_run(0)
    save(tmp_path / "one", run.snapshot(1))
    moments = run.optimizer.state_dict()["state"][0]["exp_avg"]
    moments[0, 1] += 1
    save(tmp_path / "other", run.snapshot(1))
    parts = compare_checkpoints(load(tmp_path / "one"), load(tmp_path / "other"))
    unlike = {part.name: part.differences for part in parts if part.differences}
    assert list(unlike) == ["optimizer"]
    (difference,) = unlike["optimizer"]
    # small_run has one weight of shape [8, 4], so no record is needed to name it.
    assert difference.where == "optimizer state of 0.weight: exp_avg"
    assert difference.what.startswith("differs in 1 of 32 values; first at [0, 1]: ")
    names = [part.name for part in parts]
    assert names == [
        "checkpoint",
        "model",
        "optimizer",
        "scheduler",
        "counters",
        "rng of rank 0",
    ]


def test_the_names_that_a_run_has_recorded_are_used(tmp_path: Path) -> None:
    def snapshot(moment: float) -> Snapshot:
        state = {0: {"exp_avg": torch.zeros(2)}, 1: {"exp_avg": torch.full((2,), moment)}}
        groups = [{"params": [0, 1], "lr": 0.1}]
        return Snapshot(
            step=1,
            models=[{"b": torch.zeros(2), "a": torch.zeros(2)}],
            parts={"optimizer": {"state": state, "param_groups": groups}},
            meta={"parameters": {"optimizer": ["b", "a"]}},
        )

    save(tmp_path / "one", snapshot(0.0))
    save(tmp_path / "other", snapshot(1.0))
    parts = compare_checkpoints(load(tmp_path / "one"), load(tmp_path / "other"))
    (difference,) = [d for part in parts for d in part.differences]
    assert difference.where == "optimizer state of a: exp_avg"


def test_an_accelerator_records_the_names(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    groups = [{"params": [p for p in model.parameters() if p.ndim == n]} for n in (2, 1)]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(groups))
    for name in ("one", "other"):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        accelerator.save_state(tmp_path / name)
    parts = compare_checkpoints(load(tmp_path / "one"), load(tmp_path / "other"))
    told = {d.where for part in parts if part.name == "optimizer" for d in part.differences}
    names = [name for name, _ in accelerator.unwrap_model(model).named_parameters()]
    assert {f"optimizer state of {name}: exp_avg" for name in names} <= told


def test_another_step_is_a_difference(tmp_path: Path) -> None:
    run = small_run(0)
    save(tmp_path / "one", run.snapshot(1, parts={}))
    save(tmp_path / "other", run.snapshot(2, parts={}))
    first, *rest = compare_checkpoints(load(tmp_path / "one"), load(tmp_path / "other"))
    assert [str(d) for d in first.differences] == ["the checkpoint's step is 1 and 2"]
    assert not any(part.differences for part in rest)


def test_parameters_of_one_shape_are_not_guessed() -> None:
    models = [{"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(3)}]
    state = {n: {"exp_avg": torch.zeros(2 + (n == 2)), "step": torch.zeros(())} for n in range(3)}
    groups: list[dict[str, Any]] = [{"params": [0, 1, 2]}]
    assert parameter_names(models, {"state": state, "param_groups": groups}) == {2: "c"}
    groups[0]["param_names"] = ["b", "a", "c"]
    named = parameter_names(models, {"state": state, "param_groups": groups})
    assert named == {0: "b", 1: "a", 2: "c"}
