"""The devices that a preflight can forecast for, and how much memory they have."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from anytrain.core.errors import BadInput

KINDS = ("cpu", "cuda", "mps", "tpu", "xla")
GIB = 2**30
# What torch finds on each (total_memory) in GiB, which is less than what is printed on the box.
_CUDA = {
    "t4": 14.6,
    "v100": 15.8,
    "v100-32gb": 31.7,
    "a10": 22.0,
    "a10g": 22.0,
    "l4": 22.0,
    "rtx3090": 23.7,
    "rtx4090": 23.5,
    "rtx5090": 31.4,
    "a100-40gb": 39.4,
    "l40s": 44.4,
    "a100": 79.2,
    "h100": 79.2,
    "h200": 139.8,
    "b200": 178.4,
}
# A chip's own memory (HBM) in GiB, as Google's system architecture pages list it.
_TPU = {"v4": 32.0, "v5e": 16.0, "v5p": 95.0, "v6e": 32.0}
# A Mac is sold with several sizes of memory: the chip alone tells its speed.
_MPS = {f"m{n}{suffix}": None for n in range(1, 6) for suffix in ("", "pro", "max", "ultra")}
CHIPS: dict[str, dict[str, float | None]] = {
    "cuda": dict(_CUDA),
    "mps": dict(_MPS),
    "tpu": dict(_TPU),
    "cpu": {},
    "xla": {},
}
"""The chips that have a name here, by kind, and their memory in GiB where it is one."""
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([gm])(?:i?b)?")
_TOPOLOGY = re.compile(r"\d+(?:x\d+)+")
_VERSION = re.compile(r"\d+\.\d+(?:\.\S*)?")
_FIRST, _LAST = "2.9", "2.15"
"""The versions of torch whose kernels are known: see `mps/`."""
_TORCH = tuple((2, minor) for minor in range(9, 16))
_EXAMPLES = (
    'pass "mps:16GB", "mps:m2:16GB", "cuda:24GB", "cuda:h200", "tpu:v5e", "tpu:v5e:2x2" or "cpu"; '
    'with "@2.14" after it for another version of torch.'
)


@dataclass(frozen=True, slots=True)
class Target:
    """A device that the run is meant for."""

    kind: str
    """cpu, cuda, mps, tpu or xla."""
    name: str
    """As it was asked for: "mps:16GB", "cuda:24GB", "tpu:v5e"."""
    memory_bytes: int | None
    """The whole memory of one device; None where it was not given."""
    torch_version: str
    """The torch that will run there: this one's unless told otherwise."""
    num_devices: int = 1
    chip: str = ""
    """Its name in the table of chips, such as "h200" or "v5e"; empty where it was not given."""
    topology: str = ""
    """How a TPU's chips are laid out, such as "2x2"; empty for one chip."""
    is_local: bool = False
    """Whether it is the device of this machine."""


def parse_target(text: str) -> Target:
    """Return the target that a word such as "mps:16GB" or "tpu:v5e:2x2" stands for.

    >>> target = parse_target("mps:m2:16GB@2.14")
    >>> target.kind, target.chip, target.memory_bytes // 2**30, target.torch_version
    ('mps', 'm2', 16, '2.14')
    """
    spoken, at, version = text.strip().lower().partition("@")
    if at and not _VERSION.fullmatch(version):
        raise _unknown(text, f"{version!r} is not a version of torch")
    if at and tuple(map(int, version.split(".")[:2])) not in _TORCH:
        raise _unknown(text, f"versions of torch are known from {_FIRST} to {_LAST}, not {version}")
    kind, *words = (word.strip() for word in spoken.split(":"))
    kind = {"gpu": "cuda"}.get(kind, kind)
    if kind not in KINDS:
        raise _unknown(text, f"{kind!r} is none of {', '.join(KINDS)}")
    memory: int | None = None
    chip = topology = ""
    for word in words:
        if size := _MEMORY.fullmatch(word):
            memory = _bytes(size, text)
        elif _TOPOLOGY.fullmatch(word) and kind == "tpu":
            topology = word
        else:
            chip = _chip(kind, word, text)
    if memory is None and (known := CHIPS[kind].get(chip)) is not None:
        memory = int(known * GIB)
    return Target(
        kind,
        text.strip(),
        memory,
        version or installed_torch(),
        num_devices=math.prod(map(int, topology.split("x"))) if topology else 1,
        chip=chip,
        topology=topology,
    )


def parse_targets(words: tuple[str, ...]) -> tuple[Target, ...]:
    """Return a target for each word, each once; without words this machine's own device."""
    return tuple(dict.fromkeys(map(parse_target, words))) or (local_target(),)


def local_target() -> Target:
    """Return the device that a run would take on this machine."""
    from anytrain.core import environment
    from anytrain.machine.backends import probe

    backend = probe.choose(environment.read().wishes.device)
    found = backend.capabilities(backend.device(0))
    kind = backend.name if backend.name in KINDS else "cpu"
    return Target(
        kind,
        kind,
        found.memory_bytes,
        installed_torch(),
        chip=_chip_of(kind, found.name),
        is_local=True,
    )


def installed_torch() -> str:
    """Return the version of torch that is installed here, without loading it.

    >>> "+" in installed_torch()
    False
    """
    from importlib.metadata import version

    return version("torch").partition("+")[0]


def _bytes(size: re.Match[str], text: str) -> int:
    found = int(float(size[1]) * (GIB if size[2] == "g" else 2**20))
    if not found:
        raise _unknown(text, "a device without memory runs nothing")
    return found


def _chip(kind: str, word: str, text: str) -> str:
    # "RTX 4090", "rtx-4090" and "4090" mean the same card; the longer names keep their size.
    plain = re.sub(r"[\s_]", "", word)
    for name in (plain, plain.replace("-", ""), f"rtx{plain}"):
        if name in CHIPS[kind]:
            return name
    known = ", ".join(CHIPS[kind])
    told = f"known for {kind} are {known}" if known else f"{kind} has no chips by name"
    raise _unknown(text, f"{word!r} is neither a size of memory nor a chip; {told}")


def _chip_of(kind: str, described: str) -> str:
    """Return the chip that a device's own name holds: "NVIDIA H200" is an h200."""
    plain = re.sub(r"[^a-z0-9]", "", described.lower())
    fits = [name for name in CHIPS[kind] if name.replace("-", "") in plain]
    return max(fits, key=len, default="")


def _unknown(text: str, why: str) -> BadInput:
    return BadInput(f"Unknown target {text!r}.", why=f"{why}.", fix=_EXAMPLES)
