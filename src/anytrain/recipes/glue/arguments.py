"""The options of `anytrain glue`: run_glue's, checked before anything is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anytrain.core import environment
from anytrain.core.errors import BadInput
from anytrain.core.nearest import unknown
from anytrain.doors.training_args import HfArgumentParser, TrainingArguments
from anytrain.doors.training_args.fields import option
from anytrain.recipes.glue.sources import kind_of
from anytrain.recipes.glue.tasks import TASKS, GlueTask

_LONGEST = 1_000_000  # no model reads more; a typing mistake would otherwise end in memory

# What a run's weights depend on. Two runs that differ in one of these are two runs.
_DEFINING_MODEL = (
    "model_name_or_path",
    "config_name",
    "tokenizer_name",
    "config_overrides",
    "use_fast_tokenizer",
    "model_revision",
    "ignore_mismatched_sizes",
)
_DEFINING_DATA = (
    "task_name",
    "dataset_name",
    "dataset_config_name",
    "max_seq_length",
    "pad_to_max_length",
    "max_train_samples",
    "train_file",
)
_DEFINING_TRAINING = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "max_steps",
    "learning_rate",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "optim",
    "optim_args",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "label_smoothing_factor",
    "neftune_noise_alpha",
    "seed",
    "data_seed",
    "bf16",
    "fp16",
    "precision",
    "train_sampling_strategy",
    "length_buckets",
    "dataloader_drop_last",
    "load_best_model_at_end",
    "metric_for_best_model",
    "greater_is_better",
)


@dataclass
class ModelArguments:
    """Which model, configuration and tokenizer to begin with."""

    model_name_or_path: str | None = option(
        None, "Folder of a pretrained model, or its name on the hub."
    )
    config_name: str | None = option(None, "Configuration, where it is not the model's own.")
    tokenizer_name: str | None = option(None, "Tokenizer, where it is not the model's own.")
    config_overrides: str | None = option(
        None,
        "Train a new model from scratch, with these values in its configuration: "
        "hidden_size=64,num_hidden_layers=2.",
    )
    cache_dir: str | None = option(None, "Where downloads are kept.")
    use_fast_tokenizer: bool = option(True, "Use the tokenizer's fast version where there is one.")
    model_revision: str = option("main", "Branch, tag or commit of the model on the hub.")
    token: str | None = option(None, "Token for private repositories.")
    trust_remote_code: bool = option(False, "Run the code that comes with a model from the hub.")
    ignore_mismatched_sizes: bool = option(False, "Make a new head where the model's does not fit.")

    def __post_init__(self) -> None:
        if not (self.model_name_or_path or self.config_name):
            raise BadInput(
                "No model was named.",
                why="--model_name_or_path says which one to begin with; it is not given.",
                fix="pass --model_name_or_path google-bert/bert-base-cased, or a local folder; "
                "for a new model pass --config_name and --tokenizer_name.",
            )
        if not (self.tokenizer_name or self.model_name_or_path):
            raise BadInput(
                "No tokenizer was named.",
                why="a configuration alone brings none.",
                fix="pass --tokenizer_name with the folder or hub name of a tokenizer.",
            )
        overrides(self.config_overrides)
        for name in (self.model_name_or_path, self.config_name, self.tokenizer_name):
            _check_place(name)

    @property
    def is_new(self) -> bool:
        """Whether the model is made from its configuration, without trained weights."""
        return self.model_name_or_path is None or self.config_overrides is not None


@dataclass
class DataTrainingArguments:
    """Which data to learn from, evaluate and predict."""

    task_name: str | None = option(None, f"GLUE task: {', '.join(TASKS)}.")
    dataset_name: str | None = option(None, "Data set on the hub, or a folder of one.")
    dataset_config_name: str | None = option(None, "Which part of that data set.")
    max_seq_length: int = option(128, "Longest input in tokens; what is longer is cut.")
    overwrite_cache: bool = option(False, "Tokenize rows anew, though a run before kept them.")
    pad_to_max_length: bool | None = option(
        None,
        "Pad every row to max_seq_length, as run_glue does; false: to the longest of "
        "its batch. Unset: to a few lengths that the rows ask for (length_buckets).",
    )
    max_train_samples: int | None = option(None, "Learn from this many rows only, the first.")
    max_eval_samples: int | None = option(None, "Evaluate this many rows only, the first.")
    max_predict_samples: int | None = option(None, "Predict this many rows only, the first.")
    train_file: str | None = option(None, "csv, tsv, json or parquet file to learn from, or .gz.")
    validation_file: str | None = option(None, "File of the same columns to evaluate.")
    test_file: str | None = option(None, "File to predict.")
    validation_mismatched_file: str | None = option(None, "MNLI's second file to evaluate.")
    test_mismatched_file: str | None = option(None, "MNLI's second file to predict.")

    def __post_init__(self) -> None:
        if self.task_name is not None:
            self.task_name = _known_task(self.task_name)
        _check_length(self.max_seq_length)
        for name in ("max_train_samples", "max_eval_samples", "max_predict_samples"):
            _check_count(name, getattr(self, name))
        for path in self.files.values():
            kind_of(path)
        self._check_sources()

    def _check_sources(self) -> None:
        if self.files and self.dataset_name:
            raise BadInput(
                f"Cannot use both --dataset_name and --{next(iter(self.files))}.",
                why="the rows come from a data set or from files.",
                fix="leave one of them out.",
            )
        if not (self.files or self.dataset_name or self.task_name):
            raise BadInput(
                "No data was named.",
                why="none of --task_name, --dataset_name, --train_file, --validation_file and "
                "--test_file is given.",
                fix="pass --task_name mrpc, or --train_file train.csv --validation_file dev.csv.",
            )
        second = [name for name in self.files if "mismatched" in name]
        if second and self.task_name != "mnli":
            raise BadInput(
                f"Cannot use --{second[0]} here.",
                why="MNLI alone has a second set to evaluate and predict.",
                fix="pass --task_name mnli, or leave it out.",
            )

    @property
    def files(self) -> dict[str, str]:
        """The files that were named, by option."""
        names = ("train_file", "validation_file", "test_file")
        more = ("validation_mismatched_file", "test_mismatched_file")
        return {name: path for name in (*names, *more) if (path := getattr(self, name)) is not None}

    @property
    def task(self) -> GlueTask | None:
        """The GLUE task, if there is one."""
        return TASKS[self.task_name] if self.task_name else None


@dataclass(frozen=True, slots=True)
class GlueJob:
    """Everything a command asks for, checked."""

    model: ModelArguments
    data: DataTrainingArguments
    training: TrainingArguments

    @property
    def folder(self) -> Path:
        """Where the results go."""
        return Path(str(self.training.output_dir))

    def settings(self) -> dict[str, Any]:
        """Return what defines the run, as plain values; a file counts by its content."""
        training = self.training.to_dict()
        found = {name: getattr(self.model, name) for name in _DEFINING_MODEL}
        found |= {name: getattr(self.data, name) for name in _DEFINING_DATA}
        found |= {name: training.get(name) for name in _DEFINING_TRAINING}
        if self.data.train_file:
            with open(self.data.train_file, "rb") as content:
                digest = hashlib.file_digest(content, "sha256")
            name = Path(self.data.train_file).name
            found["train_file"] = f"{name} (sha256 {digest.hexdigest()[:16]})"
        for name in ("model_name_or_path", "config_name", "tokenizer_name"):
            if found[name] and Path(found[name]).is_dir():
                found[name] = str(Path(found[name]).resolve())
        return found


class _Parser(HfArgumentParser):
    """The parser of this command: its errors are ours."""

    def error(self, message: str) -> Any:
        """Raise, so that the command says it as it says everything else."""
        why = self._in_words(message)
        raise BadInput(
            "Cannot read the options of `anytrain glue`.",
            why=why if why.endswith("?") else f"{why}.",
            fix="`anytrain glue --help` lists them.",
        )


def parser() -> HfArgumentParser:
    """Return the parser of all options."""
    made = _Parser((ModelArguments, DataTrainingArguments, TrainingArguments))
    # run_glue pads unless told not to, and has this word for it.
    no = ("--no_pad_to_max_length", "--no-pad-to-max-length")
    made.add_argument(*no, action="store_false", dest="pad_to_max_length", default=None)
    return made


def parse(argv: Sequence[str]) -> GlueJob:
    """Return the job that the options ask for, or refuse it; loads no model and no data.

    A first argument that ends in .json or .yaml is a file with options; those behind it win.
    """
    model, data, training = parser().parse_args_into_dataclasses(args=list(argv))
    _choose_precision(training)
    _choose_buckets(training, data)
    training.check()
    job = GlueJob(model, data, training)
    _check_work(job)
    return job


def _choose_precision(training: TrainingArguments) -> None:
    """Take bfloat16 where the device is faster in it, unless somebody chose: a no is a choice."""
    chosen = training.is_told("bf16") or training.is_told("fp16") or training.precision
    if not chosen and environment.read().wishes.precision is None:
        training.precision = "auto"


def _choose_buckets(training: TrainingArguments, data: DataTrainingArguments) -> None:
    """Pad to a few lengths, unless somebody chose how rows are padded or ordered."""
    if data.pad_to_max_length and training.length_buckets is not None:
        raise BadInput(
            "Cannot use --pad_to_max_length with --length_buckets.",
            why="one pads every row to one length, the other to one of a few.",
            fix="pass one of them.",
        )
    chosen = data.pad_to_max_length is not None or training.length_buckets is not None
    if not chosen and training.train_sampling_strategy == "random":
        training.length_buckets = "auto"


def _check_work(job: GlueJob) -> None:
    training, data = job.training, job.data
    if not (training.do_train or training.do_eval or training.do_predict):
        raise BadInput(
            "There is nothing to do.",
            why="none of --do_train, --do_eval and --do_predict is given.",
            fix="pass --do_train --do_eval.",
        )
    for part, split in (("train", "train"), ("eval", "validation"), ("predict", "test")):
        asked = getattr(training, f"do_{part}")
        if data.files and asked and f"{split}_file" not in data.files:
            raise BadInput(
                f"Cannot {part if part != 'eval' else 'evaluate'}: --{split}_file is missing.",
                why=f"the rows come from files here: {', '.join(data.files.values())}.",
                fix=f"pass --{split}_file, or leave out --do_{part}"
                f"{' and --eval_strategy' if part == 'eval' else ''}.",
            )
    _check_model_folder(job)


def _check_model_folder(job: GlueJob) -> None:
    """Refuse to train over the model that is begun with."""
    start = Path(job.model.model_name_or_path or "")
    if not (job.training.do_train and job.model.model_name_or_path and start.is_dir()):
        return
    inside = job.folder.resolve() in (start.resolve(), *start.resolve().parents)
    if inside and not job.training.resume_from_checkpoint:
        raise BadInput(
            f"Cannot train {str(start)!r} into {str(job.folder)!r}.",
            why="the results would replace the model that is begun with.",
            fix="choose another --output_dir.",
        )


def overrides(text: str | None) -> dict[str, str]:
    """Return the values that --config_overrides names, still as texts.

    >>> overrides("hidden_size=64, num_hidden_layers=2")
    {'hidden_size': '64', 'num_hidden_layers': '2'}
    """
    return dict(_pairs(text)) if text else {}


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not (name and equals and value):
            raise BadInput(
                f"Cannot read --config_overrides {text!r}.",
                why=f"{part.strip()!r} is not a name, '=' and a value.",
                fix="write --config_overrides hidden_size=64,num_hidden_layers=2.",
            )
        yield name, value


def _check_place(name: str | None) -> None:
    """Refuse a path that leads nowhere: the hub would be asked for it, and wait."""
    looks_local = name is not None and (name.startswith(("/", "./", "../", "~")))
    if name is not None and looks_local and not Path(name).exists():
        raise BadInput(
            f"Cannot find {name!r}.",
            why="there is no such folder.",
            fix="give the folder of a model that save_pretrained wrote, or a name on the hub.",
        )


def _known_task(name: str) -> str:
    if name.lower() in TASKS:
        return name.lower()
    fix = "pass one of these, or your own files with --train_file and --validation_file."
    raise unknown("task", name, TASKS, fix=fix)


def _check_length(length: int) -> None:
    if not 0 < length <= _LONGEST:
        raise BadInput(
            f"Cannot use --max_seq_length {length}.",
            why="it is a number of tokens, and models read some hundreds or thousands of them.",
            fix="pass --max_seq_length 128, or the length of your texts.",
        )


def _check_count(name: str, count: int | None) -> None:
    if count is not None and count < 1:
        raise BadInput(
            f"Cannot use --{name} {count}.",
            why="it is a number of rows.",
            fix=f"pass --{name} 1 or more, or leave it out to take every row.",
        )
