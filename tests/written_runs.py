"""The record of a run, written by hand: every file, every kind of line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

BEGAN = 1_790_000_000.0


def write_run(folder: Path, word: str = "news", num_steps: int = 400, **changes: Any) -> Path:
    """Write a run of two lives that was resumed at half of its steps; `word` is in every text.

    `changes` replace what a file holds, by its name with an underscore: `run_json=b"..."`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "run.json": json.dumps(_run(word)),
        "timesheet.jsonl": _lines(_timesheet(word, num_steps)),
        "metrics.jsonl": _lines(_metrics(word, num_steps)),
        "events.jsonl": _lines(_events(word, num_steps)),
        "evaluation.json": json.dumps(_classified(word, num_steps)),
        "evaluation-values.json": json.dumps(_valued(word, num_steps)),
    }
    for name, text in files.items():
        given = changes.get(name.replace(".", "_").replace("-", "_"), text)
        (folder / name).write_bytes(given if isinstance(given, bytes) else given.encode())
    return folder


def _lines(entries: list[dict[str, Any]]) -> str:
    return "".join(f"{json.dumps(entry)}\n" for entry in entries)


def _plan(word: str) -> dict[str, Any]:
    return {
        "device": {"value": "cuda:0", "because": f"automatic: {word}"},
        "precision": {"value": "bf16", "because": "asked for"},
        "step": {"value": "recorded", "because": "automatic: shapes repeat"},
    }


def _run(word: str) -> dict[str, Any]:
    start = {
        "time": BEGAN,
        "host": f"host-{word}",
        "pid": 1,
        "command": ["python", "train.py", "--name", word],
        "cwd": f"/home/{word}",
        "python": "3.11.9",
        "platform": "Linux",
        "versions": {"anytrain": "0.1.0", "torch": "2.13.0", word: word},
        "git": {"commit": "0123456789abcdef", "branch": word, "is_dirty": True},
        "hardware": {"cpu": word, "num_cores": 16, "memory_bytes": 2**36, "device": "cuda"},
        "plan": _plan(word),
        "arguments": {"learning_rate": 3e-5, "seed": 7, "warmup_ratio": 0.0, "note": word},
        "data": {"train": {"kind": word, "num_rows": 3668, "fingerprint": "f00d"}},
        "model": {"name": word, "num_parameters": 109_483_778, "num_trainable": 109_483_778},
    }
    return {"format": 1, "name": word, "starts": [start, {**start, "time": BEGAN + 100}]}


def _timesheet(word: str, num_steps: int) -> list[dict[str, Any]]:
    half = num_steps // 2
    begin = {
        "kind": "begin",
        "host": f"host-{word}",
        "pid": 1,
        "plan": _plan(word),
        "device": "cuda:0",
        "world_size": 1,
        "num_cores": 16,
        "max_steps": num_steps,
        "samples_per_step": 32,
        "settings": {},
    }
    found: list[dict[str, Any]] = []
    for life, (first, last) in enumerate([(0, half + 20), (half, num_steps)]):
        start = BEGAN + 100 * life
        found.append({**begin, "time": start, "step": first})
        for number in range(1, 21):
            spent = number * 2.0
            found.append(
                {
                    "kind": "time",
                    "time": start + 5 + spent,
                    "step": first + (last - first) * number // 20,
                    "epoch": number / 10,
                    "seconds": {
                        "start": 5.0,
                        "data": 0.15 * spent,
                        "step": 0.7 * spent,
                        "evaluate": 0.1 * spent,
                        "save": 0.05 * spent,
                    },
                    "hidden": 0.0,
                    "peak_bytes": int(3e9 + 1e8 * math.log(number)),
                    "shapes": ["32x64", f"32x{word}"],
                    "late_shapes": {word: 2},
                    "graphs": 3,
                    "revisions": [
                        {"choice": "step", "value": "eager", "because": word, "step": first}
                    ]
                    if number == 3
                    else [],
                }
            )
    found.append({**found[-1], "kind": "end", "how": "finished", "revisions": []})
    return found


def _metrics(word: str, num_steps: int) -> list[dict[str, Any]]:
    half = num_steps // 2
    found: list[dict[str, Any]] = []
    for first, last in ((0, half + 20), (half, num_steps)):
        if first:
            found.append({"step": first, "time": BEGAN, "event": "begin"})
        found += [_logged(step, num_steps, word) for step in range(first + 1, last + 1)]
    at_end = {"train_runtime": 80.0, "train_samples_per_second": 160.0, "train_loss": 0.4}
    return [*found, {"step": num_steps, "epoch": 4.0, "time": BEGAN, **at_end}]


def _logged(step: int, num_steps: int, word: str) -> dict[str, Any]:
    place = {"step": step, "epoch": 4 * step / num_steps, "time": BEGAN + step / 10}
    if step % max(num_steps // 10, 1) == 0:
        done = step / num_steps
        return {
            **place,
            "eval_loss": 0.3 + 0.5 * math.exp(-4 * done) + 0.1 * done**3,
            "eval_accuracy": 0.5 + 0.42 * (1 - math.exp(-5 * done)),
            "eval_runtime": 1.5,
        }
    return {
        **place,
        "loss": 0.25 + 0.6 * math.exp(-5 * step / num_steps) + 0.03 * math.sin(step * 7.7),
        "grad_norm": "NaN" if step == 5 else 1 + 0.5 * math.cos(step * 3.3),
        "learning_rate": 3e-5 * (1 - step / num_steps),
        word: float(step % 7),
    }


def _events(word: str, num_steps: int) -> list[dict[str, Any]]:
    half = num_steps // 2
    path = f"runs/{word}/checkpoint-"
    place = {"time": BEGAN, "step": half}
    return [
        {**place, "kind": "notice", "text": f"{word} is slow.", "category": "Notice"},
        {**place, "kind": "notice", "text": f"{word} is slow.", "category": "Notice", "count": 4},
        {**place, "kind": "checkpoint", "path": f"{path}{half}", "bytes": 10**9, "seconds": 1.2},
        {**place, "kind": "best", "path": f"{path}{half}", "metric": "eval_loss", "value": 0.35},
        {**place, "step": num_steps, "kind": "checkpoint", "path": f"{path}{num_steps}"},
        {**place, "step": num_steps, "kind": "removed", "path": f"{path}{half}"},
        {**place, "kind": word},
    ]


def _classified(word: str, num_steps: int) -> dict[str, Any]:
    wrong = {
        "index": 17,
        "inputs": {"sentence": f"The {word} of the day was good, or so they said.", word: "b"},
        "label": "sport",
        "predicted": word,
        "confidence": 0.9731,
    }
    return {
        "format": 1,
        "step": num_steps,
        "epoch": 4.0,
        "time": BEGAN,
        "split": "eval",
        "num_samples": 300,
        "kind": "classification",
        "classes": [word, "sport", "science"],
        "confusion": [[90, 6, 4], [3, 95, 2], [12, 1, 87]],
        "per_class": [
            {"precision": 0.857, "recall": 0.9, "f1": 0.878, "support": 100},
            {"precision": 0.931, "recall": 0.95, "f1": 0.94, "support": 100},
            {"precision": 0.935, "recall": 0.87, "f1": 0.902, "support": 100},
        ],
        "worst": [wrong, {**wrong, "index": 5, "confidence": None}],
        "note": f"{word}.",
    }


def _valued(word: str, num_steps: int) -> dict[str, Any]:
    edges = [-1.5 + 0.3 * n for n in range(11)]
    points = [[n / 20, n / 20 + 0.3 * math.sin(n)] for n in range(100)]
    return {
        "format": 1,
        "step": num_steps,
        "split": f"values {word}",
        "num_samples": 100,
        "kind": "regression",
        "residuals": {"edges": edges, "counts": [1, 3, 8, 14, 22, 20, 16, 10, 4, 2]},
        "points": points,
        "worst": [
            {"index": 3, "inputs": {"text": word}, "label": 1.0, "predicted": 2.5, "error": 1.5}
        ],
    }
