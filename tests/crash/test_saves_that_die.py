"""A save that dies anywhere leaves the newest committed checkpoint whole, and the next one works.

The dying is done by dying.py, in processes of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("dying.py")
TESTS = PROGRAM.parents[1]
SCENARIOS = [
    "New",
    "Hooked",
    "Overwrite",
    "OverwriteWithoutSwap",
    "Retained",
    "Behind",
    "Sharded",
]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: thousands of fsyncs then take no time.

    It is also another filesystem than the one that temporary files go to.
    """
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if Path("/dev/shm").is_dir() else tmp_path
    ) as f:
        yield Path(f)


def dying(folder: Path, *words: str) -> dict[str, Any]:
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, str(PROGRAM), str(folder), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_killed_at_every_touch_of_the_disk(memory: Path) -> None:
    found = dying(memory, *(f"deaths:{name}" for name in SCENARIOS))
    assert {word: result["wrong"] for word, result in found.items() if result["wrong"]} == {}
    for name in SCENARIOS:
        assert found[f"deaths:{name}"]["deaths"] > 20


def test_killed_at_every_touch_of_a_real_disk(tmp_path: Path) -> None:
    (result,) = dying(tmp_path, "deaths:New").values()
    assert result["wrong"] == []


def test_every_file_is_on_the_disk_before_the_folder_has_its_name(memory: Path) -> None:
    (result,) = dying(memory, "limit:New").values()
    log = [line.split("\t") for line in result["log"]]
    names = [(words[0], Path(words[1]).name) for words in log]
    rename = next(i for i, words in enumerate(log) if words[0] == "rename")
    created = [i for i, words in enumerate(names) if words[0] == "create"]
    assert names[created[-1]] == ("create", "manifest.json"), "which knows what all others hold"
    synced = [names.index(("sync", names[i][1])) for i in created]
    assert all(made < sync for made, sync in zip(created, synced, strict=True))
    folder = Path(log[rename][1]).name
    assert max(*synced, names.index(("sync_folder", folder))) < rename
    assert log[rename + 1] == ["sync_folder", str(Path(log[rename][2]).parent)]


def test_no_space_at_any_touch_of_the_disk(memory: Path) -> None:
    words = [f"no-space:{name}" for name in ("New", "OverwriteWithoutSwap", "Retained")]
    found = dying(memory, *words, "limit:New", "limit:Behind")
    assert {word: result["wrong"] for word, result in found.items() if result["wrong"]} == {}


@pytest.mark.parametrize("how", ["random", "random-behind"])
def test_killed_at_random_moments(memory: Path, how: str) -> None:
    (result,) = dying(memory, f"{how}:20").values()
    assert result["wrong"] == []
    assert result["reached"] > 0


@pytest.mark.full
@pytest.mark.parametrize("how", ["random", "random-behind"])
def test_killed_at_random_moments_many_times(tmp_path: Path, how: str) -> None:
    (result,) = dying(tmp_path, f"{how}:200").values()
    assert result["wrong"] == []
