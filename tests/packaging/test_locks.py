"""The lock files say what pyproject.toml asks for, and nothing about this machine."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CORE = [Requirement(line) for line in PROJECT["dependencies"]]
REPORT = CORE + [Requirement(line) for line in PROJECT["optional-dependencies"]["report"]]
LOCKS = ("requirements-core.lock", "requirements-demo.lock", "requirements-dev.lock")
DEV = CORE + [Requirement(line) for line in PROJECT["optional-dependencies"]["dev"]]


def pins(name: str) -> dict[str, Version]:
    lines = [x for x in (ROOT / name).read_text().splitlines() if x and not x.startswith("#")]
    split = [line.split("==") for line in lines]
    return {canonicalize_name(package): Version(version) for package, version in split}


def unmet(wanted: list[Requirement], have: dict[str, Version]) -> list[str]:
    return [
        str(each)
        for each in wanted
        if (version := have.get(canonicalize_name(each.name))) is None
        or not each.specifier.contains(version)
    ]


def test_the_development_lock_meets_the_project_and_its_dev_extra() -> None:
    assert not unmet(DEV, pins("requirements-dev.lock"))


def test_the_core_lock_meets_the_project() -> None:
    assert not unmet(CORE, pins("requirements-core.lock"))


def test_the_core_lock_brings_no_peer_and_no_tool() -> None:
    only_dev = {canonicalize_name(r.name) for r in DEV} - {canonicalize_name(r.name) for r in CORE}
    assert not only_dev & set(pins("requirements-core.lock"))


def test_the_demos_lock_can_make_reports() -> None:
    assert not unmet(REPORT, pins("requirements-demo.lock"))


def test_the_locks_agree() -> None:
    core, demo, dev = (pins(name) for name in LOCKS)
    assert core.items() <= demo.items() <= dev.items()


def test_a_pin_is_a_plain_version_that_any_machine_can_have() -> None:
    for name in LOCKS:
        local = [package for package, version in pins(name).items() if version.local]
        assert not local, "a local version such as +cpu exists on one kind of machine only"
        assert "//" not in (ROOT / name).read_text(), "a lock names no host"


def test_the_build_backend_is_pinned_too() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    for name in LOCKS:
        assert not unmet([Requirement(line) for line in build], pins(name))
