"""Which operations have a kernel on mps, for one version of torch.

The table of the installed version is read from its own files (native_functions.yaml, line by line:
a YAML parser takes seconds for what is needed of its 16,000 lines), those of others are JSON files
of package data, which `tools/mps_ops.py` writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version as version_of
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

Status = Literal["kernel", "composite", "sent to the cpu", "missing"]
YAML = "torchgen/packaged/ATen/native/native_functions.yaml"
"""Where a torch wheel keeps the list of its operations."""
PYTHON_KERNELS = ("torch/_refs/", "torch/backends/mps/")
"""Where it keeps the kernels that are written in Python; `import torch` loads them."""
_COMPOSITE = frozenset(
    {
        "CompositeImplicitAutograd",
        "CompositeExplicitAutograd",
        "CompositeExplicitAutogradNonFunctional",
    }
)
# Registered for mps by hand, with the CPU fallback in its boxed form, whatever the environment
# says: ATen/mps/MPSFallback.mm, which no wheel contains. The last version, where there is one.
_SENT_TO_CPU: dict[str, tuple[int, int] | None] = {
    "embedding_renorm_": None,
    "linalg_svd": (2, 13),
    "linalg_svd.U": (2, 13),
}
# Registered by hand in the same place, but only to refuse tensors of two devices.
_REGISTERED_BY_HAND = frozenset({"_slow_conv2d_forward"})
# Composed of other operations, though the out= sibling has kernels of its own (UnaryOps.cpp).
_NOT_THROUGH_SIBLINGS = frozenset({"mvlgamma"})


class Native(NamedTuple):
    """One operation of ATen."""

    keys: frozenset[str]
    """What its kernels are registered for: CPU, MPS, CompositeExplicitAutograd, ..."""
    delegate: str | None
    """The out= sibling that holds its kernels, for a structured functional operation."""


# -- native_functions.yaml ------------------------------------------------------------------------


def read_natives(text: str) -> dict[str, Native]:
    """Return every operation by name, such as "add.Tensor"."""
    entries = ("\n" + text).split("\n- func:")[1:]
    return {entry.split("(", 1)[0].strip(): _native(entry) for entry in entries}


def _native(entry: str) -> Native:
    keys: set[str] = set()
    delegate, dispatches, listing = None, False, False
    for line in entry.split("\n")[1:]:
        bare = line.strip()
        if not bare or bare.startswith("#"):
            continue
        name, _, value = bare.partition(":")
        if listing and line.startswith("    "):
            keys.update(key.strip() for key in name.split(","))
            continue
        listing = name == "dispatch"
        dispatches = dispatches or listing
        if name == "structured_delegate":
            delegate = value.partition("#")[0].strip()
    if not dispatches and delegate is None:
        # What registers nothing decomposes, on every device and before autograd.
        keys.add("CompositeImplicitAutograd")
    return Native(frozenset(keys), delegate)


@dataclass(frozen=True, slots=True)
class KernelTable:
    """The operations of one version of torch, as mps serves them."""

    torch: str
    registered: frozenset[str]
    cpu_fallback: frozenset[str]
    """What this torch sends to the CPU by itself, without being told to."""
    missing: frozenset[str]
    """Neither registered in C++ nor composed of others."""
    in_python: frozenset[str] = frozenset()
    """Those of the missing ones that have a kernel written in Python."""
    not_on_cpu: frozenset[str] = frozenset()
    """Those of the missing ones that have no kernel on the CPU either."""
    through: Mapping[str, str] = field(default_factory=dict)
    """Composed operations that cannot work, and the missing one that each is written with."""

    def status(self, name: str) -> Status:
        """Return how a leaf operation is served; names that torch doesn't know are composite."""
        if name in self.cpu_fallback:
            return "sent to the cpu"
        if name in self.in_python:
            return "kernel"
        if name in self.missing or name in self.through:
            return "missing"
        return "kernel" if name in self.registered else "composite"

    def as_json(self) -> str:
        plain = {k: sorted(v) if isinstance(v, frozenset) else v for k, v in asdict(self).items()}
        return json.dumps(plain, separators=(",", ":"), sort_keys=True) + "\n"


def derive(yaml: str, python: Iterable[str], version: str) -> KernelTable:
    """Derive a version's table from its native_functions.yaml and its sources in Python."""
    natives, minor = read_natives(yaml), _minor(version)
    cpu = {n for n, last in _SENT_TO_CPU.items() if n in natives and minor <= (last or minor)}
    keys = {name: _keys(native, natives) for name, native in natives.items()}
    registered = {n for n, k in keys.items() if "MPS" in k} | (_REGISTERED_BY_HAND & set(natives))
    missing = {n for n, k in keys.items() if not k & _COMPOSITE} - registered - cpu
    written = {name for text in python for name in _written_in_python(text)}
    in_python = {n for n in missing if n in written or natives[n].delegate in written}
    return KernelTable(
        torch=version,
        registered=frozenset(registered | cpu),
        cpu_fallback=frozenset(cpu),
        missing=frozenset(missing),
        in_python=frozenset(in_python),
        not_on_cpu=frozenset(n for n in missing if "CPU" not in keys[n]),
        through=dict(_through(keys, missing - in_python)),
    )


@cache
def kernel_table(version: str) -> KernelTable:
    """Return the table of a torch version, or of the nearest one that is known."""
    site = _installed()
    if site is not None and _minor(version) == _minor(version_of("torch")):
        sources = (path for folder in PYTHON_KERNELS for path in (site / folder).rglob("*.py"))
        python = [path.read_text(encoding="utf-8") for path in sources]
        return derive((site / YAML).read_text(encoding="utf-8"), python, version)
    kept = {_minor(name): name for name in _kept()}
    nearest = kept[min(kept, key=lambda minor: _distance(minor, _minor(version)))]
    plain = json.loads((files(__package__) / _file(nearest)).read_text(encoding="utf-8"))
    names = ("registered", "cpu_fallback", "missing", "in_python", "not_on_cpu")
    sets = {name: frozenset(plain[name]) for name in names}
    return KernelTable(torch=plain["torch"], through=plain["through"], **sets)


def _installed() -> Path | None:
    # Finding it loads nothing: torch may be absent, or not yet wanted.
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    site = Path(spec.origin).parent.parent
    return site if (site / YAML).is_file() else None


def _through(keys: dict[str, frozenset[str]], missing: set[str]) -> list[tuple[str, str]]:
    # A CompositeExplicitAutograd kernel is written with a sibling: `frexp` calls
    # `frexp.Tensor_out`, `put` calls `put_`, `cholesky_solve` calls `_cholesky_solve_helper`.
    by_stem: dict[str, str] = {}
    for name in sorted(missing):
        by_stem.setdefault(_stem(name), name)
    explicit = (
        n for n, k in sorted(keys.items()) if "CompositeExplicitAutograd" in k and "MPS" not in k
    )
    found = [(n, by_stem[_stem(n)]) for n in explicit if _stem(n) in by_stem]
    return [(n, sibling) for n, sibling in found if _stem(n) not in _NOT_THROUGH_SIBLINGS]


def _stem(name: str) -> str:
    base = name.partition(".")[0]
    if base.endswith("_helper"):
        return base.removesuffix("_helper").lstrip("_")
    return base[:-1] if base.endswith("_") and not base.endswith("__") else base


def _keys(native: Native, natives: dict[str, Native]) -> frozenset[str]:
    # A structured functional op has no kernels of its own: they are its out= sibling's.
    if native.delegate is None:
        return native.keys
    return native.keys | natives[native.delegate].keys


def _written_in_python(text: str) -> list[str]:
    """Return what is registered for mps: by a library of that key, or by naming it in the call."""
    ours = r'(\w+) = (?:torch\.library\.|_?)Library\("aten", "IMPL", "MPS"\)'
    calls = re.findall(r'(\w+)\.impl\(\s*"(?:aten::)?([\w.]+)"([^)]*)\)', text)
    libraries = set(re.findall(ours, text))
    return [name for library, name, rest in calls if library in libraries or '"MPS"' in rest]


def _file(version: str) -> str:
    return f"mps-{version}.json"


def _kept() -> list[str]:
    names = (entry.name for entry in files(__package__).iterdir())
    return [n.removeprefix("mps-").removesuffix(".json") for n in names if n.startswith("mps-")]


def _minor(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


def _distance(one: tuple[int, int], other: tuple[int, int]) -> int:
    return abs((one[0] - other[0]) * 1000 + one[1] - other[1])
