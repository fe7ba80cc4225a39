"""Compile graphs for a TPU with its own compiler, without one.

This runs in a process of its own, beside jax and libtpu. It leans on names of jax that are not
public, and nothing else does: its version is pinned.
"""

# mypy: disable-error-code="import-not-found"
# jax is in the other environment alone.

from __future__ import annotations

import math
import pickle
import re
import time
from pathlib import Path
from typing import Any

from anytrain.insight.preflight.child import REQUEST, leave
from anytrain.insight.preflight.tpu.graphs import Built, Graph

_DIMENSIONS = {"v4": 3, "v5p": 3}
# A v4 chip has two cores, which training takes as one device; later ones are so by themselves.
_SETTINGS: dict[str, dict[str, Any]] = {"v4": {"chip_config_name": "megacore"}}


def main(folder: str) -> None:
    """Compile what the folder asks for, and leave what became of it there."""
    chip, topology, graphs = pickle.loads((Path(folder) / REQUEST).read_bytes())
    leave(folder, lambda: [build(graph, chip, topology) for graph in graphs])


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


def build(graph: Graph, chip: str, topology: str) -> Built:
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
        return Built(0, 0, 0, 0, 0, time.perf_counter() - began, failure=str(error))
    return Built(
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
