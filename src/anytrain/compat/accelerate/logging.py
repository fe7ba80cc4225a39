"""A logger that knows which process it is in."""

from anytrain.doors.accelerator.logging import MultiProcessAdapter, get_logger

__all__ = ["MultiProcessAdapter", "get_logger"]
