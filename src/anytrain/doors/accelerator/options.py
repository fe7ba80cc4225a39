"""The options people know from HF Accelerate: small dataclasses and enums."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import EnumType, StrEnum
from typing import Any

from anytrain.core.errors import BadInput
from anytrain.engine.recording.profile import ProfileOptions


class Words(EnumType):
    """Let `in` find a member by its value; Python does so itself from 3.12 on."""

    def __contains__(cls, value: object) -> bool:
        return value in cls.__members__.values()


class Word(StrEnum, metaclass=Words):
    """An enum whose members are the strings that users type.

    >>> "bf16" in PrecisionType, "bf17" in PrecisionType
    (True, False)
    """

    @classmethod
    def list(cls) -> list[str]:
        """Return the values."""
        return [str(member.value) for member in cls]


class DistributedType(Word):
    """What kind of world a script runs in."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    XLA = "XLA"
    # Named so that scripts which compare with them run; anytrain never is one of them.
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    MEGATRON_LM = "MEGATRON_LM"
    TPU = "XLA"


class PrecisionType(Word):
    """The precisions by name."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class RNGType(Word):
    """Random generators that can be kept the same on every rank."""

    TORCH = "torch"
    CUDA = "cuda"
    XLA = "xla"
    GENERATOR = "generator"
    # Known by name; without a backend here they are refused when they are used.
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"


class LoggerType(Word):
    """Trackers by name."""

    ALL = "all"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    MLFLOW = "mlflow"
    JSONL = "jsonl"
    CSV = "csv"
    AIM = "aim"
    COMETML = "comet_ml"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class DynamoBackend(Word):
    """Compilers by name; NO means none."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    CUDAGRAPHS = "CUDAGRAPHS"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    TVM = "TVM"
    # torch says which of these it finds.
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


class DDPCommunicationHookType(Word):
    """How gradients are packed while they travel."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class KwargsHandler:
    """A dataclass of options that can tell which of them differ from the default."""

    def to_dict(self) -> dict[str, Any]:
        """Return every option."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """Return the options that were changed."""
        default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if default[name] != value}


@dataclass
class DataLoaderConfiguration:
    """How `prepare` treats data loaders.

    Args:
        split_batches: With several processes: cut each batch into one part for each, instead
            of giving each process whole batches.
        dispatch_batches: Whether the main process reads for all and hands their parts out. None:
            where the data is a stream (IterableDataset).
        even_batches: Whether the last round is filled with samples from the start, so that all
            processes take equally many batches. `gather_for_metrics` leaves them out again.
        use_seedable_sampler: Whether the shuffled order is a function of seed and epoch alone.
        data_seed: The seed of that order. None: torch's.
        non_blocking: Whether batches travel to the device while the host goes on.
        use_stateful_dataloader: Taken as HF has it: a prepared loader always knows its
            position.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How many batches make one update.

    Args:
        num_steps: Batches that make one update. None: 1, or what the launch says.
        adjust_scheduler: Whether torch's count of a schedule's steps goes on between updates.
        sync_with_dataloader: Whether an update is due at the end of a loader, too.
        sync_each_batch: Whether gradients are averaged over the processes at each batch: less
            memory, more traffic.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass
class ProjectConfiguration:
    """Where a run keeps its files.

    Args:
        project_dir: The run's folder.
        logging_dir: Where trackers write. None: the run's folder.
        automatic_checkpoint_naming: Whether `save_state()` numbers checkpoints in
            project_dir/checkpoints.
        total_limit: How many of those stay. None: all.
        iteration: The number of the next one.
        save_on_each_node: Whether `save` writes on each machine.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set the project's folder, and the logs' where none was given.

        Args:
            project_dir: The run's folder.
        """
        self.project_dir = None if project_dir is None else os.fspath(project_dir)
        if self.logging_dir is None:
            self.logging_dir = self.project_dir

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise BadInput(
                f"Cannot keep total_limit={self.total_limit} checkpoints.",
                why="a run that keeps none cannot be resumed.",
                fix="pass total_limit=1 or more, or None to keep all.",
            )
        self.set_directories(self.project_dir)


@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of torch.autocast.

    Args:
        enabled: Whether to compute in the run's precision.
        cache_enabled: Whether rounded weights are kept inside the block. None: as torch does.
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of DistributedDataParallel.

    Args:
        dim: Taken as torch has it; 0.
        broadcast_buffers: Whether the main process's buffers go to all before each forward.
        bucket_cap_mb: Megabytes of gradients that travel together.
        find_unused_parameters: Whether to look for parameters without a gradient at each step.
        check_reduction: Taken as torch has it.
        gradient_as_bucket_view: Whether gradients are views of what travels, which saves their
            memory.
        static_graph: Whether the same parameters are used in the same way at each step.
        comm_hook: How gradients are packed while they travel: "no", "fp16", "bf16",
            "power_sgd" or "batched_power_sgd".
        comm_wrapper: A rounding around that: "no", "fp16" or "bf16".
        comm_state_option: Options of PowerSGD.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Options of fp16's loss scale.

    Args:
        init_scale: The scale to begin with.
        growth_factor: What it is multiplied by after steps that were finite.
        backoff_factor: What it is multiplied by after one that was not.
        growth_interval: How many finite steps it takes to grow.
        enabled: Whether losses are scaled.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """How the ranks find each other; `backend` None is the device's own transport.

    Args:
        backend: The transport: nccl, gloo. None: the device's own.
        init_method: Where they meet, as torch.distributed has it. None: what the launcher
            says.
        timeout: How long a rank waits for the others. None: torch's 30 minutes.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.timeout is not None and self.timeout.total_seconds() <= 0:
            raise BadInput(
                f"Cannot wait {self.timeout} for the other ranks.",
                why="a timeout must be longer than zero.",
                fix="pass timeout=timedelta(minutes=30).",
            )


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Options of torch.compile.

    Args:
        backend: The compiler: "inductor".
        mode: torch.compile's mode.
        fullgraph: Whether a model must compile in one piece.
        dynamic: Whether shapes may change without compiling again. None: torch finds out.
        options: The compiler's options.
        disable: Whether not to compile after all.
    """

    backend: DynamoBackend | str | None = None
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    options: dict[str, Any] | None = None
    disable: bool = False


@dataclass
class ProfileKwargs(KwargsHandler, ProfileOptions):
    """Options of torch's profiler."""


HANDLERS = (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)


def sort_handlers(handlers: list[Any] | None) -> dict[type, Any]:
    """Return the handlers by kind, refusing what is none and what comes twice."""
    found: dict[type, Any] = {}
    for handler in handlers or []:
        kind = next((k for k in HANDLERS if isinstance(handler, k)), None)
        if kind is None:
            raise BadInput(
                f"Unknown handler {type(handler).__name__} in kwargs_handlers.",
                why=f"the known ones are {', '.join(k.__name__ for k in HANDLERS)}.",
                fix="drop it; fp8 recipes in particular have no device to serve here.",
            )
        if kind in found:
            raise BadInput(
                f"Cannot take two {kind.__name__} in kwargs_handlers.",
                why="only one of the two can count.",
                fix="pass one.",
            )
        found[kind] = handler
    return found


def changed(handler: Any) -> dict[str, Any]:
    """Return the options that a handler sets; nothing where there is no handler."""
    return {} if handler is None else handler.to_kwargs()


def plain(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with enum members as the strings they stand for."""
    return {name: getattr(value, "value", value) for name, value in options.items()}


def check_flags(**flags: Callable[..., Any] | Any) -> None:
    """Refuse a yes-or-no argument that is neither."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise BadInput(
                f"Cannot use {name}={value!r}.",
                why=f"{name} is a yes-or-no argument.",
                fix=f"pass {name}=True or {name}=False.",
            )
