"""`anytrain config`: write the options of a launch to a file that the user names."""

from __future__ import annotations

import sys
from typing import Any

import typer

from anytrain.cli import launch as options
from anytrain.core.errors import BadInput
from anytrain.doors.launch import config as files
from anytrain.doors.launch.options import DEFAULT_PORT, LaunchOptions, check

_DEVICES = ("auto", "cpu", "gpu", "tpu")
_PRECISIONS = ("no", "bf16", "fp16", "auto")


def config(  # noqa: PLR0913  a command has one parameter for each option
    output: str = typer.Option(..., "--output", "-o", help="Where to write; nowhere else."),
    default: bool = options.flag("default", "Ask nothing; write one machine, all automatic."),
    force: bool = options.flag("force", "Replace a file that exists."),
    num_processes: int | None = options.PROCESSES,
    num_machines: int | None = options.MACHINES,
    machine_rank: int | None = options.MACHINE_RANK,
    main_process_ip: str | None = options.IP,
    main_process_port: int | None = options.PORT,
    mixed_precision: str | None = options.PRECISION,
    downcast_bf16: bool = options.DOWNCAST,
    gradient_accumulation_steps: int | None = options.ACCUMULATION,
    cpu: bool = options.CPU,
    multi_gpu: bool = options.MULTI_GPU,
    tpu: bool = options.TPU,
    gpu_ids: str | None = options.GPU_IDS,
    num_cpu_threads_per_process: int | None = options.THREADS,
    dynamo_backend: str | None = options.DYNAMO,
    max_restarts: int | None = options.RESTARTS,
    stall_timeout: float | None = options.STALL,
    strategy: str | None = options.STRATEGY,
) -> None:
    """Write the options of a launch to a YAML file, for `anytrain launch --config_file`.

    With options, they are written; without, a terminal is asked. There is no default place.
    """
    asked = options.given(locals())
    if default:
        asked = asked.over(LaunchOptions(num_machines=1, mixed_precision="no"))
    elif not asked.given():
        asked = _ask()
    check(asked)
    files.write(asked, output, force)
    typer.echo(f"Wrote {output}. Use it: anytrain launch --config_file {output} script.py")


def _ask() -> LaunchOptions:
    """Ask a person at a terminal."""
    if not sys.stdin.isatty():
        raise BadInput(
            "Nothing was asked for, and there is no terminal to ask at.",
            why="without options, `anytrain config` asks its questions.",
            fix="pass options such as --num_processes 2, or --default.",
        )
    answers: dict[str, Any] = {}
    machines = typer.prompt("How many machines", default=1, type=int)
    answers["num_machines"] = machines
    if machines > 1:
        answers["machine_rank"] = typer.prompt("This machine's number, from 0", type=int)
        answers["main_process_ip"] = typer.prompt("Address of machine 0", type=str)
        answers["main_process_port"] = typer.prompt(
            "Port of machine 0", default=DEFAULT_PORT, type=int
        )
    device = _one_of("Device", _DEVICES)
    if device != "auto":
        answers[{"cpu": "cpu", "gpu": "multi_gpu", "tpu": "tpu"}[device]] = True
    processes = typer.prompt("Processes on all machines (0: one per device)", default=0, type=int)
    answers["num_processes"] = processes or None
    answers["mixed_precision"] = _one_of("Mixed precision", _PRECISIONS)
    answers["gradient_accumulation_steps"] = typer.prompt(
        "Batches that make one update", default=1, type=int
    )
    return LaunchOptions(**answers)


def _one_of(question: str, known: tuple[str, ...]) -> str:
    """Ask until the answer is one of the known words; the first is the default."""
    while True:
        answer = typer.prompt(f"{question} ({', '.join(known)})", default=known[0], type=str)
        if answer in known:
            return str(answer)
        typer.echo(f"Please answer one of {', '.join(known)}.")
