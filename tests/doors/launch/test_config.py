from __future__ import annotations

import pytest
import yaml

from anytrain.core.errors import BadInput, Unsupported
from anytrain.doors.launch import config
from anytrain.doors.launch.options import LaunchOptions

HF = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: 0,1
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def read(tmp_path, text):
    path = tmp_path / "launch.yaml"
    path.write_text(text)
    return config.read(str(path))


def test_a_file_that_hf_wrote_is_understood_without_a_word(tmp_path):
    found = read(tmp_path, HF)
    assert found.ignored == []
    assert found.options.given() == {
        "downcast_bf16": False,
        "gpu_ids": "0,1",
        "machine_rank": 0,
        "mixed_precision": "bf16",
        "multi_gpu": True,
        "num_machines": 1,
        "num_processes": 2,
    }


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("distributed_type: NO\nmixed_precision: no", {"mixed_precision": "no"}),
        ("distributed_type: MULTI_CPU\nuse_cpu: true", {"cpu": True}),
        ("distributed_type: MULTI_GPU\nuse_cpu: true", {"cpu": True}),
        ("distributed_type: XLA", {"tpu": True}),
        ("distributed_type: MPS", {}),
        ("main_process_ip: 10.0.0.1\nmain_process_port: '29501'", None),
        ("dynamo_config:\n  dynamo_backend: INDUCTOR", {"dynamo_backend": "inductor"}),
        ("dynamo_config:\n  dynamo_backend: 'NO'", {}),
        ("downcast_bf16: 'yes'", {"downcast_bf16": True}),
        ("gradient_accumulation_steps: 4\nnum_cpu_threads_per_process: 2", None),
        ("main_process_ip: null\nnum_processes: null", {}),
        ("fsdp_config: {}\ndeepspeed_config: null", {}),
        ("stall_timeout: 30", {"stall_timeout": 30.0}),
    ],
)
def test_each_key_is_read(tmp_path, text, given):
    found = read(tmp_path, text)
    assert found.ignored == []
    if given is not None:
        assert found.options.given() == given


@pytest.mark.parametrize(
    "text",
    [
        "deepspeed_config: {zero_stage: 2}",
        "fsdp_config: {fsdp_version: 2}",
        "megatron_lm_config: {a: 1}",
        "fp8_config: {backend: TE}",
        "distributed_type: DEEPSPEED",
        "distributed_type: FSDP",
        "compute_environment: AMAZON_SAGEMAKER",
        "tpu_use_cluster: true",
    ],
)
def test_what_anytrain_does_not_do_is_refused_by_name(tmp_path, text):
    with pytest.raises(Unsupported) as caught:
        read(tmp_path, text)
    assert text.split(":")[0] in caught.value.what


def test_harmless_keys_are_listed(tmp_path):
    found = read(tmp_path, "num_processes: 2\nenable_cpu_affinity: true\nsomething_new: 1\n")
    assert found.ignored == ["enable_cpu_affinity", "something_new"]
    assert found.not_used() == "enable_cpu_affinity, something_new"


def test_a_slip_of_the_keys_is_told_with_what_was_meant(tmp_path):
    found = read(tmp_path, "num_proceses: 2\nmain_training_function: train\nrdzv_backend: c10d\n")
    meant = "num_proceses (did you mean num_processes?)"
    assert found.not_used() == f"main_training_function, {meant}, rdzv_backend"


@pytest.mark.parametrize(
    "text", ["num_processes: many", "num_processes: true", "- a list", ": :", "stall_timeout: long"]
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path, text):
    with pytest.raises(BadInput):
        read(tmp_path, text)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(BadInput, match="Cannot read the config file"):
        config.read(str(tmp_path / "absent.yaml"))


@pytest.mark.parametrize(
    "options",
    [
        LaunchOptions(num_processes=2, cpu=True, mixed_precision="no"),
        LaunchOptions(multi_gpu=True, gpu_ids="0,1", downcast_bf16=False),
        LaunchOptions(tpu=True, num_processes=8, downcast_bf16=True),
        LaunchOptions(
            num_machines=2,
            machine_rank=1,
            main_process_ip="10.0.0.1",
            main_process_port=29501,
            num_processes=4,
            dynamo_backend="inductor",
            max_restarts=2,
            stall_timeout=30.0,
            gradient_accumulation_steps=4,
            num_cpu_threads_per_process=3,
        ),
    ],
)
def test_what_is_written_is_read_back(tmp_path, options):
    path = str(tmp_path / "own.yaml")
    config.write(options, path)
    assert config.read(path) == config.ReadConfig(options, [])


def test_hf_reads_what_we_write(tmp_path):
    accelerate = pytest.importorskip("accelerate.commands.config.config_args")
    path = str(tmp_path / "own.yaml")
    config.write(LaunchOptions(num_processes=2, cpu=True, mixed_precision="bf16"), path)
    theirs = accelerate.load_config_from_file(path)
    assert (theirs.num_processes, theirs.mixed_precision, theirs.use_cpu) == (2, "bf16", True)


def test_a_file_is_not_replaced_without_being_asked(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("num_processes: 8")
    with pytest.raises(BadInput, match="it exists"):
        config.write(LaunchOptions(num_processes=2), str(path))
    config.write(LaunchOptions(num_processes=2), str(path), force=True)
    assert yaml.safe_load(path.read_text())["num_processes"] == 2


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(BadInput, match="Cannot write"):
        config.write(LaunchOptions(), str(tmp_path / "no" / "own.yaml"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("num_processes: .inf", "Cannot read num_processes: inf"),
        ("num_processes: .nan", "Cannot read num_processes: nan"),
        ("num_machines: 2.5", "Cannot read num_machines: 2.5"),
        ("main_process_port: " + "9" * 5000, "a number of more than 4300 digits"),
        (f"num_processes: '{'9' * 5000}'", "Cannot read num_processes: '9999"),
        ("gpu_ids: " + "[" * 5000, "nested too deeply"),
    ],
)
def test_a_value_that_no_number_holds_is_refused_in_few_words(tmp_path, line, words):
    path = tmp_path / "launch.yaml"
    path.write_text(line)
    with pytest.raises(BadInput, match=words) as told:
        config.read(str(path))
    assert len(str(told.value)) < 600
