"""Compare what the code says of itself with a file that a person has read.

`make golden` writes the files again; the diff is what a reviewer looks at.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def check(path: Path, lines: Iterable[str]) -> None:
    """Fail unless the file holds exactly these lines."""
    now = [line.rstrip() for line in lines]
    if os.environ.get("ANYTRAIN_WRITE_GOLDEN") == "1":
        path.write_text("\n".join(now) + "\n", encoding="utf-8")
    was = path.read_text(encoding="utf-8").splitlines()
    gone, new = [x for x in was if x not in now], [x for x in now if x not in was]
    assert was == now, (
        f"{path.name} does not match.\n  gone: {gone}\n  new: {new}\n"
        "If the change is meant, run `make golden` and commit the diff."
    )
