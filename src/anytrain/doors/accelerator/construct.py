"""Read a constructor's arguments into wishes and options, refusing what cannot be."""

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
    TorchDynamoPlugin,
    changed,
    plain,
)
from anytrain.engine.assemble.loaders import LoaderOptions
from anytrain.engine.assemble.run import RunOptions
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
