"""`anytrain parity`: hold one step on this machine's device against the CPU in float32."""

from __future__ import annotations

import json
import shlex
import traceback

import typer

from anytrain.cli.preflight import check_command, read_command
from anytrain.core.errors import AnytrainError, BadInput
from anytrain.machine.processes.stack_dumps import is_library

COMMAND = typer.Argument(help="Python file that trains (or -m MODULE), and its own options.")
PRECISION = typer.Option(None, "--precision", help="no, bf16 or fp16; by default the run's own.")
JSON = typer.Option(False, "--json", help="Print one JSON object instead.")


def parity(
    command: list[str] = COMMAND,
    precision: str | None = PRECISION,
    as_json: bool = JSON,
) -> None:
    """Compare your script's first step on this machine's device with the CPU's, module by module.

    The script runs until its model is called in training mode; that call is made on the device
    and on the CPU in float32, forward and backward, with the same weights, batch and random
    numbers, and without dropout. Each module of the device gets the CPU's inputs and gradients, so
    the first one that departs is the one that is wrong. In bf16 and fp16 each tensor may be off by
    four times what rounding does to it, which is measured on the CPU.

    Exits with 0 where none departs, with 1 where one does, and with 2 where the script fails.
    """
    started = read_command(command)
    if len(started.command) < len(command):
        raise BadInput(
            "Parity compares one process.",
            why=f"`{command[0]}` would start the script; here one process runs it, on the device "
            "and on the CPU.",
            fix=f"name the script alone: anytrain parity {shlex.join(started.command)}",
        )
    check_command(command, (PRECISION, JSON))
    from dataclasses import asdict

    from anytrain.insight.proofs.parity import compare_script

    try:
        found = compare_script(
            command, precision, lambda text: typer.echo(f"anytrain: {text}", err=True)
        )
    except (AnytrainError, typer.Exit):
        raise
    except Exception as error:  # noqa: BLE001  of the script: whatever it is, it is shown as its own
        _tell_failure(error)
        raise typer.Exit(2) from None
    if as_json:
        answer = {"is_equal": found.is_equal, "num_compared": found.num_compared, **asdict(found)}
        typer.echo(json.dumps(answer, indent=2))
    else:
        typer.echo(str(found))
    if not found.is_equal:
        raise typer.Exit(1)


def _tell_failure(error: Exception) -> None:
    """Print an error of the script, from the script's own first line on."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if not is_library(f.filename)]
    lines = traceback.format_list(own) + traceback.format_exception_only(error)
    typer.echo("".join(lines).rstrip(), err=True)
    typer.echo("anytrain: the script failed before its step could be compared.", err=True)


# The first word that is no option is the script; everything after it belongs to the script.
parity.context_settings = {  # type: ignore[attr-defined]  # read by main
    "allow_interspersed_args": False,
    "ignore_unknown_options": True,
}
