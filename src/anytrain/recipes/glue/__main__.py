"""`python -m anytrain.recipes.glue`: the same as `anytrain glue`."""

from __future__ import annotations

import sys

from anytrain.recipes.glue import command
from anytrain.recipes.messages import exit_code

if __name__ == "__main__":
    words = sys.argv[1:]
    if command.wants_help(words):
        sys.stdout.write(command.help_text("python -m anytrain.recipes.glue"))
        sys.exit(0)
    sys.exit(exit_code(lambda: command.run(words)))
