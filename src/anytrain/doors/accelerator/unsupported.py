"""What HF Accelerate has and anytrain does not, each with why and what to do instead.

Questions are answered truthfully (there is no mesh, no plugin, no fp8); requests are refused.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from anytrain.core.errors import Unsupported
from anytrain.engine.prepared.model import holds_device_map

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


class UnsupportedMembers:
    """Truthful answers about engines that are not there."""

    deepspeed_plugin = None
    fp8_backend = None
    is_composable_parallelism_enabled = False
    is_fsdp2 = False
    parallelism_config = None
    torch_device_mesh = None
    tensor_parallel_rank = 0
    pipeline_parallel_rank = 0
    context_parallel_rank = 0
    data_parallel_shard_rank = 0

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Refuse: there is no DeepSpeed here.

        Args:
            dl: Not used.
            model: Not used.
        """
        raise refuse("deepspeed_plugin", "deepspeed_ulysses_dl_adapter")

    def lomo_backward(self, loss: Any, learning_rate: float) -> None:
        """Refuse: LOMO's update cannot be guarded.

        Args:
            loss: Not used.
            learning_rate: Not used.
        """
        raise refuse("lomo", "lomo_backward")

    def maybe_context_parallel(
        self,
        buffers: list[Any] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[Any] | None = None,
    ) -> AbstractContextManager[None]:
        """Do nothing: sequences are not split over processes.

        Args:
            buffers: Not used.
            buffer_seq_dims: Not used.
            no_restore_buffers: Not used.
        """
        return nullcontext()

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether the model was spread over several devices by its loader.

        Args:
            model: The model.
        """
        return any(holds_device_map(module) for module in model.modules())
