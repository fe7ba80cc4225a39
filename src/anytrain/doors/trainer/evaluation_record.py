"""Write down what an evaluation showed, beside the run's other records.

Nothing here may stop or change an evaluation: what goes wrong is one notice. A data set may name
its classes (`class_names`) and the file that its evaluations go to (`evaluated_as`), and say what
a sample is (`in_words(index)`).
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, SequentialSampler

from anytrain.core.notices import give_notice
from anytrain.doors.trainer.override_points import OverridePoints
from anytrain.doors.trainer.sample_text import label_of, look_up, token
from anytrain.engine import objective
from anytrain.engine.data.columns import base_model
from anytrain.engine.data.shard import IterableBatches
from anytrain.engine.prepared.loader import PreparedLoader
from anytrain.engine.recording.evaluation import RankVerdicts, Verdicts, figures, join, store
from anytrain.engine.tree import batch_size, take_rows

if TYPE_CHECKING:
    from anytrain.doors.trainer.trainer import Trainer

_UNNAMED = re.compile(r"LABEL_\d+")


class SampleRecorder:
    """What looks on while an evaluation goes.

    With `gives_scores`, a step that is asked for its loss alone is asked for its scores too, as
    long as they are of use: nobody else sees them.
    """

    def __init__(
        self, loader: Any, verdicts: Verdicts, *, gives_scores: bool, sees_repeats: bool
    ) -> None:
        self.loader, self.verdicts = loader, verdicts
        self._gives_scores, self._sees_repeats = gives_scores, sees_repeats
        self._num_rows = 0

    def step(
        self, predict: Callable[[bool], Any], only_loss: bool, num_own: int | None
    ) -> tuple[Any, Any, Any]:
        """Return the loss, scores and labels that a step gives, asked for its loss alone or not.

        `num_own` of the batch's rows count, the first ones.
        """
        more = only_loss and self._gives_scores and self.verdicts.is_looking
        loss, scores, labels = predict(only_loss and not more)
        if num_own != 0:
            self.verdicts.look(*self._counted(scores, labels, num_own))
        return (loss, None, None) if more else (loss, scores, labels)

    def _counted(self, scores: Any, labels: Any, num_own: int | None) -> tuple[Any, Any]:
        """Return the rows that count, where repeats have kept their labels."""
        held = batch_size(labels)
        if num_own is None or held is None or not self._sees_repeats:
            return scores, labels
        counted: tuple[Any, Any] = take_rows((scores, labels), slice(0, num_own), held)
        return counted

    def end_batch(self, num_rows: int) -> None:
        """Take note of how many rows the evaluation has counted so far."""
        new, self._num_rows = num_rows - self._num_rows, num_rows
        self.verdicts.end_batch(new)


def look_on(trainer: Trainer, loader: Any, description: str) -> SampleRecorder:
    """Return what looks on at an evaluation; it sees nothing where nothing is to be written.

    `owner` is the class whose step is known to do no more work where it gives its scores too;
    somebody's own may generate, for example.
    """
    writes = description == "Evaluation" and trainer.args.output_dir is not None
    verdicts = Verdicts(
        shifted=objective.shifts_labels(base_model(trainer.model)),
        is_looking=writes and not trainer._session.observer.is_watching,
    )
    return SampleRecorder(
        loader,
        verdicts,
        gives_scores=_is_ours(trainer, "prediction_step", OverridePoints),
        sees_repeats=trainer._parts.steps.keeps_repeats(),
    )


def note(trainer: Trainer, looking: SampleRecorder | None, asked: Any, prefix: str) -> None:
    """Write the file of an evaluation that is over; every rank calls it, the main one writes.

    `asked` is the data set that `evaluate` was given, or its name.
    """
    if looking is None:
        return
    share, failure = None, looking.verdicts.failure
    loader = looking.loader
    try:
        share = looking.verdicts.share(_samples_of(loader))
    except Exception as error:  # noqa: BLE001  every rank has to come to the gathering
        failure = f"{type(error).__name__}: {error}"
    parts = trainer._session.world.gather_object((share, failure))
    if not trainer.is_world_process_zero():
        return
    failure = next((said for _, said in parts if said is not None), None)
    try:
        joined = join([part for part, _ in parts]) if failure is None else None
        if joined is not None:
            _write(trainer, _in_order(joined, loader), _evaluated(trainer, asked, loader), prefix)
    except Exception as error:  # noqa: BLE001  see above
        failure = f"{type(error).__name__}: {error}"
    if failure is not None:
        give_notice(
            f"What the evaluation showed could not be written down: {failure}. Its metrics are not "
            "affected.",
            stacklevel=3,
        )


def _write(trainer: Trainer, shown: RankVerdicts, dataset: Any, prefix: str) -> None:
    found = figures(shown, _class_names(trainer, dataset, shown.num_classes))
    _add_inputs(found, dataset, trainer.processing_class)
    place: dict[str, Any] = {"step": None, "epoch": None}
    if trainer._parts.recorder.has_trained():
        place = {"step": trainer.state.global_step, "epoch": trainer.state.epoch}
        if trainer._parts.recorder.weights_of is not None:
            place["of"] = trainer._parts.recorder.weights_of
    split = prefix.removeprefix("eval_")
    if split == "eval":
        split = str(getattr(dataset, "evaluated_as", None) or split)
    folder = Path(trainer._get_output_dir(trainer._trial))
    store(folder, split, {**place, "time": round(time.time(), 3), **found})


def _add_inputs(found: dict[str, Any], dataset: Any, tokenizer: Any) -> None:
    """Show the inputs of the worst samples; what goes wrong with them costs them alone."""
    try:
        inputs = _inputs(found, dataset, tokenizer)
    except Exception:  # noqa: BLE001  the figures are worth more than the texts beside them
        return
    for sample, texts in zip(found["worst"], inputs, strict=False):
        sample["inputs"] = texts


def _inputs(found: dict[str, Any], dataset: Any, tokenizer: Any) -> list[dict[str, str]]:
    """Return the inputs of the worst samples, where it is certain that they are these samples'."""
    worst, names = found["worst"], found.get("classes", [])
    rows = look_up(dataset, [sample["index"] for sample in worst], tokenizer)
    inputs: list[dict[str, str]] = []
    for sample in worst:
        looked = rows.get(sample["index"])
        if looked is None:
            inputs.append({})
            continue
        if _differs(label_of(looked.row), sample["label"], names):
            return []
        word = token(looked.row, sample["token"], tokenizer) if "token" in sample else None
        inputs.append(looked.inputs if word is None else {**looked.inputs, "token": word})
    return inputs


def _differs(held: Any, seen: Any, names: Sequence[str]) -> bool:
    """Whether a row has another label than its sample had: then it is another row."""
    try:
        number = float(held)
    except (TypeError, ValueError, RuntimeError):
        return False  # a name, or labels of many tokens
    if isinstance(seen, str):
        return seen in names and names.count(seen) == 1 and names.index(seen) != number
    return seen is not None and not math.isclose(number, seen, rel_tol=1e-5, abs_tol=1e-5)


# -- which samples these were ---------------------------------------------------------------------


def _evaluated(trainer: Trainer, asked: Any, loader: Any) -> Any:
    """Return the data set whose rows were evaluated, with all its columns where they are known."""
    if not all(
        _is_ours(trainer, name, OverridePoints)
        for name in ("get_eval_dataloader", "_get_dataloader")
    ):
        return loader.dataset
    if isinstance(asked, str):
        return trainer.eval_dataset[asked]
    return trainer.eval_dataset if asked is None else asked


def _is_ours(trainer: Any, name: str, owner: type) -> bool:
    """Whether nobody has put something else in a method's place."""
    return name not in vars(trainer) and getattr(type(trainer), name) is getattr(owner, name)


def _walks_in_order(loader: Any) -> bool:
    if not isinstance(loader, PreparedLoader):
        return False
    if isinstance(loader.dataset, IterableDataset):
        return not isinstance(loader.dataset, IterableBatches) and loader.num_workers <= 1
    return isinstance(loader.get_sampler(), SequentialSampler)


def _samples_of(loader: Any) -> Callable[[int], Sequence[Any] | None] | None:
    """Return what knows the samples of this rank's batches, where they follow no plain order."""
    if not isinstance(loader, PreparedLoader) or _walks_in_order(loader):
        return None
    is_dealt_whole = loader.walk.dispatching and loader.walk.world.size > 1
    return None if is_dealt_whole or loader.walk.seeded is None else loader.samples_of


def _in_order(shown: RankVerdicts, loader: Any) -> RankVerdicts:
    if not _walks_in_order(loader):
        return shown
    return replace(shown, samples=range(shown.rows.shape[1]))


# -- what they are called -------------------------------------------------------------------------


def _class_names(trainer: Trainer, dataset: Any, num_classes: int) -> list[str]:
    """Return the classes' names: the model's where it has real ones, else the data set's."""
    config = getattr(base_model(trainer.model), "config", None)
    named = getattr(config, "id2label", None) or {}
    found = [str(named[number]) for number in range(num_classes) if number in named]
    if len(found) == num_classes and not all(map(_UNNAMED.fullmatch, found)):
        return found
    own = None
    with suppress(Exception):  # what a data set's attributes do is its own affair
        own = _named_by(dataset)
    return [str(name) for name in own] if own and len(own) == num_classes else []


def _named_by(dataset: Any) -> Any:
    own = getattr(dataset, "class_names", None)
    for column in ("label", "labels"):
        features: Any = getattr(dataset, "features", None)
        feature = features.get(column) if hasattr(features, "get") else None
        own = own or getattr(feature, "names", None)
    return own
