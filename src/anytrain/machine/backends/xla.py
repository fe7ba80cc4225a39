"""XLA devices through torch_xla 2.9, the last of its line: TPUs, and CPUs for testing.

It traces lazily: nothing runs until `end_step` cuts the graph. Its variables count only if they
are set before it is imported, so nothing here imports it before a device is asked for.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any, ClassVar

import torch

from anytrain.core import environment
from anytrain.core.errors import BadInput, DeviceBroken
from anytrain.core.facts import Capabilities, Found, MemoryUse, NotFound
from anytrain.core.plan import Wishes
from anytrain.machine.backends import trial
from anytrain.machine.backends.chips import tpu_chips

_NO = ("false", "no", "0")


@dataclass(frozen=True)
class Xla:
    """The XLA devices of this process."""

    index: int | None = None
    name: ClassVar[str] = "xla"
    # torch_xla joins processes through a runtime of its own, not through torch.distributed's
    # transports: more than one process is refused here.
    process_group: ClassVar[str | None] = None

    def probe(self) -> Found | NotFound:
        """Read torch_xla's version and variables, without importing it."""
        try:
            version = metadata.version("torch_xla")
        except metadata.PackageNotFoundError:
            return NotFound("torch_xla is not installed")
        target, because = _target()
        is_tpu = target == "TPU"
        if _minor(version) != _minor(torch.__version__):
            return NotFound(
                f"torch_xla {version} needs torch {_minor(version)}, this is {torch.__version__}",
                broken=is_tpu,
                fix=f"install torch {_minor(version)}, or torch_tpu for a newer torch",
            )
        # A CPU behind XLA is slower than the CPU itself: only a TPU is worth taking unasked.
        count = len(tpu_chips()) if is_tpu else 1
        return Found(f"torch_xla {version} on {target}, {because}", max(count, 1), automatic=is_tpu)

    def process_counts(self) -> tuple[int, ...]:
        """Return one: no process group of torch.distributed serves it yet."""
        return (1,)

    def launch_environment(self, num_processes: int, wishes: Wishes) -> Mapping[str, str]:
        """Return XLA_DOWNCAST_BF16 where it is wished for."""
        asked = wishes.downcast_bf16
        if asked is None or asked.value.lower() in _NO:
            return {}
        return {"XLA_DOWNCAST_BF16": "1"}

    def device(self, local_rank: int) -> torch.device:
        """Return the XLA device, and start its runtime."""
        if self.index or local_rank:
            raise BadInput(
                f"Cannot use xla:{self.index or local_rank}.",
                why="one process holds one XLA device.",
                fix='pass "xla", and start one process.',
            )
        try:
            device: torch.device = _library().device()
        except (ImportError, RuntimeError) as error:
            raise DeviceBroken(
                "torch_xla is installed and does not start.",
                why=trial.first_line(error),
                fix="check that torch and torch_xla have the same version, and PJRT_DEVICE.",
            ) from error
        _seed_once(device)
        return device

    def capabilities(self, device: torch.device) -> Capabilities:
        """Return what the device computes in, found by computing."""
        target, _ = _target()
        dtypes = trial.working_dtypes(device)
        return Capabilities(
            backend=self.name,
            device=str(device),
            name=f"torch_xla on {(tpu_chips() or (target,))[0]}",
            dtypes=dtypes,
            memory_bytes=self.memory(device).total_bytes,
            process_group=self.process_group,
            traces=True,
            scales_gradients="float16" in dtypes and trial.scales_gradients(device),
            narrowed_by=environment.narrowing(),
        )

    def place(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        """Return the tensor on the device; the transfer happens with the next graph."""
        return tensor.to(device)

    def lane(self, device: torch.device) -> None:
        """Return None: the runtime orders copies itself."""

    def end_step(self) -> None:
        """Cut the graph here, and start it."""
        _library().sync()

    def synchronize(self, device: torch.device) -> None:
        """Run what is pending, and wait for it."""
        _library().sync(wait=True)

    def is_idle(self, device: torch.device) -> bool:
        """Return True: the runtime does not say, so a wait counts as one."""
        return True

    def memory(self, device: torch.device) -> MemoryUse:
        """Return what the runtime counts; a CPU behind XLA counts nothing."""
        from torch_xla.core import xla_model

        try:
            told: dict[str, int] = xla_model.get_memory_info(device)
        except RuntimeError:
            return MemoryUse(None, None, None)
        used, peak = told.get("bytes_used"), told.get("peak_bytes_used")
        return MemoryUse(used, peak, told.get("bytes_limit") or None)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether the runtime could not get memory, at compile time or later."""
        return isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error)

    def explain(self, error: BaseException) -> str | None:
        """Say what to do when the device's memory is full."""
        if not self.is_out_of_memory(error):
            return None
        return (
            f"Out of memory on the XLA device: {trial.first_line(error)}\n"
            "Try a smaller batch with more gradient accumulation steps, or "
            'mixed_precision="bf16".'
        )

    def release(self) -> None:
        """Collect garbage; XLA keeps no cache that can be given back."""
        gc.collect()

    def rng_state(self, device: torch.device) -> torch.Tensor | None:
        """Return the device's seed, which is all its generator has, as eight bytes."""
        from torch_xla.core import xla_model

        seed = int(xla_model.get_rng_state(str(device)))
        return torch.tensor(list(seed.to_bytes(8, "little")), dtype=torch.uint8)

    def restore_rng(self, device: torch.device, state: torch.Tensor) -> None:
        """Set the device's seed."""
        from torch_xla.core import xla_model

        xla_model.set_rng_state(int.from_bytes(bytes(state.tolist()), "little"), str(device))

    def compilations(self) -> int | None:
        """Return how many graphs were compiled so far, cached ones not counted."""
        from torch_xla.debug import metrics

        return int(metrics.counter_value("UncachedCompile") or 0)


def number(tensor: torch.Tensor) -> int:
    """Return what a tensor and its aliases have in common; torch_xla hides their addresses."""
    return int(_library()._XLAC._xla_get_tensor_id(tensor))


def seed(value: int) -> None:
    """Seed the device's generator, which torch.manual_seed does not reach."""
    if is_loaded():
        from torch_xla.core import xla_model

        xla_model.set_rng_state(value)


def is_loaded() -> bool:
    """Whether torch_xla was imported, after which its variables count no more."""
    return "torch_xla" in sys.modules


@cache
def _seed_once(device: torch.device) -> None:
    """Let a script that has seeded torch before it had a device draw the same again."""
    from torch_xla.core import xla_model

    xla_model.set_rng_state(torch.initial_seed() % 2**63, str(device))


def _library() -> Any:
    import torch_xla

    return torch_xla


def _target() -> tuple[str, str]:
    """Return what torch_xla will run on, by its own rule, and how that is known."""
    named = environment.variable("PJRT_DEVICE")
    if named:
        return named.split("_")[0], f"as PJRT_DEVICE={named} says"
    if tpu_chips():
        return "TPU", f"because {tpu_chips()[0]} is on this host"
    return "CPU", "because PJRT_DEVICE is not set and no TPU chip is here"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
