"""A trace leaves the user's files as they are."""

from __future__ import annotations

import os
import pickle
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from anytrain.insight.preflight.sandbox import sandboxed
from anytrain.insight.preflight.targets import parse_target
from anytrain.insight.preflight.trace_process import trace_run


def _dumped(path: Path) -> None:
    with path.open("wb") as file:
        pickle.dump(1, file)


def _appended(path: Path) -> None:
    with open(path, "a") as file:
        file.write("more")
    assert path.read_text() == "oldmore"


def _moved(path: Path) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text("new")
    os.replace(draft, path)
    assert path.read_text() == "new"
    assert not draft.exists()


def _begun_anew(path: Path) -> None:
    shutil.rmtree(path.parent)
    assert not path.exists()
    path.parent.mkdir()
    (path.parent / "deeper" / "still").mkdir(parents=True)
    path.write_text("new")
    assert path.read_text() == "new"


WAYS: dict[str, Callable[[Path], object]] = {
    "write_text": lambda path: path.write_text("new"),
    "np.save": lambda path: np.save(path, np.ones(2)),
    "pickle.dump": _dumped,
    "append": _appended,
    "os.open": lambda path: os.close(os.open(path, os.O_WRONLY | os.O_TRUNC)),
    "remove": lambda path: path.unlink(),
    "rename": lambda path: path.rename(path.with_name("other")),
    "replace": _moved,
    "rmtree": _begun_anew,
    "copy": lambda path: shutil.copy(__file__, path),
    "touch": lambda path: path.with_name("new").touch(),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_users_file_stays_as_it_is(tmp_path: Path, way: str) -> None:
    own, scratch = tmp_path / "own", tmp_path / "scratch"
    own.mkdir()
    scratch.mkdir()
    (own / "file.npy").write_text("old")
    with sandboxed(str(scratch)):
        WAYS[way](own / "file.npy")
    assert [path.name for path in own.rglob("*")] == ["file.npy"]
    assert (own / "file.npy").read_text() == "old"
    (own / "file.npy").write_text("new")
    assert (own / "file.npy").read_text() == "new"


def test_what_would_fail_fails(tmp_path: Path) -> None:
    with sandboxed(str(tmp_path)):
        path = Path(__file__)
        with pytest.raises(FileExistsError):
            path.open("x").close()
        with pytest.raises(FileNotFoundError):
            (path.parent / "nowhere" / "file").write_text("new")
        with pytest.raises(FileNotFoundError):
            os.remove(f"{path}.nothing")
        with pytest.raises(FileNotFoundError):
            Path(f"{path}.nothing").open("r+").close()


SCRIPT = """
    import json, pathlib, shutil, torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from anytrain import Accelerator

    shutil.rmtree("out", ignore_errors=True)
    pathlib.Path("out").mkdir()
    accelerator = Accelerator()
    net = nn.Linear(8, 2)
    torch.save({"begun": True}, "out/begin.pt")
    optimizer = torch.optim.AdamW(net.parameters())
    loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for (x,) in loader:
        loss = net(x).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    pathlib.Path("out/results.json").write_text(json.dumps({"loss": float(loss)}))
    open("history.csv", "a").write("1")
"""


def test_a_script_that_is_traced_changes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").write_text("63")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert trace_run(parse_target("cuda:24GB"), ["train.py"]).failure == ""
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_programs_that_a_traced_script_starts_are_not_run_unless_they_only_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    starts = """
        import os, subprocess
        assert subprocess.run(["rm", "-rf", "out"]).returncode == 0
        subprocess.run("echo new > result.txt", shell=True, check=True)
        assert os.system("touch left.txt") == 0
        assert subprocess.check_output(["uname"], text=True).strip()
        assert os.popen("hostname").read().strip()
    """
    script = textwrap.dedent(starts) + textwrap.dedent(SCRIPT)
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "out").mkdir()
    (tmp_path / "result.txt").write_text("old")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    trace = trace_run(parse_target("cuda:24GB"), ["train.py"])
    assert trace.failure == ""
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    told = [note for note in trace.notes if "was not run" in note]
    assert [note.split("`")[1] for note in told] == [
        *("rm -rf out", "echo new > result.txt", "touch left.txt"),
    ]
