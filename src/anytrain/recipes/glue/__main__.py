"""`python -m anytrain.recipes.glue`: the same as `anytrain glue`."""

from __future__ import annotations

import sys

from anytrain.recipes.glue import command, options
from anytrain.recipes.words import exit_code

if __name__ == "__main__":
    words = sys.argv[1:]
    if options.wants_help(words):
        sys.stdout.write(options.text("python -m anytrain.recipes.glue"))
        sys.exit(0)
    sys.exit(exit_code(lambda: command.run(words)))
