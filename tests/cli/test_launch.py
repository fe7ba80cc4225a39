from __future__ import annotations

import sys

import pytest

from anytrain.core.errors import Unsupported
from anytrain.doors.launch.options import LaunchOptions
from launching import run_command

ANYTRAIN = [sys.executable, "-m", "anytrain", "launch"]
NAMES = [
    "num_processes",
    "num_machines",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "mixed_precision",
    "downcast_bf16",
    "gradient_accumulation_steps",
    "cpu",
    "multi_gpu",
    "tpu",
    "gpu_ids",
    "num_cpu_threads_per_process",
    "dynamo_backend",
    "max_restarts",
    "stall_timeout",
    "module",
    "debug",
    "config_file",
]


def test_every_option_is_there_in_both_spellings():
    words = run_command([*ANYTRAIN, "--help"]).stdout.replace(",", " ").split()
    for name in NAMES:
        assert f"--{name}" in words
        assert f"--{name.replace('_', '-')}" in words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--num_processes", "0", __file__], "Cannot use --num_processes 0."),
        (["--num-processes", "-1", __file__], "Cannot use --num_processes -1."),
        (["--gpu-ids", "a", __file__], "Cannot read --gpu_ids a."),
        (["--mixed_precision", "fp12", __file__], "Unknown mixed precision 'fp12'"),
        (["absent.py"], "There is no script absent.py."),
        (["--config_file", "absent.yaml", __file__], "Cannot read the config file absent.yaml."),
        (["--num_procs", "2", __file__], "No such option"),
        ([], "Missing argument"),
    ],
)
def test_bad_input_is_refused_with_exit_code_two(words, said):
    ran = run_command([*ANYTRAIN, *words], check=False)
    assert ran.returncode == 2
    assert said in ran.stderr


def test_a_device_on_the_command_line_replaces_the_files(tmp_path):
    from anytrain.doors.launch.config import with_file

    path = tmp_path / "launch.yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_processes: 4\n")
    asked = with_file(LaunchOptions(cpu=True), str(path))
    assert asked.given() == {"cpu": True, "num_processes": 4}


def test_what_a_file_asks_that_we_do_not_do_is_refused(tmp_path):
    from anytrain.doors.launch.config import with_file

    path = tmp_path / "launch.yaml"
    path.write_text("distributed_type: DEEPSPEED\n")
    with pytest.raises(Unsupported):
        with_file(LaunchOptions(), str(path))


def test_options_of_accelerates_launcher_that_change_nothing_here_are_taken(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:])")
    words = ["--same_network", "--rdzv-backend", "c10d", "--tee=3", "--quiet", "--role", "a"]
    told = run_command([*ANYTRAIN, "--cpu", *words, str(script), "--role", "mine"])
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[-1] == "['--role', 'mine']"
    assert "not used here: same_network, rdzv_backend, tee, quiet, role." in told.stderr


@pytest.mark.parametrize(
    ("word", "what"),
    [
        ("--use_fsdp", "FSDP"),
        ("--fsdp-offload-params", "FSDP"),
        ("--use_deepspeed", "DeepSpeed"),
        ("--zero_stage=2", "DeepSpeed"),
        ("--use_megatron_lm", "Megatron-LM"),
        ("--fp8_backend", "fp8 training"),
        ("--no_python", "not Python scripts"),
    ],
)
def test_what_accelerates_launcher_does_and_this_one_does_not_is_refused_by_name(word, what):
    told = run_command([*ANYTRAIN, "--cpu", word, __file__], check=False)
    assert told.returncode == 2
    assert f"Cannot launch with {word.partition('=')[0]}." in told.stderr and what in told.stderr


def test_an_option_that_nobody_knows_is_named():
    told = run_command([*ANYTRAIN, "--cpu", "--same_networks", __file__], check=False)
    assert told.returncode == 2 and "No such option" in told.stderr


def test_every_option_of_accelerates_launcher_is_known():
    """Each is taken with its value, said not to be used, or refused."""
    import click
    from accelerate.commands.launch import launch_command_parser

    from anytrain.cli.main import _load
    from anytrain.doors.launch.options import sift_hf_options

    command = _load("launch")
    own = {
        name.lstrip("-").replace("-", "_"): not getattr(parameter, "is_flag", False)
        for parameter in command.get_params(click.Context(command))
        for name in parameter.opts
    }
    for action in launch_command_parser()._actions:
        for spelt in set(action.option_strings) - {"-h"}:
            name = spelt.lstrip("-").replace("-", "_")
            words = [spelt, *(["value"] if action.nargs != 0 else []), "script.py"]
            try:
                kept, unused = sift_hf_options(words, own)
            except Unsupported:
                continue
            expected = (words, []) if name in own else (["script.py"], [name])
            assert (kept, unused) == expected, spelt
