"""The table of what HF's Trainer modules import is that of the installed transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from anytrain.compat.transformers import trainer

ROOT = Path(__file__).parents[3]
SHOW = "import import_names; print(import_names.written(), end='')"


@pytest.mark.skipif(
    not transformers.__version__.startswith("5.22."), reason="the table is of transformers 5.22"
)
def test_the_table_is_up_to_date() -> None:
    found = subprocess.run(
        [sys.executable, "-c", SHOW], cwd=ROOT / "tools", capture_output=True, text=True, check=True
    ).stdout
    table = ROOT / "src" / "anytrain" / "compat" / "transformers" / "import_names.json"
    assert table.read_text(encoding="utf-8") == found, "run python tools/import_names.py"


def test_a_name_that_hfs_module_only_imports_is_found_and_another_is_not() -> None:
    assert trainer.get_scheduler is transformers.get_scheduler
    with pytest.raises(AttributeError, match="no attribute 'get_schedulr'"):
        trainer.get_schedulr  # noqa: B018
