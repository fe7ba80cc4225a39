"""What was recorded of one traced step; pickled by the process that traced it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

ENDED = "the script ended itself with"
"""How the failure of a script begins that called sys.exit()."""
Phase = Literal["make", "data", "forward", "backward", "clip", "optimizer", "evaluate"]
Owner = Literal["parameters", "gradients", "optimizer", "activations", "buffers", "batch", "other"]


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """Where an operation comes from."""

    module: str = ""
    """The path of the module that ran it, such as "bert.encoder.layer.0"; empty for the model."""
    file: str = ""
    line: int = 0
    function: str = ""
    text: str = ""
    """The source line itself."""
    is_ours: bool = False
    """Whether this library ran it on behalf of that line: `trainer.train()` updates weights."""

    @property
    def line_alone(self) -> SourcePlace:
        """The line without the module: many modules may share it."""
        return SourcePlace("", self.file, self.line) if self.file else self

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.file else "an unknown line"
        return f"{where} in {self.module}" if self.module else where


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run is traced with in the place of its own."""

    batch_size: int
    precision: str = "no"
    is_checkpointed: bool = False
    """Whether every repeated block keeps its inputs alone (activation checkpointing)."""

    def __str__(self) -> str:
        """Return a setting in a few words.

        >>> str(Setting(8, "bf16", True))
        'bf16, activation checkpointing'
        """
        precision = "float32" if self.precision == "no" else self.precision
        return f"{precision}, activation checkpointing" if self.is_checkpointed else precision


class TensorFacts(NamedTuple):
    """A tensor as an operation saw it."""

    dtype: str
    """torch's name without "torch.": float32, bfloat16, int64."""
    shape: tuple[int, ...]
    device: str
    """cpu, or the target's kind."""


def num_bytes(tensor: TensorFacts) -> int:
    """Return how much memory a tensor takes."""
    size = {"bool": 1, "bfloat16": 2, "float16": 2, "int64": 8, "float64": 8}.get(tensor.dtype, 4)
    return size * math.prod(tensor.shape)


@dataclass(frozen=True, slots=True)
class Op:
    """Calls of one operation that are alike: the same place, phase and tensors."""

    name: str
    """As the schema writes it, without the namespace of ATen: "linalg_eigh", "add.Tensor"; other
    namespaces keep theirs: "quantized::linear"."""
    phase: Phase
    place: SourcePlace
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    settings: tuple[tuple[str, object], ...]
    """Arguments that are no tensors, by name: (("dim", 1), ("keepdim", False))."""
    calls: int
    """How often in one training step (or one evaluation step, in that phase)."""
    flops: int
    """Of all the calls together, as are the bytes."""
    bytes: int
    """Read and written."""
    host_read: str = ""
    """Why the host waits for its result: "item", "nonzero", "to cpu"; empty where it does not."""
    is_dynamic: bool = False
    """Whether the shape of its result depends on values."""

    @property
    def is_in_step(self) -> bool:
        """Whether a training step calls it, and not the making of a model or an evaluation."""
        return self.phase not in ("make", "evaluate")


class Moment(NamedTuple):
    """How much memory was held at one point of the step."""

    op: int
    """How many operations had run."""
    phase: Phase
    module: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Held:
    """What the memory held at its peak, by owner and, of activations, by module."""

    peak_bytes: int
    by_owner: dict[Owner, int]
    activations_by_module: dict[str, int]
    timeline: tuple[Moment, ...]
    events: tuple[tuple[int, int], ...] = ()
    """Memory that was taken and given back, in order, from the run's first line to the end of the
    training steps: (which, bytes), with 0 bytes where it ends. Allocators are played on them.
    What a library's kernels may take while they run is a guess, and has a number below 0."""
    step: tuple[int, int] = (0, 0)
    """Where in `events` the last training step begins and ends."""


@dataclass(frozen=True, slots=True)
class TracedJob:
    """Facts of the run: what its arguments say, and what its model and loader show."""

    precision: str = "no"
    batch_size: int = 0
    length: int = 0
    """How long the longest samples are, if a batch of them was traced; 0 if it was the first."""
    num_samples: int = 0
    """In the data set; 0 where its length is not known."""
    accumulation: int = 1
    world_size: int = 1
    num_parameters: int = 0
    num_trainable: int = 0
    optimizer: str = ""
    loader_workers: int = 0
    loader_place: SourcePlace | None = None
    """Where the training's loader was made."""
    worker_trouble: str = ""
    """Why the loader's parts cannot be handed to a worker; empty where they can."""
    unused_parameters: tuple[str, ...] = ()
    """Trainable parameters that got no gradient."""
    unused_place: SourcePlace | None = None
    """Where the module of the first one was made."""
    checkpointed_modules: tuple[str, ...] = ()
    """Modules whose activations are computed again in backward."""
    draws_in_checkpointed: tuple[SourcePlace, ...] = ()
    """Where random numbers are drawn inside of them."""
    scales_gradients: bool = False
    output_dir: str = ""
    output_place: SourcePlace | None = None
    """The line that passed it."""
    checkpoint_bytes: int = 0
    lengths: tuple[int, ...] = ()
    """The samples' own lengths, where they are known; for counting shapes."""
    buckets: str = ""
    """What the shape governor was asked for: "off", "auto", or the lengths."""
    finds_unused: bool = False
    """Whether parameters may go without a gradient in several processes."""
    mps_fallback: bool = False
    """Whether the run will have PYTORCH_ENABLE_MPS_FALLBACK=1 before it loads torch."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One training step and one evaluation step of a run, on a device that is not here."""

    job: TracedJob
    ops: tuple[Op, ...]
    held: Held
    trace_s: float
    notes: tuple[str, ...] = ()
    """What could not be seen: "only one branch of the `if` at train.py:30 was followed"."""
    failure: str = ""
    """The error that ended the trace early, with its place; empty where it went through."""
    failure_place: SourcePlace | None = None
    parts: dict[str, object] = field(default_factory=dict)
    """Facts that one check alone needs."""
