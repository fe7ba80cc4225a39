"""Make the loaders of training, evaluation and prediction from data sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from anytrain.core.errors import BadInput
from anytrain.doors.trainer.outputs import has_length, seed_worker
from anytrain.doors.trainer.override_points import OverridePoints
from anytrain.doors.trainer.overrides import call
from anytrain.doors.training_args.fields import packs
from anytrain.engine.assemble.loaders import given_loader, prepare_loader
from anytrain.engine.data.columns import (
    DropColumns,
    as_rows,
    base_model,
    column_names,
    drop_dataset_columns,
    forward_names,
)
from anytrain.engine.data.grouped import GroupedByLength, Rebalanced, lengths_of
from anytrain.engine.data.padding import WithoutFullMask, are_even
from anytrain.engine.data.shard import IterableBatches
from anytrain.engine.prepared.loader import PreparedLoader

if TYPE_CHECKING:
    from anytrain.doors.trainer.trainer import Trainer


class Loaders:
    """A Trainer's loaders, and the columns that they leave out."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.kept: dict[str, Any] = {}
        """Loaders of evaluations whose workers live on."""
        self._made_of: Mapping[bool, Any] = {}
        """What the newest loader that trains (True), and the newest other one, were made of."""

    def train_loader(self) -> DataLoader[Any]:
        """Return the loader that training walks; override it to train on another."""
        trainer = self._trainer
        if trainer.train_dataset is None:
            raise BadInput(
                "Cannot train: there is no train_dataset.",
                why="the Trainer was made without one, and get_train_dataloader is not overridden.",
                fix="pass train_dataset=, or override get_train_dataloader.",
            )
        return trainer._get_dataloader(
            trainer.train_dataset,
            "Training",
            trainer.args.train_batch_size,
            trainer._get_train_sampler,
            is_training=True,
        )

    def eval_loader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return the loader of an evaluation: of the data set given, or named, or the Trainer's."""
        trainer = self._trainer
        if eval_dataset is None and trainer.eval_dataset is None:
            raise BadInput(
                "Cannot evaluate: there is no eval_dataset.",
                why="the Trainer was made without one, and none was given to evaluate.",
                fix="pass eval_dataset=.",
            )
        if eval_dataset is trainer.eval_dataset:
            eval_dataset = None  # the Trainer's own, given by hand
        key = eval_dataset if isinstance(eval_dataset, str) else "eval"
        if key in self.kept and (eval_dataset is None or isinstance(eval_dataset, str)):
            return self.kept[key]  # type: ignore[no-any-return]  # what was made below
        dataset = trainer.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(eval_dataset, str):
            dataset = trainer.eval_dataset[eval_dataset]
        loader = trainer._get_dataloader(
            dataset,
            "Evaluation",
            trainer._parts.shapes.eval_batch_size,
            trainer._get_eval_sampler,
        )
        named = eval_dataset is None or isinstance(eval_dataset, str)
        self._keep(loader, key if named else None)
        return loader

    def test_loader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return the loader of a prediction."""
        trainer = self._trainer
        return trainer._get_dataloader(
            test_dataset,
            "test",
            trainer._parts.shapes.eval_batch_size,
            trainer._get_eval_sampler,
        )

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Return how many samples a loader has, as well as can be told."""
        dataset: Any = getattr(dataloader, "dataset", None)
        for known in (getattr(dataset, "dataset", None), dataset):
            if known is not None and has_length(known) and _is_whole(known, dataset):
                return len(known)
        return len(dataloader) * self._trainer.args.per_device_train_batch_size

    def make(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Sampler[Any] | None] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader[Any]:
        """Return the prepared loader of a data set, its batches in the run's shapes."""
        trainer = self._trainer
        args, collate, dataset = trainer.args, trainer.data_collator, as_rows(dataset)
        given = dataset  # its column of lengths is no input of the model's
        self._made_of = {**self._made_of, is_training: given}
        if hasattr(dataset, "remove_columns") and hasattr(dataset, "column_names"):
            dataset = trainer._remove_unused_columns(dataset, description)
        else:
            collate = trainer._get_collator_with_removed_columns(collate, description)
        options: dict[str, Any] = {
            "batch_size": batch_size,
            "collate_fn": collate,
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory
            and trainer._run.session.device.type not in ("cpu", "xla"),  # no pinned memory
            "persistent_workers": args.dataloader_persistent_workers,
            "multiprocessing_context": args.dataloader_multiprocessing_context,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "in_order": args.dataloader_in_order,
        }
        sampler = None
        if not isinstance(dataset, IterableDataset):
            sampler = call(sampler_fn, given) if sampler_fn is not None else None
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
        if trainer._parts.shapes.keeps_shapes:
            to_shapes = (
                trainer._parts.shapes.to_buckets
                if trainer._parts.shapes.wants_buckets(given)
                else trainer._parts.shapes.to_rows
            )
            options["collate_fn"] = to_shapes(
                collate, given, batch_size, sampler, is_training=is_training
            )
        if packs(args) and is_training:
            options["collate_fn"] = trainer._parts.shapes.packed(collate, given, batch_size)
        if is_training and self._needs_no_masks(given):
            options["collate_fn"] = WithoutFullMask(options["collate_fn"])
        free = is_training and not args.is_told("dataloader_num_workers")
        made: DataLoader[Any] = self.prepared(DataLoader(dataset, **options), auto_workers=free)
        self._keep(made, dataloader_key)
        return made

    def _keep(self, loader: Any, key: str | None) -> None:
        """Let the workers of a loader live on from one evaluation to the next, where they may."""
        if key is not None and self._trainer.args.dataloader_persistent_workers:
            self.kept[key] = loader

    def _needs_no_masks(self, dataset: Any) -> bool:
        """Whether steps may be recorded, and masks of this dataset's batches hide nothing."""
        trainer = self._trainer
        on_cuda = trainer._run.session.device.type == "cuda"
        plain = trainer.args.length_buckets is None and not packs(trainer.args)
        if not (on_cuda and plain) or trainer.compute_loss_func is not None:
            return False
        known = type(base_model(trainer.model)).__module__.startswith("transformers.")
        ours = trainer.compute_loss.__module__.startswith("anytrain.")
        return known and ours and are_even(dataset)

    def prepared(self, loader: Any, *, auto_workers: bool = False) -> Any:
        """Return a loader dealt to this rank; what the user has dealt out himself stays so."""
        trainer = self._trainer
        if isinstance(loader, PreparedLoader):
            return loader
        if not isinstance(loader, DataLoader):
            return given_loader(loader, trainer._run.session)
        session, options = trainer._run.session, trainer._run.options.loaders
        return prepare_loader(loader, session, options, place=True, auto_workers=auto_workers)

    def train_sampler(self, train_dataset: Any = None) -> Sampler[Any] | None:
        """Return the order of training: by train_sampling_strategy."""
        trainer = self._trainer
        dataset = trainer.train_dataset if train_dataset is None else train_dataset
        if dataset is None or not has_length(dataset):
            return None
        if len(dataset) == 0:
            raise BadInput(
                "Cannot train on an empty data set.",
                why="train_dataset has no sample.",
                fix="check how it was read and filtered.",
            )
        if trainer._parts.shapes.orders_by_bucket(dataset):
            return trainer._parts.shapes.bucketed(dataset)
        strategy = str(trainer.args.train_sampling_strategy)
        if strategy in ("group_by_length", "batch_rebalance"):
            return self._by_length(dataset, strategy)
        if strategy == "sequential":
            return SequentialSampler(dataset)
        return RandomSampler(dataset)

    def _by_length(self, dataset: Any, strategy: str) -> Sampler[Any]:
        args = self._trainer.args
        names = getattr(self._trainer.processing_class, "model_input_names", None) or ["input_ids"]
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

    def are_several(self, given: Any) -> bool:
        """Whether these are data sets by name: a dict whose names are no columns of the model."""
        columns = getattr(given, "column_names", None)
        if isinstance(columns, Mapping):  # of a DatasetDict, each set's
            return True
        if not isinstance(given, Mapping) or columns is not None:
            return False
        self._trainer._set_signature_columns_if_needed()
        return not set(given) & set(self._trainer._signature_columns or ())

    def without_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        trainer = self._trainer
        trainer._set_signature_columns_if_needed()
        if not trainer.args.remove_unused_columns or trainer._signature_columns is None:
            return dataset
        name = type(trainer.model).__name__
        return drop_dataset_columns(
            dataset,
            trainer._signature_columns,
            model_name=name,
            description=description,
            takes=forward_names(trainer.model),
        )

    def collator_without_unused_columns(
        self, data_collator: Callable[[list[Any]], Any], description: str | None = None
    ) -> Callable[[list[Any]], Any]:
        trainer = self._trainer
        trainer._set_signature_columns_if_needed()
        if not trainer.args.remove_unused_columns or trainer._signature_columns is None:
            return data_collator
        name = type(trainer.model).__name__
        return DropColumns(
            data_collator,
            trainer._signature_columns,
            model_name=name,
            description=description,
            takes=forward_names(trainer.model),
        )

    def columns_left_out(self, *, is_training: bool) -> list[str]:
        """Return the columns of the newest data set that did not reach the model."""
        data, keep = self._made_of.get(is_training), self._trainer._signature_columns
        if data is None or keep is None or not self._trainer.args.remove_unused_columns:
            return []
        return [str(name) for name in column_names(data) if name not in keep]


def _is_whole(known: Any, dataset: Any) -> bool:
    """Whether a data set, or what a shard of a stream was cut from, holds samples, not batches."""
    is_stream = isinstance(dataset, IterableDataset) and not isinstance(dataset, IterableBatches)
    return is_stream or (known is dataset and not isinstance(dataset, IterableBatches))


def default_collator(processing_class: Any) -> Callable[[list[Any]], Any]:
    """Return what makes a batch: padding by the tokenizer where there is one."""
    from anytrain.engine.data.collate import collate

    if hasattr(processing_class, "pad") and hasattr(processing_class, "model_input_names"):
        from transformers import DataCollatorWithPadding

        padding: Callable[[list[Any]], Any] = DataCollatorWithPadding(processing_class)
        return padding
    return collate


def check_eval_sets(trainer: Trainer, eval_dataset: Any) -> None:
    """Refuse evaluations that are asked for and cannot be, before anything is trained."""
    own = type(trainer)
    makes_own = (
        own.get_eval_dataloader is not OverridePoints.get_eval_dataloader
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
