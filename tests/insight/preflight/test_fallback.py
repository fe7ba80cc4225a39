from __future__ import annotations

from pathlib import Path

import pytest

from anytrain.insight.preflight.script import mps_fallback_is_on, mps_fallback_is_on_here


@pytest.fixture(autouse=True)
def _not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ENABLE_MPS_FALLBACK", raising=False)


@pytest.mark.parametrize(
    ("text", "is_on"),
    [
        ("from anytrain import Accelerator\nimport torch\n", True),
        ('"""Words."""\nimport os\nimport numpy as np\nimport anytrain\nimport torch\n', True),
        ("import torch\nfrom anytrain import Accelerator\n", False),
        ("import my_own_module\nimport anytrain\n", False),
        ("print('nothing')\n", False),
        ("import anytrain (\n", False),
    ],
)
def test_what_a_script_imports_first_decides(tmp_path: Path, text: str, is_on: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert mps_fallback_is_on([str(script), "--lr", "1"]) is is_on


def test_our_own_commands_have_it_and_others_modules_do_not() -> None:
    assert mps_fallback_is_on(["-m", "anytrain.cli.main", "glue"])
    assert not mps_fallback_is_on(["-m", "somebody.train"])
    assert not mps_fallback_is_on(["no_such_file.py"])


@pytest.mark.parametrize(("value", "is_on"), [("1", True), ("0", False)])
def test_the_variable_itself_is_heard_first(
    value: str, is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", value)
    monkeypatch.setattr("sys.platform", "linux")
    assert mps_fallback_is_on(["no_such_file.py"]) is is_on


def test_on_a_mac_the_variable_may_be_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    monkeypatch.setattr("sys.platform", "darwin")
    assert not mps_fallback_is_on(["no_such_file.py"])


@pytest.mark.parametrize(
    ("value", "torch_first", "is_on"),
    [("1", True, True), ("0", False, False), (None, False, True), (None, True, False)],
)
def test_this_process_is_told_by_its_variable_or_by_what_it_imported_first(
    value: str | None, torch_first: bool, is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is not None:
        monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", value)
    monkeypatch.setattr("anytrain.core.environment._torch_came_first", torch_first)
    assert mps_fallback_is_on_here() is is_on
