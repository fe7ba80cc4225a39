"""Variables are read, set for a block, and put back."""

from __future__ import annotations

import logging
import os

import pytest

from anytrain.compat.accelerate.utils import environment
from anytrain.core.errors import Unsupported


def test_words_are_read_as_yes_or_no() -> None:
    assert environment.str_to_bool("Yes") == 1
    assert environment.str_to_bool("off", to_bool=True) is False
    with pytest.raises(ValueError, match="maybe"):
        environment.str_to_bool("maybe")


def test_variables_are_read_with_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_FLAG", "true")
    monkeypatch.setenv("MY_NUMBER", "7")
    assert environment.parse_flag_from_env("MY_FLAG")
    assert not environment.parse_flag_from_env("MY_OTHER_FLAG")
    assert environment.parse_choice_from_env("MY_CHOICE", "bf16") == "bf16"
    assert environment.get_int_from_env(["MY_ABSENT", "MY_NUMBER"], 1) == 7
    assert environment.get_int_from_env(["MY_ABSENT"], 1) == 1


def test_variables_are_set_for_a_block_and_put_back_after_an_error() -> None:
    os.environ["KEPT"] = "1"
    with pytest.raises(KeyError), environment.patch_environment(kept=2, new="x"):
        assert (os.environ["KEPT"], os.environ["NEW"]) == ("2", "x")
        raise KeyError
    assert os.environ["KEPT"] == "1"
    assert "NEW" not in os.environ


def test_the_environment_is_empty_in_a_block_and_then_as_before() -> None:
    before = dict(os.environ)
    with environment.clear_environment():
        assert not os.environ
        os.environ["ONLY_HERE"] = "1"
    assert dict(os.environ) == before


def test_a_function_leaves_no_variable_of_hfs_behind() -> None:
    os.environ["ACCELERATE_OLD"] = "1"

    @environment.purge_accelerate_environment
    def set_some() -> None:
        os.environ["ACCELERATE_OLD"] = "2"
        os.environ["ACCELERATE_NEW"] = "3"

    set_some()
    assert os.environ["ACCELERATE_OLD"] == "1"
    assert "ACCELERATE_NEW" not in os.environ


def test_a_class_of_tests_and_its_heirs_leave_none_either() -> None:
    @environment.purge_accelerate_environment
    class Parent:
        def test_it(self) -> None:
            os.environ["ACCELERATE_NEW"] = "3"

    class Child(Parent):
        def test_more(self) -> None:
            os.environ["ACCELERATE_NEWER"] = "3"

    Child().test_it()
    Child().test_more()
    assert not {"ACCELERATE_NEW", "ACCELERATE_NEWER"} & set(os.environ)


def test_lines_that_would_break_a_file_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        lines = environment.convert_dict_to_env_variables({"A": "1", "B": "<x", "C": ""})
    assert lines == ["A=1\n"]
    assert "B=<x" in caplog.text


def test_the_place_and_the_device_are_those_a_run_would_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ANYTRAIN_DEVICE", "cpu")
    place = environment.get_cpu_distributed_information()
    assert (place.rank, place.world_size, place.local_rank) == (3, 4, 1)
    assert environment.get_current_device_type() == ("cpu", "MULTI_CPU")
    assert environment.are_libraries_initialized("os", "no_such_library") == ["os"]


def test_without_nvidia_smi_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.check_cuda_p2p_ib_support()
    assert not environment.check_cuda_fp8_capability()


def test_what_nvidia_smi_says_is_believed(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\ncase $1 in *name) echo RTX 4090; echo RTX 4090;; *driver*) echo 535.1;; "
        "*) echo 8.9;; esac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert environment.get_gpu_info() == (["RTX 4090", "RTX 4090"], 2)
    assert environment.get_driver_version() == "535.1"
    assert not environment.check_cuda_p2p_ib_support()
    assert environment.check_cuda_fp8_capability()


def test_pinning_to_cores_is_refused() -> None:
    with pytest.raises(Unsupported, match="set_numa_affinity"):
        environment.set_numa_affinity(0)
