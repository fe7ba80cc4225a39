"""XLA devices through torch_xla 2.9, the last of its line: TPUs, and CPUs for testing.

It traces lazily: nothing runs until `end_step` cuts the graph. Its variables count only if they
are set before it is imported, so nothing here imports it before a device is asked for.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from types import ModuleType
from typing import Any, ClassVar

import torch

from anytrain.core import environment
from anytrain.core.errors import BadInput, DeviceBroken, WrongOrder
from anytrain.core.facts import Capabilities, Found, MemoryUse, NotFound
from anytrain.core.notices import give_notice
from anytrain.core.plan import Wishes
from anytrain.machine.backends import capabilities
from anytrain.machine.backends.base import Lane
from anytrain.machine.backends.capabilities import TWO_DEVICE_TPU, tpu_chips

_NO = ("false", "no", "0")


@dataclass(frozen=True)
class Xla:
    """The XLA devices of this process."""

    index: int | None = None
    name: ClassVar[str] = "xla"

    @property
    def process_group(self) -> str | None:
        """torch_xla's own, on TPUs: CPU processes behind it do not see each other."""
        return "xla" if _target()[0] == "TPU" else None

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
        """Return one, and one a chip; a v2 or v3 chip is two devices, which need spmd."""
        chips = tpu_chips() if _target()[0] == "TPU" else ()
        if len(chips) < 2 or chips[0] == TWO_DEVICE_TPU:
            return (1,)
        return 1, len(chips)

    def launch_environment(self, num_processes: int, wishes: Wishes) -> Mapping[str, str]:
        """Return XLA_DOWNCAST_BF16 where it is wished for."""
        asked = wishes.downcast_bf16
        if asked is None or asked.value.lower() in _NO:
            return {}
        return {"XLA_DOWNCAST_BF16": "1"}

    def device(self, local_rank: int) -> torch.device:
        """Return the one XLA device of this process, and start its runtime."""
        if self.index:
            raise BadInput(
                f"Cannot use xla:{self.index}.",
                why="one process holds one XLA device.",
                fix='pass "xla"; `anytrain launch` gives each process its own.',
            )
        try:
            _take_place(environment.read().place)
            device: torch.device = _library().device()
        except (ImportError, RuntimeError) as error:
            raise DeviceBroken(
                "torch_xla is installed and does not start.",
                why=capabilities.first_line(error),
                fix="check that torch and torch_xla have the same version, and PJRT_DEVICE.",
            ) from error
        _seed_once(device)
        _serve_checkpointing()
        return device

    def capabilities(self, device: torch.device) -> Capabilities:
        """Return what the device computes in, found by computing."""
        target, _ = _target()
        dtypes = _dtypes(device)
        return Capabilities(
            backend=self.name,
            device=str(device),
            name=f"torch_xla on {(tpu_chips() or (target,))[0]}",
            dtypes=dtypes,
            memory_bytes=self.memory(device).total_bytes,
            process_group=self.process_group,
            traces=True,
            spread_over=_mesh().size() if is_spread() else None,
            scales_gradients="float16" in dtypes and capabilities.scales_gradients(device),
            narrowed_by=environment.narrowing(),
        )

    def place(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        """Return the tensor on the device; the transfer happens with the next graph."""
        return tensor.to(device)

    def lane(self, device: torch.device) -> Lane | None:
        """Return what splits a batch over all devices; None where this process has one."""
        return _SplitLane(device) if is_spread() else None

    def end_step(self) -> None:
        """Cut the graph here, and start it."""
        _cut(wait=False)

    def synchronize(self, device: torch.device) -> None:
        """Run what is pending, and wait for it."""
        _cut(wait=True)

    def is_idle(self, device: torch.device) -> bool:
        """Return True: the runtime does not say, so a wait counts as one."""
        return True

    def memory(self, device: torch.device) -> MemoryUse:
        """Return what the runtime counts; a CPU behind XLA counts nothing."""
        from torch_xla.core import xla_model

        try:
            info: dict[str, int] = xla_model.get_memory_info(device)
        except RuntimeError:
            return MemoryUse(None, None, None)
        used, peak = info.get("bytes_used"), info.get("peak_bytes_used")
        return MemoryUse(used, peak, info.get("bytes_limit") or None)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether the runtime could not get memory, at compile time or later."""
        messages = ("RESOURCE_EXHAUSTED", "Out of memory allocating")  # TPUs; CPUs behind XLA
        return isinstance(error, RuntimeError) and any(words in str(error) for words in messages)

    def explain(self, error: BaseException) -> str | None:
        """Say what to do when the device's memory is full."""
        if not self.is_out_of_memory(error):
            return None
        return (
            f"Out of memory on the XLA device: {capabilities.first_line(error)}\n"
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
        from torch_xla.core import xla_model

        xla_model.set_rng_state(int.from_bytes(bytes(state.tolist()), "little"), str(device))

    def compilations(self) -> int | None:
        """Return how many graphs were compiled so far, cached ones not counted."""
        from torch_xla.debug import metrics

        return int(metrics.counter_value("UncachedCompile") or 0)


def _cut(*, wait: bool) -> None:
    """Run what is pending; the generator goes on from where the last draw left it.

    torch_xla moves it with every cut. Then what a run draws would depend on how often it is saved
    or read, and a resumed one would draw other numbers.
    """
    from torch_xla.core import xla_model

    kept = xla_model.get_rng_state()
    _library().sync(wait=wait)
    xla_model.set_rng_state(kept)


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


def _serve_checkpointing() -> None:
    """Give torch's gradient checkpointing a `torch.xla`, by which it keeps what was drawn.

    torch looks a device's generator up under the device's name, and torch_xla has nothing there.
    """
    if not hasattr(torch, "xla"):
        torch._register_device_module("xla", _Generator("torch.xla"))


class _Generator(ModuleType):
    """The generator of torch_xla's one device, as torch looks for it."""

    _initialized = True

    def device(self, index: Any) -> AbstractContextManager[None]:
        """Return a block inside which the one device is the device."""
        return nullcontext()

    def device_count(self) -> int:
        """Return one: a process holds one device."""
        return 1

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Return the seed that the next draw begins from."""
        state = Xla().rng_state(torch.device("xla:0"))
        assert state is not None
        return state

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Let the next draw begin from a seed."""
        Xla().restore_rng(torch.device("xla:0"), state)


def _dtypes(device: torch.device) -> tuple[str, ...]:
    try:
        return capabilities.working_dtypes(device)
    except DeviceBroken as error:
        if "device_ready_queues_" not in str(error):
            raise
        raise WrongOrder(
            "Cannot train on torch_xla in this process.",
            why="a backward pass ran here before torch_xla was started, and torch counts the "
            "devices of its backward passes at the first one.",
            fix="make the Accelerator before anything is trained here, or start a new process.",
        ) from error


class _SplitLane:
    """Batches on their way to every device, a share of their rows to each."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._mesh = device, _mesh()

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the devices; rows that do not divide are computed by each."""
        from torch_xla.distributed import spmd

        placed = tensor.to(self._device)
        if placed.ndim == 0:
            return placed
        if len(placed) % self._mesh.size():
            _tell_undivided(len(placed), self._mesh.size())
        else:
            spmd.mark_sharding(placed, self._mesh, ("data", *[None] * (placed.ndim - 1)))
        return placed

    def sent(self) -> Callable[[], None]:
        """Return nothing to wait for: the runtime orders copies itself."""
        return lambda: None


@cache
def _tell_undivided(rows: int, devices: int) -> None:
    give_notice(
        f"A batch of {rows} rows cannot be split over {devices} devices: each computes all of it. "
        f"Make the batch size a multiple of {devices}.",
        stacklevel=2,
    )


def is_spread() -> bool:
    """Whether one process holds all devices, and the compiler splits batches over them."""
    asked = environment.read().wishes.strategy
    return asked is not None and asked.value == "spmd"


@cache
def _mesh() -> Any:
    """Return all devices in a row."""
    import numpy as np
    from torch_xla import runtime
    from torch_xla.distributed import spmd

    count = runtime.global_runtime_device_count()
    return spmd.Mesh(np.arange(count), (count,), ("data",))


@cache
def _take_place(place: environment.RankPlace) -> None:
    """Let the runtime know of the other processes or devices; before it has started."""
    from torch_xla import runtime

    if is_spread():
        runtime.use_spmd()
        _mesh()  # starts the runtime: autograd counts the devices once, at the first backward
    elif place.local_size > 1:
        from torch_xla._internal import pjrt

        pjrt.initialize_multiprocess(place.local_rank, place.local_size)


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
