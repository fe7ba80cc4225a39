"""Make the environment that the XLA tests run in, and print its interpreter.

    python tools/xla_env.py

It is the one that `anytrain preflight` takes a TPU's graphs in; its pins hold the tests' own tools
as well.
"""

from __future__ import annotations

import sys

from anytrain.insight.preflight.tpu import environment


def main() -> None:
    """Make the environment where it is not there yet, and print its interpreter."""
    if sys.platform != "linux":
        sys.exit(f"torch_xla has no {sys.platform} build: the XLA tests run on Linux.")
    environment.make("xla")
    print(environment.python())


if __name__ == "__main__":
    main()
