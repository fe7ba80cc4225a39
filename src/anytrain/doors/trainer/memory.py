"""What a stage of a run cost in memory, for metrics that ask for it."""

from __future__ import annotations

from typing import Any

import torch

from anytrain.engine.assemble.session import Session
from anytrain.machine.backends.cpu import Cpu


class MemoryUse:
    """Bytes before and after a stage, on the host and on the device; off unless asked for."""

    def __init__(self, session: Session, *, off: bool) -> None:
        self._session = session
        self._off = off
        self._before: list[tuple[int, int, int | None]] = []
        self._building: dict[str, Any] = {}
        self.start()

    def _now(self) -> tuple[int, int, int | None]:
        """Return the host's bytes, the most they ever were, and the device's bytes."""
        host = Cpu().memory(torch.device("cpu"))
        used, peak = host.used_bytes or 0, host.peak_bytes or 0
        if self._session.device.type == "cpu":  # its memory is the host's
            return used, peak, None
        return used, peak, self._session.backend.memory(self._session.device).used_bytes

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
        host, peak_before, device = self._before.pop()
        host_now, host_peak, device_now = self._now()
        metrics[f"{stage}_mem_cpu_alloc_delta"] = host_now - host
        grew = host_peak > peak_before  # a stage that set no new peak peaked below it
        metrics[f"{stage}_mem_cpu_peaked_delta"] = max(0, host_peak - host_now) if grew else 0
        if device is not None and device_now is not None:
            metrics[f"{stage}_mem_gpu_alloc_delta"] = device_now - device
            peak = self._session.backend.memory(self._session.device).peak_bytes
            if peak is not None:
                metrics[f"{stage}_mem_gpu_peaked_delta"] = max(0, peak - device_now)
