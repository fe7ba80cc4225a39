"""Code of the user's own, on one rank and several: each world is started once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from doors.trainer import own_code
from launching import run_command

SCRIPT = Path(__file__).with_name("own_code.py")


def of_ranks(folder: Path, size: int) -> list[dict[str, Any]]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run_command([*launcher, "--nproc-per-node", str(size), SCRIPT, folder])
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What every rank found, by the size of its world."""
    make = tmp_path_factory.mktemp
    alone = json.loads(json.dumps(own_code.answers(make("alone"))))
    return {1: [alone], 2: of_ranks(make("two"), 2), 3: of_ranks(make("three"), 3)}


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_make_the_same_calls_whatever_rows_they_have(worlds: Any, size: int) -> None:
    found = [each["speaking"] for each in worlds[size]]
    for case, first in found[0].items():
        assert first["seen"], case
        for other in found[1:]:
            assert other[case] == first, case
        shapes = {len(each) for each in first["seen"]}
        assert shapes <= {size, size * own_code.BATCH}, f"{case}: all ranks' batches are whole"


@pytest.mark.parametrize("size", [2, 3])
def test_repeats_count_in_no_score(worlds: Any, size: int) -> None:
    for case, found in worlds[size][0]["speaking"].items():
        alone = worlds[1][0]["speaking"][case]
        assert (found["rows"], found["sum"]) == (alone["rows"], alone["sum"]), case
        assert len(found["predictions"]) == len(alone["predictions"]), case


@pytest.mark.parametrize("size", [2, 3])
def test_a_model_that_gathers_has_whole_batches_and_each_row_counts_once(
    worlds: Any, size: int
) -> None:
    assert all(each["contrasted"] == worlds[1][0]["contrasted"] for each in worlds[size])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_step_is_the_mean_over_what_is_trained_on(worlds: Any, size: int) -> None:
    found = [each["making"] for each in worlds[size]]
    for case, first in found[0].items():
        accumulation = int(case.split()[1])
        weight, losses = 0.0, []
        for step in range(2):
            part = slice(step * accumulation, (step + 1) * accumulation)
            micro = [batch for each in found for batch in each[case]["made"][part]]
            xs = [x for batch in micro for x in batch]
            losses.append(sum((weight * x - 2 * x) ** 2 for x in xs) / len(xs))
            weight -= 1e-3 * sum(2 * x * (weight * x - 2 * x) for x in xs) / len(xs)
        assert first["weight"] == pytest.approx(weight, rel=1e-5), case
        assert first["losses"] == pytest.approx(losses, rel=1e-5), case


@pytest.mark.parametrize("size", [2, 3])
def test_the_first_steps_tell_whether_parameters_go_unused(worlds: Any, size: int) -> None:
    for found in (each["sharing"] for each in worlds[size]):
        assert not any(found[kind]["searches"] for kind in ("all", "unused", "by rank"))
        told = "the first 3 steps used every parameter: unused ones are not looked for"
        assert found["all"]["strategy"] == told
        told = "steps leave parameters unused, which are looked for at each: "
        assert found["unused"]["strategy"] == f"{told}spare.weight, spare.bias"
        assert found["by rank"]["strategy"] == f"{told}second.weight, second.bias"
        assert all(found[kind]["error"] is None for kind in ("all", "unused", "by rank", "twice"))
        assert found["twice"]["weights"] == worlds[size][0]["sharing"]["twice"]["weights"]
        for kind in ("unused", "by rank"):
            asked = found[f"searched {kind}"]
            assert asked["searches"] is True
            for name, weight in found[kind]["weights"].items():
                assert weight == pytest.approx(asked["weights"][name], rel=1e-6), (kind, name)


@pytest.mark.parametrize("size", [2, 3])
def test_a_parameter_that_goes_unused_later_is_named(worlds: Any, size: int) -> None:
    for found in (each["sharing"] for each in worlds[size]):
        assert found["searched late"]["error"] is None
        told = found["late"]["error"]
        assert told.startswith("The step has left parameters of the model unused: second.weight")
        assert "ddp_find_unused_parameters=True" in told


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_go_on_from_a_checkpoint_go_on_bit_for_bit(worlds: Any, size: int) -> None:
    for once, twice in (each["lives"] for each in worlds[size]):
        assert once == twice
