"""Where a resumed run stands in its data, as its checkpoint says."""

from __future__ import annotations

import dataclasses
from typing import Any

from anytrain.doors.callbacks import Callbacks
from anytrain.doors.callbacks.state import FIELDS, TrainerState
from anytrain.engine.assemble.checkpoint_checks import check_loader
from anytrain.engine.checkpoint import Loaded
from anytrain.engine.checkpoint.schema import (
    MOST,
    Maybe,
    Misfit,
    Number,
    Row,
    Whole,
    check,
    within,
)
from anytrain.engine.checkpoint.state_schema import Tensors, like

_STANDING = {
    "progress": {
        "step": Whole(),
        "epoch": Whole(),
        "batch": Whole(),
        "batches_per_epoch": Whole(1),
        "samples_per_batch": Whole(1),
        "num_micro": Whole(1),
        "this_epoch?": Maybe(Whole()),
        "surplus?": Maybe(Whole(-MOST)),
    },
    "state": FIELDS,
    "meter": {
        "num_steps": Whole(),
        "losses": Tensors(),
        "bad": Tensors(shape=(2,)),
        "rate": Number(),
    },
    "loss_so_far": Row(Number(finite=False), Whole()),
    "num_samples?": Maybe(Whole()),
}
"""What a checkpoint holds of the loop."""


def check_standing(saved: Any, callbacks: Callbacks) -> None:
    """Raise Misfit where the place in the loop, or a callback's state, has no meaning."""
    check(saved, _STANDING)
    if saved["meter"]["losses"].dim() != 1 or not len(saved["meter"]["losses"]):
        raise Misfit("meter.losses must hold one loss for each rank")
    unknown = set(saved["state"]) - {field.name for field in dataclasses.fields(TrainerState)}
    if unknown:
        raise Misfit(f"{within('state', min(unknown, key=str))} is nothing that a state holds")
    where = "state.stateful_callbacks"
    for callback in callbacks.stateful():
        name, own = type(callback).__name__, callback.state()
        found = (saved["state"].get("stateful_callbacks") or {}).get(name, [])
        for state in found if isinstance(found, list) else [found]:
            place = within(where, name)
            check(state, {f"{part}?": like(value) for part, value in own.items()}, place)
            for each in state.get("attributes", {}):
                if callable(getattr(type(callback), each, None)):
                    raise Misfit(f"{within(place, each)} is no attribute that it saves")


def position_of(saved: Loaded, loader: Any) -> dict[str, Any]:
    """Return a saved run's position in its data; that of 0.1, in batches, counted in samples.

    It is one that the loader can take.
    """
    check_loader(loader, saved)
    position: dict[str, Any] = saved.part("loader")
    if "samples" in position:
        return position
    progress = saved.part("registered")["progress"]
    size = progress["samples_per_batch"] // int(saved.meta.get("processes", saved.world_size))
    ended = progress["batch"] >= progress["batches_per_epoch"] and position["stream"] is None
    return {**position, "samples": position["done"] * size, "ended": ended}
