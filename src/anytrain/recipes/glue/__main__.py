"""`python -m anytrain.recipes.glue`: the same as `anytrain glue`."""

from __future__ import annotations

import sys

from anytrain.recipes.glue import command, options
from anytrain.recipes.words import exit_code

if __name__ == "__main__":
    if options.wants_help(sys.argv[1:]):
        sys.stdout.write(options.text("python -m anytrain.recipes.glue"))
        sys.exit(0)
    sys.exit(exit_code(lambda: command.run(sys.argv[1:])))
