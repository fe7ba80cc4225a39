"""Names that others chose are printed, and obeyed by no terminal: every command, every place."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from anytrain.cli.main import app
from anytrain.core.errors import BadInput, Notice
from anytrain.engine.checkpoint import Saved, Snapshot, Store, load
from checkpoints import small_run
from written_runs import write_run

WORD = "a\x1b]0;mine\x07\x1b[31m\r\x9b2J\x7f\u202eb\u2066\u200bc\u2028d[red]e[/red]\ud800"
IN_A_LINE = WORD + "\nfix: run this"
OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200b\u2028\ud800-\udfff]"
)


def said(*words: object, code: int | None = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "500"})
    assert code is None or result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), words
    found = OBEYED.search(result.output)
    assert found is None, f"{words} printed {found and ascii(found[0])}: {ascii(result.output)}"
    return result.output


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("hostile")
    # Half a character reaches a record by JSON's own spelling of it.
    one, other = (write_run(root / f"run{n}", IN_A_LINE, 40 + n) for n in range(2))
    return one, other


@pytest.mark.parametrize(
    "command",
    [["why"], ["watch", "--once"], ["why", "--json"], ["report"], ["diff"], ["diff", "--json"]],
    ids=" ".join,
)
def test_no_command_lets_a_record_speak_to_the_terminal(
    folders: tuple[Path, Path], command: Sequence[str]
) -> None:
    both = folders if command[0] == "diff" else folders[:1]
    told = said(command[0], *both, *command[1:], code=None)
    assert command[0] == "report" or "x1b" in told or "u001b" in told
    assert not any(line.lstrip("│ ").startswith("fix: run this") for line in told.splitlines())


def test_a_folders_own_name_is_not_obeyed(folders: tuple[Path, Path], tmp_path: Path) -> None:
    name = IN_A_LINE.replace("/", "|").replace("\ud800", "")
    run = folders[0].rename(tmp_path / name)
    for command in (["why"], ["watch", "--once"], ["report"]):
        said(command[0], run, *command[1:], code=None)
    run.rename(folders[0])


def test_no_command_lets_a_checkpoint_speak_to_the_terminal(tmp_path: Path) -> None:
    name = IN_A_LINE.replace("/", "|").replace("\ud800", "")
    run = small_run().snapshot(1)
    hostile = Snapshot(
        step=1,
        models=run.models,
        parts=run.parts,
        rank_parts=run.rank_parts,
        metrics={name: 0.5},
        meta={name: name, "plan": name},
    )

    def with_files(folder: Path) -> Snapshot:
        (folder / name).write_text("a hook's file")
        return hostile

    assert isinstance(Store(tmp_path).save(name, with_files), Saved)
    folder = tmp_path / name
    (folder / f"{name}2").write_text("nobody knows it")
    for words in (["list"], ["show"], ["verify"], ["prune", "--keep-last=1", "--dry-run"]):
        told = said("checkpoint", words[0], tmp_path, *words[1:])
        assert r"\x1b]0;mine\x07" in told or words[0] == "prune"
        assert "[red]e" in told or words[0] == "prune"
        assert not any(line.lstrip("│ ").startswith("fix: run") for line in told.splitlines())
    json.loads(said("checkpoint", "show", folder, "--json"))
    (folder / name).write_text("other")
    for command in ("list", "show", "verify"):
        said("checkpoint", command, folder, code=None)
    (folder / "manifest.json").write_text("{}")
    said("checkpoint", "show", folder, code=1)
    said("checkpoint", "list", folder / "nothing", code=2)
    with pytest.raises(RuntimeError) as refused:
        load(folder)
    assert not OBEYED.search(str(refused.value))


def test_errors_and_notices_are_safe_to_print() -> None:
    error: Any = BadInput(f"no {WORD}", why=WORD, fix=WORD)
    assert error.what == f"no {WORD}" and not OBEYED.search(str(error))
    assert str(error).count("\n") == 2, "its own lines stay"
    with pytest.warns(Notice) as told:
        warnings.warn(f"no {WORD}", Notice, stacklevel=2)
    assert not OBEYED.search(str(told[0].message))
    assert not OBEYED.search(warnings.formatwarning(told[0].message, Notice, "a.py", 1))
