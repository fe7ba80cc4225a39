"""What several commands share: options that stand in a file, and the run where none is named."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from anytrain.core import documents
from anytrain.core.errors import BadInput
from anytrain.core.nearest import nearest
from anytrain.core.text import one_line
from anytrain.insight.report.run_folders import named, newest

RUN = typer.Argument(
    None, help="A run's output_dir; an Accelerator's project_dir. Default: the newest run below."
)
_FILES = (".json", ".yaml", ".yml")


class FromFile(TyperCommand):
    """A command that reads a first word ending in .json, .yaml or .yml as its options.

    What follows on the command line wins over the file.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the file, if there is one, and the command line."""
        if args and args[0].endswith(_FILES):
            known = {
                option.lstrip("-").replace("-", "_"): str(each.name)
                for each in self.params
                for option in each.opts
                if option.startswith("--")
            }
            ctx.default_map = options_in(Path(args[0]), known)
            args = args[1:]
        return super().parse_args(ctx, args)


def options_in(path: Path, known: Mapping[str, str]) -> dict[str, Any]:
    """Return what a file holds, by the parameters that the options named there stand for."""
    if not path.is_file():
        raise BadInput(
            f"Cannot read the options in {str(path)!r}.",
            why="there is no such file.",
            fix="give the path of a JSON or YAML file, or the options themselves.",
        )
    load = documents.from_json if path.suffix == ".json" else documents.from_yaml
    try:
        found = load(path.read_text(encoding="utf-8"))
    except Exception as error:  # noqa: BLE001  each format has its own error
        raise BadInput(f"Cannot read {path}.", why=f"{error}", fix="correct the file.") from None
    if not isinstance(found, Mapping):
        raise BadInput(
            f"Cannot read {path}.",
            why=f"it holds a {type(found).__name__}, not names with their values.",
            fix="write one `name: value` for each option.",
        )
    for name in map(str, found):
        if name.replace("-", "_") not in known:
            near = nearest(name, known)
            raise BadInput(
                f"Unknown option {name} in {path}.",
                why=f"the options are {', '.join(known)}.",
                fix=f"did you mean {near}?" if near else "leave it out.",
            )
    return {known[str(name).replace("-", "_")]: value for name, value in found.items()}


def started_as() -> str:
    """Return the command that anytrain was started by, as it can be typed again."""
    script = Path(sys.argv[0])
    if script.name == "__main__.py":
        return f"{_typed(sys.executable)} -m anytrain"
    found = shutil.which(script.name)
    return script.name if found and Path(found) == script.absolute() else _typed(str(script))


def _typed(path: str) -> str:
    """Return a program's path for a shell, below the current folder without that."""
    here = Path.cwd()
    return shlex.quote(os.path.relpath(path) if Path(path).is_relative_to(here) else path)


def newest_run(
    command: str, holds: Callable[[Path], bool] = lambda run: True, what: str = "a record"
) -> Path:
    """Return the newest run below the current folder that `holds` what is read, and say which."""
    return newest_runs(command, 1, holds, what)[0]


def newest_runs(
    command: str,
    count: int,
    holds: Callable[[Path], bool] = lambda run: True,
    what: str = "a record",
) -> list[Path]:
    """Return the newest runs below the current folder, the newest last, and say which."""
    found = newest(count, f"anytrain {command}{' PATH' * count}", holds, what)
    taken = "the newest run" if count == 1 else "the two newest runs"
    say(f"anytrain: taking {named(found)}: {taken} below {one_line(Path.cwd())}.")
    return found


def say(text: str) -> None:
    """Say on stderr what was taken."""
    typer.echo(text, err=True)
