"""Where a run comes from: told without secrets, and without keeping anybody waiting."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anytrain.engine.recording import origin


def commit(folder: Path) -> str:
    def git(*words: str) -> str:
        told = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(told, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q", "-b", "trunk")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    return git("rev-parse", "HEAD")


def asked() -> object:
    git = origin.Git()
    git.ask()
    return git.answer(wait=True)


def test_the_scripts_commit_is_known_and_whether_it_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs_tool: Callable[[str], str]
) -> None:
    needs_tool("git")
    monkeypatch.setattr(origin, "_PATIENCE_S", 60)
    script = tmp_path / "train.py"
    script.write_text("1")
    head = commit(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert asked() == {"commit": head, "branch": "trunk", "is_dirty": False}
    (tmp_path / "notes.txt").write_text("a new file is no change of the code")
    assert asked() == {"commit": head, "branch": "trunk", "is_dirty": False}
    script.write_text("2")
    assert asked() == {"commit": head, "branch": "trunk", "is_dirty": True}


def test_code_outside_of_git_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("1")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    assert asked() is None
    monkeypatch.setenv("PATH", "")
    assert asked() is None


def test_a_git_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "git"
    slow.write_text("#!/bin/sh\nexec /bin/sleep 1000\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(origin, "_PATIENCE_S", 0.1)
    git = origin.Git()
    began = time.perf_counter()
    git.ask()
    assert git.answer() is None
    assert git.answer(wait=True) is None
    assert time.perf_counter() - began < 240


def test_versions_are_of_what_is_imported_and_import_nothing() -> None:
    code = (
        "import sys, json, numpy; from anytrain.engine.recording import origin;"
        "before = set(sys.modules); found = origin.here();"
        "print(json.dumps([found['versions'], sorted(set(sys.modules) - before)]))"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    versions, imported = json.loads(told.stdout)
    import numpy

    assert versions["numpy"] == numpy.__version__
    assert "transformers" not in versions
    assert imported == []


def test_settings_are_kept_without_secrets() -> None:
    given = {
        "hub_token": "abc",
        "learning_rate": 1e-3,
        "include_num_input_tokens_seen": "no",
        "nested": {"api_key": "x", "url": "https://me:pass@host/x", "sizes": (1, 2)},
        "model": "hf_abcdefghijklmnop",
    }
    assert origin.settings(given) == {
        "learning_rate": 1e-3,
        "include_num_input_tokens_seen": "no",
        "nested": {"url": "https://***@host/x", "sizes": [1, 2]},
        "model": "***",
    }


def test_a_command_is_kept_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["python", "-m", "x", "--hub_token", "abc", "--wandb-api-key=s", "--seed", "1"]
    monkeypatch.setattr(sys, "orig_argv", words)
    monkeypatch.setattr(sys, "argv", ["x", *words[3:]])
    told = origin.command()
    assert told == [
        "python",
        "-m",
        "x",
        "--hub_token",
        "***",
        "--wandb-api-key=***",
        "--seed",
        "1",
    ]


@dataclass
class Nested:
    hub_token: str = "SECRET"
    rate: float = 0.5


SECRETS = [
    "wandb.api_key=SECRET",
    "+hub_token=SECRET",
    "--opt",
    "api_key=SECRET==",
    "--options=api_key=SECRET",
    "--data",
    "https://h/x?token=SECRET&page=1&X-Amz-Signature=SECRET&sig=SECRET",
    "--header",
    "Authorization: Bearer SECRET",
    "--json",
    '{"hub_token":"SECRET", "inner": {"password": "SECRET"}}',
    "--pwd",
    "SECRET",
    "--pat=SECRET",
    "ghp_SECRETabcdefghijkl1234",
    "github_pat_SECRET_abcdefghijkl",
    "sk-SECRETabcdefghijkl",
    "AKIASECRETABCDEFGHIJ",
]


def test_no_word_of_a_command_holds_a_secret() -> None:
    told = origin.without_secrets(["train.py", *SECRETS, "--name=a=b", "model.lr=0.1"])
    assert "SECRET" not in " ".join(told)
    assert told[-2:] == ["--name=a=b", "model.lr=0.1"]
    assert "page=1" in told[7]
    assert all("SECRET" not in origin.scrubbed(f"Cannot: {word}.") for word in SECRETS[5:11])


def test_settings_of_settings_are_looked_into() -> None:
    given = {
        "args": argparse.Namespace(hub_token="SECRET", seed=1, inner=Nested()),
        "db": "https://h/?token=SECRET",
        "rate": np.float32(0.5),
        "steps": np.int64(3),
        "text": "Nested(hub_token='SECRET', rate=0.5)",
    }
    circle: dict[str, Any] = {}
    circle["me"] = circle
    assert origin.settings({**given, "circle": circle})["circle"]
    assert origin.settings(given) == {
        "args": {"seed": 1, "inner": {"rate": 0.5}},
        "db": "https://h/?token=***",
        "rate": 0.5,
        "steps": 3,
        "text": "Nested(hub_token=***, rate=0.5)",
    }
