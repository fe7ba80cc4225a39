from __future__ import annotations

import json
import os

from anytrain.engine.recording import console
from anytrain.engine.recording.notebook import NotebookBar
from anytrain.machine.processes import notebook_cell


def test_a_page_is_shown_once_and_then_updated(monkeypatch):
    ours, theirs = os.pipe()
    monkeypatch.setenv(notebook_cell.PIPE, str(theirs))
    page = notebook_cell.CellOutput(notebook_cell.cell_pipe(), {"text/plain": "begun"})
    page.update({"text/plain": "dône\n"})
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        (name, first), (again, second) = (json.loads(line) for line in pipe)
    assert name == again
    assert (first, second) == ({"text/plain": "begun"}, {"text/plain": "dône\n"})


def test_a_page_nobody_looks_at_stops_nothing():
    ours, theirs = os.pipe()
    page = notebook_cell.CellOutput(theirs, {"text/plain": "begun"})
    os.close(ours)
    page.update({"text/plain": "done"})
    os.close(theirs)


def test_a_run_launched_from_a_notebook_is_shown_in_its_cell(monkeypatch):
    ours, theirs = os.pipe()
    monkeypatch.setenv(notebook_cell.PIPE, str(theirs))
    assert isinstance(console.pick(), NotebookBar)
    os.close(ours)
    os.close(theirs)
    assert not isinstance(console.pick(), NotebookBar)  # the variable was inherited, the pipe not


def test_a_file_under_the_pipes_number_is_not_taken_for_it(tmp_path, monkeypatch):
    with (tmp_path / "notes.txt").open("w") as file:
        monkeypatch.setenv(notebook_cell.PIPE, str(file.fileno()))
        assert notebook_cell.cell_pipe() is None
    monkeypatch.delenv(notebook_cell.PIPE)
    assert notebook_cell.cell_pipe() is None
