"""`anytrain env`: what this machine has, and what a run would get here.

Made to be pasted into an issue: nothing is cut off, and `--json` holds the same facts.
"""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata

import typer
from rich.console import Console
from rich.text import Text

from anytrain._version import __version__
from anytrain.core.text import safe_console

_PACKAGES = (
    "numpy",
    "safetensors",
    "transformers",
    "accelerate",
    "torch_tpu",
    "torch_xla",
)
_GIB = 2**30


@dataclass
class EnvironmentReport:
    """Everything `anytrain env` tells."""

    system: str
    versions: dict[str, str]
    backends: list[dict[str, object]]
    devices: list[dict[str, object]]
    variables: dict[str, str]
    mps_fallback: dict[str, str] | None
    threads: dict[str, str] | None = None
    plan: dict[str, dict[str, str]] = field(default_factory=dict)
    patches: dict[str, dict[str, str]] = field(default_factory=dict)
    error: str | None = None


def env(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of text."),
) -> None:
    """Show the devices found here and why, versions, memory, and the plan a run would get."""
    report = look()
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
    else:
        _print(report)
    if report.error is not None:
        raise typer.Exit(1)


def look() -> EnvironmentReport:
    """Probe everything; a plan that is refused is part of the answer."""
    import torch

    from anytrain.core import environment
    from anytrain.core.facts import Found
    from anytrain.machine.backends import probe

    survey = probe.survey()
    found = [each.name for each in survey if isinstance(each.answer, Found)]
    fallback = environment.mps_fallback() if sys.platform == "darwin" else None
    report = EnvironmentReport(
        system=_system(),
        # The package's metadata may leave out which CUDA it was built for.
        versions=_versions(torch.__version__),
        backends=[
            {"name": each.name, "found": each.name in found, **asdict(each.answer)}
            for each in survey
        ],
        devices=[_device(name) for name in found],
        variables=environment.relevant(),
        mps_fallback=asdict(fallback) if fallback else None,
    )
    _add_plan(report)
    return report


def _add_plan(report: EnvironmentReport) -> None:
    from anytrain.core import environment, patches
    from anytrain.core.errors import AnytrainError
    from anytrain.core.facts import JobFacts
    from anytrain.core.plan import resolve
    from anytrain.machine.backends import capabilities, cpu, probe

    try:
        here = environment.read()
        report.threads = asdict(cpu.threads(here.place.local_size))
        backend = probe.choose(here.wishes.device)
        machine = backend.capabilities(backend.device(here.place.local_rank))
        if capabilities.wants_bf16_gain(here.wishes, machine):
            machine = replace(machine, bf16_gain=capabilities.bf16_gain(machine.name))
        plan = resolve(here.wishes, machine, JobFacts(), here.place.size)
    except AnytrainError as error:
        report.error = f"{type(error).__name__}: {error}"
        return
    report.plan = {name: asdict(choice) for name, choice in plan.reasons().items()}
    report.patches = {
        name: {"what": patch.what, "lasts": patch.lasts, "why": patch.why}
        for name, patch in patches.of(backend.name).items()
    }


def _device(name: str) -> dict[str, object]:
    from anytrain.machine.backends import probe

    backend = probe.get(name)
    try:
        facts = backend.capabilities(backend.device(0))
    except (RuntimeError, ValueError) as error:
        return {"backend": name, "error": str(error)}
    return {**asdict(facts), "process_counts": backend.process_counts()}


def _system() -> str:
    mac = platform.mac_ver()[0]
    name = f"macOS {mac}" if mac else f"{platform.system()} {platform.release()}"
    return f"{name} ({platform.machine()})"


def _versions(torch: str) -> dict[str, str]:
    versions = {"python": platform.python_version(), "anytrain": __version__, "torch": torch}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _print(report: EnvironmentReport) -> None:
    console = safe_console()
    _section(console, "System", [("os", report.system, ""), *_rows(report.versions)])
    backends = [
        (str(b["name"]), "found" if b["found"] else _absence(b), str(b["because"]))
        for b in report.backends
    ]
    _section(console, "Backends, in order of preference", backends)
    _section(console, "Devices", [_device_row(d) for d in report.devices])
    if report.threads is not None:
        row = ("threads", report.threads["value"], report.threads["because"])
        _section(console, "What a process computes with on the CPU", [row])
    _section(console, "Environment", _rows(report.variables) or [("none set", "", "")])
    if report.mps_fallback is not None:
        row = ("mps fallback", report.mps_fallback["value"], report.mps_fallback["because"])
        _section(console, "Ops that mps lacks run on the CPU", [row])
    plan = [(name, c["value"], c["because"]) for name, c in report.plan.items()]
    _section(console, "The plan a run would get here", plan)
    _section(
        console,
        "What of other libraries a run may replace here, each until it is put back",
        [(each["what"], each["lasts"], each["why"]) for each in report.patches.values()],
    )
    if report.error is not None:
        _line(console, report.error, "red")


def _absence(backend: dict[str, object]) -> str:
    return "BROKEN" if backend["broken"] else "not found"


def _rows(pairs: dict[str, str]) -> list[tuple[str, str, str]]:
    return [(name, value, "") for name, value in pairs.items()]


def _device_row(device: dict[str, object]) -> tuple[str, str, str]:
    if "error" in device:
        return str(device["backend"]), "FAILS", str(device["error"])
    size = device["memory_bytes"]
    memory = f"{size / _GIB:.1f} GiB" if isinstance(size, int) else "memory unknown"
    dtypes = device["dtypes"]
    assert isinstance(dtypes, tuple)
    return str(device["device"]), memory, f"{device['name']}; computes in {', '.join(dtypes)}"


def _section(console: Console, title: str, rows: list[tuple[str, str, str]]) -> None:
    _line(console, title, "bold")
    first = max((len(row[0]) for row in rows), default=0)
    second = max((len(row[1]) for row in rows if row[2]), default=0)
    for name, value, because in rows:
        line = f"  {name:<{first}}  {value:<{second}}  {because}".rstrip()
        _line(console, line, "red" if value in ("BROKEN", "FAILS") else "")
    _line(console, "", "")


def _line(console: Console, text: str, style: str) -> None:
    # soft_wrap leaves a long line whole: a pasted report must not lose the end of a reason.
    console.print(Text(text, style=style), soft_wrap=True)
