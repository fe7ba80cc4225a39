"""Batches in a few shapes: padded to the next of some lengths, and filled up to full rows."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from anytrain.core.errors import BadInput
from anytrain.engine.data.grouped import quick_lengths
from anytrain.engine.objective import IGNORED

_COARSE = 64  # what is longer than all lengths is rounded up to these: few new shapes
_FILL = {"attention_mask": 0, "token_type_ids": 0, "special_tokens_mask": 1, "labels": IGNORED}
_MASK = "attention_mask"
_TARGETS = ("labels", "decoder_input_ids", "decoder_attention_mask")
_LABELS = ("label", "label_ids")  # collators call them "labels"
BY_TOKEN = frozenset(
    {
        "attention_mask",
        "bbox",
        "global_attention_mask",
        "input_pronunciation_ids",
        "input_shape_ids",
        "labels",
        "langs",
        "mm_token_type_ids",
        "position_ids",
        "special_tokens_mask",
        "token_type_ids",
        "xpath_subs_seq",
        "xpath_tags_seq",
    }
)
"""What models of transformers take that has a value for each token of a text."""


@dataclass(frozen=True, slots=True)
class ToBuckets:
    """A collator's batches, made as long as the next of `lengths`, and as many rows as `rows`.

    What has a value for each token (`names`) grows with the inputs, filled by its name (`fills`),
    else with 0; anything else may be as wide as a batch by chance. Rows that only fill a batch up
    repeat its first one, and have the label that no loss counts.
    """

    collate: Callable[[list[Any]], Any]
    lengths: tuple[int, ...] = ()
    """None leaves batches as long as they come, and fills their rows up alone."""
    fills: Mapping[str, int] = field(default_factory=dict)
    left: bool = False
    input_name: str = "input_ids"
    names: frozenset[str] = BY_TOKEN
    """What has a value for each token, besides the inputs."""
    limits: tuple[int, ...] = ()
    """What the model is known to read, ascending: nothing is rounded up beyond the next."""
    target_lengths: tuple[int, ...] | None = None
    """The length of a second sequence (a translation's labels) for each of `lengths`."""
    rows: int | None = None
    """How many rows a batch is filled up to; None leaves a last batch small."""
    fills_unlabelled: bool = False
    """Whether rows can be added where there are no labels: what comes of them is cut off."""

    def __call__(self, features: list[Any]) -> Any:
        """Return the batch in one of the few shapes."""
        batch = self.collate(features)
        if not self.lengths:
            return self._filled(copy.copy(batch)) if isinstance(batch, Mapping) else batch
        inputs = batch.get(self.input_name) if isinstance(batch, Mapping) else None
        if not isinstance(inputs, Tensor) or inputs.ndim < 2:
            raise BadInput(
                "Cannot pad a batch to length_buckets.",
                why=f"it has no {self.input_name!r} with a row of tokens for each sample.",
                fix="leave length_buckets out, or let the data_collator return a dict with it.",
            )
        return self._filled(self._padded(copy.copy(batch), inputs))

    def _padded(self, batch: Any, inputs: Tensor) -> Any:
        width = inputs.shape[-1]
        wanted = fitting(self.lengths, width, self.limits)
        if wanted > width:
            self._check_can_grow(batch, inputs)
        for name, value in list(batch.items()):
            if not isinstance(value, Tensor) or value.ndim < 2:
                continue
            if self.target_lengths is not None and name in _TARGETS:
                more = self._target_length(wanted, value.shape[1]) - value.shape[1]
                batch[name] = self._longer(name, value, more, 1)
            elif value.shape[: inputs.ndim] == inputs.shape and self._is_by_token(name, value):
                batch[name] = self._longer(name, value, wanted - width, inputs.ndim - 1)
        return batch

    def _check_can_grow(self, batch: Any, inputs: Tensor) -> None:
        """Refuse a batch that a model would read otherwise with padding."""
        if _MASK not in batch:
            why = "it has no attention_mask, so the model would read the padding"
            fix = (
                "let the tokenizer or the data_collator give an attention_mask, or leave "
                "length_buckets out."
            )
        elif inputs.is_floating_point():
            why = f"its {self.input_name!r} are no tokens, and nothing says what pads them"
            fix = "leave length_buckets out: it is for texts."
        else:
            return
        raise BadInput("Cannot pad a batch to length_buckets.", why=f"{why}.", fix=fix)

    def _is_by_token(self, name: str, value: Tensor) -> bool:
        """Whether this grows with the inputs; labels that are no classes have no fill."""
        if name == "labels" and value.is_floating_point():
            return False
        return name == self.input_name or name in self.names

    def _target_length(self, length: int, width: int) -> int:
        """Return how long targets are beside inputs of this length: one width for each."""
        assert self.target_lengths is not None
        place = min(bisect_left(self.lengths, length), len(self.lengths) - 1)
        return fitting(self.target_lengths[place : place + 1], width, self.limits)

    def _longer(self, name: str, value: Tensor, more: int, dim: int) -> Tensor:
        if more <= 0:
            return value
        sides = [0, 0] * (value.ndim - 1 - dim)
        sides += [more, 0] if self.left else [0, more]
        return functional.pad(value, sides, value=self.fills.get(name, _FILL.get(name, 0)))

    def _filled(self, batch: Any) -> Any:
        """Return the batch with as many rows as it should have, the added ones masked."""
        tensors = [value for value in batch.values() if isinstance(value, Tensor) and value.ndim]
        held = len(tensors[0]) if tensors else 0
        is_by_row = all(len(value) == held for value in tensors)
        if self.rows is None or not 0 < held < self.rows:
            return batch
        if not (is_by_row and self._can_mask(batch)):
            return batch
        take = torch.arange(self.rows)
        take[held:] = 0
        for name, value in list(batch.items()):
            if isinstance(value, Tensor) and value.ndim and len(value) == held:
                batch[name] = value[take]
            elif isinstance(value, list) and len(value) == held:
                batch[name] = [value[place] for place in take.tolist()]
        return self.hide(batch, held)

    def _can_mask(self, batch: Any) -> bool:
        labels = batch.get("labels")
        if labels is None:
            return self.fills_unlabelled
        return isinstance(labels, Tensor) and labels.ndim > 0 and not labels.is_floating_point()

    def hide(self, batch: Any, kept: int) -> Any:
        """Return the batch with its rows but the first `kept` masked: no loss counts them."""
        labels = batch.get("labels")
        if labels is None or kept >= len(labels):
            return batch
        batch = copy.copy(batch)
        batch["labels"] = labels.clone()
        batch["labels"][kept:] = IGNORED
        return batch

    def can_hide(self, batch: Any) -> bool:
        """Whether rows of this batch can be masked, so that it keeps its shape."""
        return self.rows is not None and isinstance(batch, Mapping) and self._can_mask(batch)


def columns_by_token(
    one: Mapping[str, Any], other: Mapping[str, Any], input_name: str = "input_ids"
) -> frozenset[str]:
    """Return what has a value for each token, as two samples of unlike lengths show.

    What is as long in both has none. Of what they do not show, the name decides.

    >>> short = {"input_ids": [5, 6], "votes": [1, 0], "parts": [7, 7, 7]}
    >>> found = columns_by_token(short, {**short, "input_ids": [5, 6, 7], "votes": [1, 0, 1]})
    >>> "votes" in found, "parts" in found, "attention_mask" in found
    (True, False, True)
    """
    inputs = num_values(one.get(input_name)), num_values(other.get(input_name))
    found = set(BY_TOKEN)
    if inputs[0] == inputs[1]:
        return BY_TOKEN
    for name in one.keys() & other.keys():
        sizes = num_values(one[name]), num_values(other[name])
        given = "labels" if name in _LABELS else name
        if sizes == inputs:
            found.add(given)
        elif sizes[0] == sizes[1] is not None:
            found.discard(given)
    return frozenset(found)


def num_values(value: Any) -> int | None:
    """Return how many values there are; None where this is a single one, or a text."""
    if isinstance(value, str | bytes) or not hasattr(value, "__len__"):
        return None
    return len(value) if getattr(value, "ndim", 1) else None


def fitting(lengths: Sequence[int], width: int, limits: Sequence[int] = ()) -> int:
    """Return the next of some ascending lengths, or beyond them a multiple of 64.

    It is not above the next of `limits`, which ascend too. One that is below the width already
    is none: the batch is there.

    >>> [fitting((16, 32), width, limits=(20, 100)) for width in (9, 17, 21, 33, 99, 101)]
    [16, 20, 32, 64, 100, 128]
    """
    place = bisect_left(lengths, width)
    rounded = lengths[place] if place < len(lengths) else -(-width // _COARSE) * _COARSE
    return min(rounded, next((limit for limit in limits if limit >= width), rounded))


class WithoutFullMask:
    """A collator's batches, without a mask where it hides nothing.

    Models take no mask for one of ones. They look whether it is, to take attention's quick path;
    inside a recording they cannot look, and would take the slow one.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, rows: list[Any]) -> Any:
        """Return the batch of these rows."""
        batch = self.collate(rows)
        mask = batch.get(_MASK) if isinstance(batch, Mapping) else None
        if isinstance(mask, torch.Tensor) and mask.device.type == "cpu" and bool(mask.all()):
            return {name: value for name, value in batch.items() if name != _MASK}
        return batch


def are_even(dataset: Any) -> bool:
    """Whether all samples are known to be of one length, without reading them one by one."""
    lengths = quick_lengths(dataset)
    return lengths is not None and len(lengths) > 0 and min(lengths) == max(lengths)
