"""What one loop was given to train with, prepared."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from anytrain.core.errors import BadInput
from anytrain.core.notices import give_notice
from anytrain.core.plan import Choice, with_memory
from anytrain.engine import precision as precisions
from anytrain.engine.assemble.fast_room import record_calls
from anytrain.engine.assemble.loaders import (
    LoaderOptions,
    batch_size,
    prepare_loader,
    tell_if_empty,
)
from anytrain.engine.assemble.session import Session, replacements
from anytrain.engine.data.prefetch import Placement
from anytrain.engine.data.shard import BatchSamplerShard
from anytrain.engine.optim.state_size import model_facts
from anytrain.engine.prepared import model as models
from anytrain.engine.prepared.loader import PreparedLoader
from anytrain.engine.prepared.optimizer import (
    PreparedOptimizer,
    PreparedScheduler,
    follow,
    fuse,
    place_state,
)
from anytrain.engine.prepared.rebuild import SkippedLoader
from anytrain.engine.recording.loss_curve import LossCurve
from anytrain.engine.step.guard import DeviceGuard, Guard, HostGuard, ScaledGuard
from anytrain.engine.step.traced_guard import CutGuard, SelectGuard, select, why_asked


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How objects are prepared."""

    device_placement: bool = True
    loaders: LoaderOptions = field(default_factory=LoaderOptions)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    compile: Mapping[str, Any] = field(default_factory=dict)
    step_scheduler_with_optimizer: bool = True
    schedules_count_updates: bool = False
    """Whether schedules are written in updates, and not in one process's batches."""


class Run:
    """The prepared objects of one session, in the order they came."""

    def __init__(self, session: Session, options: RunOptions) -> None:
        self.session = session
        self.options = options
        self.models: list[nn.Module] = []
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[PreparedScheduler] = []
        self.loaders: list[PreparedLoader] = []
        self._moved: dict[int, nn.Parameter] = {}
        self.losses: LossCurve | None = None
        """The curve of what goes through a user's own backward; None where nothing is recorded."""
        self.recorded_models: list[Any] = []
        """What replays the calls of models in a user's own loop."""
        self._is_closed = False
        """Whether what is prepared from here on is no part of the run."""
        self._until_end: ExitStack | None = None
        """What undoes the replacements of a run; None where its door makes them itself."""

    def replace_until_end(self) -> None:
        """Let the first prepared model begin the run's replacements, and `end` undo them."""
        self._until_end = ExitStack()
        weakref.finalize(self, self._until_end.close).atexit = False

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "_until_end": None,
            "recorded_models": [],
        }  # what is replaced is this process's

    def end(self) -> None:
        """Put back what was replaced, and let go of recordings."""
        self.stop_recording()
        if self._until_end is not None:
            self._until_end.close()

    def stop_recording(self) -> None:
        """Let models run op by op, and let go of what was recorded of their calls."""
        for recorded in self.recorded_models:
            recorded.stop(None)
        self.recorded_models.clear()

    def prepare(self, objects: tuple[Any, ...], placements: list[bool | None] | None) -> Any:
        """Return the objects prepared, in their order; what is nothing of ours passes through."""
        if placements is None:
            placements = [None] * len(objects)
        if len(placements) != len(objects):
            raise BadInput(
                f"Cannot place {len(objects)} objects by {len(placements)} values.",
                why="device_placement says yes or no for each object, in their order.",
                fix=f"pass a list of {len(objects)} values, or leave it out.",
            )
        # Models go first, optimizers next, schedulers last: each needs the ones before it.
        done: list[Any] = list(objects)
        for kinds in (nn.Module, Optimizer), (DataLoader,), (LRScheduler,):
            for kind in kinds:
                done = [
                    self._prepare_kind(obj, kind, place)
                    for obj, place in zip(done, placements, strict=True)
                ]
        return tuple(done) if len(done) != 1 else done[0]

    def _prepare_kind(self, obj: Any, kind: type[Any], place: bool | None) -> Any:
        if type(obj) in (list, tuple):
            return type(obj)(self._prepare_kind(item, kind, place) for item in obj)
        if type(obj) is dict:
            return {key: self._prepare_kind(item, kind, place) for key, item in obj.items()}
        if not isinstance(obj, kind):
            return obj
        if kind is nn.Module:
            return self.model(obj, place)
        if kind is Optimizer:
            return self.optimizer(obj, place)
        if kind is DataLoader:
            return self.loader(obj, place)
        return self.scheduler(obj)

    def model(
        self,
        model: nn.Module,
        place: bool | None = None,
        *,
        evaluation_mode: bool = False,
        looks_for_unused: bool = False,
    ) -> nn.Module:
        """Return the model on its device, in its precision, tied to the other ranks'.

        With `looks_for_unused`, steps find out which parameters they do not use: whoever trains
        it ends each step's backward by the strategy's `end_backward`.
        """
        if any(model is known for known in self.models):
            return model
        session = self.session
        self._check_model(model)
        placing = self.options.device_placement if place is None else place
        if placing and not models.holds_device_map(model):
            self._moved.update(models.move(model, session.device))
        if session.end_step is not None:
            models.check_dense(model, session.backend.name)
        if self._until_end is not None:
            self._until_end.enter_context(replacements(session))
        models.restore_forward(model)  # an earlier run may have had another precision
        self._cast(model)
        prepared = model
        if not evaluation_mode:
            looks = {"find_unused_parameters": "auto"} if looks_for_unused else {}
            prepared = session.strategy.place(model, {**self.options.ddp, **looks})
        if session.plan.step.value == "compiled" and not hasattr(prepared, "_orig_mod"):
            prepared = models.compiled(prepared, self.options.compile)
        self._remember(self.models, prepared)
        return prepared

    def _cast(self, model: nn.Module) -> None:
        """Let a model compute in the run's precision, and in a user's own loop be recorded."""
        models.cast_forward(model, self.session.precision)
        if self._until_end is not None:
            record_calls(self, model)

    def _check_model(self, model: nn.Module) -> None:
        """Refuse a model that its loader has put where it cannot train."""
        if models.holds_device_map(model) and self.session.world.size > 1:
            raise BadInput(
                "Cannot train a model that is spread over several devices with several processes.",
                why="it was loaded with a device_map, and each process owns one device.",
                fix="load it without device_map, or start one process.",
            )
        if models.is_quantized(model) and models.is_offloaded(model):
            raise BadInput(
                "Cannot train a quantized model with CPU or disk offload.",
                why="its device_map keeps some layers off the device, where they cannot train.",
                fix='load it with device_map={"": 0}, or without one.',
            )

    def optimizer(self, optimizer: Optimizer, place: bool | None = None) -> PreparedOptimizer:
        """Return the optimizer, guarded and bound to accumulated steps."""
        session = self.session
        if isinstance(optimizer, PreparedOptimizer):
            if optimizer.belongs_to(session.cursor):
                self._remember(self.optimizers, optimizer)
                return optimizer
            optimizer = optimizer.optimizer  # prepared by an earlier run, as in a notebook's cell
        follow(optimizer, self._moved)
        self._check_optimizer(optimizer)
        if self.options.device_placement if place is None else place:
            place_state(optimizer, Placement(session.backend, session.device))
        prepared = PreparedOptimizer(
            optimizer, session.cursor, guard_for(optimizer, session), session.world
        )
        self._remember(self.optimizers, prepared)
        return prepared

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that was made for a twin of a model which nobody else trains.

        Others may hold what belongs to no model here: a learnt input, a model that comes later.
        """
        held = [p for group in optimizer.param_groups for p in group["params"]]
        known = [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
        mine, trained = set(map(id, held)), set(map(id, known))
        models = [list(model.parameters()) for model in self.models]
        if any(id(p) in mine for own in models for p in own):
            return
        shapes = Counter(p.shape for p in held)
        for own in models:
            is_twin = shapes == Counter(p.shape for p in own if p.requires_grad)
            if not is_twin or any(id(p) in trained for p in own):
                continue
            raise BadInput(
                f"This {type(optimizer).__name__} holds none of the prepared model's parameters.",
                why="it was made for another model, or the model was copied or made anew after "
                "the optimizer; training it would change nothing.",
                fix="make the optimizer from model.parameters() of the model that you prepare.",
            )

    def loader(
        self,
        loader: DataLoader[Any],
        place: bool | None = None,
        slice_fn: Callable[..., Any] | None = None,
    ) -> Any:
        """Return the loader, dealt to this rank."""
        if isinstance(loader, SkippedLoader):
            return loader
        if isinstance(loader, PreparedLoader):
            if loader.walk.cursor is self.session.cursor:
                self._remember(self.loaders, loader)
                return loader
            loader = loader.given  # prepared by an earlier run, as in a notebook's cell
        self._compare_sizes(loader)
        tell_if_empty(loader)
        prepared = prepare_loader(
            loader,
            self.session,
            self.options.loaders,
            place=self.options.device_placement if place is None else place,
            slice_fn=slice_fn,
        )
        self._remember(self.loaders, prepared)
        return prepared

    def _compare_sizes(self, loader: DataLoader[Any]) -> None:
        """Say that a loader's batches have another size than the first one's, where that costs."""
        if self.session.graphs is None or not self.loaders or self.session.world.rank:
            return
        size, first = batch_size(loader), batch_size(self.loaders[0].given)
        if size is not None and first is not None and size != first:
            give_notice(
                f"This loader has batches of {size}, the first one of {first}: "
                f"{self.session.backend.name} compiles a graph for each shape. Give both one "
                "batch size, unless the graphs are worth compiling.",
                stacklevel=6,
            )

    def scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Return the scheduler, moving with its optimizer."""
        if isinstance(scheduler, PreparedScheduler):
            if all(any(o is own for own in self.optimizers) for o in scheduler.optimizers):
                self._remember(self.schedulers, scheduler)
                return scheduler
            scheduler = scheduler.scheduler
        own = [
            optimizer
            for optimizer in self.optimizers
            if getattr(scheduler, "optimizer", None) in (optimizer, optimizer.optimizer)
        ]
        if not own and self.optimizers:
            give_notice(
                f"This {type(scheduler).__name__} belongs to no prepared optimizer; it moves with "
                "all of them.",
                stacklevel=3,
            )
        split = self.options.loaders.split_batches or self.options.schedules_count_updates
        prepared = PreparedScheduler(
            scheduler,
            own or self.optimizers,
            self.session.cursor,
            positions=1 if split else self.session.world.size,
            with_optimizer=self.options.step_scheduler_with_optimizer,
        )
        self._remember(self.schedulers, prepared)
        return prepared

    def unwrap(self, model: nn.Module, *, keep_forward: bool, keep_compiled: bool) -> nn.Module:
        """Return the model that was given to `prepare`."""
        return models.unwrap(
            model, self.session.strategy, keep_forward=keep_forward, keep_compiled=keep_compiled
        )

    def compute_in(self, precision: str, because: str) -> None:
        """Change the precision of what is prepared, as a resumed run's checkpoint asks."""
        session = self.session
        self.stop_recording()
        guard = session.planned.guard  # what fp16 has made of it is the guards' to say again
        session.plan = replace(session.plan, precision=Choice(precision, because), guard=guard)
        session.precision = precisions.build(precision, session.device.type)
        for model in self.models:
            inner = self.unwrap(model, keep_forward=False, keep_compiled=False)
            self._cast(inner)
        for optimizer in self.optimizers:
            optimizer.guard = guard_for(optimizer.optimizer, session)

    @contextmanager
    def evenness(self, even_batches: bool | None) -> Iterator[bool]:
        """Give the block loaders that fill their last round, or not; say which."""
        if even_batches is None:
            yield self.options.loaders.even_batches
            return
        dealt = [
            shard
            for loader in self.loaders
            if isinstance(shard := loader.batch_sampler, BatchSamplerShard)
        ]
        if len(dealt) < len(self.loaders):
            give_notice(
                "Overriding even_batches is only supported for map-style datasets; a stream keeps "
                "its own.",
                stacklevel=4,
            )
        before = [shard.even_batches for shard in dealt]
        for shard in dealt:
            shard.even_batches = even_batches
        try:
            yield even_batches
        finally:
            for shard, value in zip(dealt, before, strict=True):
                shard.even_batches = value

    def forget(self) -> None:
        """Let go of every prepared object."""
        self.models.clear()
        self.optimizers.clear()
        self.schedulers.clear()
        self.loaders.clear()
        self._moved.clear()
        self.stop_recording()
        self._is_closed = False
        self.session.cursor.micro = 0
        self.session.cursor.sync = True

    def close(self, model: nn.Module, optimizer: Any, scheduler: Any, loader: Any) -> None:
        """Take these for all that the run trains and saves, whatever else was or will be prepared.

        A Trainer's users prepare loaders to evaluate on, and optimizers that they step themselves.
        """
        self.models[:], self.optimizers[:] = [model], [optimizer]
        self.schedulers[:], self.loaders[:] = [scheduler], [loader]
        self._is_closed = True
        self.forecast_memory()

    def forecast_memory(self) -> None:
        """Put into the plan, once, what each rank will hold of what is prepared."""
        session = self.session
        if session.memory is not None:
            return
        facts = model_facts(self.models, [each.optimizer for each in self.optimizers])
        session.memory = session.strategy.forecast(facts, self.options.ddp)
        whole = None if session.machine is None else session.machine.memory_bytes
        session.plan = with_memory(session.plan, session.memory, whole)
        session.planned = with_memory(session.planned, session.memory, whole)

    def _remember(self, known: list[Any], prepared: Any) -> None:
        if not self._is_closed and not any(prepared is other for other in known):
            known.append(prepared)


def guard_for(optimizer: Optimizer, session: Session) -> Guard:
    """Return what keeps a non-finite gradient from this optimizer."""
    if session.end_step is not None:
        _check_unfused(optimizer, session)
        if session.precision.scale is None:
            return _traced_guard(optimizer, session, session.end_step)
        told = "fp16's loss scale follows what overflowed: one flag is read per step"
        session.revise("guard", "host", told)
    on_device = session.plan.guard.value == "device" and fuse(optimizer, session.device)
    if session.precision.scale is not None:
        return ScaledGuard(session.precision.scale, session.device, on_device)
    return DeviceGuard(session.device) if on_device else HostGuard(session.device)


def _traced_guard(optimizer: Optimizer, session: Session, end_step: Callable[[], None]) -> Guard:
    if session.planned.guard.value != "select":
        return CutGuard(session.device, end_step)
    why = why_asked(optimizer)
    if why is not None:
        session.revise("guard", "host", f"{why}: one flag is read per step")
        return CutGuard(session.device, end_step)
    select(optimizer)
    return SelectGuard(session.device, end_step)


def _check_unfused(optimizer: Optimizer, session: Session) -> None:
    """Refuse a fused update that torch would refuse at the first step."""
    kind, name = type(optimizer).__name__, session.backend.name
    if name == "xla" and any(group.get("fused") for group in optimizer.param_groups):
        raise BadInput(
            f"Cannot update with {kind}(fused=True) on {name!r}.",
            why=f"torch has no fused update of {name}'s tensors.",
            fix=f"leave fused out: {name} compiles the whole step, the update with it.",
        )


def holders(optimizers: list[PreparedOptimizer], parameters: list[Any]) -> list[PreparedOptimizer]:
    """Return the optimizers that hold any of the parameters."""
    wanted = {id(parameter) for parameter in parameters}
    return [
        optimizer
        for optimizer in optimizers
        if any(id(p) in wanted for group in optimizer.param_groups for p in group["params"])
    ]


def unscale(optimizers: list[PreparedOptimizer]) -> None:
    """Undo fp16's loss scale, so that gradients can be looked at."""
    for optimizer in optimizers:
        if isinstance(optimizer.guard, ScaledGuard):
            optimizer.guard.unscale(optimizer.optimizer)


def num_skipped(optimizers: list[PreparedOptimizer]) -> int:
    """Return how many updates were left out; reads the device."""
    return sum(optimizer.guard.num_skipped for optimizer in optimizers)


def note_norm(optimizers: list[PreparedOptimizer], norm: torch.Tensor) -> None:
    """Let every guard of these know a gradient norm."""
    for optimizer in optimizers:
        optimizer.guard.note_norm(norm)
