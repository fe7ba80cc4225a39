"""Choose the lengths which batches keep to, from the data's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import IterableDataset

from anytrain.core.errors import BadInput
from anytrain.doors.trainer.outputs import has_length
from anytrain.engine.data.buckets import Numbers, choose
from anytrain.engine.data.columns import as_rows, base_model
from anytrain.engine.data.grouped import lengths_of
from anytrain.engine.data.padding import BY_TOKEN, columns_by_token, num_values
from anytrain.engine.data.seeded import hold, put_back

if TYPE_CHECKING:
    from anytrain.doors.trainer.trainer import Trainer

_MOST = 8
_MULTIPLE = 8
# What one more shape costs. A new process took 0.25 s to record one of BERT-base on an H200 (0.16 s
# of them for cuDNN to plan its attention). In that time it computes 200,000 tokens more in bf16, at
# 1.25 us for each that a step of 32 x 128 has more than one of 32 x 48, so many operations. A
# compiler takes seconds.
_RECORDED_FLOP, _COMPILED_TOKENS = 1e14, 3e6
# How configurations call the most tokens that a model reads, or writes.
_LONGEST = (
    "max_position_embeddings",
    "max_source_positions",
    "max_target_positions",
    "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
)
_NO_LIMIT = 10**9  # tokenizers without one name a huge number
_LOOKED_AT = 64  # samples, at most, in search of two with unlike lengths


class Lengths(NamedTuple):
    """The lengths that a run's batches keep to."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...] | None = None
    """For each of these the length of a second sequence; None where there is none."""
    names: frozenset[str] = BY_TOKEN
    """What has a value for each token, besides the inputs."""


class BucketLengths:
    """The lengths of a run: as listed, or chosen so that little is padded and little recorded."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._measured: tuple[Any, Numbers] | None = None
        self._chosen: tuple[Any, Any, Lengths] | None = None

    def chosen(self, dataset: Any) -> Lengths:
        """Return the lengths of the run: as listed, or chosen from what is trained on, once."""
        source = self._trainer.train_dataset if self._trainer.train_dataset is not None else dataset
        asked = self._buckets_asked()
        kept = self._chosen
        if kept is None or kept[0] is not source or kept[1] != asked:
            inputs = asked[0] if isinstance(asked[0], tuple) else self._choose_buckets(source)
            rows = as_rows(source)
            found = Lengths(inputs, self._target_lengths(rows, inputs), self._by_token(rows))
            self._chosen = kept = (source, asked, found)
        return kept[2]

    def _buckets_asked(self) -> tuple[Any, ...]:
        """Return what the choice depends on, besides the data."""
        args, asked = self._trainer.args, self._trainer.args.length_buckets
        step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        how_long = (args.max_steps, args.num_train_epochs, step, self._tokens_per_shape())
        return tuple(sorted(set(asked))) if isinstance(asked, list) else asked, how_long

    def _choose_buckets(self, source: Any) -> tuple[int, ...]:
        args, asked = self._trainer.args, self._trainer.args.length_buckets
        if not can_be_read(source):
            raise BadInput(
                f"Cannot choose length_buckets={asked!r} from a stream.",
                why="the lengths of its samples are not known before they come.",
                fix="list the lengths, as in length_buckets=[64, 128, 256], or leave it out.",
            )
        lengths = self.measured(as_rows(source))
        limit = next((most for most in self.limits if most >= lengths.max(initial=0)), None)
        if asked not in ("auto", None):  # None: chosen unasked
            assert isinstance(asked, int)  # a list is no choice
            return choose(lengths, asked, _MULTIPLE, limit=limit)
        passes = float(args.num_train_epochs)
        if args.max_steps > 0:
            step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
            passes = args.max_steps * step / len(lengths)
        per_pass = self._tokens_per_shape() / max(passes, 1e-9)
        return choose(lengths, _MOST, _MULTIPLE, limit=limit, cost_per_shape=per_pass)

    def _tokens_per_shape(self) -> float:
        """Return what one more shape costs: how many tokens are trained in that time."""
        trainer = self._trainer
        if trainer.args.torch_compile or trainer._session.graphs is not None:
            return _COMPILED_TOKENS
        planned = trainer._session.planned
        records = planned.step_is_free or planned.step.value == "cuda_graph"
        if trainer._session.backend.name != "cuda" or not records or trainer.args.world_size > 1:
            return 0.0  # nothing is made for a shape
        return _RECORDED_FLOP / (6 * max(_num_multiplied(base_model(trainer.model)), 1))

    def measured(self, dataset: Any) -> Numbers:
        """Return the samples' lengths, counted once."""
        kept = self._measured
        if kept is None or kept[0] is not dataset:
            kept = (
                dataset,
                self._count_lengths(
                    dataset, self._trainer.args.length_column_name, self.input_name
                ),
            )
            self._measured = kept
        return kept[1]

    def _count_lengths(self, dataset: Any, column: str, name: str) -> Numbers:
        before = hold()  # a data set may draw while it is read
        try:
            return np.asarray(lengths_of(dataset, column, name), dtype=np.int64)
        finally:
            put_back(before)

    def _target_lengths(self, source: Any, buckets: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return how long targets are made for each length, where a model reads two sequences."""
        if not _writes(base_model(self._trainer.model)) or not can_be_read(source):
            return None
        if num_values(looked_at(source).get("labels")) is None:  # none to pad
            return None
        targets = self._count_lengths(source, "", "labels")
        place = np.searchsorted(buckets, self.measured(source)).clip(max=len(buckets) - 1)
        longest = np.ones(len(buckets), dtype=np.int64)
        np.maximum.at(longest, place, targets)
        # A short sample may move up to any longer bucket.
        longest = np.maximum.accumulate(longest)
        return tuple((-(-longest // _MULTIPLE) * _MULTIPLE).tolist())

    def _by_token(self, source: Any) -> frozenset[str]:
        """Return what has a value for each token, as the model and the first samples tell."""
        model, name = base_model(self._trainer.model), self.input_name
        first = looked_at(source)
        size, found = num_values(first.get(name)), BY_TOKEN
        for index in range(1, min(len(source), _LOOKED_AT) if size is not None else 0):
            other = looked_at(source, index)
            if num_values(other.get(name)) != size:
                found = columns_by_token(first, other, name)
                break
        return found - {"labels"} if _writes(model) or names_classes(model) else found

    @property
    def input_name(self) -> str:
        names = getattr(self._trainer.processing_class, "model_input_names", None) or ["input_ids"]
        return str(names[0])

    @property
    def limits(self) -> tuple[int, ...]:
        """The numbers of tokens that the tokenizer or the model may read at most, ascending."""
        config = getattr(base_model(self._trainer.model), "config", None)
        parts = (config, *getattr(config, "__dict__", {}).values())  # a text's, a decoder's
        known = [getattr(part, name, None) for part in parts for name in _LONGEST]
        known.append(getattr(self._trainer.processing_class, "model_max_length", None))
        return tuple(sorted({n for n in known if isinstance(n, int) and 0 < n < _NO_LIMIT}))


def _num_multiplied(model: nn.Module) -> int:
    """Return how many weights each token is multiplied with: all that are not looked up.

    Quantized ones are buffers; what has no size yet counts nothing.

    >>> words, fixed, lazy = nn.Embedding(9, 4), nn.Linear(4, 2, bias=False), nn.LazyLinear(3)
    >>> _num_multiplied(nn.Sequential(words, fixed, lazy))
    8
    """
    looked_up = (nn.Embedding, nn.EmbeddingBag)
    kinds = [module for module in model.modules() if not isinstance(module, looked_up)]
    tensors = [t for m in kinds for t in (*m.parameters(False), *m.buffers(False))]
    return sum(tensor.numel() for tensor in tensors if not is_lazy(tensor))


def can_be_read(dataset: Any) -> bool:
    """Whether samples can be read by their number, and it is known how many there are."""
    return not isinstance(dataset, IterableDataset) and has_length(dataset)


def looked_at(dataset: Any, index: int = 0) -> Mapping[str, Any]:
    """Return a sample, with nothing drawn by it; an empty one where it has no names."""
    if not can_be_read(dataset) or index >= len(dataset):
        return {}
    before = hold()
    try:
        found = dataset[index]
    finally:
        put_back(before)
    return found if isinstance(found, Mapping) else {}


def names_classes(model: nn.Module) -> bool:
    """Whether a model of transformers gives a whole text a class."""
    return any(
        kind.__module__.startswith("transformers.")
        and kind.__name__.endswith("ForSequenceClassification")
        for kind in type(model).__mro__
    )


def _writes(model: nn.Module) -> bool:
    """Whether a model reads two sequences: the second is what it learns to write."""
    classifies = any("Classification" in kind.__name__ for kind in type(model).__mro__)
    config = getattr(model, "config", None)
    return bool(getattr(config, "is_encoder_decoder", False)) and not classifies
