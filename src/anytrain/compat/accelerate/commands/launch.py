"""`accelerate launch` from within a program: the same as `anytrain launch`."""

from __future__ import annotations

import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from anytrain.doors.launch import config, elastic, options
from anytrain.doors.launch.options import LaunchOptions

__all__ = ["launch_command", "launch_command_parser", "main"]


class _Parser(ArgumentParser):
    """A parser that takes HF's options, and says which of them are not used."""

    def parse_known_args(  # type: ignore[override]  # the same, less argparse's overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Read the command line; refuse by name what anytrain does not do."""
        own = {
            spelling.lstrip("-").replace("-", "_"): action.nargs != 0
            for action in self._actions
            for spelling in action.option_strings
        }
        words, unused = options.sift_hf_options(list(sys.argv[1:] if args is None else args), own)
        if unused:
            sys.stderr.write(f"anytrain: not used here: {', '.join(unused)}.\n")
        return super().parse_known_args(words, namespace)


def launch_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Return a parser of `anytrain launch`'s options; the script and its own words come last."""
    parser: ArgumentParser = (
        _Parser("anytrain launch", allow_abbrev=False)
        if subparsers is None
        else subparsers.add_parser("launch", allow_abbrev=False)
    )
    for field in fields(LaunchOptions):
        _add(parser, field.name, str(field.type))
    _add(parser, "config_file", "str")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=REMAINDER)
    if subparsers is not None:
        parser.set_defaults(func=launch_command)
    return parser


def _add(parser: ArgumentParser, name: str, kind: str) -> None:
    """Let the parser take an option, spelt with underscores or dashes; None where it is not."""
    spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
    kinds: dict[str, Any] = {"int": int, "float": float, "str": str}
    word = kind.partition(" ")[0]
    if word == "bool":
        parser.add_argument(*spellings, dest=name, action="store_true", default=None)
    else:
        parser.add_argument(*spellings, dest=name, type=kinds[word], default=None)


def launch_command(args: Namespace) -> None:
    """Run the script as the options say; end this program where the job fails."""
    asked = LaunchOptions(**{f.name: getattr(args, f.name) for f in fields(LaunchOptions)})
    options = config.with_file(asked, args.config_file)
    code = elastic.launch(options, args.training_script, args.training_script_args)
    if code:
        raise SystemExit(code)


def main() -> None:
    """Launch what this program's own command line says."""
    launch_command(launch_command_parser().parse_args())
