"""Write the lock files: what to install to develop anytrain, to see its demo, and to run it.

    python tools/lock.py            resolve again, take what is newest
    python tools/lock.py --keep     resolve again, keep every version that is locked already

The files name versions and nothing else, so that pip takes them from wherever the machine gets
its packages; a torch built for one kind of device (`2.13.0+cpu`) counts as that version.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
TORCH = "torch==2.13.0"
# The editable install and the wheel are built in the environment itself, without isolation.
BUILD = "setuptools>=77"
LOCKS = {
    "requirements-dev.lock": ("develop anytrain: core, the dev extra, and the builder", ".[dev]"),
    "requirements-demo.lock": ("run anytrain and make reports", ".[report]"),
    "requirements-core.lock": ("run anytrain with no extra", "."),
}


def resolve(wanted: str, constraints: list[str]) -> list[str]:
    """Return `name==version` for everything that the project and `wanted` need."""
    with tempfile.TemporaryDirectory() as scratch:
        report, limits = Path(scratch, "report.json"), Path(scratch, "constraints.txt")
        limits.write_text("\n".join([TORCH, *constraints]) + "\n")
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run", "--ignore-installed"]
        asked = ["--report", str(report), "--constraint", str(limits), wanted, TORCH, BUILD]
        subprocess.run([*pip, *asked], cwd=ROOT, check=True, stdin=subprocess.DEVNULL)
        found = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    pins = {m["name"]: m["version"].partition("+")[0] for m in found if m["name"] != "anytrain"}
    return [f"{name}=={pins[name]}" for name in sorted(pins, key=str.lower)]


def pins(path: Path) -> list[str]:
    """Return the pins of a lock file, or none where there is no file yet."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if line and not line.startswith("#")]


def main() -> None:
    """Write the files; each takes its versions from the one before it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="keep versions that are locked")
    kept = pins(ROOT / "requirements-dev.lock") if parser.parse_args().keep else []
    for name, (purpose, wanted) in LOCKS.items():
        locked = resolve(wanted, [pin for pin in kept if not pin.startswith("torch==")])
        head = f"# What it takes to {purpose}.\n# Made by tools/lock.py (`make lock`).\n"
        (ROOT / name).write_text(head + "\n".join(locked) + "\n")
        kept = locked
        print(f"{name}: {len(locked)} packages")


if __name__ == "__main__":
    main()
