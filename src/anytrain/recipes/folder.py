"""Decide whether a run may use its output folder, and keep its settings there.

A folder holds one run. `run.json` keeps what defines it beside what the run itself writes there
of its starts, so that the same command continues a run that was cut short, and another command
cannot train over it by mistake.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from anytrain._version import __version__
from anytrain.core import documents
from anytrain.core.documents import as_file
from anytrain.core.errors import BadInput

RECORD = "run.json"
# What a run writes. Only these are ever removed; a file by any other name is somebody else's.
_OWN_FILES = (
    RECORD,
    "trainer_state.json",
    "metrics.jsonl",
    "timesheet.jsonl",
    "events.jsonl",
    "evaluation.json",
    "evaluation-*.json",
    "report.html",
    f".{RECORD}.part",
    f"{RECORD}.new",  # drafts that a kill has left
    "evaluation*.json.new",
    "result.json",
    "*_results.json",
    "predict_results*.txt",
    "training_args.*",
    "config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
# A checkpoint, or what a save that died has left of one. Trackers' folders stay: `runs` may hold
# the logs of many runs.
_OWN_FOLDER = re.compile(r"checkpoint-\d+|\.checkpoint-\d+\.(saving|replaced|removed)-.+")
# One of these means that a run, or a model, lies here already.
_MARKS = (RECORD, "trainer_state.json", "checkpoint-[0-9]*", "config.json", "*.safetensors")


@dataclass(frozen=True, slots=True)
class RunStart:
    """How a run begins in its folder."""

    kind: Literal["fresh", "continue", "anew", "resume"]
    said: str = ""
    """What to tell the user; empty where there is nothing to tell."""


def look(
    folder: Path, settings: Mapping[str, Any], *, overwrite: bool, resume: object = None
) -> RunStart:
    """Return how a run with these settings may begin here, or refuse; changes nothing.

    With resume="auto" it goes on where there is a checkpoint, and begins as ever where there is
    none.
    """
    is_auto = str(resume).lower() == "auto"
    if resume and not (is_auto and not any(_matching(folder, ("checkpoint-[0-9]*",)))):
        return RunStart("resume")
    if not any(_matching(folder, _MARKS)):
        return RunStart("fresh")
    if overwrite:
        return RunStart("anew", f"Starting anew: what an earlier run left in {folder} is removed.")
    record = read(folder)
    if record is None:
        raise _taken(folder, "it holds a model or a run that kept no run.json.")
    differing = _differing(record.get("settings", {}), settings)
    if differing:
        raise _taken(folder, f"it holds a run with other settings: {'; '.join(differing)}.")
    if record.get("state") == "finished":
        raise _taken(folder, "it holds this run already, and it is finished.")
    return RunStart("continue", f"Continuing the run in {folder} that was cut short.")


def begin(folder: Path, start: RunStart, settings: Mapping[str, Any]) -> None:
    """Write the run's settings; where it starts anew, first remove what the old one left."""
    if start.kind == "anew":
        remove_own(folder)
    folder.mkdir(parents=True, exist_ok=True)
    own = {"anytrain": __version__, "state": "unfinished", "settings": dict(settings)}
    _write(folder, {**(read(folder) or {}), **own})


def finish(folder: Path) -> None:
    """Note that the run is over, so that the same command does not train it again."""
    record = read(folder)
    if record is not None:
        _write(folder, {**record, "state": "finished"})


def remove_own(folder: Path) -> None:
    """Remove the files and checkpoints of a run, and nothing else."""
    for path in sorted(folder.iterdir()):
        if _OWN_FOLDER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
    for path in _matching(folder, _OWN_FILES):
        if path.is_file() or path.is_symlink():
            path.unlink()


def _matching(folder: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    for pattern in patterns:
        yield from sorted(folder.glob(pattern))


def read(folder: Path) -> dict[str, Any] | None:
    """Return what the folder's run kept about itself, or None where there is nothing to read."""
    try:
        record = documents.from_json(as_file(folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _write(folder: Path, record: Mapping[str, Any]) -> None:
    # Whole or as it was: a run that dies here must still be known when it is started again.
    part = folder / f".{RECORD}.part"
    part.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(part, folder / RECORD)


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return "name was x, is y" for each setting that is not the same."""
    new = json.loads(json.dumps(new))  # as the old ones came back: lists for tuples
    return [
        f"{name} was {old.get(name)}, is {new.get(name)}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def _taken(folder: Path, why: str) -> BadInput:
    return BadInput(
        f"Cannot train into {str(folder)!r}.",
        why=why,
        fix="choose another --output_dir, start anew with --overwrite_output_dir, or go on from "
        "one of its checkpoints with --resume_from_checkpoint.",
    )
