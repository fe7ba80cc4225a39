"""Door 3: start one script, or one function, in as many processes as the machine has room for."""

from __future__ import annotations

from anytrain.doors.launch.notebook import debug_launcher, notebook_launcher

__all__ = ["debug_launcher", "notebook_launcher"]
