"""A real Jupyter kernel to run cells in, and what they showed.

Import it as `from jupyter_kernel import Kernel`; tests/ is on the path.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jupyter_client.manager import KernelManager

from launching import child_environment

_STYLE = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Shown:
    """What a cell showed: text by stream, pages by MIME type, and its error."""

    stdout: str = ""
    stderr: str = ""
    pages: list[dict[str, str]] = field(default_factory=list)
    updates: list[dict[str, str]] = field(default_factory=list)
    error: str | None = None
    traceback: str = ""

    def take(self, message: Mapping[str, Any]) -> None:
        """Add one message of the kernel's."""
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            setattr(self, content["name"], getattr(self, content["name"]) + content["text"])
        elif kind in ("display_data", "execute_result"):
            self.pages.append(content["data"])
        elif kind == "update_display_data":
            self.updates.append(content["data"])
        elif kind == "error":
            self.error = content["ename"]
            self.traceback = _STYLE.sub("", "\n".join(content["traceback"]))

    def line(self, stream: str) -> str:
        """Return the stream as a page shows it: after a carriage return, lines are written over."""
        return "\n".join(row.split("\r")[-1] for row in getattr(self, stream).split("\n"))


class Kernel:
    """A kernel of this environment, with the variables it is given."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=child_environment(env))
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=240)

    @property
    def pid(self) -> int:
        """The kernel's process."""
        return int(self.manager.provisioner.pid)

    def run(self, code: str, timeout: float = 240) -> Shown:
        """Run a cell to its end."""
        shown = Shown()
        self.client.execute_interactive(code, timeout=timeout, output_hook=shown.take)
        return shown

    def begin(self, code: str) -> str:
        """Start a cell; `finish` waits for it."""
        return str(self.client.execute(code))

    def finish(self, request: str, timeout: float = 240) -> Shown:
        """Return what a started cell showed, once the kernel is idle again."""
        shown, deadline = Shown(), time.monotonic() + timeout
        while True:
            message = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            if message["parent_header"].get("msg_id") != request:
                continue
            shown.take(message)
            if message["content"].get("execution_state") == "idle":
                return shown

    def close(self) -> None:
        """End the kernel."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
