"""Keep torch_tpu in the user's cache, and print its folder.

    python tools/tpu_env.py

Tests hold us to its Python side in child processes that find this folder first. Installed in the
environment itself, torch_tpu would load with every `import torch`. What it needs besides (torch,
numpy, absl-py, tensorboard, pyzmq) is the environment's own. 300 MB to fetch, 920 MB on disk.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from anytrain.core import environment

PINS = (
    "torch_tpu==0.2.0",
    "libtpu==0.0.51",
    "portpicker==1.6.0",
    "frozendict==2.5.1",
    "immutabledict==4.3.1",
)
MOST_S = 1800


def folder() -> Path:
    """Return where these pins are kept for this Python."""
    version, library = (pin.partition("==")[2] for pin in PINS[:2])
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return environment.cache_folder() / "envs" / f"torch_tpu-{version}-libtpu-{library}-py{python}"


def make(place: Path) -> None:
    """Install beside the place, and move it there once it is whole."""
    draft = place.with_name(f"{place.name}.draft-{os.getpid()}")
    draft.parent.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
    patience = ["--timeout", "20", "--retries", "1"]
    sys.stderr.write(f"Making {place}: 300 MB to fetch.\n")
    try:
        subprocess.run(
            [*pip, *patience, "--no-deps", "--target", str(draft), *PINS],
            check=True,
            stdout=sys.stderr,
            stdin=subprocess.DEVNULL,
            timeout=MOST_S,
        )
        draft.rename(place)
    except subprocess.SubprocessError as error:
        sys.exit(f"Cannot install torch_tpu for its tests: {error}.")
    except OSError as error:
        if not place.is_dir():  # else another process was faster
            sys.exit(f"Cannot install torch_tpu for its tests: {error}.")
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def main() -> None:
    """Print the folder, made if it is not there."""
    place = folder()
    if not place.is_dir():
        make(place)
    sys.stdout.write(f"{place}\n")


if __name__ == "__main__":
    main()
