"""`TrainingArguments`: everything a run is told, converted, checked and readable."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from anytrain.core.errors import BadInput
from anytrain.core.nearest import NamedArguments
from anytrain.core.notices import notify_caller
from anytrain.doors.training_args import checks, convert, legacy, support
from anytrain.doors.training_args.fields import (
    Fields,
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    SaveStrategy,
    SchedulerType,
    option,
)
from anytrain.doors.training_args.legacy import RULES, OldFields, shown
from anytrain.doors.training_args.processes import Processes

if TYPE_CHECKING:
    GenerationChoice = Any
else:
    GenerationChoice = str | Path | None


class WrittenArguments(Fields):
    """Ways to write arguments down; tokens are never written."""

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments as plain values; old names, which hold nothing, are left out."""
        return {name: _plain(name, value) for name, value in self._listed()}

    def to_json_string(self) -> str:
        """Return the arguments as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return the arguments as numbers and text alone, as trackers take them."""
        sizes = {
            "train_batch_size": self.per_device_train_batch_size,
            "eval_batch_size": self.per_device_eval_batch_size,
        }
        kinds: tuple[type, ...] = (bool, int, float, str)
        torch = sys.modules.get("torch")
        if torch is not None:
            kinds = (*kinds, torch.Tensor)
        return {
            name: value if type(value) in kinds else str(value)
            for name, value in {**self.to_dict(), **sizes}.items()
        }

    def __str__(self) -> str:
        lines = "".join(f"{n}={shown(n, v)},\n" for n, v in sorted(self._listed()))
        return f"{type(self).__name__}(\n{lines})"

    __repr__ = __str__

    def _listed(self) -> list[tuple[str, Any]]:
        named = [(f.name, getattr(self, f.name)) for f in fields(self) if f.init]
        return [(name, value) for name, value in named if name not in RULES]


def _plain(name: str, value: Any) -> Any:
    if name.endswith("_token"):
        return shown(name, value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list):
        return [item.value if isinstance(item, Enum) else item for item in value]
    if isinstance(value, dict):
        return {key: _plain_item(str(key), item) for key, item in value.items()}
    if name == "accelerator_config" and hasattr(value, "to_dict"):
        return value.to_dict()
    return _plain_item(name, value)


def _plain_item(key: str, value: Any) -> Any:
    """Return a setting's value: a dtype by its name, and a configuration as a dict."""
    if isinstance(value, dict):
        return {inner: _plain_item(str(inner), item) for inner, item in value.items()}
    if key.endswith("dtype") and value is not None and not isinstance(value, str):
        return str(value).split(".")[-1]
    if key == "quantization_config" and hasattr(value, "to_dict"):
        return value.to_dict()
    return value


class Setters(OldFields, Fields):
    """The `set_*` methods; each returns the arguments, so that calls can be chained."""

    def set_training(
        self,
        learning_rate: float = 5e-5,
        batch_size: int = 8,
        weight_decay: float = 0,
        num_epochs: float = 3,
        max_steps: int = -1,
        gradient_accumulation_steps: int = 1,
        seed: int = 42,
        gradient_checkpointing: bool = False,
    ) -> Self:
        """Set what training needs, and do_train.

        Args:
            learning_rate: The highest learning rate of the schedule.
            batch_size: Samples a device sees at once in training.
            weight_decay: Weight decay; biases and norms are left out.
            num_epochs: Passes over the training data.
            max_steps: Optimizer steps in all; above 0 it beats num_epochs.
            gradient_accumulation_steps: Batches that make one optimizer step.
            seed: Seed of everything that draws.
            gradient_checkpointing: Compute activations again to save memory.
        """
        self.do_train = True
        self.learning_rate = learning_rate
        self.per_device_train_batch_size = batch_size
        self.weight_decay = weight_decay
        self.num_train_epochs = num_epochs
        self.max_steps = max_steps
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.seed = seed
        self.gradient_checkpointing = gradient_checkpointing
        return self._checked()

    def set_evaluate(
        self,
        strategy: str | IntervalStrategy = "no",
        steps: int = 500,
        batch_size: int = 8,
        accumulation_steps: int | None = None,
        delay: float | None = None,
        loss_only: bool = False,
    ) -> Self:
        """Set how evaluation is done during training, and do_eval where it is.

        Args:
            strategy: "no", "steps" or "epoch".
            steps: Steps between two evaluations.
            batch_size: Samples a device sees at once.
            accumulation_steps: Batches after which predictions move to the CPU. None: at
                the end.
            delay: Steps or epochs before the first one.
            loss_only: Compute the loss and keep nothing else.
        """
        self.eval_strategy = IntervalStrategy(strategy)
        _check_steps(self.eval_strategy, steps)
        self.do_eval = self.eval_strategy != IntervalStrategy.NO
        self.eval_steps = steps
        self.per_device_eval_batch_size = batch_size
        self.eval_accumulation_steps = accumulation_steps
        self.eval_delay = 0 if delay is None else delay
        self.prediction_loss_only = loss_only
        return self._checked()

    def set_testing(self, batch_size: int = 8, loss_only: bool = False) -> Self:
        """Set how predictions are made, and do_predict.

        Args:
            batch_size: Samples a device sees at once.
            loss_only: Compute the loss and keep nothing else.
        """
        self.do_predict = True
        self.per_device_eval_batch_size = batch_size
        self.prediction_loss_only = loss_only
        return self._checked()

    def set_save(
        self,
        strategy: str | IntervalStrategy | SaveStrategy = "steps",
        steps: int = 500,
        total_limit: int | None = None,
        on_each_node: bool = False,
    ) -> Self:
        """Set when checkpoints are written, and how many stay.

        Args:
            strategy: "no", "steps", "epoch" or "best".
            steps: Steps between two saves.
            total_limit: How many checkpoints stay. None: all.
            on_each_node: Save on each machine.
        """
        self.save_strategy = SaveStrategy(str(strategy))
        _check_steps(self.save_strategy, steps)
        self.save_steps = steps
        self.save_total_limit = total_limit
        self.save_on_each_node = on_each_node
        return self._checked()

    def set_logging(
        self,
        strategy: str | IntervalStrategy = "steps",
        steps: int = 500,
        report_to: str | list[str] = "none",
        level: str = "passive",
        first_step: bool = False,
        nan_inf_filter: bool = False,
        on_each_node: bool = False,
        replica_level: str = "passive",
    ) -> Self:
        """Set what is logged, when, and with which trackers.

        Args:
            strategy: "no", "steps" or "epoch".
            steps: Steps between two logs.
            report_to: Trackers by name, "all" or "none".
            level: Log level of the main process.
            first_step: Log the first step too.
            nan_inf_filter: Leave losses that are not finite out of the logged mean.
            on_each_node: Log on each machine's main process.
            replica_level: Log level of the other processes.
        """
        self.logging_strategy = IntervalStrategy(strategy)
        _check_steps(self.logging_strategy, steps)
        self.logging_steps = steps
        self.report_to = report_to
        self.log_level = level
        self.logging_first_step = first_step
        self.logging_nan_inf_filter = nan_inf_filter
        self.log_on_each_node = on_each_node
        self.log_level_replica = replica_level
        return self._checked()

    def set_push_to_hub(
        self,
        model_id: str,
        strategy: str | HubStrategy = "every_save",
        token: str | None = None,
        private_repo: bool | None = None,
        always_push: bool = False,
        revision: str | None = None,
    ) -> Self:
        """Push to the hub, and set where and when.

        Args:
            model_id: The repository, as user/name.
            strategy: What is pushed, and when: every_save, end, checkpoint or
                all_checkpoints.
            token: The hub's token.
            private_repo: Whether a new repository is private.
            always_push: Push also while the last push is going on.
            revision: The branch to push to.
        """
        self.push_to_hub = True
        self.hub_model_id = model_id
        self.hub_strategy = HubStrategy(strategy)
        self.hub_token = token
        self.hub_private_repo = private_repo
        self.hub_always_push = always_push
        self.hub_revision = revision
        return self._checked()

    def set_optimizer(
        self,
        name: str | OptimizerNames = "adamw_torch",
        learning_rate: float = 5e-5,
        weight_decay: float = 0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        args: str | None = None,
    ) -> Self:
        """Set the optimizer and its numbers.

        Args:
            name: The optimizer's name, as in `optim`.
            learning_rate: The highest learning rate of the schedule.
            weight_decay: Weight decay; biases and norms are left out.
            beta1: Decay of Adam's mean of gradients.
            beta2: Decay of Adam's mean of squared gradients.
            epsilon: What keeps Adam's division finite.
            args: The optimizer's own options: 'key=value,key2=value2'.
        """
        self.optim = OptimizerNames(name)
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.adam_beta1 = beta1
        self.adam_beta2 = beta2
        self.adam_epsilon = epsilon
        self.optim_args = args
        return self._checked()

    def set_lr_scheduler(
        self,
        name: str | SchedulerType = "linear",
        num_epochs: float = 3.0,
        max_steps: int = -1,
        warmup_steps: float = 0,
        warmup_ratio: float | None = None,
    ) -> Self:
        """Set the schedule, how long it is, and its warm-up.

        Args:
            name: The schedule's name, as in `lr_scheduler_type`.
            num_epochs: Passes over the training data.
            max_steps: Optimizer steps in all; above 0 it beats num_epochs.
            warmup_steps: Steps of warm-up; below 1, a share of all steps.
            warmup_ratio: The share alone, as older scripts have it.
        """
        self.lr_scheduler_type = SchedulerType(name)
        self.num_train_epochs = num_epochs
        self.max_steps = max_steps
        self.warmup_steps = warmup_steps
        if warmup_ratio is not None:
            self.warmup_ratio = warmup_ratio
        return self._checked()

    def set_dataloader(
        self,
        train_batch_size: int = 8,
        eval_batch_size: int = 8,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | None = None,
        in_order: bool = True,
        auto_find_batch_size: bool = False,
        ignore_data_skip: bool = False,
        sampler_seed: int | None = None,
    ) -> Self:
        """Set how data is loaded.

        Args:
            train_batch_size: Samples a device sees at once in training.
            eval_batch_size: Samples a device sees at once in evaluation.
            drop_last: Drop a last batch that is not full, in training.
            num_workers: Processes that load data.
            pin_memory: Load into pinned memory.
            persistent_workers: Keep those processes from one epoch to the next.
            prefetch_factor: Batches that each of them loads ahead.
            multiprocessing_context: How they are started: fork, spawn or forkserver.
            in_order: Give batches in their order, whichever is loaded first.
            auto_find_batch_size: Split a batch that does not fit memory; the effective
                batch stays.
            ignore_data_skip: After a resume, begin the epoch anew instead of going on in
                it.
            sampler_seed: Seed of the order of samples. None: the run's seed.
        """
        self.per_device_train_batch_size = train_batch_size
        self.per_device_eval_batch_size = eval_batch_size
        self.dataloader_drop_last = drop_last
        self.dataloader_num_workers = num_workers
        self.dataloader_pin_memory = pin_memory
        self.dataloader_persistent_workers = persistent_workers
        self.dataloader_prefetch_factor = prefetch_factor
        self.dataloader_multiprocessing_context = multiprocessing_context
        self.dataloader_in_order = in_order
        self.auto_find_batch_size = auto_find_batch_size
        self.ignore_data_skip = ignore_data_skip
        self.data_seed = sampler_seed
        return self._checked()

    def _checked(self) -> Self:
        """Check each value; whether they fit together is looked at once all are set."""
        convert.convert_all(self)
        checks.values(self)
        return self


def _check_steps(strategy: IntervalStrategy | SaveStrategy, steps: float) -> None:
    if strategy == "steps" and steps == 0:
        raise BadInput(
            "Cannot use strategy='steps' with steps=0.",
            why="nothing happens every 0 steps.",
            fix='pass steps=100, for example, or strategy="no".',
        )


@dataclass(repr=False)
class TrainingArguments(Setters, Processes, WrittenArguments, OldFields, Fields, NamedArguments):
    """What a run is told: HF's names, checked before a model is loaded.

    Old names are taken for what replaced them; what anytrain does not do is refused at once.
    `docs/arguments.md` lists every argument with what it does here.

    >>> TrainingArguments("runs/one", learning_rate="1e-4").learning_rate
    0.0001
    """

    # A subclass adds fields of its own that a command line or a file may give as JSON text.
    _not_suggested = frozenset(legacy.RULES)
    _VALID_DICT_FIELDS = [
        "accelerator_config",
        "fsdp_config",
        "deepspeed",
        "gradient_checkpointing_kwargs",
        "lr_scheduler_kwargs",
    ]

    def __new__(cls, *given: Any, **named: Any) -> TrainingArguments:
        """Note which arguments are given: a value that is not may be chosen by the run."""
        made = super().__new__(cls, *given, **named)
        made.__dict__["_told"] = {*list(cls.__dataclass_fields__)[: len(given)], *named}
        return made

    def __post_init__(self) -> None:
        self.check()

    def is_told(self, name: str) -> bool:
        """Whether somebody has given this argument, if only its default.

        `dataclasses.replace` gives every argument; to change some and give no more, assign them.

        Args:
            name: The argument's name.
        """
        return name in self.__dict__["_told"]

    def forget_untold(self, told: set[str]) -> None:
        """Say that no other arguments were given: a parser fills all of them in.

        Args:
            told: The names that somebody has given.
        """
        self.__dict__["_told"] = self.__dict__["_told"] & told

    def check(self) -> None:
        """Convert, complete and check every argument; a second time changes nothing.

        A trainer calls it again, since arguments can be assigned after construction.
        """
        told = self.__dict__["_told"]
        convert.convert_all(self)
        legacy.settle(self)
        convert.complete(self)
        support.refuse(self)
        checks.check(self)
        # What is completed here was given by nobody.
        self.__dict__.update(_settled=True, _told=told)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if self.__dict__.get("_settled"):
            self.__dict__["_told"] = self.__dict__["_told"] | {name}  # a copy may hold the same
        # An old name that is assigned later must not be lost in silence.
        if value is not None and name in legacy.RULES and self.__dict__.get("_settled"):
            legacy.answer(self, name)


@dataclass(repr=False)
class Seq2SeqTrainingArguments(TrainingArguments):
    """What a run of a sequence-to-sequence model is told."""

    sortish_sampler: bool = option(False, "A sampler of old data sets.")
    predict_with_generate: bool = option(False, "Evaluate what the model generates.")
    generation_max_length: int | None = option(None, "The longest text that is generated.")
    generation_num_beams: int | None = option(None, "Beams that generation searches with.")
    generation_config: GenerationChoice = option(
        None, "Generation's settings: a name, a folder, or a GenerationConfig."
    )

    def check(self) -> None:
        """Convert, complete and check every argument; a second time changes nothing."""
        super().check()
        if self.sortish_sampler:
            self.sortish_sampler = False
            notify_caller(
                f"sortish_sampler=True changes nothing: {support.SEQ2SEQ['sortish_sampler'].note}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return every argument as plain values, the generation's settings too."""
        found = super().to_dict()
        config: Any = found.get("generation_config")
        if hasattr(config, "to_dict"):
            found["generation_config"] = config.to_dict()
        elif isinstance(config, Path):
            found["generation_config"] = str(config)
        return found
