"""Find the browser that tests open pages with, or install it, and print where it lies.

    python tools/browser.py

It is the system's Chromium, with fonts for Arabic, Chinese and Korean. On Debian and Ubuntu it is
installed where this runs as root; elsewhere this says what to install.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PACKAGES = ("chromium", "fonts-noto-core", "fonts-noto-cjk")


def find() -> str | None:
    """Return where a browser lies, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def install() -> None:
    """Install browser and fonts with apt-get."""
    # Nobody is there to answer a question.
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}  # noqa: TID251
    for command in (
        ("apt-get", "update", "-qq"),
        ("apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES),
    ):
        subprocess.run(command, check=True, env=quiet, stdout=sys.stderr)


def main() -> None:
    """Print the browser's path; install it first where that can be done."""
    found = find()
    if found is None and shutil.which("apt-get") and os.geteuid() == 0:
        try:
            install()
        except subprocess.CalledProcessError as error:
            sys.exit(f"Could not install {', '.join(PACKAGES)}: {error}")
        found = find()
    if found is None:
        sys.exit(
            "The browser tests need Chromium: install it "
            f"(Debian: apt-get install {' '.join(PACKAGES)}; macOS: brew install --cask chromium)."
        )
    print(found)


if __name__ == "__main__":
    main()
