from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from anytrain.insight.preflight.mps import kernels

TOOLS = Path(__file__).parents[4] / "tools"
# A copy of what the wheels themselves register, kept beside the repository by its developers.
FOUND_IN_WHEELS = Path(__file__).parents[5] / "shared" / "data" / "mps_ops"
VERSIONS = ("2.9.0", "2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.0", "2.15.0")

SOME_YAML = """
- func: add.Tensor(Tensor self, Tensor other) -> Tensor
  structured_delegate: add.out
  variants: function, method

- func: add.out(Tensor self, Tensor other, *, Tensor(a!) out) -> Tensor(a!)
  structured: True
  dispatch:
    # a remark
    CPU, CUDA: add_out
    MPS: add_out_mps

- func: solve(Tensor a) -> Tensor
  structured_delegate: solve.out

- func: solve.out(Tensor a, *, Tensor(a!) out) -> Tensor(a!)
  dispatch:
    CPU, CUDA: solve_out

- func: whole(Tensor self) -> Tensor
  variants: function

- func: put(Tensor self) -> Tensor
  dispatch:
    CompositeExplicitAutograd: put

- func: put_(Tensor(a!) self) -> Tensor(a!)
  dispatch:
    CPU, CUDA: put_

- func: _chosen(Tensor self) -> Tensor
  dispatch:
    CUDA: chosen_cuda

- func: _nobody(Tensor self) -> Tensor
  dispatch: {}
"""


def test_a_structured_function_has_the_kernels_of_its_out_sibling() -> None:
    table = kernels.derive(SOME_YAML, (), "2.13.0")
    assert table.status("add.Tensor") == "kernel"
    assert table.status("solve") == table.status("solve.out") == "missing"


def test_an_op_that_registers_nothing_is_composite_and_one_that_says_so_is_missing() -> None:
    table = kernels.derive(SOME_YAML, (), "2.13.0")
    assert table.status("whole") == "composite"
    assert table.status("_nobody") == "missing"


def test_a_composite_op_is_missing_if_the_sibling_it_is_written_with_is() -> None:
    table = kernels.derive(SOME_YAML, (), "2.13.0")
    assert table.through == {"put": "put_"}
    assert table.status("put") == "missing"


def test_what_the_cpu_has_no_kernel_for_is_known() -> None:
    assert kernels.derive(SOME_YAML, (), "2.13.0").not_on_cpu == {"_chosen", "_nobody"}


def test_a_kernel_written_in_python_counts() -> None:
    python = 'lib = torch.library.Library("aten", "IMPL", "MPS")\nlib.impl("aten::solve.out", f)\n'
    other = 'lib = torch.library.Library("aten", "IMPL", "XPU")\nlib.impl("aten::put_", f)\n'
    table = kernels.derive(SOME_YAML, (python, other), "2.13.0")
    assert table.in_python == {"solve", "solve.out"}
    assert table.status("solve") == "kernel"
    assert table.status("put_") == "missing"


def test_a_python_kernel_may_name_the_device_in_its_call() -> None:
    python = '_lib = _Library("aten", "IMPL")\n_lib.impl(\n    "put_", f, "MPS"\n)\n'
    table = kernels.derive(SOME_YAML, (python,), "2.13.0")
    assert table.status("put_") == "kernel"
    assert table.status("put") == "composite"


def test_reading_by_lines_finds_what_a_yaml_parser_finds() -> None:
    installed = kernels._installed()
    assert installed is not None
    text = (installed / kernels.YAML).read_text()
    parsed = {e["func"].split("(")[0]: e for e in yaml.load(text, yaml.CSafeLoader)}
    read = kernels.read_natives(text)
    assert set(read) == set(parsed)
    for name, entry in parsed.items():
        keys = {k.strip() for group in entry.get("dispatch", {}) for k in group.split(",")}
        if "dispatch" not in entry and "structured_delegate" not in entry:
            keys = {"CompositeImplicitAutograd"}
        assert read[name] == (keys, entry.get("structured_delegate"))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_kept_table_says_what_the_wheel_of_its_version_registers(version: str) -> None:
    found = FOUND_IN_WHEELS / f"torch-{version}.json"
    if not found.is_file():
        pytest.skip(f"{FOUND_IN_WHEELS} is not here")
    wheel = json.loads(found.read_text())
    kept = json.loads((Path(kernels.__file__).parent / f"mps-{version}.json").read_text())
    assert kept["torch"] == version
    for key in ("registered", "cpu_fallback", "missing"):
        assert sorted(kept[key]) == sorted(wheel[key]), key


def test_the_installed_version_is_read_from_its_own_files_and_says_what_was_kept() -> None:
    import torch

    version = torch.__version__.partition("+")[0]
    kept = Path(kernels.__file__).parent / f"mps-{version}.json"
    if not kept.is_file():
        pytest.skip(f"no table of torch {version} is kept")
    assert kernels.kernel_table(version).as_json() == kept.read_text()


@pytest.mark.parametrize(("asked", "answered"), [("2.9.1", "2.9.0"), ("2.40.0", "2.15.0")])
def test_a_version_without_a_table_is_answered_by_the_nearest(asked: str, answered: str) -> None:
    assert kernels.kernel_table(asked).torch == answered


def test_versions_differ_in_what_they_send_to_the_cpu() -> None:
    assert kernels.kernel_table("2.9.0").status("linalg_svd") == "sent to the cpu"
    assert kernels.kernel_table("2.15.0").status("_linalg_svd") == "kernel"
    assert kernels.kernel_table("2.15.0").status("embedding_renorm_") == "sent to the cpu"


def test_tables_are_small() -> None:
    tables = list(Path(kernels.__file__).parent.glob("mps-*.json"))
    assert len(tables) == len(VERSIONS)
    assert max(t.stat().st_size for t in tables) < 32_000


def test_the_tool_writes_the_table_of_a_wheel(tmp_path: Path) -> None:
    import importlib.util
    import zipfile

    spec = importlib.util.spec_from_file_location("mps_ops", TOOLS / "mps_ops.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    wheel = tmp_path / "torch-2.13.0-cp312-cp312-macosx_14_0_arm64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(kernels.YAML, SOME_YAML)
        archive.writestr("torch/_refs/linalg/__init__.py", "")
    tool.write(wheel, tmp_path)
    assert json.loads((tmp_path / "mps-2.13.0.json").read_text())["through"] == {"put": "put_"}


def test_group_norm_trains_on_versions_whose_kernel_is_written_in_python() -> None:
    assert kernels.kernel_table("2.12.0").status("native_group_norm_backward") == "kernel"
    assert "native_group_norm_backward" in kernels.kernel_table("2.12.0").in_python
