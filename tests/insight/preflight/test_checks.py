"""Each question, asked of traces made by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from anytrain.insight.preflight import checks
from anytrain.insight.preflight.checks import (
    disk,
    distributed,
    host_reads,
    precision,
    randomness,
    shapes,
    unused,
    workers,
)
from anytrain.insight.preflight.targets import parse_target
from anytrain.insight.preflight.trace import SourcePlace
from made_traces import CPU, CUDA, LINE, MPS, TPU, op, trace


def test_asking_loads_no_torch() -> None:
    code = "import sys; from anytrain.insight.preflight import checks; "
    code += "[__import__(f'{checks.__name__}.{n}') for n in checks.names()]; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_gravest_comes_first() -> None:
    found = checks.ask_all(trace(op("_local_scalar_dense", host_read="item"), world_size=2), MPS)
    severities = [each.severity for each in found if each.kind in ("distributed", "host_reads")]
    assert severities == ["error", "note"]


def test_a_value_that_is_read_stops_a_recording_at_its_line() -> None:
    read = op("_local_scalar_dense", host_read="item", calls=3)
    (found,) = host_reads.check(trace(op(), read), CUDA)
    assert found.severity == "warning"
    assert found.place == LINE
    assert found.per_step == 3
    assert "CUDA graph" in found.why


def test_a_read_costs_a_note_on_mps_and_nothing_on_the_cpu() -> None:
    read = op("_local_scalar_dense", host_read="item")
    assert [each.severity for each in host_reads.check(trace(read), MPS)] == ["note"]
    assert not list(host_reads.check(trace(read), CPU))


def test_a_mask_that_selects_compiles_anew_on_a_tpu() -> None:
    mask = op("nonzero", host_read="nonzero", is_dynamic=True)
    (found,) = host_reads.check(trace(mask), TPU)
    assert "each new shape is compiled" in found.why
    assert "torch.where" in found.fix


def test_one_line_in_many_modules_is_one_finding() -> None:
    reads = [
        op("nonzero", host_read="nonzero", place=SourcePlace(f"layer.{n}", "train.py", 12))
        for n in range(12)
    ]
    (found,) = host_reads.check(trace(*reads), CUDA)
    assert found.per_step == 12


def test_a_read_in_evaluation_alone_is_a_note() -> None:
    read = op("_local_scalar_dense", host_read="item", phase="evaluate")
    (found,) = host_reads.check(trace(read), CUDA)
    assert found.severity == "note"
    both = trace(read, op("_local_scalar_dense", host_read="item"))
    assert [each.severity for each in host_reads.check(both, CUDA)] == ["warning"]


LENGTHS = tuple(10 + (n * 37) % 90 for n in range(640))


def test_a_tpu_is_told_how_many_graphs_the_data_asks_for() -> None:
    (found,) = shapes.check(trace(lengths=LENGTHS), TPU)
    assert found.severity == "warning"
    assert "compiled" in found.why
    assert "length_buckets='auto'" in found.fix


def test_the_governor_leaves_few_shapes() -> None:
    job = trace(lengths=LENGTHS, buckets="auto").job
    before, (after, waste) = shapes.num_shapes(job), shapes.num_governed(job)
    assert before > 8 >= after
    assert 0 <= waste < 0.5
    (found,) = shapes.check(trace(lengths=LENGTHS, buckets="auto"), TPU)
    assert found.severity == "note"


def test_lengths_that_were_listed_are_taken() -> None:
    job = trace(lengths=LENGTHS, buckets="32,64,104").job
    assert shapes.num_governed(job)[0] <= 3 + 1  # and a last batch that is not full


def test_one_length_is_one_shape_and_no_finding() -> None:
    assert not list(shapes.check(trace(lengths=(32,) * 64), TPU))
    assert shapes.num_shapes(trace(lengths=(32,) * 65).job) == 2  # a last batch of one


def test_a_shape_that_values_decide_is_found_at_its_line() -> None:
    (found,) = shapes.check(trace(op("repeat_interleave.Tensor", is_dynamic=True)), TPU)
    assert found.place == LINE


def test_mps_has_room_for_one_process() -> None:
    (found,) = distributed.check(trace(world_size=4, accumulation=2), MPS)
    assert found.severity == "error"
    assert "gradient_accumulation_steps=8" in found.fix
    assert not list(distributed.check(trace(world_size=4), CUDA))
    assert not list(distributed.check(trace(), MPS))


def test_float16_needs_its_loss_scaled() -> None:
    (found,) = precision.check(trace(precision="fp16"), CUDA)
    assert found.severity == "error"
    assert not list(precision.check(trace(precision="fp16", scales_gradients=True), CUDA))
    assert not list(precision.check(trace(precision="bf16"), CUDA))


def test_a_gradient_in_float16_is_seen_without_being_told() -> None:
    half = op("mm", dtype="float16", phase="backward")
    (found,) = precision.check(trace(half), MPS)
    assert found.place == LINE
    assert not list(precision.check(trace(op("mm", dtype="float16")), MPS))


def test_parameters_without_a_gradient_stop_ddp() -> None:
    names = tuple(f"layer.{n}.weight" for n in range(6))
    (found,) = unused.check(trace(unused_parameters=names, world_size=2), CUDA)
    assert found.severity == "error"
    assert "and 2 more" in found.what
    for told in ({}, {"world_size": 2, "finds_unused": True}):
        (found,) = unused.check(trace(unused_parameters=names, **told), CUDA)
        assert found.severity == "note"


def test_work_that_cannot_be_pickled_fails_on_a_mac() -> None:
    told = {"worker_trouble": "Can't pickle local object 'main.<locals>.collate'"}
    (found,) = workers.check(trace(loader_workers=2, **told), MPS)
    assert found.severity == "error"
    (found,) = workers.check(trace(loader_workers=2, **told), CUDA)
    assert found.severity == "note"
    assert not list(workers.check(trace(**told), MPS))


def test_dropout_in_a_checkpointed_block_is_wrong_on_mps() -> None:
    drawn = trace(draws_in_checkpointed=(LINE, LINE), checkpointed_modules=("encoder.layer.0",))
    (found,) = randomness.check(drawn, MPS)
    assert (found.severity, found.place) == ("error", LINE)
    assert not list(randomness.check(drawn, CUDA))


class _Usage(NamedTuple):
    free: int


@pytest.mark.parametrize(("free", "severity"), [(50, "error"), (150, "warning"), (250, None)])
def test_a_checkpoint_needs_room_beside_the_last_one(
    free: int, severity: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: _Usage(free * 2**30))
    told = {"checkpoint_bytes": 100 * 2**30, "output_dir": str(tmp_path / "not" / "yet")}
    found = [each.severity for each in disk.check(trace(**told), CPU)]
    assert found == ([] if severity is None else [severity])


def test_a_real_disk_is_asked(tmp_path: Path) -> None:
    told = {"checkpoint_bytes": 2**60, "output_dir": str(tmp_path)}
    (found,) = disk.check(trace(**told), CPU)
    assert found.severity == "error"


def test_a_look_at_a_mask_that_a_recorded_step_leaves_out_is_a_note_on_cuda() -> None:
    place = SourcePlace("bert", "/lib/transformers/masking_utils.py", 740, "if mask.all():")
    read = op("_local_scalar_dense", host_read="item", place=place)
    (found,) = host_reads.check(trace(read), CUDA)
    assert found.severity == "note" and "a recorded step leaves it out" in found.why
    (found,) = host_reads.check(trace(read), TPU)
    assert found.severity == "warning"


@pytest.mark.parametrize(("target", "count"), [("cuda:t4", 1), ("cuda:v100", 1), ("cuda:l4", 0)])
def test_a_gpu_without_bfloat16_is_named(target: str, count: int) -> None:
    found = list(precision.check(trace(op(), precision="bf16"), parse_target(target)))
    assert len(found) == count
    assert all(each.severity == "warning" and "no units" in each.what for each in found)
    assert not list(precision.check(trace(op(), precision="no"), parse_target(target)))
