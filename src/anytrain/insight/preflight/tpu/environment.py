"""Make the environments that a training step is compiled for a TPU in, and find them.

    python -m anytrain.insight.preflight.tpu.environment

torch_xla ends with 2.9.0 and needs torch 2.9, so it has a virtual environment of its own, in the
user's cache (ANYTRAIN_CACHE moves it). The TPU's compiler lies in a folder beside it. Their names
hold a digest of their pins: other pins are other ones. Each is made in a draft folder and renamed
when it is whole; an interrupted draft counts for nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from anytrain.core import environment

COMMAND = "python -m anytrain.insight.preflight.tpu.environment"
"""What makes both environments."""
SIZES = {
    "xla": "torch 2.9 and torch_xla 2.9, about 3 GB to fetch and 7.5 GB on disk",
    "tpu-compiler": "jax and libtpu, about 300 MB to fetch and 1 GB on disk",
}
_PINS = Path(__file__).parent / "pins.json"
# pip waits minutes for a host that does not answer, several times over: without a network this
# must end soon.
_PATIENCE = ["--timeout", "20", "--retries", "1"]
_MOST_S = 3600


def pins(name: str) -> list[str]:
    """Return what is installed in an environment: "xla" or "tpu-compiler"."""
    found: dict[str, list[str]] = json.loads(_PINS.read_text(encoding="utf-8"))
    return found[name]


def folder(name: str) -> Path:
    """Return where the environment of these pins is, or would be."""
    kind = f"{sys.version_info.major}.{sys.version_info.minor} {platform.machine()}"
    digest = hashlib.sha256("\n".join([kind, *pins(name)]).encode()).hexdigest()[:12]
    return environment.cache_folder() / "envs" / f"{name}-{digest}"


def python() -> Path:
    """Return the interpreter that has torch_xla."""
    return folder("xla") / "bin" / "python"


def trouble() -> str:
    """Return why this machine can have no such environment; empty where it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"torch_xla and libtpu are built for Linux on x86_64, this is {platform.platform()}"
    return ""


def missing() -> list[str]:
    """Return what is to be installed; nothing where both are here and whole."""
    return [text for name, text in SIZES.items() if not folder(name).is_dir()]


def make(name: str) -> Path:
    """Return an environment's folder, made if it is not there; end the process if it cannot be."""
    place = folder(name)
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    _clear_drafts(place)
    draft = place.parent / f"{place.name}.draft-{os.getpid()}"
    tell(f"Making {place}: {SIZES[name]}.")
    began = time.monotonic()
    try:
        _INSTALLERS[name](draft)
        draft.rename(place)
    except OSError as error:
        if not place.is_dir():  # else another process was faster
            sys.exit(f"Cannot make {place}: {error}.")
    except subprocess.SubprocessError as error:
        sys.exit(
            f"Cannot make {place}: {error}.\n"
            "  why: pip's own words are above; without a network it finds no packages.\n"
            "  fix: connect, or let pip know where packages are (PIP_INDEX_URL, PIP_FIND_LINKS),\n"
            "       or bring the folder from a machine that has it."
        )
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    tell(f"Made it in {time.monotonic() - began:.0f} s, {_num_bytes(place) / 1e9:.1f} GB.")
    return place


def _install_xla(draft: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(draft)], check=True, stdout=sys.stderr)
    _pip(draft / "bin" / "python", ["--no-deps", *pins("xla")])


def _install_compiler(draft: Path) -> None:
    # Beside the other one, not in it: torch_xla looks for a libtpu of its own age.
    _pip(Path(sys.executable), ["--no-deps", "--target", str(draft), *pins("tpu-compiler")])


_INSTALLERS: dict[str, Callable[[Path], None]] = {
    "xla": _install_xla,
    "tpu-compiler": _install_compiler,
}


def _pip(interpreter: Path, asked: list[str]) -> None:
    start = [str(interpreter), "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
    subprocess.run(
        [*start, *_PATIENCE, *asked],
        check=True,
        stdout=sys.stderr,
        stdin=subprocess.DEVNULL,
        timeout=_MOST_S,
    )


def _clear_drafts(place: Path) -> None:
    """Remove what processes left behind that were killed on the way."""
    for draft in place.parent.glob(f"{place.name}.draft-*"):
        if not Path("/proc", draft.name.rpartition("-")[2]).exists():
            tell(f"Removing {draft}, which was never finished.")
            shutil.rmtree(draft, ignore_errors=True)


def _num_bytes(place: Path) -> int:
    return sum(f.lstat().st_size for f in place.rglob("*") if f.is_file() and not f.is_symlink())


def tell(text: str) -> None:
    """Write it to stderr: stdout is for the folders."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def main() -> None:
    """Make what is not there yet, and say where it is."""
    if trouble():
        sys.exit(f"Cannot compile for a TPU here: {trouble()}.")
    for name in SIZES:
        sys.stdout.write(f"{make(name)}\n")


if __name__ == "__main__":
    main()
