"""Take everything a run is made of, and put it back in the order that makes it exact.

Generators go last: making loaders' iterators draws from them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anytrain.core.errors import BadInput, CheckpointError
from anytrain.engine.assemble.run import Run
from anytrain.engine.checkpoint import Loaded, Snapshot, check, model_state

SaveHook = Callable[[list[Any], list[Any], str], None]
LoadHook = Callable[[list[Any], str], None]


def take(run: Run, registered: list[Any], hooks: list[SaveHook], folder: Path) -> Snapshot:
    """Return the whole run; hooks see the models, their weights, and the folder being written."""
    session = run.session
    models = [run.unwrap(m, keep_forward=True, keep_compiled=False) for m in run.models]
    weights: list[Any] = [model.state_dict() for model in models]
    given = list(weights)
    for hook in hooks:
        hook(list(run.models), weights, str(folder))
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
        rank_parts={"rng": rng_state(run)},
        meta={
            "plan": {name: choice.value for name, choice in session.plan.reasons().items()},
            "num_models": len(kept),
        },
    )


def restore(run: Run, registered: list[Any], loaded: Loaded, hooks: list[LoadHook]) -> None:
    """Put a saved run back; a part that is missing is an error, never a fresh default."""
    session = run.session
    models = list(run.models)
    for hook in hooks:
        hook(models, str(loaded.path))
    kept = [m for m in run.models if any(m is left for left in models)]
    _check_count("model", len(kept), int(loaded.meta["num_models"]), loaded)
    for position, model in enumerate(kept):
        loaded.load_model(run.unwrap(model, keep_forward=True, keep_compiled=False), position)
    for kind, objects in _stateful(run, registered).items():
        saved = sum(1 for name in loaded.part_names if name == kind or _is_nth(name, kind))
        _check_count(kind, len(objects), saved, loaded)
        for position, obj in enumerate(objects):
            obj.load_state_dict(loaded.part(_name(kind, position)))
    if session.precision.scale is not None:
        session.precision.scale.scaler.load_state_dict(loaded.part("scaler"))
    place = loaded.part("cursor")
    session.cursor.micro, session.cursor.updates = place["micro"], place["updates"]
    if loaded.world_size == session.world.size:
        restore_rng(run, loaded.rank_part("rng", session.world.rank))


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
