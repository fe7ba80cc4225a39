"""What every argument does here: one table, from which docs/arguments.md is made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from anytrain.core.errors import Unsupported
from anytrain.doors.training_args import legacy
from anytrain.doors.training_args.fields import RUNNING, DebugOption, Fields, OptimizerNames

Kind = legacy.Kind


@dataclass(frozen=True, slots=True)
class Support:
    """Whether an argument works, was replaced, changes nothing, or is refused; and a note."""

    kind: Kind
    note: str = ""
    fix: str = ""


def works(note: str = "") -> Support:
    """Return the answer for an argument that does what its help says."""
    return Support("works", note)


def refused(why: str, fix: str) -> Support:
    """Return the answer for an argument that may only keep its default."""
    return Support("refused", why, fix)


_SHARDED = "anytrain replicates the model on every process (DDP) and does not shard it."
_SMALLER = "drop it; use gradient checkpointing, bf16, a smaller batch with accumulation, or LoRA."
_LIGER = "anytrain does not patch a model's kernels."
_UNPATCHED = "drop it; apply Liger's kernels to the model yourself before you hand it over."
_SCRIPT = "`anytrain glue` reads it too; a trainer's methods do not look at it."

NOTES: dict[str, Support] = {
    "output_dir": works(
        'Unset: "trainer_output". A run that does not resume moves checkpoints that an earlier one '
        "left there to output_dir/earlier-1, and says how much they take; overwrite_output_dir "
        "removes them, earlier_total_limit caps how many such folders stay."
    ),
    "num_train_epochs": works("0 trains no step."),
    "max_steps": works("0 and below: num_train_epochs counts."),
    "optim": works(
        "adamw_torch, adamw_torch_fused (fused where the device has it), adafactor, sgd, adagrad "
        "and rmsprop run; those of other libraries are refused by name."
    ),
    "optim_target_modules": refused(
        "it is for GaLore and APOLLO, which anytrain does not have.", "drop it; use LoRA."
    ),
    "average_tokens_across_devices": works(
        "Always so: the loss of a step is the mean over its items on all ranks. False is refused "
        "with several processes."
    ),
    "dataloader_drop_last": works(
        "In training alone: evaluation and prediction see every sample, where HF drops there too."
    ),
    "precision": works("anytrain's own; bf16=True and fp16=True are its HF spellings."),
    "bf16": works('The same as precision="bf16".'),
    "fp16": works('The same as precision="fp16".'),
    "use_liger_kernel": refused(_LIGER, _UNPATCHED),
    "liger_kernel_config": refused(_LIGER, _UNPATCHED),
    "logging_nan_inf_filter": works(
        "Always so: such a step stops the run or is counted as skipped_steps (see on_nonfinite)."
    ),
    "report_to": works(
        "It can be tensorboard, wandb, mlflow, trackio, jsonl and csv; others are refused by name. "
        "output_dir/metrics.jsonl is written in any case."
    ),
    "trackio_static_space_id": refused(
        "a read-only Space is not made when training ends.",
        "drop it; trackio.freeze(...) makes one of a run's Space.",
    ),
    "eval_use_gather_object": works(
        "True is refused with several processes: tensors are gathered, of unlike lengths too."
    ),
    "eval_accumulation_steps": works("Always as if 1: predictions leave the device by batch."),
    "enable_jit_checkpoint": works("Every run already does: see save_on_signal."),
    "save_total_limit": works("Unset, or below 1, keeps all."),
    "save_strategy": works('"best" needs an eval_strategy and a metric_for_best_model.'),
    "accelerator_config": works("A run with use_configured_state is refused."),
    "parallelism_config": refused(
        "anytrain has one kind of parallelism, data parallel, and picks it by itself.", "drop it."
    ),
    "fsdp": refused(_SHARDED, _SMALLER),
    "fsdp_config": refused(_SHARDED, _SMALLER),
    "deepspeed": refused(_SHARDED + " DeepSpeed brings an engine of its own.", _SMALLER),
    "debug": works("tpu_metrics_debug is refused."),
    "do_train": works(_SCRIPT),
    "do_eval": works(_SCRIPT + " Set by an eval_strategy."),
    "do_predict": works(_SCRIPT),
    "resume_from_checkpoint": works(
        "A folder, true for the newest whole checkpoint, auto for that one or the start. For the "
        "first train() that is not told otherwise; HF leaves it to scripts. Unset: "
        "ANYTRAIN_RESUME_FROM_CHECKPOINT, which `anytrain launch --resume_from_checkpoint` sets."
    ),
    "restore_callback_states_from_checkpoint": works(
        "Without it too, a callback that is made with the same arguments goes on from its saved "
        "state (a count of early stopping), so that a resumed run is the uninterrupted one."
    ),
    "local_rank": works("What is passed changes nothing: the launcher's LOCAL_RANK is shown here."),
    "step_engine": works(
        "anytrain's own: auto, eager or cuda_graph; auto records steps on CUDA where it can."
    ),
    "on_nonfinite": works("anytrain's own: stop, skip or rewind."),
    "trim_padding": works(
        "anytrain's own. Where it does so, and where it does not: docs/speed.md."
    ),
    "length_buckets": works(
        "anytrain's own: auto chooses up to 8 lengths from the training data, a number that many. "
        "Batches are of one length each; `anytrain glue` takes auto by itself."
    ),
    "activation_checkpointing": works(
        "anytrain's own: with fit, every other repeated block, then all of them, are computed "
        "again in backward once the memory is full, before auto_find_batch_size cuts the batch."
    ),
    "packing": works(
        "anytrain's own: in training, rows lie one after the other in a single long one, and are "
        "computed as if apart. Refused where the model's attention would mix them."
    ),
    "async_save": works("anytrain's own. What a kill may cost: docs/guides/resume.md."),
    "earlier_total_limit": works(
        "anytrain's own. The checkpoints in older ones are removed when a new one is made; "
        "anything else in them stays."
    ),
    "save_on_signal": works("anytrain's own."),
    "ddp_find_unused_parameters": works(
        "Unset: the first steps tell whether any go unused (False with gradient_checkpointing)."
    ),
    "use_cpu": works("Without it the best device is taken: tpu, xla, cuda, mps, cpu."),
    "ddp_backend": works("nccl and gloo; torch refuses what it was not built with."),
    "overwrite_output_dir": works("A name of 4.x that still means something here."),
    "logging_dir": works("A name of 4.x that still means something here."),
}

_BITSANDBYTES = "it is bitsandbytes' optimizer, whose quantized state anytrain does not keep."
_OTHERS: dict[str, str] = {
    "adamw_torch_xla": "it is torch_xla's own; AdamW runs on XLA devices without it.",
    "adamw_torch_npu_fused": "it is for Ascend NPUs, which anytrain has no backend for.",
    "adamw_anyprecision": "it is torchdistx's, which is no longer maintained.",
    "adamw_torch_4bit": "it is torchao's, whose quantized state anytrain does not keep.",
    "adamw_torch_8bit": "it is torchao's, whose quantized state anytrain does not keep.",
    "grokadamw": "it is another library's (grokadamw).",
    "stable_adamw": "it is another library's (torch-optimi).",
}
_FAMILIES = {
    "galore": "GaLore projects gradients inside its own optimizer, which anytrain does not have.",
    "apollo": "APOLLO projects gradients inside its own optimizer, which anytrain does not have.",
    "lomo": "LOMO updates inside backward, where no gradient can be checked or clipped.",
    "schedule_free": "it must be told when evaluation begins, which is not done here.",
}


def refuse(args: Any) -> None:
    """Refuse the first argument that asks for what anytrain does not do."""
    for name, support in NOTES.items():
        value = getattr(args, name)
        if support.kind == "refused" and value not in (None, False, "", [], {}):
            raise Unsupported(
                f"anytrain does not do {name}={value!r}.", why=support.note, fix=support.fix
            )
    _refuse_optimizer(args.optim)
    _refuse_words(args)


def _refuse_optimizer(name: OptimizerNames) -> None:
    if name in RUNNING:
        return
    why = _OTHERS.get(name) or next(
        (text for part, text in _FAMILIES.items() if part in name), _BITSANDBYTES
    )
    raise Unsupported(
        f"anytrain does not do optim={str(name)!r}.",
        why=why,
        fix=f"pass optim= one of {', '.join(RUNNING)}; or hand your own optimizer to the trainer: "
        "Trainer(optimizers=(optimizer, None)).",
    )


def _refuse_words(args: Any) -> None:
    if DebugOption.TPU_METRICS_DEBUG in args.debug:
        raise Unsupported(
            "anytrain does not do debug='tpu_metrics_debug'.",
            why="torch_xla's counters are not printed.",
            fix='drop it, or pass debug="underflow_overflow".',
        )


SEQ2SEQ: dict[str, Support] = {
    "sortish_sampler": Support(
        "no_effect",
        "it was for data sets that are gone; train_sampling_strategy='group_by_length' brings "
        "samples of like length together.",
    ),
    "predict_with_generate": works(),
    "generation_max_length": works("Unset: the model's own."),
    "generation_num_beams": works("Unset: the model's own."),
    "generation_config": works(),
}

# Where a default is not that of transformers 5.22; each with its date and reason.
DIFFERENCES = {
    "logging_nan_inf_filter": "2026-11: such a step is never hidden; see on_nonfinite.",
}


def table() -> dict[str, Support]:
    """Return the answer for every argument of every run by name, the old names last."""
    names = [f.name for f in (*fields(Fields), *fields(legacy.OldFields))]
    answers = {name: NOTES.get(name, works()) for name in names}
    for name, rule in legacy.RULES.items():
        answers[name] = Support(rule.kind, rule.note, getattr(rule, "fix", ""))
    return answers
