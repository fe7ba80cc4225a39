"""Run the notebooks of docs/notebooks in a real kernel, and save what they show.

python tools/notebooks.py [FILE ...]            run and save
python tools/notebooks.py --check [FILE ...]    say whether they still show what is saved

They run on the CPU, whatever else is here. What is saved has no colours, no frames of libraries
and no paths; where a run differs from it in times and sizes alone, the file stays as it is.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
MOST_S = 120
"""How long one cell may take."""
# What is saved must not depend on the devices here, nor on tqdm's wish for a package.
_VARIABLES = {"ANYTRAIN_DEVICE": "cpu", "PYTHONWARNINGS": "ignore:IProgress not found"}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_FRAME = re.compile(r"^(?=File |Cell In\[)", re.MULTILINE)
_FRAMES_LEFT_OUT = "(frames of libraries)\n\n"
# What differs from run to run, or from machine to machine, and means nothing here.
_VARIES = (
    (re.compile(r"\[[\d:]+<[\d:?]+, *[\d.?]+ ?(it/s|s/it)\]"), "[times]"),
    (re.compile(r"[\d.]+ of [\d.]+ [KMGT]iB( that this machine has)?"), "sizes"),
    (re.compile(r"[\d.]+ [KMGT]iB"), "size"),
    (re.compile(r"\(pid \d+\)"), "(pid)"),
    (re.compile(r"(\.py line) \d+"), r"\1"),
)


def run(notebook: Any) -> Any:
    """Return the notebook as a fresh kernel fills it in; raise where a cell fails unannounced."""
    fresh = copy.deepcopy(notebook)
    client = NotebookClient(fresh, timeout=MOST_S, kernel_name="python3", record_timing=False)
    client.execute(env={**os.environ, **_VARIABLES})  # noqa: TID251  a kernel inherits all
    fresh.metadata = notebook.metadata
    for cell in code_cells(fresh):
        cell.outputs = clean(cell.outputs)
    return fresh


def clean(outputs: Sequence[Any]) -> list[Any]:
    """Return outputs as they are read: one text a stream, errors with the cells' own frames."""
    texts = {"stdout": "", "stderr": ""}
    others = []
    for each in outputs:
        if each.output_type == "stream":
            texts[each.name] += each.text
        else:
            others.append(_cleaned(each))
    streams = [
        nbformat.v4.new_output("stream", name=name, text=_as_shown(text))
        for name, text in texts.items()
        if text
    ]
    return [*streams, *others]


def _cleaned(output: Any) -> Any:
    if output.output_type == "error":
        output.traceback = _own_frames("\n".join(output.traceback)).split("\n")
        output.evalue = _COLOUR.sub("", output.evalue)
    return output


def _as_shown(text: str) -> str:
    """Return what stays on the page: after a carriage return, a line is written over."""
    rows = [row.rstrip("\r").split("\r")[-1] for row in _COLOUR.sub("", text).split("\n")]
    return "\n".join(rows)


def _own_frames(traceback: str) -> str:
    """Return a traceback without the frames of files, whose paths and lines are the machine's."""
    told = ""
    for part in _FRAME.split(_COLOUR.sub("", traceback)):
        if not part.startswith("File "):
            told += part
            continue
        frame, gap, rest = part.partition("\n\n")
        if not told.endswith(_FRAMES_LEFT_OUT):
            told += _FRAMES_LEFT_OUT
        told += rest if gap else ""
    return told


def differences(saved: Any, fresh: Any) -> str:
    """Return what a fresh run shows otherwise, as a diff of the pages; "" where it is the same."""
    before, after = (list(_lines(each)) for each in (saved, fresh))
    return "\n".join(difflib.unified_diff(before, after, "saved", "fresh", lineterm="", n=1))


def _lines(notebook: Any) -> Iterator[str]:
    """Give the outputs of a notebook line by line, without what varies."""
    for cell in code_cells(notebook):
        yield f"In [{cell.execution_count}]"
        for output in cell.outputs:
            yield f"{output.output_type} {output.get('name', '')}".strip()
            text = _text(output)
            for pattern, word in _VARIES:
                text = pattern.sub(word, text)
            # A progress bar pads its line to cover a longer one before it.
            yield from (line.rstrip() for line in text.split("\n"))


def _text(output: Any) -> str:
    if output.output_type == "stream":
        return str(output.text)
    if output.output_type == "error":
        return "\n".join(output.traceback)
    return "\n".join(f"{kind}: {value}" for kind, value in sorted(output.data.items()))


def code_cells(notebook: Any) -> list[Any]:
    """Return the cells that run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def main() -> None:
    """Run the notebooks, and save or compare them."""
    parser = argparse.ArgumentParser(description="Run the notebooks and save what they show.")
    parser.add_argument("files", nargs="*", type=Path, help="all of docs/notebooks by default")
    parser.add_argument("--check", action="store_true", help="compare, and save nothing")
    told = parser.parse_args()
    stale = []
    for path in told.files or sorted(FOLDER.glob("*.ipynb")):
        saved = nbformat.read(path, as_version=4)
        fresh = run(saved)
        changes = differences(saved, fresh)
        if changes and told.check:
            stale.append(f"{path.name} shows something else now:\n{changes}\n")
        elif changes:
            nbformat.write(fresh, path)
    if stale:
        sys.exit("\n".join(stale) + "\nRun `python tools/notebooks.py`, and read the diff.")


if __name__ == "__main__":
    main()
