"""What people may rely on changes only on purpose: names, commands, options."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
            ours = [vars(kind) for kind in value.__mro__ if kind.__module__.startswith("anytrain")]
            members = {member for kind in ours for member in kind if member[0] != "_"}
            yield from (f"{name}.{member}" for member in sorted(members))


def cli_options(command: Any, path: str) -> Iterator[str]:
    """Give every command with its options and arguments."""
    yield path
    for parameter in command.params:
        yield " ".join([path, "/".join([*parameter.opts, *parameter.secondary_opts])])
    if hasattr(command, "list_commands"):
        context = command.make_context(path, [], resilient_parsing=True)
        for name in command.list_commands(context):
            _, inner, _ = command.resolve_command(context, [name])
            yield from cli_options(inner, f"{path} {name}")


def test_every_public_name_is_there() -> None:
    golden.check(HERE / "public_names.txt", public_names())


def test_every_command_and_option_is_there() -> None:
    from anytrain.cli.main import app

    command = typer.main.get_command(app)
    golden.check(HERE / "cli_options.txt", cli_options(command, "anytrain"))
