"""Show a comparison: tables for the terminal, the same as Markdown, everything as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from anytrain.recipes.bench.comparison import (
    LOSS_TOLERANCE,
    SCORE_TOLERANCE,
    Comparison,
    ContenderRow,
    summarise,
)

_GIB = 2**30
Grid = tuple[Sequence[str], Sequence[Sequence[str]]]

_TRAINING = (
    "contender", "trained by", "precision", "padding", "train s", "samples/s",
    "against HF as it comes", "like for like (same precision)", "first step s", "loss",
    "held out", "peak GiB",
)  # fmt: skip
_STEPS = (
    "contender", "precision", "step", "ms", "CPU ms", "samples/s", "of the matmul rate",
    "device busy ms", "idle", "idle under the profiler", "host waits",
)  # fmt: skip


def show(console: Console, found: Comparison) -> None:
    """Print the tables; where nobody watches, as Markdown."""
    if not console.is_terminal:
        console.print(_text(found), soft_wrap=True, markup=False, highlight=False)
        return
    for head, lines in grids(summarise(found.runs)):
        table = Table(*head)
        for line in lines:
            table.add_row(*line)
        console.print(table)
    for line in remarks(found):
        console.print(line, markup=False, highlight=False)


def grids(rows: Sequence[ContenderRow]) -> list[Grid]:
    """Return the table of whole trainings, and of single steps where they were measured."""
    steps = [_step(row, shape) for row in rows for shape in row.shapes()]
    whole: list[Grid] = [(_TRAINING, [_training(row) for row in rows])]
    return [*whole, (_STEPS, steps)] if steps else whole


def _training(row: ContenderRow) -> list[str]:
    contender = row.contender
    marked = " (!)" if row.unlike else ""
    like = f"{row.like[1]:.2f}x {row.like[0]}" if row.like else "-"
    held_out = _number(row.middle("accuracy"), ".3f", row.spread("accuracy"))
    if row.middle("accuracy") is None:
        held_out = "loss " + _number(row.middle("eval_loss"), ".3f")
    elif row.middle("f1") is not None:
        held_out += f", F1 {_number(row.middle('f1'), '.3f', row.spread('f1'))}"
    return [
        contender.name + marked,
        contender.what,
        row.precision,
        contender.padding,
        _number(row.seconds, ".2f", row.spread("seconds")),
        _number(row.middle("samples_per_second"), ".1f"),
        "-" if row.base_ratio is None else f"{row.base_ratio:.2f}x",
        like,
        _number(row.middle("first_step_s"), ".1f"),
        _number(row.middle("train_loss"), ".3f"),
        held_out,
        _number((row.middle("peak_bytes") or 0) / _GIB, ".2f"),
    ]


def _step(row: ContenderRow, shape: Mapping[str, Any]) -> list[str]:
    waits = "-"
    if "host_waits" in shape:
        waits = f"{shape['host_waits']:.0f} in {shape['profiled_steps']:.0f} steps"
    return [
        row.contender.name,
        row.precision,
        str(shape["shape"]),
        f"{1e3 * shape['step_s']:.2f}",
        f"{1e3 * shape['cpu_s']:.2f}",
        f"{shape['samples_per_second']:.1f}",
        f"{100 * shape['matmul_share']:.1f} %",
        _number(_scaled(shape.get("busy_s"), 1e3), ".2f"),
        _number(_scaled(shape.get("idle"), 100), ".1f", unit=" %"),
        _number(_scaled(shape.get("profiled_idle"), 100), ".1f", unit=" %"),
        waits,
    ]


def _scaled(value: float | None, by: float) -> float | None:
    return None if value is None else value * by


def _number(value: float | None, form: str, spread: float | None = None, unit: str = "") -> str:
    if value is None:
        return "-"
    more = "" if spread is None else f" +- {spread:{form}}"
    return f"{value:{form}}{more}{unit}"


def remarks(found: Comparison) -> list[str]:
    """Return what a reader must know: who learnt something else, and who is missing."""
    rows = summarise(found.runs)
    unlike = [f"(!) {row.contender.name} learnt something else: {'; '.join(row.unlike)}."
              for row in rows if row.unlike]  # fmt: skip
    if len(rows) > 1 and not unlike:
        unlike = [
            "All learnt the same: losses within "
            f"{LOSS_TOLERANCE:.0%}, accuracies within {SCORE_TOLERANCE:.2f} of their middle."
        ]
    out = [f"{name}: left out, {why}." for name, why in found.left_out.items()]
    rates = [float(run["matmul_rate"]) for run in found.runs if "matmul_rate" in run]
    rate = [f"Measured matmul rate: {max(rates) / 1e12:.1f} TFLOP/s in bf16."] if rates else []
    return [*unlike, *out, *rate]


def markdown(found: Comparison) -> str:
    """Return the whole report, with the single runs in it."""
    return _text(found) + "\n```json\n" + json.dumps(asdict(found), indent=1) + "\n```\n"


def _text(found: Comparison) -> str:
    settings, machine = found.settings, found.machine
    versions = ("python", "torch", "anytrain", "transformers", "accelerate", "lightning")
    model = settings["model"] and "real weights" or f"{settings['size']}, random weights"
    data = "MRPC's own rows" if settings["data"] else "made-up rows"
    steps = f"at most {settings['max_steps']} steps" if settings["max_steps"] else "all of them"
    lines = [
        f"# Side by side: {model}, {data}",
        "",
        f"{found.date}, {machine['device']} ({machine['threads']} CPU threads), "
        + ", ".join(f"{name} {machine[name]}" for name in versions)
        + ".",
        f"{machine['parameters']:,} parameters, {machine['rows']:,} rows, batch "
        f"{settings['batch_size']}, length {settings['length']}, {settings['epochs']} epochs "
        f"({steps}), learning rate {settings['learning_rate']:g}, AdamW, clipping at 1.",
        "Each contender trained in a process of its own, one after the other, with the same rows,",
        "weights, collator and optimizer. Train seconds are the whole training after a warm-up of",
        f"{settings['warm_up_steps']} steps, what is recorded or compiled in it included; the",
        "first step counts from the start of the process. Made by `anytrain bench glue`.",
        "",
    ]
    for head, body in grids(summarise(found.runs)):
        lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        lines += ["| " + " | ".join(line) + " |" for line in body]
        lines.append("")
    return "\n".join([*lines, *(f"- {line}" for line in remarks(found)), ""])
