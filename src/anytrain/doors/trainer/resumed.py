"""Where a resumed run stands in its data, and where it is not as its checkpoint was."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from anytrain.core.notices import give_notice
from anytrain.core.records.lines import as_file
from anytrain.doors.callbacks import Callbacks
from anytrain.doors.callbacks.state import FIELDS, TrainerState
from anytrain.engine.assemble.checkpoint_checks import check_loader
from anytrain.engine.checkpoint import Loaded
from anytrain.engine.checkpoint.expected import Tensors, like
from anytrain.engine.checkpoint.schema import (
    MOST,
    Maybe,
    Misfit,
    Named,
    Number,
    Row,
    Whole,
    check,
    within,
)
from anytrain.engine.loop import Progress

_SETTLED = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
"""What an optimizer's saved state holds."""

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


def tell_settled(arguments: Path, given: Any) -> dict[str, Any]:
    """Give notice of arguments that differ from those that the checkpoint was made with.

    Return what is used in the place of what was given, by name.
    """
    try:
        saved = json.loads(as_file(arguments).read_text())
        kept = {name: saved[name] for name in _SETTLED if name in saved}
        check(kept, Named(Number()))
        schedule = saved.get("lr_scheduler_type")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, Misfit):
        return {}  # another library's, or one that a subclass writes: there is nothing to compare
    used = {name: value for name, value in kept.items() if value != getattr(given, name)}
    changed = [
        f"{name} {value:g} (given: {getattr(given, name):g})" for name, value in used.items()
    ]
    if changed:
        _tell(
            f"The run goes on with its checkpoint's {', '.join(changed)}: an optimizer's settings "
            "are part of its state. To train on with others, begin a new run from the saved model."
        )
    now = getattr(given.lr_scheduler_type, "value", given.lr_scheduler_type)
    if schedule not in (None, now):
        _tell(
            f"The checkpoint's lr_scheduler_type is {schedule}, this run's is {now}: the learning "
            f"rate goes on where {now} is at this step, which is not where {schedule} left it."
        )
    return used


def tell_other_data(saved: int | None, now: int | None, progress: Progress) -> None:
    """Give notice of another number of training samples; None is a number that nobody knows."""
    if saved is None or now is None or saved == now:
        return
    step, in_all = progress.step, progress.max_steps
    left = (
        f"the training and its schedule end at step {in_all}"
        if step < in_all
        else f"nothing is left to train: the end would be step {in_all}"
    )
    _tell(
        f"The saved run had {saved} training samples, this one has {now}: it goes on "
        f"{_place(progress)}. It is at step {step}, and {left}."
    )


def _place(progress: Progress) -> str:
    if progress.batch >= progress.batches_per_epoch:
        return f"after epoch {progress.epoch + 1}"
    return (
        f"after batch {progress.batch} of the {progress.batches_per_epoch} of epoch "
        f"{progress.epoch + 1}, in another order: samples may come again in this epoch, and "
        "others not at all"
    )


def _tell(text: str) -> None:
    give_notice(text, stacklevel=6)
