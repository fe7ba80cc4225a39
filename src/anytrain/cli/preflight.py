"""`anytrain preflight`: know before a run what will fail in it, on a machine you don't have."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from anytrain.core import environment
from anytrain.core.errors import BadInput
from anytrain.core.nearest import nearest
from anytrain.doors.launch.config import with_file
from anytrain.doors.launch.options import LaunchOptions

COMMAND = typer.Argument(
    help="Python file that trains (or -m MODULE), and its own options; `anytrain launch` or "
    "torchrun may stand before it."
)
TARGET = typer.Option(
    None,
    "--target",
    help="Where it will run: mps:16GB, cuda:24GB, cuda:h200, tpu:v5e:2x2, cpu; @2.14 behind it "
    "for another torch. May be given several times. Without it: this machine's own device.",
)
JSON = typer.Option(None, "--json", help="Write everything as JSON to a file; - prints it.")
HTML = typer.Option(None, "--html", help="Write one page that needs nothing else.")
PROCESSES = typer.Option(
    None,
    "--num_processes",
    "--num-processes",
    "-n",
    min=1,
    help="How many processes will train together: what fails only in several is told too. "
    "Without it, as many as the launcher before the script starts, or one.",
    show_default=False,
)
QUICK = typer.Option(False, "--quick", help="Skip the search for the largest batch.")
THOROUGH = typer.Option(
    False,
    "--thorough",
    help="Look for the largest batch with bf16 and with activation checkpointing, too; without "
    "it only where the batch does not fit as it is.",
)


class Grave(StrEnum):
    """What makes the command exit with 1."""

    error = "error"
    warning = "warning"


FAIL_ON = typer.Option(
    None, "--fail-on", help="Exit with status 1 if something at least this serious is found."
)

_OPTIONS = (TARGET, JSON, HTML, FAIL_ON, PROCESSES, QUICK, THOROUGH)


def preflight(  # noqa: PLR0913  a command has one parameter for each option
    command: list[str] = COMMAND,
    target: list[str] = TARGET,
    json_file: str | None = JSON,
    html_file: Path | None = HTML,
    fail_on: Grave | None = FAIL_ON,
    num_processes: int | None = PROCESSES,
    quick: bool = QUICK,
    thorough: bool = THOROUGH,
) -> None:
    """Trace one training step of your script on devices that are not here, and tell what awaits it.

    The script runs from its first line with a device that is only claimed: no weight is
    allocated, and none is saved; loops end after two updates. Operations that the device lacks,
    waits, shapes, memory, the largest batch and the time of a step are told for each target.
    Your files stay as they are: what the script writes or removes, outside of caches, is a copy,
    and programs that it starts are not run unless they only look.

    Exits with 0, or with 1 where --fail-on says so.
    """
    started = read_command(command)
    check_command(started.command, _OPTIONS)
    from anytrain.insight.preflight.run import Start, preflight_command

    report = preflight_command(
        started.command,
        target or (),
        Start(num_processes or started.options.num_processes or 1, started.variables),
        json_file=json_file,
        html_file=html_file,
        quick=quick,
        thorough=thorough,
    )
    if fail_on is not None and report.fails_on(fail_on.value):
        raise typer.Exit(1)


# The first word that is no option is the script; everything after it belongs to the script.
preflight.context_settings = {  # type: ignore[attr-defined]  # read by main
    "allow_interspersed_args": False,
    "ignore_unknown_options": True,
}


def check_command(command: list[str], options: Iterable[Any]) -> None:
    """Refuse a command that names no script and no module.

    `options` are those that may stand before it, as typer has them.
    """
    first = command[0]
    if first == "-m" and len(command) > 1:
        if not _is_module(command[1]):
            raise BadInput(
                f"There is no module {command[1]}.",
                why=f"Python finds no module of that name from {Path.cwd()}.",
                fix="pass -m and the name of a module that is installed or in this folder.",
            )
    elif first.startswith("-") and first != "-m":
        names = [name[2:] for each in options for name in each.param_decls if name[:2] == "--"]
        near = nearest(first.lstrip("-").split("=")[0], names)
        raise BadInput(
            f"There is no option {first}.",
            why="what comes before the script is for this command, which has no such option.",
            fix=f"did you mean --{near}? The script's own options come after the script."
            if near
            else "`--help` lists its options; the script's own come after the script.",
        )
    elif not Path(first).is_file():
        raise BadInput(
            f"There is no script {first}.",
            why="-m needs the name of a module after it."
            if first == "-m"
            else f"no such file, seen from {Path.cwd()}.",
            fix="pass the path of a Python file, or -m and a module, and its own options after it.",
        )


def _is_module(name: str) -> bool:
    """Whether Python can find a module, from this folder too, as `python -m` does."""
    sys.path.insert(0, "")
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # a parent that is not there, or is no package
        return False
    finally:
        sys.path.remove("")


_TORCHRUN = (("torchrun",), ("-m", "torch.distributed.run"), ("-m", "torch.distributed.launch"))
_LAUNCH = (
    ("anytrain", "launch"),
    ("accelerate", "launch"),
    ("-m", "anytrain", "launch"),
    ("-m", "accelerate.commands.launch"),
)
# torchrun's options that stand alone; each of its others has a value behind it.
_ALONE = ("standalone", "no_python", "run_path", "module", "use_env")


@dataclass(frozen=True, slots=True)
class Started:
    """A script with its own arguments, and what its launcher was told."""

    command: list[str]
    """A Python file, or "-m" and a module, and its arguments."""
    options: LaunchOptions = LaunchOptions()

    @property
    def variables(self) -> dict[str, str]:
        """What the launcher would tell the script by its environment; the device is the target."""
        return environment.launch_variables(replace(self.options.wishes(), device=None))


def read_command(words: Sequence[str]) -> Started:
    """Return what a command starts; a script by itself is such a command too.

    >>> words = ["torchrun", "--nproc_per_node=4", "--standalone", "train.py", "--lr", "1"]
    >>> read_command(words).command
    ['train.py', '--lr', '1']
    >>> read_command(["anytrain", "launch", "-n", "2", "-m", "my.train"]).options.num_processes
    2
    """
    rest = list(words)
    if Path(rest[0]).name.startswith("python") and not rest[0].endswith(".py"):
        rest = rest[1:]
    for ways, reader in ((_TORCHRUN, _by_torchrun), (_LAUNCH, _by_launch)):
        for way in ways:
            if tuple(rest[: len(way)]) == way:
                return reader(rest[len(way) :])
    if not rest:
        raise _nothing(words)
    return Started(rest)


def _by_launch(words: list[str]) -> Started:
    from anytrain.cli.launch import launch

    app = typer.Typer(add_completion=False)
    app.command(context_settings=launch.context_settings)(launch)  # type: ignore[attr-defined]
    params: dict[str, Any] = typer.main.get_command(app).make_context("launch", words).params
    names = {field.name for field in fields(LaunchOptions)}
    given = {name: value or None for name, value in params.items() if name in names}
    options = with_file(LaunchOptions(**given), params["config_file"])
    script = [params["script"], *(params["args"] or ())]
    return Started(["-m", *script] if options.module else script, options)


def _by_torchrun(words: list[str]) -> Started:
    given: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        name, has_value, value = rest.pop(0).lstrip("-").partition("=")
        name = {"m": "module"}.get(name, name).replace("-", "_")
        if not has_value and name not in _ALONE and rest:
            value = rest.pop(0)
        given[name] = value
    if not rest:
        raise _nothing(words)
    number = _count(given, "nproc_per_node") * _count(given, "nnodes")
    return Started(
        ["-m", *rest] if "module" in given else rest, LaunchOptions(num_processes=number)
    )


def _count(given: dict[str, str], name: str) -> int:
    """Return a count of torchrun's; of a range of machines the most."""
    value = given.get(name, "1").rpartition(":")[2]
    if value.isdecimal() and int(value):
        return int(value)
    raise BadInput(
        f"Cannot tell how many processes --{name}={value} means.",
        why="it depends on the machine, which is not here.",
        fix="write the number, or pass --num_processes to `anytrain preflight` with the script "
        "alone.",
    )


def _nothing(words: Sequence[str]) -> BadInput:
    return BadInput(
        "There is no script to trace.",
        why=f"`{' '.join(words)}` names none.",
        fix="pass the path of a Python file, or -m and a module, and its own options after it.",
    )
