"""A progress bar for the main process alone."""

from anytrain.doors.accelerator.logging import tqdm

__all__ = ["tqdm"]
