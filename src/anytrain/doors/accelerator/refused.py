"""What HF Accelerate has and anytrain does not, each with why and what to do instead."""

from __future__ import annotations

from typing import Any

from anytrain.core.errors import Unsupported

_SHARDED = "anytrain replicates the model on every process (DDP) and does not shard it."
_FIX_SHARDED = (
    "drop the argument; for a model that does not fit, use gradient checkpointing, bf16, a smaller "
    "micro-batch with gradient_accumulation_steps, or LoRA."
)
REASONS: dict[str, tuple[str, str]] = {
    "deepspeed_plugin": (_SHARDED + " DeepSpeed brings an engine of its own.", _FIX_SHARDED),
    "deepspeed_plugins": (_SHARDED + " DeepSpeed brings an engine of its own.", _FIX_SHARDED),
    "fsdp_plugin": (_SHARDED, _FIX_SHARDED),
    "torch_tp_plugin": (_SHARDED, _FIX_SHARDED),
    "megatron_lm_plugin": (
        _SHARDED + " Megatron-LM brings models and an engine of its own.",
        _FIX_SHARDED,
    ),
    "parallelism_config": (
        "anytrain has one kind of parallelism, data parallel, and picks it by itself.",
        "drop the argument.",
    ),
    "fp8": (
        "fp8 needs Transformer Engine, torchao or MS-AMP, and anytrain has no fp8 recipe.",
        'pass mixed_precision="bf16".',
    ),
    "lomo": (
        "LOMO updates inside backward, where no gradient can be checked, clipped or accumulated.",
        "use AdamW or Adafactor.",
    ),
}


def refuse(name: str, what: str | None = None) -> Unsupported:
    """Return the refusal of a name in the table."""
    why, fix = REASONS[name]
    return Unsupported(f"anytrain does not support {what or name}.", why=why, fix=fix)


def refuse_plugins(**plugins: Any) -> None:
    """Refuse the first plugin that was given."""
    for name, plugin in plugins.items():
        if plugin is not None:
            raise refuse(name)
