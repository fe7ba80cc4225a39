"""HF's old home of `find_executable_batch_size`."""

from anytrain.compat.accelerate.utils.memory import find_executable_batch_size

__all__ = ["find_executable_batch_size"]
