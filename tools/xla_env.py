"""Make the environment that the XLA tests run in, and print its interpreter.

    python tools/xla_env.py

torch_xla 2.9 needs torch 2.9, so it lives in a virtual environment of its own, in the user's
cache (ANYTRAIN_CACHE moves it). Its name holds a digest of its pins: other pins are another one.
It is made in a draft folder and renamed when it is whole; an interrupted draft counts for nothing.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

from anytrain.core import environment

LOCK = Path(__file__).parent.parent / "requirements-xla.lock"
# pip waits minutes for a host that does not answer, several times over: without a network this
# must end soon.
PATIENCE = ["--timeout", "20", "--retries", "1"]
MOST_S = 3600


def folder() -> Path:
    """Return where the environment of these pins is, or would be."""
    pins = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    kind = f"{sys.version_info.major}.{sys.version_info.minor} {platform.machine()}"
    digest = hashlib.sha256("\n".join([kind, *pins]).encode()).hexdigest()[:12]
    return environment.cache_folder() / "envs" / f"xla-{digest}"


def make(place: Path) -> None:
    """Make the environment beside its place, and move it there once it is whole."""
    place.parent.mkdir(parents=True, exist_ok=True)
    clear_drafts(place)
    draft = place.parent / f"{place.name}.draft-{os.getpid()}"
    tell(f"Making {place}: torch 2.9 and torch_xla 2.9, about 3 GB to fetch and 7.5 GB on disk.")
    began = time.monotonic()
    try:
        subprocess.run([sys.executable, "-m", "venv", str(draft)], check=True, stdout=sys.stderr)
        pip = [str(draft / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        asked = ["install", "-qq", *PATIENCE, "--no-deps", "-r", str(LOCK)]
        subprocess.run(
            [*pip, *asked], check=True, stdout=sys.stderr, stdin=subprocess.DEVNULL, timeout=MOST_S
        )
        draft.rename(place)
    except FileExistsError:
        tell("Another process was faster.")
    except OSError as error:
        if not place.is_dir():
            sys.exit(f"Cannot make the XLA tests' environment: {error}.")
    except subprocess.SubprocessError as error:
        sys.exit(
            f"Cannot make the XLA tests' environment: {error}.\n"
            "  why: pip's own words are above; without a network it finds no packages.\n"
            "  fix: connect, or let pip know where packages are (PIP_INDEX_URL, PIP_FIND_LINKS),\n"
            f"       or bring {place} from a machine that has it."
        )
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    tell(f"Made it in {time.monotonic() - began:.0f} s, {num_bytes(place) / 1e9:.1f} GB.")


def clear_drafts(place: Path) -> None:
    """Remove what processes left behind that were killed on the way."""
    for draft in place.parent.glob(f"{place.name}.draft-*"):
        if not Path("/proc", draft.name.rpartition("-")[2]).exists():
            tell(f"Removing {draft}, which was never finished.")
            shutil.rmtree(draft, ignore_errors=True)


def num_bytes(place: Path) -> int:
    """Return what the files below take."""
    return sum(f.lstat().st_size for f in place.rglob("*") if f.is_file() and not f.is_symlink())


def tell(text: str) -> None:
    """Say it beside the interpreter's path, which is all that stdout holds."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Make the environment where it is not there yet, and print its interpreter."""
    if sys.platform != "linux":
        sys.exit(f"torch_xla has no {sys.platform} build: the XLA tests run on Linux.")
    place = folder()
    if not place.is_dir():
        make(place)
    print(place / "bin" / "python")


if __name__ == "__main__":
    main()
