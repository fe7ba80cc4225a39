"""The `anytrain` command. Each command's file is loaded only when that command runs."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from anytrain._version import __version__
from anytrain.core import environment
from anytrain.core.errors import AnytrainError
from anytrain.core.nearest import nearest

# name: (where, what --help says). A Typer app there is a command with commands of its own.
_COMMANDS = {
    "launch": ("anytrain.cli.launch:launch", "Run a script in one process or in many."),
    "env": ("anytrain.cli.env:env", "Show what this machine has and what a run would get here."),
    "config": ("anytrain.cli.config:config", "Write the options of a launch to a YAML file."),
    "test": ("anytrain.cli.selftest:selftest", "Check processes and a few training steps here."),
    "glue": ("anytrain.cli.glue:glue", "Train text classification: a GLUE task or your files."),
    "demo": ("anytrain.cli.demo:demo", "Train a small model here and now."),
    "why": ("anytrain.cli.why:why", "Show where a run's time went, and what to do about it."),
    "report": (
        "anytrain.cli.report:report",
        "Make one page of a run, to look at or to mail.",
    ),
    "diff": ("anytrain.cli.diff:diff", "Show what differs between runs, and where curves part."),
    "watch": ("anytrain.cli.watch:watch", "Follow a run from another terminal, or in a browser."),
    "checkpoint": ("anytrain.cli.checkpoint:app", "List, show, verify and prune checkpoints."),
    "verify-resume": (
        "anytrain.cli.verify_resume:verify_resume",
        "Kill a training at random, and prove that it resumes.",
    ),
    "preflight": (
        "anytrain.cli.preflight:preflight",
        "Tell what awaits your training on a device you don't have.",
    ),
    "parity": (
        "anytrain.cli.parity:parity",
        "Compare one step on this device with the CPU in float32.",
    ),
    "bench": ("anytrain.cli.bench:app", "Train the same job with anytrain and its peers."),
}


# How newer typers speak of values, and how people do.
_PLAINER = {
    r"Input should be a valid integer, .*": "not a whole number.",
    r"Input should be a valid number, .*": "not a number.",
    r"Input should be greater than or equal to (\S+)": r"must be at least \1.",
    r"Input should be less than or equal to (\S+)": r"must be at most \1.",
    r"Value error, ": "",
    r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)": r"Unexpected: \1.",
}


class _Commands(TyperGroup):
    """Commands known by name and summary until one of them is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands in the order of the table."""
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a stand-in with the summary, which is all that --help needs."""
        if cmd_name not in _COMMANDS:
            return None
        return TyperCommand(cmd_name, help=_COMMANDS[cmd_name][1])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the real command, loading its file."""
        if args and args[0] in _COMMANDS:
            return args[0], _load(args[0]), args[1:]
        if args and args[0] and args[0][0] != "-":
            near = "--" + args[0] if args[0] in ("help", "version") else nearest(args[0], _COMMANDS)
            guess = f" Did you mean {near!r}?" if near else ""
            ctx.fail(f"No such command {args[0]!r}.{guess}")
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read what stands before the command's name."""
        with _with_a_guess():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Read the command's own options, and run it."""
        with _with_a_guess(), _errors_as_text():
            return super().invoke(ctx)


@contextmanager
def _with_a_guess() -> Iterator[None]:
    """Say of an option that is not known which one was meant, and leave it at one."""
    try:
        yield
    except Exception as error:
        # typer has classes of errors of its own since 0.26, and click's before.
        if type(error).__name__ == "NoSuchOption":
            _name_one(error)
        elif isinstance(getattr(error, "message", None), str):
            for words, plain in _PLAINER.items():
                error.message = re.sub(words, plain, error.message)  # type: ignore[attr-defined]
        raise


@contextmanager
def _errors_as_text() -> Iterator[None]:
    """Print our own errors as their text, and leave quietly on Ctrl-C."""
    try:
        yield
    except AnytrainError as error:
        if environment.read().debug:
            traceback.print_exc()
        else:
            typer.echo(f"anytrain: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _name_one(error: Any) -> None:
    options = error.ctx.command.get_params(error.ctx) if error.ctx else ()
    known = [name.lstrip("-") for each in options for name in each.opts if name[:2] == "--"]
    near = nearest(error.option_name.lstrip("-").split("=")[0], known)
    error.possibilities = None
    error.message = f"No such option {error.option_name}."
    if near:
        error.message += f" Did you mean --{near}?"


app = typer.Typer(
    name="anytrain",
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},  # every command takes its parent's
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"anytrain {__version__}")
        raise typer.Exit


@app.callback()
def anytrain(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version."
    ),
    debug: bool = typer.Option(False, "--debug", help="Show whole tracebacks."),
) -> None:
    """Train a PyTorch script on any device."""
    if debug:
        os.environ["ANYTRAIN_DEBUG"] = "1"  # noqa: TID251  read again here and by children


def run() -> None:
    """Run the command line of this process."""
    environment.enable_mps_fallback()
    app(prog_name="anytrain")


def _load(name: str) -> Any:
    """Return the command of that name."""
    module, _, attribute = _COMMANDS[name][0].partition(":")
    target = getattr(import_module(module), attribute)
    if isinstance(target, typer.Typer):
        target.rich_markup_mode = None
        return typer.main.get_command(target)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    settings = getattr(target, "context_settings", None)
    kind = getattr(target, "command_class", None)
    alone.command(name, cls=kind, context_settings=settings)(target)
    return typer.main.get_command(alone)
