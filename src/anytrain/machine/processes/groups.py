"""What Linux's control groups allow a process, whichever version of them a host has."""

from __future__ import annotations

from pathlib import Path


def folders(root: Path, controller: str) -> list[Path]:
    """Return this process's groups of a controller, its own first, up to the top of the tree.

    Version 2 has one tree for all controllers, version 1 one for each. `root` stands in for /
    in tests.
    """
    mount = root / "sys/fs/cgroup"
    found: list[Path] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = mount / controller if controllers else mount
        parts = [part for part in path.split("/") if part not in ("", "..")]
        found += [top.joinpath(*parts[:n]) for n in range(len(parts), 0, -1)]
    # In a container the group's own files stand at the mount, whatever path /proc names.
    return [*found, mount, mount / controller]


def values(root: Path, controller: str, *names: str) -> list[str]:
    """Return what a setting says for these groups; its name differs between the versions."""
    texts = (text(folder / name) for folder in folders(root, controller) for name in names)
    return [found.strip() for found in texts if found is not None]


def text(path: Path) -> str | None:
    """Return what a file of a group says; None where there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return None


def number(path: Path) -> int | None:
    """Return the number in a file of a group; None where it says "max" or is not there."""
    try:
        return int(text(path) or "")
    except ValueError:
        return None


def counter(path: Path, name: str) -> int | None:
    """Return a counter out of a file of a group that has one in each line."""
    for line in (text(path) or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdecimal():
            return int(value)
    return None
