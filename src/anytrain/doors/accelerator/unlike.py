"""Members of HF's `Accelerator` for engines that anytrain does not have.

Questions are answered truthfully (there is no mesh, no plugin, no fp8); requests are refused.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from anytrain.doors.accelerator.refused import refuse
from anytrain.engine.prepared.model import holds_device_map


class UnlikeAccelerate:
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
