"""`anytrain glue ... --preflight`: told what awaits the job, and nothing is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from anytrain.core.errors import BadInput
from anytrain.insight.preflight.report import foretold
from anytrain.recipes.glue import command
from tiny_bert import OVERRIDES, model_folder, pairs, write_rows

SHORT = ["--max_steps", "3", "--precision", "no", "--per_device_train_batch_size", "8"]


def words(folder: Path) -> list[str]:
    tiny = model_folder(folder / "tiny")
    train = write_rows(folder / "train.json", pairs(32))
    return [
        *("--model_name_or_path", str(tiny), "--config_overrides", OVERRIDES),
        *("--train_file", str(train), "--do_train", "--output_dir", str(folder / "out")),
    ]


@pytest.mark.full
def test_the_job_is_traced_and_not_run(tmp_path: Path, capsys: Any) -> None:
    command.run([*words(tmp_path), "--preflight", "mps:16GB", *SHORT])
    told = capsys.readouterr().out
    assert "mps:16GB: runs, fits" in told
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["preflight.json"]
    forecast = foretold(tmp_path / "out", "mps")
    assert forecast is not None
    assert forecast["fits"]


def test_what_is_wrong_with_the_options_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="Cannot use both|No model was named|No data was named"):
        command.run(["--preflight", "mps:16GB", "--output_dir", str(tmp_path)])


def test_help_tells_of_it() -> None:
    assert "--preflight [TARGET ...]" in command.help_text("anytrain glue")
