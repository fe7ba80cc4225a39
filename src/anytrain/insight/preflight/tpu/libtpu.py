"""Compile graphs for a TPU with its own compiler, without one.

`build` runs in a process of its own, beside jax and libtpu. It leans on names of jax that are not
public, and nothing else does: its version is pinned. The graphs, and what became of them, travel
between the processes.
"""

from __future__ import annotations

import math
import pickle
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from anytrain.insight.preflight.trace_process import REQUEST, leave_result

_DIMENSIONS = {"v4": 3, "v5p": 3}
# A v4 chip has two cores, which training takes as one device; later ones are so by themselves.
_SETTINGS: dict[str, dict[str, Any]] = {"v4": {"chip_config_name": "megacore"}}


class Alias(NamedTuple):
    """A result that takes the place of what it was computed from."""

    argument: int
    result: int


@dataclass(frozen=True, slots=True)
class Graph:
    """A part of a step that runs without the host, in the compiler's language."""

    module: bytes
    """StableHLO as portable bytes; weights are arguments, never constants."""
    aliases: tuple[Alias, ...]
    split: tuple[int, ...]
    """Arguments whose rows are dealt to the chips; each chip has the others whole."""
    beside_bytes: int
    """What the device holds meanwhile and this part does not touch."""


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """The graphs of one training step, once the optimizer has its state."""

    graphs: tuple[Graph, ...]
    batch_size: int = 0
    """Rows for each chip."""
    precision: str = ""
    seconds: float = 0.0
    failure: str = ""
    """Why there are none; empty where there are."""


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """What the compiler says of one graph, for one chip."""

    argument_bytes: int
    result_bytes: int
    alias_bytes: int
    """How much of the results lies where arguments lay."""
    scratch_bytes: int
    code_bytes: int
    seconds: float
    num_exchanges: int = 0
    """How often the chips wait for each other."""
    failure: str = ""
    """The compiler's words where it made no program."""

    @property
    def needed_bytes(self) -> int:
        """What the chip must hold while the graph runs."""
        results = self.result_bytes - self.alias_bytes
        return self.argument_bytes + results + self.scratch_bytes + self.code_bytes


# mypy: disable-error-code="import-not-found"
# jax is in the other environment alone.


def main(folder: str) -> None:
    """Compile what the folder asks for, and leave what became of it there."""
    chip, topology, graphs = pickle.loads((Path(folder) / REQUEST).read_bytes())
    leave_result(folder, lambda: [build(graph, chip, topology) for graph in graphs])


def described(chip: str, topology: str) -> tuple[str, dict[str, Any]]:
    """Return a topology as libtpu names it, and what else it must be told.

    >>> described("v5e", "")
    ('v5e:1x1', {'chips_per_host_bounds': (1, 1, 1)})
    >>> described("v5p", "2x2")
    ('v5p:2x2x1', {})
    """
    settings = dict(_SETTINGS.get(chip, {}))
    if math.prod(map(int, topology.split("x"))) == 1 if topology else True:
        topology = "1"
        settings["chips_per_host_bounds"] = (1, 1, 1)
    sides = topology.split("x")
    sides += ["1"] * (_DIMENSIONS.get(chip, 2) - len(sides))
    return f"{chip}:{'x'.join(sides)}", settings


def build(graph: Graph, chip: str, topology: str) -> CompiledGraph:
    """Compile one graph; the compiler's refusal is an answer as well."""
    from jax.experimental import topologies
    from jaxlib.xla_client import XlaRuntimeError

    name, settings = described(chip, topology)
    began = time.perf_counter()
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name, **settings)
        program = _compiled(graph, found.devices)
        stats = program.get_compiled_memory_stats()
    except (XlaRuntimeError, ValueError) as error:
        return CompiledGraph(0, 0, 0, 0, 0, time.perf_counter() - began, failure=str(error))
    return CompiledGraph(
        argument_bytes=stats.argument_size_in_bytes,
        result_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        scratch_bytes=stats.temp_size_in_bytes,
        code_bytes=stats.generated_code_size_in_bytes,
        num_exchanges=sum(_exchanges(module.to_string()) for module in program.hlo_modules()),
        seconds=time.perf_counter() - began,
    )


def _exchanges(program: str) -> int:
    """Return how often a program's chips wait for each other."""
    return len(re.findall(r"= \S.* (?:all-reduce|reduce-scatter|all-gather)(?:-start)?\(", program))


def _compiled(graph: Graph, devices: list[Any]) -> Any:
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax

    with mlir.make_ir_context():
        module = _jax.mlir.deserialize_portable_artifact(graph.module)
        _annotate(module, graph, len(devices))
        client = devices[0].client
        return client.compile(module, _jax.DeviceList(tuple(devices)), _options(devices))


def _options(devices: list[Any]) -> Any:
    import numpy as np
    from jaxlib import xla_client

    options = xla_client.CompileOptions()
    order = np.array([[device.id for device in devices]])
    assigned = xla_client.DeviceAssignment.create(order)
    for part in (options, options.executable_build_options):
        part.num_replicas, part.num_partitions = 1, len(devices)
        part.device_assignment = assigned
    options.executable_build_options.use_spmd_partitioning = len(devices) > 1
    options.executable_build_options.use_shardy_partitioner = False
    return options


def _annotate(module: Any, graph: Graph, num_chips: int) -> None:
    """Write into the module which results take an argument's place, and which rows are dealt."""
    from jaxlib.mlir import ir

    function = next(f for f in module.body.operations if f.name.value == "main")
    types = list(function.type.inputs)
    notes: list[dict[str, Any]] = [{} for _ in types]
    number = ir.IntegerType.get_signless(32)
    for argument, result in graph.aliases:
        notes[argument]["tf.aliasing_output"] = ir.IntegerAttr.get(number, result)
    if num_chips > 1:
        module.operation.attributes["mhlo.num_partitions"] = ir.IntegerAttr.get(number, num_chips)
        for index, note in enumerate(notes):
            rank = ir.RankedTensorType(types[index]).rank
            sides = ",".join([str(num_chips), *["1"] * (rank - 1)])
            dealt = f"{{devices=[{sides}]<=[{num_chips}]}}"
            told = dealt if index in graph.split else "{replicated}"
            note["mhlo.sharding"] = ir.StringAttr.get(told)
        whole = ir.DictAttr.get({"mhlo.sharding": ir.StringAttr.get("{replicated}")})
        function.res_attrs = ir.ArrayAttr.get([whole] * len(function.type.results))
    function.arg_attrs = ir.ArrayAttr.get([ir.DictAttr.get(note) for note in notes])
