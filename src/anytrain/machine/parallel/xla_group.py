"""torch_xla's process group: one process a TPU device.

It has never run on more than one device here: on CPUs its collectives abort.
"""

from __future__ import annotations

import torch.distributed as dist


def make() -> dist.ProcessGroup:
    """Return a group of all ranks that carries tensors from device to device, inside graphs."""
    from torch_xla.distributed import xla_backend  # noqa: F401  # registers the name

    group: dist.ProcessGroup = dist.new_group(backend="xla")
    return group
