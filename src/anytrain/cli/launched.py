"""Find the script in the command that would start it: `anytrain launch`, torchrun or python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import typer

from anytrain.core import environment
from anytrain.core.errors import BadInput
from anytrain.doors.launch.options import LaunchOptions

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


def read(words: Sequence[str]) -> Started:
    """Return what a command starts; a script by itself is such a command too.

    >>> read(["torchrun", "--nproc_per_node=4", "--standalone", "train.py", "--lr", "1"]).command
    ['train.py', '--lr', '1']
    >>> read(["anytrain", "launch", "-n", "2", "-m", "my.train"]).options.num_processes
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
    from anytrain.cli.launch import launch, with_file

    app = typer.Typer(add_completion=False)
    app.command(context_settings=launch.context_settings)(launch)  # type: ignore[attr-defined]
    params: dict[str, Any] = typer.main.get_command(app).make_context("launch", words).params
    names = {field.name for field in fields(LaunchOptions)}
    told = {name: value or None for name, value in params.items() if name in names}
    options = with_file(LaunchOptions(**told), params["config_file"])
    script = [params["script"], *(params["args"] or ())]
    return Started(["-m", *script] if options.module else script, options)


def _by_torchrun(words: list[str]) -> Started:
    told: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        name, has_value, value = rest.pop(0).lstrip("-").partition("=")
        name = {"m": "module"}.get(name, name).replace("-", "_")
        if not has_value and name not in _ALONE and rest:
            value = rest.pop(0)
        told[name] = value
    if not rest:
        raise _nothing(words)
    number = _count(told, "nproc_per_node") * _count(told, "nnodes")
    return Started(["-m", *rest] if "module" in told else rest, LaunchOptions(num_processes=number))


def _count(told: dict[str, str], name: str) -> int:
    """Return a count of torchrun's; of a range of machines the most."""
    value = told.get(name, "1").rpartition(":")[2]
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
