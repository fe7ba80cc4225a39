"""Start a function in several processes.

The error that the function raised is raised here itself, with its class: code that expects
torch's ChildFailedError, which holds the words alone, must name that class instead.
"""

from anytrain.compat.accelerate import refused
from anytrain.compat.accelerate.state import PartialState
from anytrain.doors.launch import debug_launcher, notebook_launcher

__all__ = ["debug_launcher", "notebook_launcher", "test_launch"]

__getattr__ = refused.module_getattr(__name__, "utils.launch")


def test_launch() -> None:
    """Check that this process finds its place."""
    PartialState()
