"""What Linux's control groups allow a process, whichever version of them a host has."""

from __future__ import annotations

from pathlib import Path


def values(root: Path, controller: str, name: str, old_name: str) -> list[str]:
    """Return what a setting says for this process's groups, up to the top of the tree.

    `name` is the file of cgroup v2, `old_name` that of v1; `root` stands in for / in tests.
    """
    found = []
    for path in _files(root, controller, name, old_name):
        try:
            found.append(path.read_text().strip())
        except OSError:
            continue
    return found


def _files(root: Path, controller: str, name: str, old_name: str) -> list[Path]:
    mount = root / "sys/fs/cgroup"
    # In a container the group's own files stand at the mount, whatever path /proc names.
    files = [mount / name, mount / controller / old_name]
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return files
    for line in lines:
        _, controllers, path = line.split(":", 2)
        parts = [part for part in path.split("/") if part not in ("", "..")]
        if controllers == "":
            top, file = mount, name
        elif controller in controllers.split(","):
            top, file = mount / controller, old_name
        else:
            continue
        files += [top.joinpath(*parts[: n + 1], file) for n in range(len(parts))]
    return files
