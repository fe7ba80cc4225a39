"""Start a function in several processes."""

from anytrain.compat.accelerate.state import PartialState
from anytrain.doors.launch import debug_launcher, notebook_launcher

__all__ = ["debug_launcher", "notebook_launcher", "test_launch"]


def test_launch() -> None:
    """Check that this process finds its place."""
    PartialState()
