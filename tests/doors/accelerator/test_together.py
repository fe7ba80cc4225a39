"""Two ranks together, each promise by name."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from launching import run_command

SCRIPT = Path(__file__).with_name("together.py")
CHECKS = re.findall(r"^def (check_\w+)", SCRIPT.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("together")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run_command([sys.executable, *launcher, SCRIPT, folder], timeout=280)
    return [json.loads((folder / f"results-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks_keep_the_promise(results: list[dict[str, str]], check: str) -> None:
    for rank, found in enumerate(results):
        assert found[check] == "ok", f"rank {rank}: {found[check]}"
