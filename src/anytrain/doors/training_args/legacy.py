"""Names of transformers 4.x that people still paste, and what becomes of each.

After construction such a field is None again: its value lives where it was moved to, so that
`dataclasses.replace` and a second construction from `to_dict` neither move it twice nor clash.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from anytrain.core.errors import BadInput, Unsupported
from anytrain.core.notices import notify_caller
from anytrain.doors.training_args.fields import Fields, flag, option

Kind = Literal["works", "replaced", "no_effect", "refused"]
_OLD = "An old name; docs/arguments.md says what became of it."


@dataclass
class OldFields:
    """What a run could be told in transformers 4.x."""

    overwrite_output_dir: bool = option(False, "Start anew in a folder that holds another run.")
    logging_dir: str | None = option(None, "Where TensorBoard's files go; unset: output_dir/runs.")

    evaluation_strategy: str | None = option(None, _OLD)
    evaluate_during_training: bool | None = flag(_OLD)
    per_gpu_train_batch_size: int | None = option(None, _OLD)
    per_gpu_eval_batch_size: int | None = option(None, _OLD)
    warmup_ratio: float | None = option(None, _OLD)
    group_by_length: bool | None = flag(_OLD)
    adafactor: bool | None = flag(_OLD)
    no_cuda: bool | None = flag(_OLD)
    use_mps_device: bool | None = flag(_OLD)
    save_safetensors: bool | None = flag(_OLD)
    fp16_backend: str | None = option(None, _OLD)
    half_precision_backend: str | None = option(None, _OLD)
    fp16_opt_level: str | None = option(None, _OLD)
    torchdynamo: str | None = option(None, _OLD)
    jit_mode_eval: bool | None = flag(_OLD)
    use_ipex: bool | None = flag(_OLD)
    xpu_backend: str | None = option(None, _OLD)
    tpu_num_cores: int | None = option(None, _OLD)
    tpu_metrics_debug: bool | None = flag(_OLD)
    past_index: int | None = option(None, _OLD)
    ray_scope: str | None = option(None, _OLD)
    use_legacy_prediction_loop: bool | None = flag(_OLD)
    include_inputs_for_metrics: bool | None = flag(_OLD)
    include_tokens_per_second: bool | None = flag(_OLD)
    dispatch_batches: bool | None = flag(_OLD)
    split_batches: bool | None = flag(_OLD)
    push_to_hub_model_id: str | None = option(None, _OLD)
    push_to_hub_organization: str | None = option(None, _OLD)
    push_to_hub_token: str | None = field(default=None, repr=False, metadata={"help": _OLD})
    model_parallel: bool | None = flag(_OLD)
    sharded_ddp: str | None = option(None, _OLD)
    fsdp_min_num_params: int | None = option(None, _OLD)
    fsdp_transformer_layer_cls_to_wrap: str | None = option(None, _OLD)
    mp_parameters: str | None = option(None, _OLD)


@dataclass(frozen=True, slots=True)
class Moved:
    """The argument has another name now; values in `silent` ask for nothing."""

    kind: ClassVar[Kind] = "replaced"
    new: str
    note: str
    convert: Callable[[Any], Any] = lambda value: value
    silent: tuple[Any, ...] = (False,)

    def answer(self, args: Any, name: str, value: Any) -> None:
        """Give the value to the new argument, unless that one says something else."""
        target = self.convert(value)
        now = getattr(args, self.new)
        if now not in (_default(self.new), target):
            raise BadInput(
                f"Cannot take {name}={value!r} and {self.new}={now!r} together.",
                why=f"{name} is the old name of {self.new}, and they disagree.",
                fix=f"drop {name}.",
            )
        setattr(args, self.new, target)
        notify_caller(f"{name} is an old name: taken as {self.new}={shown(name, target)!r}.")


@dataclass(frozen=True, slots=True)
class Gone:
    """The argument has nothing left to change."""

    kind: ClassVar[Kind] = "no_effect"
    note: str
    silent: tuple[Any, ...] = (False,)

    def answer(self, args: Any, name: str, value: Any) -> None:
        """Say so."""
        notify_caller(f"{name}={value!r} changes nothing: {self.note}.")


@dataclass(frozen=True, slots=True)
class Refused:
    """The argument asks for what anytrain does not do; values in `silent` do not ask."""

    kind: ClassVar[Kind] = "refused"
    note: str
    fix: str
    silent: tuple[Any, ...] = (False,)

    def answer(self, args: Any, name: str, value: Any) -> None:
        """Refuse it."""
        raise Unsupported(f"anytrain does not do {name}={value!r}.", why=self.note, fix=self.fix)


@dataclass(frozen=True, slots=True)
class Custom:
    """The argument is answered by a function of its own."""

    kind: ClassVar[Kind] = "replaced"
    note: str
    how: Callable[[Any, str, Any], None]
    silent: tuple[Any, ...] = (False,)

    def answer(self, args: Any, name: str, value: Any) -> None:
        """Do what the function says."""
        self.how(args, name, value)


Rule = Moved | Gone | Refused | Custom


def shown(name: str, value: Any) -> Any:
    """Return the value, or a word in its place where it is a secret."""
    return f"<{name.upper()}>" if name.endswith("_token") else value


def _default(name: str) -> Any:
    return next(f.default for f in fields(Fields) if f.name == name)


def _warmup(args: Any, name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise BadInput(
            f"Cannot use warmup_ratio={value}.",
            why="it is the share of the steps that warm up, from 0 to 1.",
            fix="pass warmup_steps=0.1 for a tenth of the steps, or warmup_steps=100 for 100.",
        )
    # 1 would be read as one step; the number just below it rounds up to every step.
    share = math.nextafter(1.0, 0.0) if value == 1 else value
    if args.warmup_steps not in (0, share):
        raise BadInput(
            f"Cannot warm up by warmup_ratio={value} and warmup_steps={args.warmup_steps}.",
            why="they disagree.",
            fix="pass warmup_steps alone: below 1 it is a share of all steps.",
        )
    args.warmup_steps = share
    notify_caller(
        f"warmup_ratio is an old name: taken as warmup_steps={value}, a share of all steps."
    )


def _organization(args: Any, name: str, value: str) -> None:
    model = args.hub_model_id or Path(args.output_dir).name
    if "/" in model and not model.startswith(f"{value}/"):
        raise BadInput(
            f"Cannot push {model} to the organization {value}.",
            why="the repository's name already names another owner.",
            fix=f"pass hub_model_id='{value}/<name>' alone.",
        )
    args.hub_model_id = model if "/" in model else f"{value}/{model}"
    notify_caller(f"{name} is an old name: taken as hub_model_id={args.hub_model_id!r}.")


def _inputs(args: Any, name: str, value: bool) -> None:
    args.include_for_metrics = [*args.include_for_metrics]
    if "inputs" not in args.include_for_metrics:
        args.include_for_metrics.append("inputs")
    notify_caller(f"{name} is an old name: taken as include_for_metrics=['inputs'].")


def _tokens(args: Any, name: str, value: bool) -> None:
    if args.include_num_input_tokens_seen in ("no", False):
        args.include_num_input_tokens_seen = "all"
    seen = args.include_num_input_tokens_seen
    notify_caller(f"{name} is an old name: taken as include_num_input_tokens_seen={seen!r}.")


def _loaders(args: Any, name: str, value: bool) -> None:
    config = args.accelerator_config
    if getattr(config, name) not in (None, False, value):
        raise BadInput(
            f"Cannot take {name}={value!r} and {getattr(config, name)!r} in accelerator_config.",
            why="they disagree.",
            fix=f"drop {name}.",
        )
    args.accelerator_config = type(config)(**{**config.to_dict(), name: value})
    notify_caller(f"{name} is an old name: taken as accelerator_config={{{name!r}: {value!r}}}.")


_SHARDED = "anytrain replicates the model on every process (DDP) and does not shard it."
_SMALLER = "drop it; use gradient checkpointing, bf16, a smaller batch with accumulation, or LoRA."
_AMP = ("auto", "amp", "cuda_amp", "cpu_amp")
_APEX = "apex is not used: torch's own autocast computes in fp16."

RULES: dict[str, Rule] = {
    "evaluation_strategy": Moved("eval_strategy", "eval_strategy", str.lower, silent=()),
    "evaluate_during_training": Moved(
        "eval_strategy", 'eval_strategy="steps"', lambda value: "steps"
    ),
    "per_gpu_train_batch_size": Moved(
        "per_device_train_batch_size", "per_device_train_batch_size", silent=()
    ),
    "per_gpu_eval_batch_size": Moved(
        "per_device_eval_batch_size", "per_device_eval_batch_size", silent=()
    ),
    "warmup_ratio": Custom("warmup_steps, which takes a share below 1", _warmup, silent=(0,)),
    "group_by_length": Moved(
        "train_sampling_strategy",
        'train_sampling_strategy="group_by_length"',
        lambda value: "group_by_length",
    ),
    "adafactor": Moved("optim", 'optim="adafactor"', lambda value: "adafactor"),
    "no_cuda": Moved("use_cpu", "use_cpu"),
    "use_mps_device": Gone(
        "it is no longer needed, the best device of the machine is taken by itself"
    ),
    "save_safetensors": Refused(
        "weights are written as safetensors: a pickle can run code when it is loaded.",
        "drop it; torch.save(model.state_dict(), path) writes a pickle of your own.",
        silent=(True,),
    ),
    "fp16_backend": Refused(_APEX, "drop it.", silent=_AMP),
    "half_precision_backend": Refused(_APEX, "drop it.", silent=_AMP),
    "fp16_opt_level": Gone("it was apex's, and torch's own autocast is used", silent=("O1",)),
    "torchdynamo": Moved("torch_compile_backend", "torch_compile_backend", silent=("",)),
    "jit_mode_eval": Refused("models are not traced by torch.jit.", "pass torch_compile=True."),
    "use_ipex": Refused(
        "Intel's extension is not used: torch itself has its kernels.",
        "drop it; bf16=True computes in bfloat16.",
    ),
    "xpu_backend": Moved("ddp_backend", "ddp_backend", silent=()),
    "tpu_num_cores": Gone(
        "the launcher says how many: `anytrain launch --tpu --num_processes N`", silent=()
    ),
    "tpu_metrics_debug": Refused("torch_xla's counters are not printed.", "drop it."),
    "past_index": Refused(
        "a model's past states are not fed back into it.",
        "override compute_loss in a subclass of Trainer.",
        silent=(-1,),
    ),
    "ray_scope": Refused(
        "hyperparameter search runs on optuna, not on Ray.", "drop it.", silent=("last",)
    ),
    "use_legacy_prediction_loop": Gone("there is one evaluation loop"),
    "include_inputs_for_metrics": Custom('include_for_metrics=["inputs"]', _inputs),
    "include_tokens_per_second": Custom('include_num_input_tokens_seen="all"', _tokens),
    "dispatch_batches": Custom('accelerator_config={"dispatch_batches": ...}', _loaders, silent=()),
    "split_batches": Custom('accelerator_config={"split_batches": ...}', _loaders),
    "push_to_hub_model_id": Moved("hub_model_id", "hub_model_id", silent=()),
    "push_to_hub_organization": Custom("hub_model_id, as owner/name", _organization, silent=()),
    "push_to_hub_token": Moved("hub_token", "hub_token", silent=()),
    "model_parallel": Refused("a model is not spread over devices.", _SMALLER),
    "sharded_ddp": Refused(_SHARDED, _SMALLER, silent=("", "[]", [])),
    "fsdp_min_num_params": Refused(_SHARDED, _SMALLER, silent=(0,)),
    "fsdp_transformer_layer_cls_to_wrap": Refused(_SHARDED, _SMALLER, silent=("",)),
    "mp_parameters": Refused("SageMaker's model parallelism is not used.", _SMALLER, silent=("",)),
}


def settle(args: Any) -> None:
    """Answer every old name that was given, and leave it unset."""
    for name in RULES:
        answer(args, name)


def answer(args: Any, name: str) -> None:
    """Answer one old name, if it was given, and leave it unset."""
    value = getattr(args, name)
    if value is None:
        return
    setattr(args, name, None)
    rule = RULES[name]
    # True == 1 in Python: a number does not stand for a yes.
    if not any(value == word and _is_flag(value) == _is_flag(word) for word in rule.silent):
        rule.answer(args, name, value)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)
