"""Keep batches to a few shapes.

Where length_buckets asks for it, and by itself where the device compiles each shape.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from anytrain.core.errors import BadInput
from anytrain.doors.trainer.bucket_lengths import (
    can_be_read,
    looked_at,
    names_classes,
)
from anytrain.doors.training_args.fields import packs
from anytrain.engine import objective
from anytrain.engine.data.buckets import Bucketed, padding_share
from anytrain.engine.data.columns import as_rows, base_model
from anytrain.engine.data.packing import Packed, packed_lengths, why_rows_mix
from anytrain.engine.data.padding import ToBuckets, num_values

if TYPE_CHECKING:
    from anytrain.doors.trainer.trainer import Trainer

# Heads whose loss of whole numbers leaves out those that are -100.
_COUNTING = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForTokenClassification",
    "ForMaskedLM",
    "ForCausalLM",
    "LMHeadModel",
    "ForConditionalGeneration",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
)
_NAMES = ("labels", "label", "label_ids")


class Shapes:
    """The lengths that batches keep to, and whether a last batch is filled up."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def eval_batch_size(self) -> int:
        """The rows of evaluation's batches: training's, where each shape is compiled."""
        trainer = self._trainer
        args = trainer.args
        if trainer._session.graphs is None or args.is_told("per_device_eval_batch_size"):
            return args.eval_batch_size
        size = args.train_batch_size
        trainer._session.revise(
            "evaluation",
            f"batches of {size}",
            f"{trainer._session.backend.name} compiles each shape, and per_device_eval_batch_size "
            "was not given: as in training",
        )
        return size

    @property
    def keeps_shapes(self) -> bool:
        """Whether batches come in few shapes: if asked for, or where each is compiled."""
        trainer = self._trainer
        compiles = trainer._session.graphs is not None and not packs(trainer.args)
        return compiles or trainer.args.length_buckets is not None

    def wants_buckets(self, dataset: Any) -> bool:
        """Whether batches keep to a few lengths: if asked for, or where each is compiled."""
        if self._trainer.args.length_buckets is not None:
            return True
        if not self.keeps_shapes:
            return False
        return self._unbucketed_because(dataset) is None

    def orders_by_bucket(self, dataset: Any) -> bool:
        """Whether a batch holds samples of one length; unasked, one length is no order."""
        if not self.wants_buckets(dataset):
            return False
        return (
            self._trainer.args.length_buckets is not None
            or len(self._trainer._parts.lengths.chosen(dataset).inputs) > 1
        )

    def _unbucketed_because(self, dataset: Any) -> str | None:
        """Say why nobody can choose the lengths of batches unasked; None where it can be done."""
        trainer = self._trainer
        source = dataset if trainer.train_dataset is None else trainer.train_dataset
        if str(trainer.args.train_sampling_strategy) != "random":
            return f"train_sampling_strategy is {str(trainer.args.train_sampling_strategy)!r}"
        firsts = [looked_at(as_rows(given)) for given in (source, dataset)]
        if not all(
            num_values(first.get(trainer._parts.lengths.input_name)) and "attention_mask" in first
            for first in firsts
        ):
            return "the samples are not texts with an attention_mask whose lengths can be read"
        if not _pads_to_longest(trainer.data_collator):
            return f"the data_collator is your own: {type(trainer.data_collator).__name__}"
        try:
            if getattr(trainer.processing_class, "padding_side", "right") != "left":
                _check_end_is_found(base_model(trainer.model))
        except BadInput as refused:
            return refused.why.rstrip(".")
        return None

    def bucketed(self, dataset: Any) -> Bucketed:
        """Return the order of training: batches of one length each, the steps shuffled."""
        trainer = self._trainer
        args, split = trainer.args, trainer._run.options.loaders.split_batches
        return Bucketed(
            trainer._parts.lengths.measured(dataset),
            trainer._parts.lengths.chosen(dataset).inputs,
            args.train_batch_size,
            batches_per_step=args.gradient_accumulation_steps * (1 if split else args.world_size),
            drop_last=args.dataloader_drop_last,
            seed=args.seed if args.data_seed is None else args.data_seed,
        )

    def _tell_shapes(self, buckets: tuple[int, ...], sampler: Any, small: str | None) -> None:
        """Put the lengths into the plan, with what they save where that is known."""
        told = f"buckets of {', '.join(map(str, buckets))}"
        if isinstance(sampler, Bucketed):
            lengths = sampler.lengths
            now = 1 - lengths.sum() / sampler.padded().sum()
            otherwise = padding_share(lengths, max(buckets[-1], int(lengths.max())))
            told += f": padding {now:.0%} instead of {otherwise:.0%}".replace("%", " %")
        if small is not None:
            told += f"; the last batch stays small: {small}"
        self._trainer._session.revise("shapes", "buckets", told, step=0)

    def to_buckets(
        self,
        collate: Callable[[list[Any]], Any],
        dataset: Any,
        batch_size: int,
        sampler: Any,
        *,
        is_training: bool,
    ) -> ToBuckets:
        """Return the collator with its batches padded to the run's lengths."""
        trainer = self._trainer
        tokenizer = trainer.processing_class
        left = getattr(tokenizer, "padding_side", "right") == "left"
        if not left:
            _check_end_is_found(base_model(trainer.model))
        buckets = trainer._parts.lengths.chosen(dataset)
        split = trainer._run.options.loaders.split_batches
        small = trainer._small_because(dataset, is_training=is_training)
        small = small or _deals_otherwise(sampler, dataset)
        if is_training:
            self._tell_shapes(buckets.inputs, sampler, small)
        return ToBuckets(
            collate,
            buckets.inputs,
            fills={
                trainer._parts.lengths.input_name: self._pad_token,
                "decoder_input_ids": self._pad_token,
                "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0),
            },
            left=left,
            input_name=trainer._parts.lengths.input_name,
            names=buckets.names,
            limits=trainer._parts.lengths.limits,
            target_lengths=buckets.targets,
            rows=None if small else batch_size // (trainer.args.world_size if split else 1),
            fills_unlabelled=not is_training,
        )

    def to_rows(
        self,
        collate: Callable[[list[Any]], Any],
        dataset: Any,
        batch_size: int,
        sampler: Any,
        *,
        is_training: bool,
    ) -> Callable[[list[Any]], Any]:
        """Return the collator with last batches filled up, where lengths cannot be chosen."""
        trainer = self._trainer
        small = trainer._small_because(dataset, is_training=is_training)
        small = small or _deals_otherwise(sampler, dataset)
        if is_training or trainer._session.plan.shapes == trainer._session.planned.shapes:
            why = self._unbucketed_because(dataset)
            last = "is filled up" if small is None else f"stays small: {small}"
            told = (
                f"{trainer._session.backend.name} compiles each, but {why}; the last batch {last}"
            )
            trainer._session.revise("shapes", "any", told)
        if small is not None:
            return collate
        split = trainer._run.options.loaders.split_batches
        rows = batch_size // (trainer.args.world_size if split else 1)
        return ToBuckets(collate, rows=rows, fills_unlabelled=not is_training)

    def packed(self, collate: Callable[[list[Any]], Any], dataset: Any, batch_size: int) -> Packed:
        """Return the collator with its batches in one row each, where the model can read that."""
        trainer = self._trainer
        why = self._unpackable()
        if why is not None:
            raise BadInput(
                f"Cannot use packing=True with {type(base_model(trainer.model)).__name__}.",
                why=f"{why}.",
                fix="leave packing out; length_buckets='auto' pads less, too.",
            )
        lengths: tuple[int, ...] = ()
        told = "rows of a batch in one"
        if can_be_read(dataset):
            counted = trainer._parts.lengths.measured(dataset)
            lengths = packed_lengths(counted, batch_size)
            told += f" of {', '.join(map(str, lengths))} tokens: no row is padded"
        trainer._session.revise("shapes", "packed", told, step=0)
        return Packed(collate, lengths, {trainer._parts.lengths.input_name: self._pad_token})

    def _unpackable(self) -> str | None:
        """Say why rows cannot lie in one; None where they can."""
        trainer = self._trainer
        precision = trainer._session.precision
        if not objective.shifts_labels(base_model(trainer.model)):
            return "it is not a causal language model, whose loss is by token"
        if trainer.args.world_size > 1 and not trainer.args.dataloader_drop_last:
            return (
                "a last round that is filled up with repeats cannot be told from others once it "
                "is in one row; dataloader_drop_last=True leaves that round out"
            )
        return why_rows_mix(trainer.model, precision.autocast, is_exact=not precision.is_mixed)

    @property
    def _pad_token(self) -> int:
        """The token that pads: the model's, if it goes by one, else the tokenizer's."""
        own = _own_pad_token(base_model(self._trainer.model))
        pad = getattr(self._trainer.processing_class, "pad_token_id", None) if own is None else own
        return pad if isinstance(pad, int) else 0

    def small_because(self, dataset: Any, *, is_training: bool) -> str | None:
        """Say why a last batch cannot be filled with rows that count nothing; None where it can."""
        trainer = self._trainer
        kind = type(trainer)
        step = "training_step" if is_training else "prediction_step"
        own = [name for name in ("compute_loss", step) if not _is_ours(getattr(kind, name))]
        if own or trainer.compute_loss_func is not None:
            return f"{own[0] if own else 'compute_loss_func'} is your own"
        if trainer._run.options.loaders.dispatch_batches:
            return "batches are dealt out by the first process"
        model = base_model(trainer.model)
        if is_training and any(_is_batch_norm(module) for module in model.modules()):
            return "batch normalisation would count the rows that fill it"
        return _loss_counts_all(model) or _unlike_classes(dataset)


def _loss_counts_all(model: nn.Module) -> str | None:
    """Say why a model's loss may count a row whose labels are -100; None where it does not."""
    kind, config = type(model), getattr(model, "config", None)
    known = kind.__module__.startswith("transformers.") and kind.__name__.endswith(_COUNTING)
    if not known:
        return f"the loss of {kind.__name__} is not known to leave out rows labelled -100"
    if getattr(config, "output_router_logits", False):
        return "the loss of its router counts every row"
    problem = getattr(config, "problem_type", None)
    for_a_class = kind.__name__.endswith(("ForSequenceClassification", "ForImageClassification"))
    if problem in ("regression", "multi_label_classification") or (
        (for_a_class or names_classes(model)) and getattr(config, "num_labels", 2) == 1
    ):
        return "its labels are not classes, and none of their values is left out of the loss"
    return None


def _unlike_classes(dataset: Any) -> str | None:
    """Say that labels are no whole numbers, where the first sample shows it."""
    if not can_be_read(dataset):
        return "a stream does not tell how many samples come"
    first = looked_at(dataset)
    labels = next((first[n] for n in _NAMES if n in first), None)
    if labels is not None and np.asarray(labels).dtype.kind == "f":
        return "its labels are not classes, and none of their values is left out of the loss"
    return None


def _pads_to_longest(collate: Any) -> bool:
    """Whether a collator is known to pad a batch to its longest sample, and no further."""
    kind = collate if isinstance(collate, FunctionType) else type(collate)
    known = str(kind.__module__).startswith(("anytrain.", "transformers."))
    return known and getattr(collate, "padding", True) in (True, "longest")


def _deals_otherwise(sampler: Sampler[Any] | None, dataset: Any) -> str | None:
    """Say that another number of samples may come than there are; None where it is the same."""
    dealt: Any = sampler.lengths if isinstance(sampler, Bucketed) else sampler
    known = type(sampler) in (Bucketed, SequentialSampler, RandomSampler)
    if known and can_be_read(dataset) and len(dealt) == len(dataset):
        return None
    return "the sampler is your own"


def _own_pad_token(model: nn.Module) -> int | None:
    """Return the token that the model takes for padding; None where it knows of none."""
    config = getattr(model, "config", None)
    pad = getattr(getattr(config, "text_config", None) or config, "pad_token_id", None)
    return pad if isinstance(pad, int) and pad >= 0 else None


def _check_end_is_found(model: nn.Module) -> None:
    """Refuse a model that would take the end of the padding for the end of a text."""
    if not names_classes(model):
        return
    if getattr(model.config, "summary_type", None) == "last":
        why = "it reads a text's class from the last position, which padding on the right fills"
        fix = "pass processing_class=, a tokenizer with padding_side='left'"
    elif _own_pad_token(model) is None:
        why = "its configuration has no pad_token_id, so that it may read the class from padding"
        fix = "set model.config.pad_token_id = tokenizer.pad_token_id"
    else:
        return
    raise BadInput(
        f"Cannot use length_buckets with {type(model).__name__}.",
        why=f"{why}.",
        fix=f"{fix}, or leave length_buckets out.",
    )


def _is_ours(method: Any) -> bool:
    return str(getattr(method, "__module__", "")).startswith("anytrain.")


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)
