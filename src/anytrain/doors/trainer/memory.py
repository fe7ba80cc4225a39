"""What a stage of a run cost in memory, for metrics that ask for it."""

from __future__ import annotations

from typing import Any

import psutil

from anytrain.engine.assemble.session import Session


class MemoryUse:
    """Bytes before and after a stage, on the host and on the device; off unless asked for."""

    def __init__(self, session: Session, *, off: bool) -> None:
        self._session = session
        self._off = off
        self._before: list[tuple[int, int | None]] = []
        self._building: dict[str, Any] = {}
        self.start()

    def _now(self) -> tuple[int, int | None]:
        used = self._session.backend.memory(self._session.device)
        return psutil.Process().memory_info().rss, used.used_bytes

    def start(self) -> None:
        """Begin a stage; an evaluation inside training is a stage of its own."""
        if not self._off:
            self._before.append(self._now())

    def built(self) -> None:
        """End the Trainer's making; the first stage to end tells what it took."""
        self.stop("init", self._building)

    def stop(self, stage: str, metrics: dict[str, Any]) -> None:
        """End the stage that was begun last, and put what it took into the metrics."""
        if self._off or not self._before:
            return
        if metrics is not self._building:
            metrics |= self._building
            self._building = {}
        (host, device), (host_now, device_now) = self._before.pop(), self._now()
        metrics[f"{stage}_mem_cpu_alloc_delta"] = host_now - host
        if device is not None and device_now is not None:
            metrics[f"{stage}_mem_gpu_alloc_delta"] = device_now - device
            peak = self._session.backend.memory(self._session.device).peak_bytes
            if peak is not None:
                metrics[f"{stage}_mem_gpu_peaked_delta"] = max(0, peak - device_now)
