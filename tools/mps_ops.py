"""Write the tables of what mps has kernels for, one per version of torch.

    python tools/mps_ops.py 2.9.0 2.10.0 2.11.0
    python tools/mps_ops.py --wheel torch-2.13.0-cp312-cp312-macosx_14_0_arm64.whl

Each version's wheel for Macs is downloaded with pip, one at a time, and three things are taken
from it: its native_functions.yaml (which operations have which kernels), the few mps kernels that
are written in Python, and its version. What torch sends to the CPU by itself is in none of them:
ATen/mps/MPSFallback.mm says so, and `mps/kernels.py` repeats it with the last version that it
holds for. A wheel's `libtorch_cpu.dylib` confirms it: an operation that is registered for mps there
and not in the yaml is one of these.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from anytrain.insight.preflight.mps import kernels

TABLES = Path(kernels.__file__).parent
# The oldest macOS that a version's wheel is for changed on the way.
PLATFORMS = ("macosx_14_0_arm64", "macosx_11_0_arm64")


def main() -> None:
    """Write the tables that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("versions", nargs="*", help="torch versions to download, such as 2.13.0")
    parser.add_argument("--wheel", type=Path, action="append", default=[], help="a wheel at hand")
    parser.add_argument("--output", type=Path, default=TABLES, help="the folder to write to")
    args = parser.parse_args()
    for wheel in args.wheel:
        write(wheel, args.output)
    for version in args.versions:
        with tempfile.TemporaryDirectory() as folder:
            write(download(version, Path(folder)), args.output)


def download(version: str, folder: Path) -> Path:
    """Fetch a version's wheel for Macs."""
    platforms = [part for name in PLATFORMS for part in ("--platform", name)]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
    ]
    command += [*platforms, "--python-version", "3.12", "--only-binary=:all:", f"torch=={version}"]
    subprocess.run(command, check=True)
    return next(folder.glob("torch-*.whl"))


def write(wheel: Path, output: Path) -> None:
    """Derive the table of a wheel and write it."""
    version = wheel.name.split("-")[1].partition("+")[0]
    with zipfile.ZipFile(wheel) as archive:
        yaml = archive.read(kernels.YAML).decode()
        python = [archive.read(n).decode() for n in archive.namelist() if is_python_kernel(n)]
    table = kernels.derive(yaml, python, version)
    path = output / f"mps-{re.sub(r'[^0-9.]', '', version)}.json"
    path.write_text(table.as_json(), encoding="utf-8")
    print(f"{path.name}: {len(table.registered)} kernels, {len(table.missing)} missing")


def is_python_kernel(name: str) -> bool:
    """Whether a file of the wheel may hold kernels that are written in Python."""
    return name.startswith(kernels.PYTHON_KERNELS) and name.endswith(".py")


if __name__ == "__main__":
    main()
