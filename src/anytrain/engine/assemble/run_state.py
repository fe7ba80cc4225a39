"""Take everything a run is made of, and put it back in the order that makes it exact.

Generators go last: making loaders' iterators draws from them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from anytrain.core.errors import BadInput, CheckpointError
from anytrain.core.notices import give_notice
from anytrain.engine import rng
from anytrain.engine.assemble import checkpoint_checks
from anytrain.engine.assemble.checkpoint_checks import name_of
from anytrain.engine.assemble.run import Run
from anytrain.engine.assemble.session import Session
from anytrain.engine.checkpoint import Loaded, Snapshot, check, check_fit, load_weights, model_state
from anytrain.engine.checkpoint.huggingface import HFCheckpoint
from anytrain.engine.checkpoint.snapshot import writer_of
from anytrain.engine.data.seeded import mix

SaveHook = Callable[[list[Any], list[Any], str], None]
LoadHook = Callable[[list[Any], str], None]


@dataclass(frozen=True, slots=True)
class OwnLoading:
    """What the caller loads itself, which `restore` then leaves out."""

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
        (model, weight)
        for model, weight in zip(models, given, strict=True)
        if any(weight is w for w in weights)  # a hook that saved a model itself takes it out
    ]
    parts: dict[str, Any] = {}
    for kind, objects in _stateful(run, registered).items():
        for position, obj in enumerate(objects):
            parts[name_of(kind, position)] = obj.state_dict()
    if session.precision.scale is not None:
        parts["scaler"] = session.precision.scale.scaler.state_dict()
    cursor = session.cursor
    parts["cursor"] = {
        "micro": cursor.micro,
        "updates": cursor.updates,
        "pending": 0 if cursor.sync else cursor.micro % cursor.accumulation.num_steps,
    }
    curve = {} if run.losses is None else {"losses": run.losses.state_dict()}
    return Snapshot(
        step=session.cursor.updates,
        models=[model_state(model, weights=weight) for model, weight in kept],
        parts=parts,
        rank_parts={"rng": rng_state(run), "gradients": _pending(run), **curve},
        meta={
            "plan": {name: choice.value for name, choice in session.plan.reasons().items()},
            "num_models": len(kept),
            "parameters": _parameters(models, run),
            "optimizers": [checkpoint_checks.describe_optimizer(each) for each in run.optimizers],
            "seed": torch.initial_seed(),
            "processes": session.world.size,
        },
        writers=_writers(run, [model for model, _ in kept]),
    )


def _writers(run: Run, models: Sequence[nn.Module]) -> dict[str, int]:
    """Return the rank that writes each model and optimizer, as the strategy says."""
    parts = run.session.strategy.parts
    held: list[tuple[str, nn.Module | Optimizer]] = []
    held += [(name_of("model", number), model) for number, model in enumerate(models)]
    held += [(name_of("optimizer", number), own) for number, own in enumerate(run.optimizers)]
    return {name: writer_of(name, parts(each)) for name, each in held}


def _parameters(models: list[torch.nn.Module], run: Run) -> dict[str, list[str | None]]:
    """Return the names of each optimizer's parameters, whose state knows them by number."""
    names = {id(p): name for model in models for name, p in model.named_parameters()}
    return {
        name_of("optimizer", position): [
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
    own: OwnLoading | None = None,
) -> None:
    """Put a saved run back; a part that is missing is an error, never a fresh default."""
    session = run.session
    own = own or OwnLoading()
    _check(run, registered, loaded, hooks, strict=strict, own=own)
    # What tensors hold is seen when they are read: those of optimizers before anything is touched.
    states = _optimizer_states(run, loaded) if own.optimizers is None else []
    if not own.has_model:
        kept = _left(run, hooks, loaded)
        checkpoint_checks.check_models(kept, loaded, strict=strict)
        for position, model in enumerate(kept):
            loaded.load_model(model, position, strict=strict, load=session.strategy.load)
    checkpoint_checks.restore_registered(registered, loaded)
    _settle_precision(run, loaded)
    if own.optimizers is None:
        _restore_optimizers(run, loaded, states)
    else:
        own.optimizers()
    for position, loader in enumerate(run.loaders):
        loader.load_state_dict(loaded.part(name_of("loader", position)))
    if session.precision.scale is not None:
        session.precision.scale.scaler.load_state_dict(loaded.part("scaler"))
    _restore_place(run, loaded)


def _restore_place(run: Run, loaded: Loaded) -> None:
    """Put back where in a step the run was, with the randomness and the gradients of that place."""
    session, place = run.session, loaded.part("cursor")
    session.cursor.updates = place["updates"]
    session.cursor.micro = place.get("pending", place["micro"])
    if _is_same_world(run, loaded):
        restore_rng(run, loaded.rank_part("rng", session.world.rank))
        if run.losses is not None and "losses" in loaded.rank_part_names:
            run.losses.load_state_dict(loaded.rank_part("losses", session.world.rank))
        _restore_pending(run, loaded.rank_part("gradients", session.world.rank))
        return
    _derive_rng(run, loaded)
    if loaded.world_size == _num_processes(loaded):
        _restore_pending(run, _mean_pending(loaded))
    elif place.get("pending"):
        _begin_step_again(run, place["pending"])


def _check(
    run: Run,
    registered: list[Any],
    loaded: Loaded,
    hooks: list[LoadHook],
    *,
    strict: bool,
    own: OwnLoading,
) -> None:
    """Raise CheckpointError, before anything is touched, where a part cannot be put back."""
    checkpoint_checks.check_meta(loaded)
    if not own.has_model and not hooks:  # a hook may take models out, and loads them then
        checkpoint_checks.check_models(_bare(run), loaded, strict=strict)
    if own.optimizers is None:
        checkpoint_checks.check_optimizers(run, loaded)
    checkpoint_checks.check_standing(run, loaded, registered)
    if _is_same_world(run, loaded):
        checkpoint_checks.check_own(run, loaded)
    elif loaded.world_size == _num_processes(loaded):
        for rank in range(loaded.world_size):
            checkpoint_checks.check_gradients(run, loaded, rank)


def _is_same_world(run: Run, loaded: Loaded) -> bool:
    return run.session.world.size == loaded.world_size == _num_processes(loaded)


def restore_optimizers(run: Run, saved: Loaded | HFCheckpoint) -> None:
    """Put the optimizers and their schedules back."""
    if isinstance(saved, Loaded):
        checkpoint_checks.check_meta(saved)
        checkpoint_checks.check_optimizers(run, saved)
        _restore_optimizers(run, saved, _optimizer_states(run, saved))
        return
    checkpoint_checks.check_hf_optimizers(run, saved)
    for number, optimizer in enumerate(run.optimizers):
        run.session.strategy.load(optimizer, saved.optimizers[number])
    for number, scheduler in enumerate(run.schedulers):
        scheduler.load_state_dict(saved.schedulers[number])


def _optimizer_states(run: Run, saved: Loaded) -> list[Any]:
    """Return what the optimizers are to remember, found to be values that a run saves."""
    states = []
    for number, optimizer in enumerate(run.optimizers):
        name = name_of("optimizer", number)
        states.append(saved.part(name))
        checkpoint_checks.check_values(optimizer, states[-1], name, saved)
    return states


def _restore_optimizers(run: Run, saved: Loaded, states: list[Any]) -> None:
    for optimizer in run.optimizers:
        run.session.strategy.load(optimizer, states.pop(0))  # one by one, to let go of its memory
    for number, scheduler in enumerate(run.schedulers):
        scheduler.load_state_dict(saved.part(name_of("scheduler", number)))


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


def _mean_pending(loaded: Loaded) -> dict[str, Any]:
    """Return gradients that each rank may begin with where other ranks were in an accumulated step.

    Ranks average theirs when the step ends, so all of them begin with the mean.
    """
    found: dict[str, torch.Tensor] = {}
    for rank in range(loaded.world_size):
        for name, gradient in loaded.rank_part("gradients", rank).items():
            share = gradient / loaded.world_size
            found[name] = found[name] + share if name in found else share
    return found


def _begin_step_again(run: Run, num_batches: int) -> None:
    """Train again on the batches of a step whose gradients were not all saved."""
    _restore_pending(run, {})
    run.session.cursor.micro = 0
    for loader in run.loaders:
        loader.step_back(num_batches)
    if run.session.world.rank == 0:
        give_notice(
            "Saved by one process alone in the middle of an accumulated step: the others' "
            "gradients were lost, so the step begins again, with its samples.",
            stacklevel=5,
        )


def _restore_pending(run: Run, gradients: dict[str, Any]) -> None:
    run.session.cursor.sync = not gradients
    for position, model in enumerate(run.models):
        for name, parameter in model.named_parameters():
            saved = gradients.get(f"{position}.{name}")
            fits = None if saved is None else saved.to(parameter.device, parameter.dtype)
            parameter.grad = None if fits is None else fits.reshape(parameter.shape)


def _settle_precision(run: Run, loaded: Loaded) -> None:
    """Take the saved run's precision, unless the user asked for another: then say so."""
    saved, now = loaded.meta["plan"]["precision"], run.session.plan.precision
    if saved == now.value:
        return
    if run.session.plan.precision_is_free:
        run.compute_in(saved, f"the checkpoint {loaded.path.name} was made in it")
    elif run.session.world.rank == 0:
        give_notice(
            f"Saved in precision {saved!r}, continued in {now.value!r} ({now.because}): the run "
            f"goes on, but not to the bit. Pass mixed_precision={saved!r} for that.",
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
        give_notice(
            f"Saved by {who}, continued by {world.size}: the data goes on "
            "at the next unseen sample, and each rank's randomness (dropout) is drawn anew from "
            "seed, step and rank.",
            stacklevel=4,
        )


def rewind(run: Run, loaded: Loaded, hooks: Sequence[LoadHook] = ()) -> None:
    """Take weights and the optimizers' memory back; schedule, data and step count go on."""
    for position, model in enumerate(_left(run, hooks, loaded)):
        loaded.load_model(model, position, load=run.session.strategy.load)
    for position, optimizer in enumerate(run.optimizers):
        rates = [group["lr"] for group in optimizer.param_groups]
        run.session.strategy.load(optimizer, loaded.part(name_of("optimizer", position)))
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


def restore_hf(
    run: Run,
    registered: list[Any],
    found: HFCheckpoint,
    *,
    tells_position: bool = True,
    own: OwnLoading | None = None,
) -> None:
    """Put back what could be taken of another library's checkpoint, and say what could not."""
    session = run.session
    own = own or OwnLoading()
    models = [] if own.has_model else run.models
    inner = [run.unwrap(each, keep_forward=True, keep_compiled=False) for each in models]
    _check_hf(run, models, registered, found, own)
    for number, model in enumerate(inner):
        check_fit(model, found.models[number], source=str(found.path))
    if own.optimizers is None:
        checkpoint_checks.check_hf_optimizers(run, found)
    checkpoint_checks.check_hf_states(run, found)
    for number, model in enumerate(inner):
        source, load = str(found.path), session.strategy.load
        load_weights(model, found.models[number], source=source, load=load)
    if own.optimizers is None:
        restore_optimizers(run, found)
    else:
        own.optimizers()
    for number, obj in enumerate(registered):
        obj.load_state_dict(found.custom[number])
    if session.precision.scale is not None and found.scalers:
        session.precision.scale.scaler.load_state_dict(found.scalers[0])
    _restore_hf_rng(session, found.rng.get(session.world.rank) or {})
    _tell_untaken(found, tells_position)


def _check_hf(
    run: Run,
    models: Sequence[Any],
    registered: Sequence[Any],
    found: HFCheckpoint,
    own: OwnLoading,
) -> None:
    """Refuse what lacks a part that nobody else puts back."""
    left = own.optimizers is not None
    for kind, wanted, saved in (
        ("model", len(models), found.models),
        ("optimizer", 0 if left else len(run.optimizers), found.optimizers),
        ("scheduler", 0 if left else len(run.schedulers), found.schedulers),
        ("registered object", len(registered), found.custom),
    ):
        if any(number not in saved for number in range(wanted)):
            raise CheckpointError(
                f"Cannot load {found.path}: it holds {len(saved)} of kind {kind!r}, this run has "
                f"{wanted}.",
                why="; ".join(map(str, found.not_taken)) or "the other library did not save it.",
                fix="prepare and register only what was saved, or load the model's weights alone.",
            )


def _tell_untaken(found: HFCheckpoint, tells_position: bool) -> None:
    untaken = [str(each) for each in found.not_taken]
    if tells_position:
        untaken.append("the position in the data was not saved: use skip_first_batches")
    if untaken:
        give_notice(f"Loaded {found.path}: " + "; ".join(untaken), stacklevel=5)


def _restore_hf_rng(session: Session, state: dict[str, Any]) -> None:
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
