"""resolve() is pure, every choice says why, and impossible pairs are refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest

from anytrain.core import environment
from anytrain.core.errors import AnytrainError
from anytrain.core.facts import Capabilities, JobFacts
from anytrain.core.plan import Wish, Wishes, resolve

CPU = Capabilities("cpu", "cpu", "a CPU", ("float32", "bfloat16"), process_group="gloo")
MPS = Capabilities("mps", "mps:0", "Apple M2", ("float32", "bfloat16", "float16"))
XLA = Capabilities("xla", "xla:0", "TPU v5e", ("float32", "bfloat16"))
TPU = Capabilities("tpu", "tpu:0", "TPU v5e", ("float32", "bfloat16"), process_group="tpu_dist")
CUDA = Capabilities(
    "cuda",
    "cuda:0",
    "NVIDIA H200",
    ("float32", "bfloat16", "float16"),
    process_group="nccl",
    scales_gradients=True,
    fuses_optimizer=True,
)


def plan(machine: Capabilities, world_size: int = 1, **wishes: str) -> dict[str, str]:
    asked = Wishes(**{name: Wish(value, "argument") for name, value in wishes.items()})
    found = resolve(asked, machine, JobFacts(), world_size)
    assert found == resolve(asked, machine, JobFacts(), world_size)
    assert all(choice.because for choice in found.reasons().values())
    return {name: choice.value for name, choice in found.reasons().items()}


def test_the_default_is_float32_eager_and_alone() -> None:
    found = plan(CPU)
    assert found["precision"] == "no"
    assert found["strategy"] == "solo"
    assert found["step"] == "eager"
    assert found["accumulation"] == "1"


def test_auto_takes_bf16_where_the_device_computes_in_it() -> None:
    assert plan(CUDA, precision="auto")["precision"] == "bf16"
    old = Capabilities("cuda", "cuda:0", "an old GPU", ("float32", "float16"))
    assert plan(old, precision="auto")["precision"] == "no"
    without = replace(CPU, slow_dtypes=("bfloat16",))
    assert plan(without, precision="auto")["precision"] == "no"
    assert plan(without, precision="bf16")["precision"] == "bf16"


def test_two_processes_replicate() -> None:
    assert plan(CPU, 2)["strategy"] == "ddp"


def test_who_decides_on_a_bad_step_follows_the_device() -> None:
    assert plan(CUDA)["guard"] == "device"
    assert plan(CPU)["guard"] == "host"


@pytest.mark.parametrize(
    ("machine", "world_size", "wishes"),
    [
        (MPS, 2, {}),
        (CPU, 1, {"precision": "fp16"}),
        (MPS, 1, {"precision": "fp16"}),
        (CPU, 1, {"precision": "fp8"}),
        (CPU, 1, {"precision": "int4"}),
        (CPU, 1, {"accumulation": "0"}),
        (CPU, 1, {"downcast_bf16": "True"}),
        (TPU, 1, {"downcast_bf16": "True"}),
    ],
)
def test_impossible_pairs_are_refused(
    machine: Capabilities, world_size: int, wishes: dict[str, str]
) -> None:
    with pytest.raises(AnytrainError) as caught:
        plan(machine, world_size, **wishes)
    assert caught.value.why
    assert caught.value.fix


def test_several_processes_on_mps_name_the_way_out() -> None:
    with pytest.raises(AnytrainError, match="--cpu --num_processes 2"):
        plan(MPS, 2)


def test_downcast_is_for_torch_xla() -> None:
    assert plan(XLA, downcast_bf16="True")["precision"] == "no"


def test_bf16_on_a_tpu_is_autocast_and_says_why_not_the_variable() -> None:
    asked = Wishes(precision=Wish("bf16", "argument"))
    because = resolve(asked, XLA, JobFacts(), 1).precision.because
    assert because.startswith("argument; autocast, not XLA_USE_BF16, which would turn float64")
    assert "torch_tpu has no XLA_USE_BF16" in resolve(asked, TPU, JobFacts(), 1).precision.because
    assert resolve(asked, CUDA, JobFacts(), 1).precision.because == "argument"


@pytest.mark.parametrize("name", ["XLA_USE_BF16", "XLA_DOWNCAST_BF16"])
def test_a_variable_that_narrows_every_float_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    narrowed = replace(XLA, narrowed_by=environment.narrowing())
    for asked in (Wishes(), Wishes(precision=Wish("bf16", "argument"))):
        found = resolve(asked, narrowed, JobFacts(), 1)
        assert f"{name} is set" in found.precision.because
        assert "not XLA_USE_BF16" not in found.precision.because
        assert found.precision_is_free == (asked.precision is None)


def test_fp16_on_a_tpu_needs_both_its_numbers_and_its_scaler() -> None:
    half = replace(TPU, dtypes=("float32", "bfloat16", "float16"))
    for machine in (TPU, half):
        with pytest.raises(AnytrainError, match='mixed_precision="bf16"'):
            plan(machine, precision="fp16")
    assert plan(replace(half, scales_gradients=True), precision="fp16")["precision"] == "fp16"


def test_downcasting_is_set_before_torch_xla_loads_and_refused_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(environment.DOWNCAST, raising=False)
    monkeypatch.setitem(sys.modules, "torch_xla", ModuleType("torch_xla"))
    with pytest.raises(AnytrainError, match="anytrain launch --downcast_bf16"):
        environment.downcast()
    monkeypatch.delitem(sys.modules, "torch_xla")
    environment.downcast()
    assert environment.variable(environment.DOWNCAST) == "1"
    monkeypatch.setitem(sys.modules, "torch_xla", ModuleType("torch_xla"))
    environment.downcast()  # it was there in time


@pytest.mark.parametrize("name", ["ANYTRAIN_DOWNCAST_BF16", "ACCELERATE_DOWNCAST_BF16"])
def test_downcasting_is_refused_by_the_variables_too(name: str) -> None:
    asked = environment.read({name: "true"}).wishes
    with pytest.raises(AnytrainError, match="Cannot use downcast_bf16 on 'tpu'"):
        resolve(asked, TPU, JobFacts(), 1)
    silent = environment.read({name: "false"}).wishes  # what a launcher of Accelerate exports
    assert resolve(silent, TPU, JobFacts(), 1).device.value == "tpu:0"


def test_an_argument_beats_a_launch_option_which_beats_the_environment() -> None:
    exported = {"ANYTRAIN_MIXED_PRECISION": "fp16", "ACCELERATE_MIXED_PRECISION": "no"}
    assert environment.read(exported).wishes.precision == Wish(
        "fp16", "environment variable ANYTRAIN_MIXED_PRECISION"
    )
    launched = environment.launch_variables(Wishes(precision=Wish("bf16", "launch option")))
    env = environment.read({**exported, **launched})
    assert env.wishes.precision == Wish("bf16", "launch option")
    argument = Wishes(precision=Wish("no", "argument"))
    assert argument.over(env.wishes).precision == Wish("no", "argument")


def test_torch_compile_is_refused_where_every_step_is_compiled() -> None:
    machine = replace(TPU, backend="xla", traces=True)
    with pytest.raises(AnytrainError, match="compiles the whole step already"):
        plan(machine, compile="inductor")
    assert plan(machine, compile="no")["step"] == "eager"
    assert plan(TPU, compile="inductor")["step"] == "compiled"


@pytest.mark.parametrize(
    ("value", "counts"), [("1", True), ("true", True), ("2", True), ("0", False), ("yes", False)]
)
def test_torch_xlas_variables_count_as_it_reads_them(
    value: str, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.USE_BF16, value)
    monkeypatch.setenv(environment.DOWNCAST, value)
    assert (environment.narrowing() != ()) == counts


def test_places_are_read_from_torchrun_and_srun() -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert environment.read(torchrun).place == environment.RankPlace(3, 1, 4, 2, "torchrun")
    srun = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "2"}
    assert environment.read(srun).place.size == 2
    batch = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}
    assert environment.read(batch).place.size == 1, "plain python in an sbatch script is alone"


def test_a_flag_that_is_neither_yes_nor_no_is_refused() -> None:
    with pytest.raises(AnytrainError, match="ANYTRAIN_DEBUG"):
        environment.read({"ANYTRAIN_DEBUG": "perhaps"})
    with pytest.raises(AnytrainError, match="RANK"):
        environment.read({"RANK": "first", "WORLD_SIZE": "2"})
