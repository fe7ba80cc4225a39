"""The part of `Trainer` that makes loaders from data sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from anytrain.core.errors import BadInput
from anytrain.doors.trainer import signatures
from anytrain.doors.trainer.outputs import has_length, seed_worker
from anytrain.doors.trainer.shapes import Shapes
from anytrain.doors.training_args.fields import packs
from anytrain.engine.assemble.loaders import given_loader, prepare_loader
from anytrain.engine.assemble.run import Run
from anytrain.engine.data.columns import (
    DropColumns,
    as_rows,
    base_model,
    column_names,
    drop_dataset_columns,
    forward_names,
    kept_columns,
)
from anytrain.engine.data.grouped import GroupedByLength, Rebalanced, lengths_of
from anytrain.engine.data.padding import WithoutFullMask, are_even
from anytrain.engine.data.shard import Given
from anytrain.engine.prepared.loader import PreparedLoader


class Data(Shapes):
    """Loaders for training, evaluation and prediction, and what may be overridden about them."""

    model: nn.Module
    data_collator: Callable[[list[Any]], Any]
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    label_names: list[str]
    compute_loss: Callable[..., Any]
    _run: Run
    _signature_columns: list[str] | None
    _made_of: Mapping[bool, Any] = MappingProxyType({})
    """What the newest loader that trains (True), and the newest other one, were made of."""
    _kept_loaders: dict[str, Any]

    @property
    def _train_batch_size(self) -> int:
        """The samples of a micro-batch; subclasses that make their own loader read it."""
        return self.args.train_batch_size

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the loader that training walks; override it to train on another."""
        if self.train_dataset is None:
            raise BadInput(
                "Cannot train: there is no train_dataset.",
                why="the Trainer was made without one, and get_train_dataloader is not overridden.",
                fix="pass train_dataset=, or override get_train_dataloader.",
            )
        return self._get_dataloader(
            self.train_dataset,
            "Training",
            self.args.train_batch_size,
            self._get_train_sampler,
            is_training=True,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return the loader of an evaluation: of the data set given, or named, or the Trainer's.

        Args:
            eval_dataset: A data set, or the name of one in the Trainer's dict of data
                sets. None: the Trainer's own.
        """
        if eval_dataset is None and self.eval_dataset is None:
            raise BadInput(
                "Cannot evaluate: there is no eval_dataset.",
                why="the Trainer was made without one, and none was given to evaluate.",
                fix="pass eval_dataset=.",
            )
        if eval_dataset is self.eval_dataset:
            eval_dataset = None  # the Trainer's own, given by hand
        key = eval_dataset if isinstance(eval_dataset, str) else "eval"
        if key in self._kept_loaders and (eval_dataset is None or isinstance(eval_dataset, str)):
            return self._kept_loaders[key]  # type: ignore[no-any-return]  # what was made below
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(eval_dataset, str):
            dataset = self.eval_dataset[eval_dataset]
        loader = self._get_dataloader(
            dataset, "Evaluation", self._eval_batch_size, self._get_eval_sampler
        )
        named = eval_dataset is None or isinstance(eval_dataset, str)
        self._keep(loader, key if named else None)
        return loader

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return the loader of a prediction.

        Args:
            test_dataset: The samples to predict.
        """
        return self._get_dataloader(
            test_dataset, "test", self._eval_batch_size, self._get_eval_sampler
        )

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Return how many samples a loader has, as well as can be told.

        Args:
            dataloader: The loader. Where its data set has no length, batches are counted
                as full.
        """
        dataset: Any = getattr(dataloader, "dataset", None)
        for known in (getattr(dataset, "dataset", None), dataset):
            if known is not None and has_length(known) and _is_whole(known, dataset):
                return len(known)
        return len(dataloader) * self.args.per_device_train_batch_size

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Sampler[Any] | None] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader[Any]:
        args, collate, dataset = self.args, self.data_collator, as_rows(dataset)
        given = dataset  # its column of lengths is no input of the model's
        self._made_of = {**self._made_of, is_training: given}
        if hasattr(dataset, "remove_columns") and hasattr(dataset, "column_names"):
            dataset = self._remove_unused_columns(dataset, description)
        else:
            collate = self._get_collator_with_removed_columns(collate, description)
        options: dict[str, Any] = {
            "batch_size": batch_size,
            "collate_fn": collate,
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory
            and self._run.session.device.type not in ("cpu", "xla"),  # no pinned memory
            "persistent_workers": args.dataloader_persistent_workers,
            "multiprocessing_context": args.dataloader_multiprocessing_context,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "in_order": args.dataloader_in_order,
        }
        sampler = None
        if not isinstance(dataset, IterableDataset):
            sampler = signatures.call(sampler_fn, given) if sampler_fn is not None else None
            if isinstance(sampler, BatchSampler):
                options.pop("batch_size")
                options["batch_sampler"] = sampler
            else:
                # Only training drops: a score is of every sample.
                drops = is_training and args.dataloader_drop_last
                options |= {"sampler": sampler, "drop_last": drops}
            if is_training:
                options["worker_init_fn"] = partial(
                    seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index
                )
        if self._keeps_shapes:
            to_shapes = self._to_buckets if self._wants_buckets(given) else self._to_rows
            options["collate_fn"] = to_shapes(
                collate, given, batch_size, sampler, is_training=is_training
            )
        if packs(args) and is_training:
            options["collate_fn"] = self._packed(collate, given, batch_size)
        if is_training and self._needs_no_masks(given):
            options["collate_fn"] = WithoutFullMask(options["collate_fn"])
        free = is_training and not args.is_told("dataloader_num_workers")
        made: DataLoader[Any] = self._prepared(DataLoader(dataset, **options), auto_workers=free)
        self._keep(made, dataloader_key)
        return made

    def _keep(self, loader: Any, key: str | None) -> None:
        """Let the workers of a loader live on from one evaluation to the next, where they may."""
        if key is not None and self.args.dataloader_persistent_workers:
            self._kept_loaders[key] = loader

    @property
    def _eval_dataloaders(self) -> dict[str, Any]:
        """The loaders that were kept; subclasses that make their own ask here for one."""
        return self._kept_loaders

    @_eval_dataloaders.setter
    def _eval_dataloaders(self, kept: dict[str, Any]) -> None:
        self._kept_loaders = kept

    def _needs_no_masks(self, dataset: Any) -> bool:
        """Whether steps may be recorded, and masks of this dataset's batches hide nothing."""
        on_cuda = self._run.session.device.type == "cuda"
        plain = self.args.length_buckets is None and not packs(self.args)
        if not (on_cuda and plain) or self.compute_loss_func is not None:
            return False
        known = type(base_model(self.model)).__module__.startswith("transformers.")
        ours = self.compute_loss.__module__.startswith("anytrain.")
        return known and ours and are_even(dataset)

    def _prepared(self, loader: Any, *, auto_workers: bool = False) -> Any:
        """Return a loader dealt to this rank; what the user has dealt out himself stays so."""
        if isinstance(loader, PreparedLoader):
            return loader
        if not isinstance(loader, DataLoader):
            return given_loader(loader, self._run.session)
        session, options = self._run.session, self._run.options.loaders
        return prepare_loader(loader, session, options, place=True, auto_workers=auto_workers)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[Any] | None:
        """Return the order of training: by train_sampling_strategy."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if dataset is None or not has_length(dataset):
            return None
        if len(dataset) == 0:
            raise BadInput(
                "Cannot train on an empty data set.",
                why="train_dataset has no sample.",
                fix="check how it was read and filtered.",
            )
        if self._orders_by_bucket(dataset):
            return self._bucketed(dataset)
        strategy = str(self.args.train_sampling_strategy)
        if strategy in ("group_by_length", "batch_rebalance"):
            return self._by_length(dataset, strategy)
        if strategy == "sequential":
            return SequentialSampler(dataset)
        return RandomSampler(dataset)

    def _by_length(self, dataset: Any, strategy: str) -> Sampler[Any]:
        args = self.args
        names = getattr(self.processing_class, "model_input_names", None) or ["input_ids"]
        lengths = lengths_of(dataset, args.length_column_name, names[0])
        seed = args.seed if args.data_seed is None else args.data_seed
        num_samples = args.train_batch_size * args.gradient_accumulation_steps
        if strategy == "group_by_length":
            return GroupedByLength(lengths, num_samples, seed=seed)
        return Rebalanced(
            lengths,
            num_samples * args.world_size,
            num_ranks=args.world_size,
            accumulation=args.gradient_accumulation_steps,
            drop_last=args.dataloader_drop_last,
            seed=seed,
        )

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler[Any] | None:
        return SequentialSampler(eval_dataset) if has_length(eval_dataset) else None

    def _are_several(self, given: Any) -> bool:
        """Whether these are data sets by name: a dict whose names are no columns of the model."""
        columns = getattr(given, "column_names", None)
        if isinstance(columns, Mapping):  # of a DatasetDict, each set's
            return True
        if not isinstance(given, Mapping) or columns is not None:
            return False
        self._set_signature_columns_if_needed()
        return not set(given) & set(self._signature_columns or ())

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = kept_columns(self.model, self.label_names)

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        self._set_signature_columns_if_needed()
        if not self.args.remove_unused_columns or self._signature_columns is None:
            return dataset
        name = type(self.model).__name__
        return drop_dataset_columns(
            dataset,
            self._signature_columns,
            model_name=name,
            description=description,
            takes=forward_names(self.model),
        )

    def _get_collator_with_removed_columns(
        self, data_collator: Callable[[list[Any]], Any], description: str | None = None
    ) -> Callable[[list[Any]], Any]:
        self._set_signature_columns_if_needed()
        if not self.args.remove_unused_columns or self._signature_columns is None:
            return data_collator
        name = type(self.model).__name__
        return DropColumns(
            data_collator,
            self._signature_columns,
            model_name=name,
            description=description,
            takes=forward_names(self.model),
        )

    def _columns_left_out(self, *, is_training: bool) -> list[str]:
        """Return the columns of the newest data set that did not reach the model."""
        data, keep = self._made_of.get(is_training), self._signature_columns
        if data is None or keep is None or not self.args.remove_unused_columns:
            return []
        return [str(name) for name in column_names(data) if name not in keep]


def _is_whole(known: Any, dataset: Any) -> bool:
    """Whether a data set, or what a shard of a stream was cut from, holds samples, not batches."""
    is_stream = isinstance(dataset, IterableDataset) and not isinstance(dataset, Given)
    return is_stream or (known is dataset and not isinstance(dataset, Given))


def default_collator(processing_class: Any) -> Callable[[list[Any]], Any]:
    """Return what makes a batch: padding by the tokenizer where there is one."""
    from anytrain.engine.data.collate import collate

    if hasattr(processing_class, "pad") and hasattr(processing_class, "model_input_names"):
        from transformers import DataCollatorWithPadding

        padding: Callable[[list[Any]], Any] = DataCollatorWithPadding(processing_class)
        return padding
    return collate


def check_eval_sets(trainer: Any, eval_dataset: Any) -> None:
    """Refuse evaluations that are asked for and cannot be, before anything is trained."""
    own = type(trainer)
    makes_own = (
        own.get_eval_dataloader is not Data.get_eval_dataloader
        or getattr(own.evaluate, "__module__", "").partition(".")[0] != "anytrain"
    )
    if eval_dataset is None and trainer.args.eval_strategy != "no" and not makes_own:
        raise BadInput(
            "Cannot evaluate: there is no eval_dataset.",
            why=f'eval_strategy="{trainer.args.eval_strategy}" asks for evaluations, and the '
            "Trainer was made without data for them.",
            fix='pass eval_dataset=, override get_eval_dataloader, or pass eval_strategy="no".',
        )
    if isinstance(eval_dataset, Mapping) and not eval_dataset:
        raise BadInput(
            "Cannot evaluate on no data set.",
            why="eval_dataset is an empty dict.",
            fix='pass a data set, or a dict such as {"dev": dataset}.',
        )
