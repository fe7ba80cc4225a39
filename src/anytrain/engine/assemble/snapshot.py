"""Take everything a run is made of, and put it back in the order that makes it exact.

Generators go last: making loaders' iterators draws from them.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from anytrain.core.errors import BadInput, CheckpointError, Notice
from anytrain.engine import rng
from anytrain.engine.assemble import optimizer_kind
from anytrain.engine.assemble.run import Run
from anytrain.engine.assemble.session import Session
from anytrain.engine.checkpoint import Loaded, Snapshot, check, load_weights, model_state
from anytrain.engine.checkpoint.foreign import ForeignCheckpoint
from anytrain.engine.data.seeded import mix

SaveHook = Callable[[list[Any], list[Any], str], None]
LoadHook = Callable[[list[Any], str], None]


@dataclass(frozen=True, slots=True)
class OwnWays:
    """What somebody puts back in a way of his own, which is then left to him."""

    has_model: bool = False
    """The model's weights are in it already."""
    optimizers: Callable[[], None] | None = None
    """What puts the optimizers and schedules back."""


def take(run: Run, registered: list[Any], hooks: list[SaveHook], folder: Path) -> Snapshot:
    """Return the whole run; hooks see the models, their weights, and the folder being written.

    The number of processes is kept beside those that take part: the main one may save alone.
    """
    session = run.session
    models = _bare(run)
    weights: list[Any] = [model.state_dict() for model in models]
    given = list(weights)
    for hook in hooks:
        hook(list(models), weights, str(folder))
    kept = [
        model_state(model, weights=weight)
        for model, weight in zip(models, given, strict=True)
        if any(weight is w for w in weights)  # a hook that saved a model itself takes it out
    ]
    parts: dict[str, Any] = {}
    for kind, objects in _stateful(run, registered).items():
        for position, obj in enumerate(objects):
            parts[_name(kind, position)] = obj.state_dict()
    if session.precision.scale is not None:
        parts["scaler"] = session.precision.scale.scaler.state_dict()
    parts["cursor"] = {"micro": session.cursor.micro, "updates": session.cursor.updates}
    return Snapshot(
        step=session.cursor.updates,
        models=kept,
        parts=parts,
        rank_parts={"rng": rng_state(run), "gradients": _pending(run)},
        meta={
            "plan": {name: choice.value for name, choice in session.plan.reasons().items()},
            "num_models": len(kept),
            "parameters": _parameters(models, run),
            "optimizers": [optimizer_kind.describe(each) for each in run.optimizers],
            "seed": torch.initial_seed(),
            "processes": session.world.size,
        },
    )


def _parameters(models: list[torch.nn.Module], run: Run) -> dict[str, list[str | None]]:
    """Return the names of each optimizer's parameters, whose state knows them by number."""
    names = {id(p): name for model in models for name, p in model.named_parameters()}
    return {
        _name("optimizer", position): [
            names.get(id(p)) for group in optimizer.param_groups for p in group["params"]
        ]
        for position, optimizer in enumerate(run.optimizers)
    }


def restore(
    run: Run,
    registered: list[Any],
    loaded: Loaded,
    hooks: list[LoadHook],
    *,
    strict: bool = True,
    own: OwnWays | None = None,
) -> None:
    """Put a saved run back; a part that is missing is an error, never a fresh default."""
    session = run.session
    own = own or OwnWays()
    _settle_precision(run, loaded)
    if not own.has_model:
        kept = _left(run, hooks, loaded)
        _check_count("model", len(kept), int(loaded.meta["num_models"]), loaded)
        for position, model in enumerate(kept):
            loaded.load_model(model, position, strict=strict)
    if own.optimizers is None:
        restore_optimizers(run, loaded)
    else:
        own.optimizers()
    _restore_kind("loader", run.loaders, loaded)
    _restore_kind("registered", registered, loaded)
    if session.precision.scale is not None:
        session.precision.scale.scaler.load_state_dict(loaded.part("scaler"))
    place = loaded.part("cursor")
    session.cursor.micro, session.cursor.updates = place["micro"], place["updates"]
    if session.world.size == loaded.world_size == _num_processes(loaded):
        restore_rng(run, loaded.rank_part("rng", session.world.rank))
        _restore_pending(run, loaded.rank_part("gradients", session.world.rank))
    else:
        _derive_rng(run, loaded)


def restore_optimizers(run: Run, saved: Loaded | ForeignCheckpoint) -> None:
    """Put the optimizers and their schedules back."""
    if isinstance(saved, Loaded):
        _check_saved("optimizer", run.optimizers, saved)
        noted = saved.meta.get("optimizers")  # older checkpoints hold none
        for number, optimizer in enumerate(run.optimizers):
            state, kind = saved.part(_name("optimizer", number)), noted and noted[number]
            optimizer_kind.load_state(optimizer, state, kind, saved.path)
        _check_saved("scheduler", run.schedulers, saved)
        for number, scheduler in enumerate(run.schedulers):
            _load_schedule(scheduler, saved.part(_name("scheduler", number)), saved.path)
        return
    for number, optimizer in enumerate(run.optimizers):
        optimizer_kind.load_state(optimizer, saved.optimizers[number], None, saved.path)
    for number, scheduler in enumerate(run.schedulers):
        _load_schedule(scheduler, saved.schedulers[number], saved.path)


def _load_schedule(scheduler: Any, state: Any, path: Path) -> None:
    try:
        scheduler.load_state_dict(state)
    except KeyError as error:
        raise CheckpointError(
            f"Cannot load {path}: its schedule of the learning rate is not of this run's kind.",
            why=f"this run's needs {error}, which was not saved.",
            fix="go on with the schedule that was saved (lr_scheduler_type). To train on with "
            "another, begin a new run from the saved model.",
        ) from error


def _check_saved(kind: str, objects: Sequence[Any], loaded: Loaded) -> None:
    saved = sum(1 for name in loaded.part_names if name == kind or _is_nth(name, kind))
    _check_count(kind, len(objects), saved, loaded)


def _restore_kind(kind: str, objects: Sequence[Any], loaded: Loaded) -> None:
    _check_saved(kind, objects, loaded)
    for position, obj in enumerate(objects):
        obj.load_state_dict(loaded.part(_name(kind, position)))


def _num_processes(loaded: Loaded) -> int:
    return int(loaded.meta.get("processes", loaded.world_size))


def _pending(run: Run) -> dict[str, Any]:
    """Return gradients that wait for the rest of their accumulated step; nothing between steps."""
    if run.session.cursor.sync:
        return {}
    return {
        f"{position}.{name}": parameter.grad
        for position, model in enumerate(run.models)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def _restore_pending(run: Run, gradients: dict[str, Any]) -> None:
    run.session.cursor.sync = not gradients
    for position, model in enumerate(run.models):
        for name, parameter in model.named_parameters():
            saved = gradients.get(f"{position}.{name}")
            parameter.grad = None if saved is None else saved.to(parameter.device)


def _settle_precision(run: Run, loaded: Loaded) -> None:
    """Take the saved run's precision, unless the user asked for another: then say so."""
    saved, now = loaded.meta["plan"]["precision"], run.session.plan.precision
    if saved == now.value:
        return
    if run.session.plan.precision_is_free:
        run.compute_in(saved, f"the checkpoint {loaded.path.name} was made in it")
    elif run.session.world.rank == 0:
        warnings.warn(
            f"Saved in precision {saved!r}, continued in {now.value!r} ({now.because}): the run "
            f"goes on, but not to the bit. Pass mixed_precision={saved!r} for that.",
            Notice,
            stacklevel=5,
        )


def _derive_rng(run: Run, loaded: Loaded) -> None:
    """Seed a rank that the saved run did not have, from the run's seed, the step and the rank."""
    world = run.session.world
    word = mix(mix(mix(0, loaded.meta["seed"]), loaded.step), world.rank)
    rng.seed_everything(word & 0xFFFFFFFF)
    if world.rank == 0:
        number, alone = _num_processes(loaded), loaded.world_size == 1
        who = f"one process of {number}" if alone and number > 1 else f"{number} processes"
        warnings.warn(
            f"Saved by {who}, continued by {world.size}: the data goes on "
            "at the next unseen sample, and each rank's randomness (dropout) is drawn anew from "
            "seed, step and rank.",
            Notice,
            stacklevel=4,
        )


def rewind(run: Run, loaded: Loaded, hooks: Sequence[LoadHook] = ()) -> None:
    """Take weights and the optimizers' memory back; schedule, data and step count go on."""
    for position, model in enumerate(_left(run, hooks, loaded)):
        loaded.load_model(model, position)
    for position, optimizer in enumerate(run.optimizers):
        rates = [group["lr"] for group in optimizer.param_groups]
        optimizer.load_state_dict(loaded.part(_name("optimizer", position)))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _bare(run: Run) -> list[nn.Module]:
    """Return the models as they were given to `prepare`: hooks call methods of their own."""
    return [run.unwrap(m, keep_forward=True, keep_compiled=False) for m in run.models]


def _left(run: Run, hooks: Sequence[LoadHook], loaded: Loaded) -> list[nn.Module]:
    """Return the models that no hook has taken out of the list to load them itself."""
    models = _bare(run)
    given = list(models)
    for hook in hooks:
        hook(given, str(loaded.path))
    return [model for model in models if any(model is left for left in given)]


def restore_foreign(
    run: Run,
    registered: list[Any],
    found: ForeignCheckpoint,
    *,
    tells_position: bool = True,
    own: OwnWays | None = None,
) -> None:
    """Put back what could be taken of another library's checkpoint, and say what could not."""
    session = run.session
    own = own or OwnWays()
    models = [] if own.has_model else run.models
    _check_foreign(run, models, registered, found, own)
    for number, model in enumerate(models):
        inner = run.unwrap(model, keep_forward=True, keep_compiled=False)
        load_weights(inner, found.models[number], source=str(found.path))
    if own.optimizers is None:
        restore_optimizers(run, found)
    else:
        own.optimizers()
    for number, obj in enumerate(registered):
        obj.load_state_dict(found.custom[number])
    if session.precision.scale is not None and found.scalers:
        session.precision.scale.scaler.load_state_dict(found.scalers[0])
    _restore_foreign_rng(session, found.rng.get(session.world.rank, {}))
    _tell_untaken(found, tells_position)


def _check_foreign(
    run: Run,
    models: Sequence[Any],
    registered: Sequence[Any],
    found: ForeignCheckpoint,
    own: OwnWays,
) -> None:
    """Refuse what lacks a part that nobody else puts back."""
    left = own.optimizers is not None
    for kind, wanted, saved in (
        ("model", len(models), found.models),
        ("optimizer", 0 if left else len(run.optimizers), found.optimizers),
        ("scheduler", 0 if left else len(run.schedulers), found.schedulers),
        ("registered object", len(registered), found.custom),
    ):
        if wanted > len(saved):
            raise CheckpointError(
                f"Cannot load {found.path}: it holds {len(saved)} of kind {kind!r}, this run has "
                f"{wanted}.",
                why="; ".join(map(str, found.not_taken)) or "the other library did not save it.",
                fix="prepare and register only what was saved, or load the model's weights alone.",
            )


def _tell_untaken(found: ForeignCheckpoint, tells_position: bool) -> None:
    untaken = [str(each) for each in found.not_taken]
    if tells_position:
        untaken.append("the position in the data was not saved: use skip_first_batches")
    if untaken:
        warnings.warn(f"Loaded {found.path}: " + "; ".join(untaken), Notice, stacklevel=5)


def _restore_foreign_rng(session: Session, state: dict[str, Any]) -> None:
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        np.random.set_state(state["numpy"])
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    device = state.get(session.backend.name)
    if isinstance(device, (list, tuple)):
        device = device[session.world.local_rank] if device else None
    if isinstance(device, torch.Tensor):
        session.backend.restore_rng(session.device, device)


def _stateful(run: Run, registered: list[Any]) -> dict[str, list[Any]]:
    return {
        "optimizer": list(run.optimizers),
        "scheduler": list(run.schedulers),
        "loader": list(run.loaders),
        "registered": list(registered),
    }


def _name(kind: str, position: int) -> str:
    return kind if position == 0 else f"{kind}_{position}"


def _is_nth(name: str, kind: str) -> bool:
    return name.startswith(f"{kind}_") and name[len(kind) + 1 :].isdigit()


def _check_count(kind: str, wanted: int, saved: int, loaded: Loaded) -> None:
    if wanted != saved:
        raise CheckpointError(
            f"Cannot load {loaded.path}: it holds {saved} of kind {kind!r}, this run has {wanted}.",
            why="a run is restored whole; what is missing would start afresh unnoticed.",
            fix="prepare and register the same objects as when it was saved, then load.",
        )


def check_registered(objects: Sequence[Any]) -> None:
    """Refuse objects that cannot be saved, or whose state no file can hold."""
    needed = ("state_dict", "load_state_dict")
    lacking = {
        f"Item at index {position}, a {type(obj).__name__}": missing
        for position, obj in enumerate(objects)
        if (missing := [name for name in needed if not callable(getattr(obj, name, None))])
    }
    if lacking:
        raise BadInput(
            f"Cannot register for checkpointing: {'; '.join(lacking)}.",
            why="; ".join(f"{who}, has no {' and no '.join(m)}" for who, m in lacking.items())
            + ".",
            fix="give it state_dict() and load_state_dict(), or leave it out.",
        )
    for obj in objects:
        check(obj.state_dict(), type(obj).__name__)


def rng_state(run: Run) -> dict[str, Any]:
    """Return every generator's state: python, numpy, torch, and the device's."""
    session = run.session
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
        "torch": torch.get_rng_state(),
        "device": session.backend.rng_state(session.device),
        "device_kind": session.backend.name,
    }


def restore_rng(run: Run, state: dict[str, Any]) -> None:
    """Set what `rng_state` returned."""
    session = run.session
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    # Another kind of device has another generator: its stream cannot be continued there.
    if state["device"] is not None and state["device_kind"] == session.backend.name:
        session.backend.restore_rng(session.device, state["device"])
