"""`Accelerator`, with the attributes and classes that scripts and tests of HF's rely on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from anytrain.compat.accelerate import refused
from anytrain.compat.accelerate.data_loader import to_hf_class
from anytrain.compat.accelerate.optimizer import AcceleratedOptimizer
from anytrain.compat.accelerate.scheduler import AcceleratedScheduler
from anytrain.compat.accelerate.state import AcceleratorState, GradientState, was_reset
from anytrain.compat.accelerate.utils.dataclasses import (
    DataLoaderConfiguration,
    DistributedType,
    GradientAccumulationPlugin,
)
from anytrain.compat.accelerate.utils.imports import (
    is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available,
    is_xpu_available as is_xpu_available,
)
from anytrain.core.notices import give_notice
from anytrain.doors.accelerator import facade, options
from anytrain.doors.accelerator.states import run_is_over
from anytrain.engine.prepared.optimizer import PreparedOptimizer, PreparedScheduler

__all__ = ["Accelerator", "DataLoaderConfiguration", "GradientAccumulationPlugin"]

__getattr__ = refused.module_getattr(__name__, "checkpointing", "parallelism_config")

_JOINABLE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class Accelerator(facade.Accelerator):
    """Run a training loop on whatever device and processes there are."""

    # Nothing of fp8 and LOMO is ever in force here.
    ao_recipe_handler = None
    delayed_fp8_autocast = False
    flag_tensor = None
    fp8_enabled = False
    fp8_recipe_handler = None
    has_fp8_handler = False
    has_lomo_optimizer = False
    msamp_recipe_handler = None
    te_recipe_handler = None

    def _check_not_reset(self, name: str) -> None:
        """Refuse to speak of a run whose state was reset, as HF's does."""
        if was_reset(self._run.session):
            raise run_is_over("AcceleratorState", name)

    @property
    def num_processes(self) -> int:
        """The number of processes of the job."""
        self._check_not_reset("num_processes")
        return super().num_processes

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        self._check_not_reset("device")
        return super().device

    @property
    def state(self) -> AcceleratorState:
        """This run, as HF's state object shows it; the same object each time."""
        view: AcceleratorState | None = self.__dict__.get("_state_view")
        if view is None:
            view = self.__dict__["_state_view"] = AcceleratorState._of(self._run.session)
        return view

    @property
    def gradient_state(self) -> GradientState:
        """Where this run's loop stands between two updates."""
        view: GradientState = GradientState._of(self._run.session.cursor)  # type: ignore[assignment]  # of the class it is called on
        return view

    @property
    def distributed_type(self) -> DistributedType:
        """What kind of world this is, in HF's words."""
        self._check_not_reset("distributed_type")
        return self.state.distributed_type

    @property
    def log_with(self) -> list[Any]:
        """The trackers that were chosen."""
        return list(self._log_with)

    @property
    def rng_types(self) -> list[str]:
        """The generators that are kept the same on every rank."""
        return list(self._run.options.loaders.rng_types)

    @property
    def autocast_handler(self) -> Any:
        """The options of torch.autocast that were given."""
        return self._handlers.get(options.AutocastKwargs)

    @property
    def ddp_handler(self) -> Any:
        """The options of DistributedDataParallel that were given."""
        return self._handlers.get(options.DistributedDataParallelKwargs)

    @property
    def init_handler(self) -> Any:
        """How the ranks were told to find each other."""
        return self._handlers.get(options.InitProcessGroupKwargs)

    @property
    def profile_handler(self) -> Any:
        """The profiler's options that were given."""
        return self._handlers.get(options.ProfileKwargs)

    @property
    def scaler_handler(self) -> Any:
        """The options of fp16's loss scale that were given."""
        return self._handlers.get(options.GradScalerKwargs)

    def prepare(self, *args: Any, device_placement: list[bool | None] | None = None) -> Any:
        """Return models, optimizers, loaders and schedulers ready for this run, in their order."""
        self._check_not_reset("distributed_type")
        prepared = super().prepare(*args, device_placement=device_placement)
        self._to_hf_classes()
        return prepared

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Return the model on its device, in its precision, tied to the other ranks'."""
        prepared = super().prepare_model(model, device_placement, evaluation_mode)
        self._to_hf_classes()
        return prepared

    def prepare_optimizer(
        self, optimizer: Any, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """Return the optimizer, guarded and bound to accumulated steps."""
        prepared = super().prepare_optimizer(optimizer, device_placement)
        self._to_hf_classes()
        return prepared

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Return the loader, dealt to this rank."""
        prepared = super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        self._to_hf_classes()
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return the scheduler, moving with its optimizer."""
        prepared = super().prepare_scheduler(scheduler)
        self._to_hf_classes()
        return prepared

    def _to_hf_classes(self) -> None:
        """Let what was prepared be of HF's classes, and say of itself that it was prepared."""
        for loader in self._run.loaders:
            to_hf_class(loader)
        for optimizer in self._run.optimizers:
            if type(optimizer) is PreparedOptimizer:
                optimizer.__class__ = AcceleratedOptimizer
        for scheduler in self._run.schedulers:
            if type(scheduler) is PreparedScheduler:
                scheduler.__class__ = AcceleratedScheduler
        for model in self._run.models:
            model.__dict__["_is_accelerate_prepared"] = True

    @contextmanager
    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Let ranks run out of batches at different times inside the block."""
        if self.distributed_type not in _JOINABLE:
            give_notice(
                f"Joining uneven inputs is only supported for multi-GPU and multi-CPU runs; on "
                f"{self.distributed_type} it does nothing.",
                stacklevel=3,
            )
            yield
            return
        with super().join_uneven_inputs(joinables, even_batches):
            yield
