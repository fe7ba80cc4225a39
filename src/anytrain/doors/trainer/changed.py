"""What a resumed run is told to do otherwise than the run whose checkpoint it goes on from."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytrain.core.documents import as_file
from anytrain.core.notices import give_notice
from anytrain.engine.checkpoint.schema import Misfit, Named, Number, check
from anytrain.engine.loop import Progress

if TYPE_CHECKING:
    from anytrain.doors.trainer.saving import Saving, Standing

_SETTLED = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
"""What an optimizer's saved state holds."""


def arguments_of(path: Path) -> Mapping[str, Any]:
    """Return the arguments that a run wrote beside its checkpoint; empty where none can be read.

    They may be another library's, or those that a subclass writes.
    """
    try:
        saved = json.loads(as_file(path).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return saved if isinstance(saved, dict) else {}


def begun_with(position: dict[str, Any], loader: Any, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a position with the seed of its epoch's order, where a former version left it out."""
    seed = _order_seed(saved.get("seed"), saved.get("data_seed"))
    if position.get("layout") is None and tuple(loader.layout_names) == ("seed",):
        return position if type(seed) is not int else {**position, "layout": {"seed": seed}}
    return position


def tell_place(path: Path, progress: Progress) -> None:
    """Say where the run goes on from, on a line of its own."""
    if progress.step < progress.max_steps:  # else it is said that nothing is left to do
        where = f"at step {progress.step} of {progress.max_steps}"
        sys.stderr.write(f"anytrain: goes on from {path} {where}\n")
        sys.stderr.flush()


def tell_changed(saved: Mapping[str, Any], standing: Standing, trainer: Saving) -> dict[str, Any]:
    """Give notice of all that is not as it was: `saved` holds the former arguments.

    Return what is used in the place of what was given, by name.
    """
    args, progress, state = trainer.args, trainer._progress, standing.state
    used = _tell_settled(saved, args)
    _tell_seeds(saved, args, trainer._run.loaders[0], progress)
    num_samples = trainer._num_samples()
    is_told = standing.is_laid_out_anew
    if standing.num_samples not in (None, num_samples) and num_samples is not None:
        _tell_other_data(standing.num_samples or 0, num_samples, progress)
        is_told = True
    if not is_told:
        _tell_other_end(state.get("max_steps"), progress)
    for kind in ("eval", "save"):
        _tell_interval(kind, saved, state, trainer)
    return used


def _tell_settled(saved: Mapping[str, Any], given: Any) -> dict[str, Any]:
    kept = {name: saved[name] for name in _SETTLED if name in saved}
    try:
        check(kept, Named(Number()))
    except Misfit:
        return {}
    used = {name: value for name, value in kept.items() if value != getattr(given, name)}
    changed = [
        f"{name} {value:g} (given: {getattr(given, name):g})" for name, value in used.items()
    ]
    if changed:
        _tell(
            f"The run goes on with its checkpoint's {', '.join(changed)}: an optimizer's settings "
            "are part of its state. To train on with others, begin a new run from the saved model."
        )
    schedule = saved.get("lr_scheduler_type")
    now = getattr(given.lr_scheduler_type, "value", given.lr_scheduler_type)
    if schedule not in (None, now):
        _tell(
            f"The checkpoint's lr_scheduler_type is {schedule}, this run's is {now}: the learning "
            f"rate goes on where {now} is at this step, which is not where {schedule} left it."
        )
    return used


def _tell_seeds(saved: Mapping[str, Any], given: Any, loader: Any, progress: Progress) -> None:
    changed = [
        f"{name} {saved[name]} (given: {getattr(given, name)})"
        for name in ("seed", "data_seed")
        if name in saved and saved[name] != getattr(given, name)
    ]
    if not changed:
        return
    text = f"The run goes on with the randomness of its checkpoint, of {', '.join(changed)}."
    now = _order_seed(given.seed, given.data_seed)
    was = _order_seed(saved.get("seed"), saved.get("data_seed"))
    if "seed" in loader.layout_names and was != now:
        whole = progress.this_epoch or progress.batches_per_epoch
        in_midst = 0 < progress.batch < whole and not given.ignore_data_skip
        here = "This epoch ends in the order that it began with; " if in_midst else ""
        text += f" {here}{'later' if in_midst else 'Later'} ones are in the order of {now}."
    _tell(text)


def _order_seed(seed: Any, data_seed: Any) -> Any:
    return seed if data_seed is None else data_seed


def _tell_other_data(was: int, now: int, progress: Progress) -> None:
    step, in_all = progress.step, progress.max_steps
    left = (
        f"the training and its schedule end at step {in_all}"
        if step < in_all
        else f"nothing is left to train: the end would be step {in_all}"
    )
    _tell(
        f"The saved run had {was} training samples, this one has {now}: it goes on "
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


def _tell_other_end(was: Any, progress: Progress) -> None:
    now = progress.max_steps
    if was not in (None, now) and progress.step < now:
        _tell(
            f"The saved run was to end at step {was}, this one ends at step {now}: the learning "
            f"rate goes on where a schedule of {now} steps is at this step."
        )


def _tell_interval(
    kind: str, saved: Mapping[str, Any], state: Mapping[str, Any], trainer: Saving
) -> None:
    name = f"{kind}_steps"
    both = (saved.get(f"{kind}_strategy"), getattr(trainer.args, f"{kind}_strategy"))
    was, now = state.get(name), getattr(trainer.state, name)
    if all(str(each) == "steps" for each in both) and was not in (None, now):
        _tell(f"The saved run had {name} {was}, this one has {now}, which counts from here on.")


def _tell(text: str) -> None:
    give_notice(text, stacklevel=7)
