"""Rows one after the other in a single long one, so that next to nothing is padded.

Positions begin anew with each row, and attention that knows what this means keeps rows apart.
Whether a model's does is tried, not guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from anytrain.core.errors import BadInput
from anytrain.engine.data.buckets import Numbers, choose
from anytrain.engine.data.padding import fitting
from anytrain.engine.objective import IGNORED

_MASK = "attention_mask"
_MULTIPLE = 64
_TRIES = 4
# What models say to a row with positions that they cannot read.
_FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, ImportError)


@dataclass(frozen=True, slots=True)
class Packed:
    """A collator's batches as one row of the next of `lengths`, without their padding.

    The first token of a row is predicted by none, so its label does not count. What fills the row
    up counts nothing either.
    """

    collate: Callable[[list[Any]], Any]
    lengths: tuple[int, ...] = ()
    fills: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, features: list[Any]) -> dict[str, Tensor]:
        """Return the batch in one row, with the positions of its tokens."""
        batch = self.collate(features)
        mask = batch.get(_MASK) if isinstance(batch, Mapping) else None
        if not isinstance(mask, Tensor) or not isinstance(batch.get("labels"), Tensor):
            raise _refusal("it needs input_ids, labels and an attention_mask of one shape")
        kept = mask.bool()
        sizes = kept.sum(1)
        begins = sizes.cumsum(0) - sizes
        total = int(sizes.sum())
        more = fitting(self.lengths, total) - total
        packed: dict[str, Tensor] = {}
        for name, value in batch.items():
            if not isinstance(value, Tensor) or value.shape != mask.shape:
                raise _refusal(f"{name!r} has no value for each token")
            if name == _MASK:  # every token is read, and positions tell the rows apart
                continue
            row = value[kept]
            if name == "labels":
                row[begins[sizes > 0]] = IGNORED
            fill = IGNORED if name == "labels" else self.fills.get(name, 0)
            packed[name] = functional.pad(row, (0, more), value=fill)[None]
        places = torch.arange(total) - begins.repeat_interleave(sizes)
        # What fills the row up is rows of its own, none longer than the batch's longest.
        spare = torch.arange(more) % max(int(sizes.max()), 1)
        packed["position_ids"] = torch.cat([places, spare])[None]
        return packed


def _refusal(why: str) -> BadInput:
    return BadInput(
        "Cannot pack a batch into one row.",
        why=f"{why}.",
        fix="use a data_collator that gives a label for each token, or leave packing out.",
    )


def packed_lengths(lengths: Numbers, batch_size: int, most: int = 4) -> tuple[int, ...]:
    """Return the lengths that rows of `batch_size` samples in random order are filled up to."""
    draw = np.random.default_rng(0)
    whole = max(len(lengths) // batch_size, 1)
    size = min(batch_size, len(lengths))
    totals = [
        draw.permutation(lengths)[: whole * size].reshape(whole, size).sum(1) for _ in range(_TRIES)
    ]
    return choose(np.concatenate(totals), most, _MULTIPLE)


def why_rows_mix(
    model: nn.Module, context: Callable[[], AbstractContextManager[Any]], *, is_exact: bool
) -> str | None:
    """Say why a model cannot be given rows in one; None where they are to it what they were.

    Two short rows are computed together, once beside another row, and alone.
    """
    place = next(model.parameters()).device
    one, other, own = [1, 2, 3, 4], [4, 3, 2, 1], [3, 1, 2]

    def last(rows: list[list[int]]) -> Tensor:
        words = torch.tensor([[word for row in rows for word in row]], device=place)
        places = torch.tensor([[i for row in rows for i in range(len(row))]], device=place)
        found = model(input_ids=words, position_ids=places)
        logits = found["logits"] if isinstance(found, Mapping) else found[0]
        row: Tensor = logits[0, -len(own) :].float()
        return row

    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), context():
            beside_one, beside_other, alone = last([one, own]), last([other, own]), last([own])
    except _FAILURES as error:
        return f"it failed on two rows in one: {error}"
    finally:
        for module, mode in modes.items():
            module.training = mode
    size = float(alone.abs().max()) or 1.0
    if not torch.allclose(beside_one, beside_other, atol=1e-6 * size, rtol=0.0):
        return "its attention mixes rows that lie in one"
    if not torch.allclose(beside_one, alone, atol=(1e-4 if is_exact else 3e-2) * size, rtol=0.0):
        return "it does not begin a row's positions anew"
    return None
