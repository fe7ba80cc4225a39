"""The known name that somebody meant: what other tools call it, else what is spelt most alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Self

from anytrain.core.errors import BadInput, BadType

# A name here: what tools elsewhere, or people in a hurry, call it.
_ELSEWHERE = {
    "per_device_train_batch_size": "batch_size train_batch_size per_device_batch_size bs "
    "micro_batch_size train_micro_batch_size_per_gpu",
    "per_device_eval_batch_size": "eval_batch_size test_batch_size val_batch_size "
    "validation_batch_size",
    "batch_size": "per_device_train_batch_size train_batch_size bs",
    "learning_rate": "lr",
    "num_train_epochs": "epochs epoch num_epochs n_epochs max_epochs train_epochs nb_epochs",
    "epochs": "num_train_epochs num_epochs n_epochs max_epochs",
    "max_steps": "steps num_steps train_steps num_train_steps max_train_steps total_steps "
    "num_training_steps",
    "gradient_accumulation_steps": "accumulation_steps accumulation grad_accum grad_accum_steps "
    "grad_accumulation_steps gradient_accumulation accumulate_grad_batches",
    "lr_scheduler_type": "scheduler lr_scheduler lr_schedule schedule scheduler_type "
    "lr_scheduler_name",
    "warmup_steps": "warmup num_warmup_steps warm_up warm_up_steps",
    "optim": "optimizer optimizer_name opt",
    "optim_args": "optimizer_args optimizer_kwargs optim_kwargs",
    "max_grad_norm": "clip grad_clip clip_grad clip_grad_norm gradient_clipping gradient_clip_val "
    "max_gradient_norm",
    "weight_decay": "wd decay",
    "adam_epsilon": "eps epsilon adam_eps",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "eval_steps": "evaluation_steps eval_every eval_interval evaluate_every val_check_interval",
    "eval_strategy": "evaluation eval_mode",
    "logging_steps": "log_steps log_every log_interval logging_interval print_every "
    "log_every_n_steps",
    "save_steps": "save_every save_interval checkpoint_steps checkpointing_steps",
    "save_total_limit": "max_checkpoints keep_last total_limit checkpoints_total_limit",
    "total_limit": "save_total_limit max_checkpoints",
    "load_best_model_at_end": "load_best save_best restore_best_weights",
    "metric_for_best_model": "best_metric monitor",
    "dataloader_num_workers": "num_workers workers loader_workers",
    "dataloader_pin_memory": "pin_memory",
    "dataloader_drop_last": "drop_last",
    "seed": "random_seed random_state manual_seed",
    "mixed_precision": "precision amp dtype torch_dtype bf16 fp16",
    "precision": "mixed_precision amp dtype torch_dtype",
    "torch_compile": "compile",
    "gradient_checkpointing": "activation_checkpointing_enable grad_checkpointing",
    "report_to": "log_with logger loggers tracker trackers",
    "log_with": "report_to logger loggers tracker trackers",
    "output_dir": "output out out_dir output_path output_folder save_dir checkpoint_dir work_dir",
    "output": "output_dir out out_dir output_path output_folder",
    "project_dir": "output_dir out_dir save_dir project_folder",
    "resume_from_checkpoint": "resume checkpoint ckpt ckpt_path load_checkpoint",
    "use_cpu": "cpu",
    "cpu": "use_cpu",
    "kwargs_handlers": "handlers kwargs",
    "label_smoothing_factor": "label_smoothing",
    "model_name_or_path": "model model_name model_path",
    "task_name": "task",
    "dataset_name": "dataset data",
    "train_file": "train_data train_path",
    "validation_file": "valid_file val_file dev_file eval_file",
    "max_seq_length": "max_length max_len max_seq_len seq_length seq_len",
    "train_dataset": "dataset train_data training_dataset data",
    "eval_dataset": "val_dataset valid_dataset validation_dataset test_dataset eval_data",
    "data_collator": "collator collate_fn collate",
    "processing_class": "processor feature_extractor",
    "compute_metrics": "metrics metric",
    "callbacks": "callback",
    "num_processes": "nproc nproc_per_node num_procs processes num_gpus gpus devices num_workers "
    "np world_size",
    "num_machines": "nnodes num_nodes nodes machines",
    "machine_rank": "node_rank node",
    "main_process_ip": "master_addr master_address rdzv_endpoint",
    "main_process_port": "master_port port",
    "gpu_ids": "gpu gpu_id device_ids cuda_visible_devices",
    "multi_gpu": "gpu cuda",
    "config_file": "config",
    # commands
    "launch": "run start torchrun exec",
    "glue": "train classify finetune fine_tune text run_glue",
    "env": "info doctor machine devices system hardware",
    "test": "selftest check",
    "why": "profile slow time",
    "report": "html page summary",
    "diff": "compare",
    "watch": "follow monitor tail status",
    "checkpoint": "checkpoints ckpt",
    "bench": "benchmark",
    "list": "ls",
    "prune": "rm remove delete clean",
    "verify": "check",
    # words that an argument may be
    "adamw_torch": "adamw adam torch_adamw",
    "linear": "linear_with_warmup linear_schedule_with_warmup warmup_linear",
    "cosine": "cosine_with_warmup cosine_annealing",
    "reduce_lr_on_plateau": "plateau",
    "bf16": "bfloat16 16_bf16 bf16_mixed half",
    "fp16": "float16 16 16_mixed f16",
    "no": "none off never false fp32 float32 full 32",
    "steps": "every_n_steps",
    "epoch": "every_epoch",
    "tensorboard": "tb tensorboardx",
    "wandb": "weights_and_biases",
    "jsonl": "json",
}
_MEANT: dict[str, list[str]] = {}
for _name, _others in _ELSEWHERE.items():
    for _other in _others.split():
        _MEANT.setdefault(_other, []).append(_name)


def nearest(word: str, known: Iterable[str], *, alike: float = 0.6) -> str | None:
    """Return the known word that was meant by this one, or None.

    `alike` is how much of two words must agree, from 0 to 1, where the spelling decides.

    >>> nearest("cosin", ["linear", "cosine"]), nearest("lr", ["learning_rate", "lr_end"])
    ('cosine', 'learning_rate')
    """
    words = list(known)
    plain = word.lower().replace("-", "_")
    spelt = {each.replace("-", "_"): each for each in reversed(words)}  # the first spelling
    if plain in spelt:
        return spelt[plain]
    meant = next((spelt[name] for name in _MEANT.get(plain, ()) if name in spelt), None)
    if meant is not None:
        return meant
    near = get_close_matches(word.replace("-", "_"), spelt, n=1, cutoff=alike)
    return spelt[near[0]] if near else None


def unknown(
    what: str,
    value: object,
    known: Iterable[str],
    *,
    source: str = "",
    fix: str = "pass one of these.",
) -> BadInput:
    """Return the refusal of a word that is not among the known ones.

    `source` says where it was asked for; `fix` is for a word that is like none of them.
    """
    words = list(known)
    near = nearest(str(value), words)
    return BadInput(
        f"Unknown {what} {value!r}{source and f' ({source})'}.",
        why=f"the known ones are {', '.join(map(repr, words))}.",
        fix=f"did you mean {near!r}?" if near else fix,
    )


class NamedArguments:
    """A class whose arguments, where one is given that it does not take, are named with a guess."""

    _not_suggested = frozenset[str]()

    def __new__(cls, *given: Any, **named: Any) -> Self:
        """Make an instance; refuse what `__init__` would refuse in fewer words."""
        if named:
            _check(cls, named)
        return super().__new__(cls)


def _check(kind: type[NamedArguments], named: Iterable[str]) -> None:
    init: Callable[..., Any] = kind.__init__
    taken = _taken(init)
    wrong = [name for name in named if name not in taken] if taken else []
    if not wrong:
        return
    known = [name for name in taken if name not in kind._not_suggested]
    near = {name: found for name in wrong if (found := nearest(name, known))}
    raise BadType(
        f"{kind.__name__}() got an unexpected keyword argument {' and '.join(map(repr, wrong))}.",
        why="it has no argument of that name.",
        fix="; ".join(f"{name}: did you mean {found}?" for name, found in near.items())
        or f"leave it out; help({kind.__name__}) lists the arguments.",
    )


@lru_cache(maxsize=64)
def _taken(init: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names that a class's arguments have; none where it takes any name."""
    _, *parameters = inspect.signature(init).parameters.values()
    is_open = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return () if is_open else tuple(each.name for each in parameters)
