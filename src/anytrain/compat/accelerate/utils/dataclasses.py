"""HF's options and enums; those of engines that anytrain does not have are refused by name."""

from __future__ import annotations

import copy
import enum
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from anytrain.compat.accelerate import refused
from anytrain.compat.accelerate.utils.environment import (
    parse_choice_from_env,
    parse_flag_from_env,
    str_to_bool,
)
from anytrain.core.errors import Unsupported
from anytrain.doors.accelerator.options import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs as _DistributedDataParallelKwargs,
    DistributedType,
    DynamoBackend,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    LoggerType,
    PrecisionType,
    ProfileKwargs as _ProfileKwargs,
    ProjectConfiguration,
    RNGType,
    TorchDynamoPlugin as _TorchDynamoPlugin,
    Word as BaseEnum,
    Words as EnumWithContains,
)
from anytrain.doors.accelerator.states import live_session
from anytrain.engine.recording import profile
from anytrain.machine.strategies import ddp

__all__ = [
    "AutocastKwargs",
    "BaseEnum",
    "ComputeEnvironment",
    "CustomDtype",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "EnumWithContains",
    "FP8BackendType",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "SageMakerDistributedType",
    "TensorInformation",
    "TorchDynamoPlugin",
]

__getattr__ = refused.module_getattr(__name__)


class ComputeEnvironment(BaseEnum):
    """Where jobs run, in HF's configuration files."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class SageMakerDistributedType(BaseEnum):
    """SageMaker's kinds of world; anytrain never is one of them."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class FP8BackendType(BaseEnum):
    """Libraries of fp8 recipes; anytrain uses none."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


class CustomDtype(enum.Enum):
    """Widths that torch has no dtype for; sizes can be computed with them."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


@dataclass
class TensorInformation:
    """A tensor less its values."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass
class DistributedDataParallelKwargs(_DistributedDataParallelKwargs):
    """Options of DistributedDataParallel, with HF's two extra methods."""

    def to_dict(
        self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Return the options that DistributedDataParallel itself takes."""
        return {k: v for k, v in copy.deepcopy(self.__dict__).items() if k not in ignore_keys}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the options that were changed, those of the communication hook too."""
        default = type(self)().__dict__
        return {name: value for name, value in self.__dict__.items() if default[name] != value}

    def register_comm_hook(self, model: Any) -> None:
        """Put the wished compression between a replica's backward and its transport."""
        ddp.compress(model, self.__dict__)


@dataclass
class ProfileKwargs(_ProfileKwargs):
    """Options of torch's profiler, with HF's extra method."""

    def build(self) -> torch.profiler.profile:
        """Return the profiler."""
        return profile.build(self, live_session().world.rank)


@dataclass
class TorchDynamoPlugin(_TorchDynamoPlugin):
    """Options of torch.compile; what is left out is read from HF's ACCELERATE_DYNAMO_ variables."""

    use_regional_compilation: bool | None = None

    _PREFIX: ClassVar[str] = "ACCELERATE_DYNAMO_"

    def __post_init__(self) -> None:
        backend = self.backend or parse_choice_from_env(self._PREFIX + "BACKEND", "no")
        self.backend = DynamoBackend(str(backend).upper())
        self.mode = self.mode or parse_choice_from_env(self._PREFIX + "MODE", "default")
        self.fullgraph = self.fullgraph or parse_flag_from_env(self._PREFIX + "USE_FULLGRAPH")
        dynamic = parse_choice_from_env(self._PREFIX + "USE_DYNAMIC", "")
        if self.dynamic is None and dynamic:
            self.dynamic = bool(str_to_bool(dynamic))
        if self.use_regional_compilation is None:
            variable = self._PREFIX + "USE_REGIONAL_COMPILATION"
            self.use_regional_compilation = parse_flag_from_env(variable)
        if self.use_regional_compilation:
            raise Unsupported(
                "anytrain does not compile a prepared model by regions.",
                why="torch.compile is given the whole model.",
                fix="call compile_regions(model) yourself, before prepare(model).",
            )

    def to_dict(self) -> dict[str, Any]:
        """Return every option, the backend as torch spells it."""
        return {**copy.deepcopy(self.__dict__), "backend": str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the options for torch.compile that differ from its own."""
        given = self.to_dict()
        given.pop("use_regional_compilation")
        plain = {**_TorchDynamoPlugin().to_dict(), "backend": "no", "mode": "default"}
        return {name: value for name, value in given.items() if plain[name] != value}
