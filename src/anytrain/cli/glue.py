"""`anytrain glue`: train, evaluate and predict text classification, as run_glue does."""

from __future__ import annotations

import typer


def glue(ctx: typer.Context) -> None:
    """Train on a GLUE task or on files of your own; the options are those of run_glue."""
    from anytrain.recipes.glue import command

    if command.wants_help(ctx.args):
        typer.echo(command.help_text("anytrain glue"), nl=False)
        return
    command.run(ctx.args)


# The options are parsed as TrainingArguments are, not by typer; --help among them.
glue.context_settings = {  # type: ignore[attr-defined]  # read by main
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}
