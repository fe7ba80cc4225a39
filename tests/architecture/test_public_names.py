"""What people may rely on changes only on purpose: names, commands, options."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import click
import typer

import anytrain
import golden

HERE = Path(__file__).parent


def public_names() -> Iterator[str]:
    """Give every public name of the package, and the public members of its classes."""
    for name in sorted(anytrain.__all__):
        yield name
        value = getattr(anytrain, name)
        if inspect.isclass(value):
            yield from (f"{name}.{member}" for member in sorted(vars(value)) if member[0] != "_")


def cli_options(command: click.Command, path: str) -> Iterator[str]:
    """Give every command with its options and arguments."""
    yield path
    for parameter in command.params:
        spelled = "/".join([*parameter.opts, *parameter.secondary_opts])
        yield f"{path} {spelled}"
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from cli_options(command.commands[name], f"{path} {name}")


def test_every_public_name_is_there() -> None:
    golden.check(HERE / "public_names.txt", public_names())


def test_every_command_and_option_is_there() -> None:
    from anytrain.cli.main import app

    command = typer.main.get_command(app)
    golden.check(HERE / "cli_options.txt", cli_options(command, "anytrain"))
