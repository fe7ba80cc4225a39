"""Keep one process that has loaded torch and what the run imports, and copies itself for traces.

Loading takes many times as long as tracing, and a search for the largest batch traces often. A
copy that dies of its claimed device takes nobody with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType, TracebackType

# transformers loads by threads, which have no claimed device; dynamo would compile the watching.
VARIABLES = {
    "HF_DEACTIVATE_ASYNC_LOAD": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
    "ANYTRAIN_STEP": "eager",
}


class Warm:
    """A process that runs requests in copies of itself, started when it is first needed."""

    def __init__(
        self, variables: Mapping[str, str] = MappingProxyType({}), *, serves: bool = True
    ) -> None:
        # macOS: a copy of a process that has talked to the system's frameworks may be ended.
        self._serves = serves and hasattr(os, "fork") and sys.platform != "darwin"
        # A child gets what this process has, what a launcher would add, and what tracing needs.
        self.variables = {**os.environ, **variables, **VARIABLES}  # noqa: TID251  a child's
        self._process: subprocess.Popen[str] | None = None

    def run(self, folder: str) -> int | None:
        """Run the request in a folder; return its exit code, None where nobody could run it."""
        if not self._serves:
            return None
        self._process = self._process or self._start()
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(f"{folder}\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline())
        except (OSError, ValueError):  # it is gone, or has threads and makes no more copies
            self._serves = False
            return None

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "anytrain.insight.preflight.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self.variables,
            text=True,
            start_new_session=True,  # so that a copy at work can be ended with it
        )

    def __enter__(self) -> Warm:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
