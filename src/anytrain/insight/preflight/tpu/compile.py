"""Compile a training step for a TPU that is not here: how much memory each of its chips needs.

torch_xla takes the step as a graph and libtpu compiles it, each in a process of its own in an
environment of its own. The numbers are the compiler's, not an estimate. Where it cannot be asked,
the answer says why and what to do, and the estimate stands.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from anytrain.core.text import amount
from anytrain.insight.preflight.findings import Finding
from anytrain.insight.preflight.targets import CHIPS, GIB, Target
from anytrain.insight.preflight.tpu import environment, start
from anytrain.insight.preflight.tpu.libtpu import CapturedStep, CompiledGraph, Graph
from anytrain.insight.preflight.trace_process import REQUEST, RESULT
from anytrain.insight.preflight.units import seconds, size

Say = Callable[[str], None]
_EXHAUSTED = "RESOURCE_EXHAUSTED"
# What the processes must find set before anything is loaded.
GRAPH = {
    "PJRT_DEVICE": "CPU",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}
CHIP = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is taken, so nobody need wait for it
    "TPU_SKIP_MDS_QUERY": "1",  # else libtpu asks a cloud's metadata server, for minutes
    "JAX_PLATFORMS": "cpu",
    "TPU_MIN_LOG_LEVEL": "3",
}
# The compiler's own count, and what it leaves to programs; it has two ways to say so.
_COUNTS = (
    re.compile(r"required[^()]*\(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)"),
    re.compile(r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm"),
)
_UNITS = {"K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}
# What libtpu 0.0.51 leaves to programs in GiB, as it says where one is too large.
_USABLE_GIB = {"v4": 30.75, "v5e": 15.75, "v5p": 95.73, "v6e": 31.24}
_LIMIT_S = 3600.0
_PARTS = {
    "argument": "weights, state and batch",
    "result": "results",
    "scratch": "scratch",
    "code": "code",
    "beside": "beside it",
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the TPU's compiler says of a training step, for each chip."""

    chip: str
    topology: str
    num_chips: int
    batch_size: int
    """Rows on each chip."""
    precision: str
    needed_bytes: int | None
    """All that a chip must hold; None where the compiler gave up without a number."""
    usable_bytes: int | None
    """What a chip has for programs."""
    fits: bool
    num_graphs: int
    trace_s: float
    compile_s: float
    num_exchanges: int = 0
    """How often a step waits for the other chips."""
    argument_bytes: int = 0
    """Weights, the optimizer's state and the batch, as the chip lays them out."""
    result_bytes: int = 0
    """What is new when the step ends: results that take no argument's place."""
    scratch_bytes: int = 0
    code_bytes: int = 0
    beside_bytes: int = 0
    """What lies on the device and the step does not touch."""

    def __str__(self) -> str:
        chips, each = "a ", ""
        if self.num_chips > 1:
            chips, each = f"{self.num_chips} chips of ", " on each"
        named = zip(_PARTS, (getattr(self, f"{part}_bytes") for part in _PARTS), strict=True)
        parts = ", ".join(f"{_PARTS[name]} {_size(held)}" for name, held in named if held)
        lines = [
            f"Compiled by libtpu for {chips}{self.chip}: {self.precision}, a batch of "
            f"{self.batch_size}{each}. It {'fits' if self.fits else 'does not fit'}.",
            f"A chip needs {_size(self.needed_bytes)} of {_size(self.usable_bytes)}"
            f"{f': {parts}' if parts else ''}.",
            f"Compiling took {seconds(self.compile_s)} here, in "
            f"{amount(self.num_graphs, 'graph')}.",
        ]
        if self.num_exchanges:
            lines.append(f"Its chips meet in {amount(self.num_exchanges, 'exchange')} a step.")
        return "\n".join(lines)

    def findings(self) -> tuple[Finding, ...]:
        """Return the error where the chip's memory is too small."""
        if self.fits:
            return ()
        return (
            Finding(
                "memory",
                "error",
                f"The step needs {_size(self.needed_bytes)} of {_size(self.usable_bytes)} on a "
                f"{self.chip}.",
                why=f"libtpu has compiled it, with a batch of {self.batch_size} for each chip.",
                fix="Take a smaller batch and accumulate, bf16, or activation checkpointing.",
            ),
        )


@dataclass(frozen=True, slots=True)
class NotCompiled:
    """Why the compiler was not asked, or had no answer."""

    why: str
    fix: str
    fits: None = None

    def __str__(self) -> str:
        return (
            f"Not compiled, so the memory above is an estimate.\n  why: {self.why}\n"
            f"  fix: {self.fix}"
        )

    def findings(self) -> tuple[Finding, ...]:
        """Return none: other checks tell what is known of the step."""
        return ()


class Compiler:
    """A command's steps, each taken once for as many chips, and compiled for any."""

    def __init__(
        self,
        command: Sequence[str],
        say: Say = lambda text: None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._command, self._say, self._variables = tuple(command), say, dict(variables)
        self._taken: dict[int, CapturedStep] = {}

    def compile(self, target: Target) -> Compiled | NotCompiled:
        refused = self._refused(target)
        if refused is not None:
            return refused
        count = target.num_devices
        if count not in self._taken:
            self._say("taking the training step as a graph, with torch_xla")
            self._taken[count] = _take(target, self._command, self._variables)
        taken = self._taken[count]
        if taken.failure:
            return NotCompiled(
                f"torch_xla did not take the step: {taken.failure}",
                "see if the script trains with torch 2.9 and torch_xla 2.9; what it imports must "
                f"be in this environment or in {environment.folder('xla')}.",
            )
        self._say(f"compiling for {target.name}, with libtpu")
        return _told(target, taken, _build(target, taken.graphs))

    def _refused(self, target: Target) -> NotCompiled | None:
        """Return why nothing can be compiled; None where it can."""
        if not target.chip:
            return NotCompiled(f"{target.name} names no chip.", 'ask for "tpu:v5e" or another.')
        if not self._command:
            return NotCompiled(
                "the step of a running program cannot be taken to another environment.",
                f"run `anytrain preflight --target {target.name} SCRIPT`.",
            )
        if trouble := environment.trouble():
            return NotCompiled(f"{trouble}.", "run this command on such a machine.")
        if environment.missing():
            return NotCompiled(
                f"the compiler's environment is not installed: {'; '.join(environment.missing())}.",
                f"run `{environment.COMMAND}` once.",
            )
        return None


def _take(target: Target, command: tuple[str, ...], variables: Mapping[str, str]) -> CapturedStep:

    result = _child("lazy_graph", (target, command), {**variables, **GRAPH})
    return result if isinstance(result, CapturedStep) else CapturedStep((), failure=str(result))


def _build(target: Target, graphs: tuple[Graph, ...]) -> list[CompiledGraph]:

    library = {"PYTHONPATH": str(environment.folder("tpu-compiler"))}
    result = _child("libtpu", (target.chip, target.topology, graphs), {**CHIP, **library})
    return (
        result
        if isinstance(result, list)
        else [CompiledGraph(0, 0, 0, 0, 0, 0.0, failure=str(result))]
    )


def _child(module: str, request: Any, variables: Mapping[str, str]) -> Any:
    """Return what a module makes of a request in the other environment, or why it made nothing."""
    from anytrain.insight.preflight.trace_process import TRACE_VARIABLES, last_words

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / REQUEST).write_bytes(pickle.dumps(request))
        (Path(folder) / start.PATH).write_text(json.dumps(_path()), encoding="utf-8")
        name = f"{start.__name__.rpartition('.')[0]}.{module}"
        log = Path(folder) / "output.txt"
        with log.open("wb") as out:
            try:
                code = subprocess.run(
                    [str(environment.python()), "-P", str(start.__file__), name, folder],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env={**_inherited(), **TRACE_VARIABLES, **variables},
                    timeout=_LIMIT_S,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                return f"it had not finished after {_LIMIT_S:.0f} s{last_words(log)}"
        left = Path(folder) / RESULT
        if left.exists():
            return pickle.loads(left.read_bytes())
        return f"the process ended with {code}{last_words(log)}"


def _path() -> list[str]:
    """Return where this process finds modules: this library first, wherever it lies."""
    own = str(Path(__file__).parents[4])
    return list(dict.fromkeys([own, *(str(Path(place).resolve()) for place in sys.path)]))


def _inherited() -> dict[str, str]:
    # What leads Python to this environment's modules would lead it past the other one's.
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "ANYTRAIN_DEVICE", "ANYTRAIN_STRATEGY")
    found = dict(os.environ)  # noqa: TID251  a child gets what this process has
    return {name: value for name, value in found.items() if name not in ours}


def _told(
    target: Target, taken: CapturedStep, built: list[CompiledGraph]
) -> Compiled | NotCompiled:
    """Return what the graphs need together; they run one after another."""
    refused = next((each for each in built if each.failure), None)
    usable = _usable(target)
    facts: dict[str, Any] = {
        "chip": target.chip,
        "topology": target.topology,
        "num_chips": target.num_devices,
        "batch_size": taken.batch_size,
        "precision": "float32" if taken.precision == "no" else taken.precision,
        "num_graphs": len(taken.graphs),
        "trace_s": taken.seconds,
        "compile_s": sum(each.seconds for each in built),
        "num_exchanges": sum(each.num_exchanges for each in built),
    }
    if refused is not None:
        return _refusal(refused, facts)
    pairs = list(zip(built, taken.graphs, strict=True))
    most, graph = max(pairs, key=lambda pair: pair[0].needed_bytes + pair[1].beside_bytes)
    needed = most.needed_bytes + graph.beside_bytes
    return Compiled(
        **facts,
        argument_bytes=most.argument_bytes,
        result_bytes=most.result_bytes - most.alias_bytes,
        scratch_bytes=most.scratch_bytes,
        code_bytes=most.code_bytes,
        beside_bytes=graph.beside_bytes,
        needed_bytes=needed,
        usable_bytes=usable,
        fits=needed <= usable,
    )


def _usable(target: Target) -> int:
    """Return what a chip has for programs; a size that was asked for counts where it is less."""
    usable = int(_USABLE_GIB[target.chip] * GIB)
    asked = target.memory_bytes
    if asked is None or asked == int((CHIPS["tpu"][target.chip] or 0) * GIB):
        return usable
    return min(usable, asked)


def _refusal(built: CompiledGraph, facts: dict[str, Any]) -> Compiled | NotCompiled:
    """Return a step that is too large as such; another refusal is no answer."""
    if _EXHAUSTED not in built.failure:
        first = built.failure.strip().splitlines()
        return NotCompiled(
            f"libtpu did not compile the step: {' '.join(first[:3])}",
            "check the topology's name; the estimate stands without the compiler.",
        )
    told = next(filter(None, (count.search(built.failure) for count in _COUNTS)), None)
    needed, usable = (
        None if told is None else int(float(told[n]) * _UNITS[told[n + 1]]) for n in (1, 3)
    )
    return Compiled(**facts, needed_bytes=needed, usable_bytes=usable, fits=False)


def _size(num_bytes: int | None) -> str:
    return "more than there is" if num_bytes is None else size(num_bytes)
