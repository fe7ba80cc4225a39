"""`TrainingArguments`: everything a run is told, converted, checked and readable."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytrain.core.nearest import NamedArguments
from anytrain.doors.training_args import checks, legacy, normal, support
from anytrain.doors.training_args.fields import Fields, option
from anytrain.doors.training_args.legacy import OldFields
from anytrain.doors.training_args.notices import tell
from anytrain.doors.training_args.processes import Processes
from anytrain.doors.training_args.record import Record
from anytrain.doors.training_args.setters import Setters

if TYPE_CHECKING:
    GenerationChoice = Any
else:
    GenerationChoice = str | Path | None


@dataclass(repr=False)
class TrainingArguments(Setters, Processes, Record, OldFields, Fields, NamedArguments):
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
        normal.convert(self)
        legacy.settle(self)
        normal.complete(self)
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
            tell(f"sortish_sampler=True changes nothing: {support.SEQ2SEQ['sortish_sampler'].note}")

    def to_dict(self) -> dict[str, Any]:
        """Return every argument as plain values, the generation's settings too."""
        found = super().to_dict()
        config: Any = found.get("generation_config")
        if hasattr(config, "to_dict"):
            found["generation_config"] = config.to_dict()
        elif isinstance(config, Path):
            found["generation_config"] = str(config)
        return found
