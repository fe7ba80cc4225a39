"""Run plain scripts in turns and compare a number that they print, or their time."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from anytrain.core.errors import BadInput


@dataclass
class TimedScript:
    """A script with the seconds and the numbers of its runs."""

    path: Path
    seconds: list[float] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)


def number_in(text: str, name: str) -> float | None:
    """Return the last value that a text gives to a name.

    >>> number_in("{'train_samples_per_second': 31.5, 'epoch': 3}", "samples_per_second")
    31.5
    """
    found = re.findall(rf"{re.escape(name)}\W*?(-?\d[\d.]*(?:e[-+]?\d+)?)", text)
    return float(found[-1].rstrip(".")) if found else None


def compare(
    paths: Sequence[Path], rounds: int, name: str, tell: Callable[[str], None]
) -> list[TimedScript]:
    """Run every script once a round, and turn the order around every time."""
    for path in paths:
        if not path.is_file():
            raise BadInput(
                f"There is no script {path}.", why="no such file.", fix="give paths of scripts."
            )
    scripts = [TimedScript(path) for path in paths]
    for turn in range(rounds):
        for script in scripts if turn % 2 == 0 else list(reversed(scripts)):
            began = time.perf_counter()
            done = subprocess.run(
                [sys.executable, str(script.path)], capture_output=True, text=True, check=False
            )
            script.seconds.append(time.perf_counter() - began)
            if done.returncode:
                said = (done.stdout + done.stderr).strip().splitlines()
                raise BadInput(
                    f"{script.path} failed.",
                    why=f"it ended with code {done.returncode}: {said[-1] if said else 'silent'}",
                    fix="run it by itself first.",
                )
            number = number_in(done.stdout + done.stderr, name)
            if number is not None:
                script.numbers.append(number)
            also = "" if number is None else f", {name} {number:g}"
            tell(f"{script.path}: {script.seconds[-1]:.2f} s{also}")
    return scripts


def table(scripts: Sequence[TimedScript], name: str) -> list[list[str]]:
    """Return a line for each script; ratios are to the first, more is faster.

    Where every script printed the number it is compared, else the time of the whole process.
    """
    by_number = all(script.numbers for script in scripts)
    head = name if by_number else "seconds"
    lines = [["script", head, "lowest", "highest", "times as fast as the first"]]
    first: float | None = None
    for script in scripts:
        values = script.numbers if by_number else script.seconds
        middle = statistics.median(values)
        first = middle if first is None else first
        ratio = middle / first if by_number else first / middle
        numbers = [f"{value:.4g}" for value in (middle, min(values), max(values))]
        lines.append([script.path.name, *numbers, f"{ratio:.2f}"])
    return lines
