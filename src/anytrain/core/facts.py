"""What is known about the machine and the job before anything is decided."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Found:
    """A backend that can be used, with the sentence that proves it."""

    because: str
    num_devices: int
    automatic: bool = True
    """Whether a run that names no device may take it."""


@dataclass(frozen=True, slots=True)
class NotFound:
    """A backend that cannot be used.

    `broken` means the hardware is there and something fails: taking another device without a
    word would hide it. `fix` says how to repair it, where that is known.
    """

    because: str
    broken: bool = False
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Gain:
    """How many times as fast as in float32 a step was, and the day it was measured."""

    factor: float
    day: str


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one device can truly do, found by trying."""

    backend: str
    device: str
    name: str
    dtypes: tuple[str, ...]
    memory_bytes: int | None = None
    process_group: str | None = None
    scales_gradients: bool = False
    """Whether fp16's loss scaling runs on this device."""
    fuses_optimizer: bool = False
    """Whether torch's fused optimizers run here, which skip a bad step on the device."""
    traces: bool = False
    """Whether ops are traced into one graph, which runs where a step ends."""
    spread_over: int | None = None
    """Over how many devices the compiler splits a batch; None where it does not."""
    slow_dtypes: tuple[str, ...] = ()
    """Of the dtypes, those that are made up from others: they work and gain nothing."""
    bf16_gain: Gain | None = None
    """What bfloat16 gains, where it was measured; None where nobody needed to know."""
    narrowed_by: tuple[str, ...] = ()
    """Variables by which the runtime narrows every float, whatever a tensor's dtype says."""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What is known of the job: nothing yet for a loop that the user keeps."""

    own_loop: bool = True


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model and its optimizer take in all, before anybody shares them among ranks."""

    weight_bytes: int
    """Parameters and buffers."""
    gradient_bytes: int
    """Gradients of the parameters that are trained."""
    optimizer_bytes: int | None
    """What the optimizer keeps once it has made an update; None where its kind is not known."""


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """What one rank holds of model and optimizer between steps, whatever the batch."""

    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int | None
    """None where the optimizer's kind is not known."""
    copy_bytes: int = 0
    """What the strategy adds: the buckets in which gradients are sent."""

    @property
    def num_bytes(self) -> int:
        """All that is known of."""
        known = self.optimizer_bytes or 0
        return self.weight_bytes + self.gradient_bytes + known + self.copy_bytes


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes in use now, at the peak, and in all; None where the device does not tell."""

    used_bytes: int | None
    peak_bytes: int | None
    total_bytes: int | None
