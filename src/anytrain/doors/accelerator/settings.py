"""Read the arguments of `Accelerator` into wishes and options, and show what they were."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from anytrain.core import environment
from anytrain.core.errors import BadInput
from anytrain.core.plan import Wishes, wish
from anytrain.doors.accelerator.options import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    changed,
    plain,
)
from anytrain.engine.assemble.loaders import LoaderOptions
from anytrain.engine.assemble.run import Run, RunOptions
from anytrain.engine.assemble.session import SessionOptions
from anytrain.engine.prepared.walk import Accumulation


def accumulation_plugin(
    steps: int | None, plugin: GradientAccumulationPlugin | None
) -> GradientAccumulationPlugin:
    """Return the one plugin that counts; a plugin and a number that disagree are refused."""
    if plugin is None:
        return GradientAccumulationPlugin(num_steps=steps)
    if steps not in (None, 1) and plugin.num_steps not in (None, steps):
        raise BadInput(
            "Cannot take gradient_accumulation_steps twice.",
            why=f"the argument says {steps}, the plugin says {plugin.num_steps}.",
            fix="pass one of them.",
        )
    return plugin


def session_options(
    plugin: GradientAccumulationPlugin, handlers: dict[type, Any]
) -> SessionOptions:
    """Return what the session needs besides wishes."""
    return SessionOptions(
        accumulation=Accumulation(
            adjust_scheduler=plugin.adjust_scheduler,
            sync_with_dataloader=plugin.sync_with_dataloader,
            sync_each_batch=plugin.sync_each_batch,
        ),
        process_group=changed(handlers.get(InitProcessGroupKwargs)),
        scaler=changed(handlers.get(GradScalerKwargs)),
        autocast=changed(handlers.get(AutocastKwargs)),
    )


def run_options(
    *,
    device_placement: bool,
    loaders: DataLoaderConfiguration,
    rng_types: list[Any] | None,
    handlers: dict[type, Any],
    dynamo: TorchDynamoPlugin,
    step_scheduler_with_optimizer: bool,
) -> RunOptions:
    """Return how objects are prepared."""
    config = asdict(loaders)
    config.pop("use_stateful_dataloader")  # a prepared loader always knows its position
    kinds = ["generator"] if rng_types is None else rng_types
    return RunOptions(
        device_placement=device_placement,
        loaders=LoaderOptions(rng_types=tuple(str(kind) for kind in kinds), **config),
        ddp=plain(changed(handlers.get(DistributedDataParallelKwargs))),
        compile=_compile_options(dynamo),
        step_scheduler_with_optimizer=step_scheduler_with_optimizer,
    )


def _compile_options(dynamo: TorchDynamoPlugin) -> dict[str, Any]:
    """Return what torch.compile is given; the backend may come from the launch or the variable."""
    asked = wish(dynamo.backend, "argument dynamo_backend") or environment.read().wishes.compile
    backend = "inductor" if asked is None else asked.value.lower()
    return {**plain(changed(dynamo)), "backend": backend}


def wishes(
    *,
    cpu: bool,
    mixed_precision: Any,
    accumulation: int | None,
    dynamo: TorchDynamoPlugin,
    downcast_bf16: bool | None,
) -> Wishes:
    """Return what the arguments ask for."""
    return Wishes(
        device=wish("cpu" if cpu else None, "argument cpu=True"),
        precision=wish(mixed_precision, "argument mixed_precision"),
        accumulation=wish(accumulation, "argument gradient_accumulation_steps"),
        compile=wish(dynamo.backend, "argument dynamo_backend"),
        downcast_bf16=wish(downcast_bf16, "argument downcast_bf16"),
    )


class AcceleratorSettings:
    """What the constructor was given, as HF's properties name it."""

    dataloader_config: DataLoaderConfiguration
    project_configuration: ProjectConfiguration
    _run: Run

    @property
    def device_placement(self) -> bool:
        """Whether prepared objects are put on the device."""
        return self._run.options.device_placement

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether prepared schedulers move with their optimizer."""
        return self._run.options.step_scheduler_with_optimizer

    @property
    def split_batches(self) -> bool:
        """Whether each batch is cut among the processes."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process reads for all."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether the last round is filled from the start."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether shuffling is a function of seed and epoch alone."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches travel while the host goes on."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """What was asked; a prepared loader always knows its position."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def project_dir(self) -> str | None:
        """The run's folder."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """The trackers' folder."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next automatically named checkpoint."""
        return self.project_configuration.iteration
