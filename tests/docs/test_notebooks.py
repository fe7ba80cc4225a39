"""The notebooks of docs/notebooks run in a real kernel, and show what is saved in them."""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

import nbformat

from launching import run_command

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "notebooks.py"
NOTEBOOKS = sorted(ROOT.glob("docs/notebooks/*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])


def write(path: Path, source: str, *outputs: nbformat.NotebookNode) -> Path:
    cell = nbformat.v4.new_code_cell(source, id="one", execution_count=1, outputs=list(outputs))
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    return path


def printed(text: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_output("stream", name="stdout", text=text)


def run_tool(*words: object, check: bool = True):
    return run_command([sys.executable, TOOL, *words], cwd=ROOT, check=check)


def names_host(text: str, host: str) -> bool:
    """Whether a host is named; one called "gpu" or "worker" is no other than the word."""
    is_a_word = re.fullmatch(r"[A-Za-z]*", host) is not None and len(host) < 12
    return not is_a_word and re.search(rf"(?<![\w-]){re.escape(host)}(?![\w-])", text) is not None


@each_notebook
def test_a_notebook_shows_what_is_saved_in_it(path: Path) -> None:
    run_tool("--check", path)


@each_notebook
def test_every_cell_was_run_in_order_and_fails_only_where_it_is_said(path: Path) -> None:
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        failed = any(output.output_type == "error" for output in cell.outputs)
        assert failed == ("raises-exception" in cell.metadata.get("tags", []))


@each_notebook
def test_nothing_of_the_machine_is_saved(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    saved = json.dumps(notebook)
    assert not re.search(r"/(home|root|Users|tmp|work|usr|opt)/|site-packages|\\u001b", saved)
    shown = json.dumps([cell.outputs for cell in notebook.cells if cell.cell_type == "code"])
    assert not names_host(shown, socket.gethostname())


def test_a_hosts_name_is_found_as_a_whole_and_only_if_it_is_no_word() -> None:
    assert names_host("on build-7.local, pid 3", "build-7")
    assert not names_host("on rebuild-71", "build-7")
    for host in ("gpu", "train", "worker", "main", ""):
        assert not names_host(f"the {host} said", host)


@each_notebook
def test_links_lead_somewhere(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert targets
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_another_output_is_noticed_and_saved_on_wish(tmp_path: Path) -> None:
    path = write(tmp_path / "one.ipynb", "print('two')", printed("one\n"))
    ran = run_tool("--check", path, check=False)
    assert ran.returncode == 1
    assert "-one\n+two\n" in ran.stderr
    run_tool(path)
    assert nbformat.read(path, as_version=4).cells[0].outputs == [printed("two\n")]


def test_other_times_and_sizes_leave_the_file_as_it_is(tmp_path: Path) -> None:
    bar = "100%|##| 2/2 [00:0{0}<00:00, {0}.50it/s], {0}.1 of 8.0 GiB (pid {0}7)"
    path = write(tmp_path / "one.ipynb", f"print({bar.format(3)!r})", printed(bar.format(9) + "\n"))
    before = path.read_text()
    run_tool(path)
    assert path.read_text() == before


def test_a_cell_that_fails_unannounced_fails_the_run(tmp_path: Path) -> None:
    ran = run_tool(write(tmp_path / "one.ipynb", "1 / 0"), check=False)
    assert ran.returncode == 1
    assert "ZeroDivisionError" in ran.stderr
