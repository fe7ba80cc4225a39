"""NVIDIA GPUs, and AMD's through torch's ROCm build: whatever torch calls cuda."""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from anytrain.core import environment
from anytrain.core.errors import BadInput, DeviceBroken, WrongOrder
from anytrain.core.facts import Capabilities, Found, MemoryUse, NotFound
from anytrain.core.plan import Wishes
from anytrain.machine.backends import capabilities
from anytrain.machine.backends.base import Lane

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_SMI_LIMIT_S = 10
_GIB = 2**30


@dataclass(frozen=True)
class Cuda:
    """The GPUs of this host; `index` pins one of them."""

    index: int | None = None
    name: ClassVar[str] = "cuda"
    process_group: ClassVar[str | None] = "nccl"

    def probe(self) -> Found | NotFound:
        """Count the GPUs through NVML, which leaves a later fork free to use them."""
        shown = environment.variable(_VISIBLE)
        if shown is not None and _hides_all(shown):
            return NotFound(f"hidden by {_VISIBLE}={shown!r}")
        count, complaint = _count()
        if count > 0:
            return Found(f"torch {torch.__version__} sees {count} GPU(s)", count)
        return _why_none(complaint, shown)

    def process_counts(self) -> tuple[int, ...]:
        """Return up to one process per GPU; one where a GPU is pinned."""
        return tuple(range(1, _count()[0] + 1)) if self.index is None else (1,)

    def launch_environment(self, num_processes: int, wishes: Wishes) -> Mapping[str, str]:
        """Return nothing: each rank takes the GPU of its local rank."""
        return {}

    def device(self, local_rank: int) -> torch.device:
        """Return this rank's GPU and make it the current one."""
        device = torch.device("cuda", self._index_of(local_rank))
        try:
            torch.cuda.set_device(device)
        except (RuntimeError, AssertionError) as error:
            raise _cannot_start(device, error) from error
        return device

    def _index_of(self, local_rank: int) -> int:
        count, place = _count()[0], environment.read().place
        if self.index is not None and place.local_size > 1:
            raise BadInput(
                f"Cannot give {place.local_size} processes the device cuda:{self.index}.",
                why="each process needs a GPU of its own.",
                fix=f'ask for "cuda" without a number, and choose GPUs with {_VISIBLE}.',
            )
        # srun may show each task nothing but its own GPU, which is then number 0 for all.
        if count == 1 and place.launcher == "srun":
            return 0
        index = local_rank if self.index is None else self.index
        if index >= count > 0:
            raise BadInput(
                f"There is no cuda:{index} for local rank {local_rank}.",
                why=f"this process sees {count} GPU(s), and each process needs its own.",
                fix=f"start at most {count} process(es) here, or show more with {_VISIBLE}.",
            )
        return index

    def capabilities(self, device: torch.device) -> Capabilities:
        """Return what the GPU computes in, found by computing."""
        properties = torch.cuda.get_device_properties(device)
        return Capabilities(
            backend=self.name,
            device=str(device),
            name=properties.name,
            dtypes=capabilities.working_dtypes(device),
            memory_bytes=properties.total_memory,
            process_group=self.process_group,
            scales_gradients=capabilities.scales_gradients(device),
            fuses_optimizer=capabilities.fused_optimizer_skips(device),
        )

    def place(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        """Return the tensor on the GPU; a pinned one is copied while the host goes on."""
        if tensor.device == device:
            return tensor
        from_pinned = tensor.device.type == "cpu" and tensor.is_pinned()
        return tensor.to(device, non_blocking=non_blocking or from_pinned)

    def lane(self, device: torch.device) -> Lane:
        """Return a stream of its own for copies from pinned memory."""
        return _SideStream(device)

    def end_step(self) -> None:
        """Do nothing: a stream needs no cut."""

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def is_idle(self, device: torch.device) -> bool:
        """Whether the stream that computes has run dry; copies run on streams of their own."""
        return bool(torch.cuda.current_stream(device).query())

    def memory(self, device: torch.device) -> MemoryUse:
        """Return what tensors hold, the most they held, and the GPU's memory."""
        stats = torch.cuda.memory_stats(device)
        return MemoryUse(
            stats.get("allocated_bytes.all.current", 0),
            stats.get("allocated_bytes.all.peak", 0),
            torch.cuda.get_device_properties(device).total_memory,
        )

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether torch, cuBLAS or cuDNN could not get memory."""
        if isinstance(error, torch.OutOfMemoryError):
            return True
        # The libraries fail to make their workspace with codes of their own.
        codes = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA out of memory")
        return isinstance(error, RuntimeError) and any(code in str(error) for code in codes)

    def explain(self, error: BaseException) -> str | None:
        """Say what the GPU's error means, in three lines."""
        if self.is_out_of_memory(error):
            try:
                return _explain_memory(error)
            except RuntimeError:  # the GPU no longer answers; the error itself has to do
                return None
        text = str(error)
        if "device-side assert" in text:
            return (
                "A kernel found a value out of range, most often a label or token id that is "
                "negative or too large.\n"
                "The line shown may be a later one: kernels run after the host has gone on.\n"
                "Run once with ANYTRAIN_DEVICE=cpu, or with CUDA_LAUNCH_BLOCKING=1, to see the op."
            )
        if "no kernel image is available" in text:
            return (
                f"This torch ({torch.__version__}) has no kernels for this GPU.\n"
                f"It was built for {' '.join(torch.cuda.get_arch_list())}.\n"
                "Install a torch build that names the GPU's architecture."
            )
        return None

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def rng_state(self, device: torch.device) -> torch.Tensor | None:
        return torch.cuda.get_rng_state(device)

    def restore_rng(self, device: torch.device, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state.cpu(), device)

    def compilations(self) -> int | None:
        """Return None: nothing compiles by itself."""
        return None


class _SideStream:
    """Copies from pinned memory, on a stream beside the one that computes.

    A copy's memory is the computing stream's, which uses it again in its own order. So a copy
    begins when all that was computed before it is done, and memory in use never grows, however
    far the host runs ahead.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._is_open = False

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a plain tensor of the host's; move any other one at once."""
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if tensor.device.type != "cpu" or not plain or tensor.requires_grad:
            return tensor.to(self._device)
        copy = torch.empty_like(tensor, device=self._device)
        if not self._is_open or torch.are_deterministic_algorithms_enabled():
            self._is_open = True  # in deterministic mode the computing stream fills each new tensor
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # The host's allocator keeps the pinned memory until this stream is through with it.
            copy.copy_(tensor if tensor.is_pinned() else tensor.pin_memory(), non_blocking=True)
        return copy

    def sent(self) -> Callable[[], None]:
        """Return what lets the current stream wait for the copies."""
        if not self._is_open:
            return lambda: None
        self._is_open = False
        event = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(event)


def _count() -> tuple[int, str]:
    """Return how many GPUs torch sees, and what it said where it sees none."""
    if torch.version.cuda is None and torch.version.hip is None:
        return 0, f"this torch ({torch.__version__}) is built without CUDA"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = torch.cuda.device_count()
    complaint = str(said[-1].message).strip().splitlines()[0] if said else "torch sees no GPU"
    return count, complaint


def _hides_all(shown: str) -> bool:
    # The driver stops at the first entry it does not know; SLURM writes NoDevFiles for "none".
    first = shown.split(",")[0].strip()
    return first in ("", "-1", "NoDevFiles")


def _why_none(complaint: str, shown: str | None) -> NotFound:
    card = nvidia_gpu()
    if card is None:
        return NotFound(f"no NVIDIA GPU on this host; {complaint}")
    if shown is not None:
        complaint += f", with {_VISIBLE}={shown!r}"
    without = torch.version.cuda is None
    fix = "install a CUDA build of torch" if without else "check the driver with nvidia-smi"
    return NotFound(f"{card} is here, but {complaint}", broken=True, fix=fix)


def is_started() -> bool:
    """Whether this process has used a GPU, so that a fork of it can use none."""
    return bool(torch.cuda.is_initialized())


def nvidia_gpu() -> str | None:
    """Name an NVIDIA GPU that the system shows, whatever torch thinks; None where none is."""
    program = shutil.which("nvidia-smi")
    if program is not None:
        try:
            ran = subprocess.run(
                [program, "-L"], capture_output=True, text=True, timeout=_SMI_LIMIT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            ran = None
        # A driver without a card, as on many cloud images, answers with an error or with nothing.
        if ran is not None and ran.returncode == 0:
            listed = re.search(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", ran.stdout, re.MULTILINE)
            if listed:
                return listed.group(1)
    nodes = sorted(Path("/dev").glob("nvidia[0-9]*"))
    return f"an NVIDIA GPU ({nodes[0]})" if nodes else None


def _cannot_start(device: torch.device, error: BaseException) -> DeviceBroken | WrongOrder:
    if "forked subprocess" in str(error):
        return WrongOrder(
            f"Cannot use {device} in this process.",
            why="its parent used CUDA before it forked, and CUDA does not survive a fork.",
            fix="touch no GPU before launching, or start the processes with spawn.",
        )
    return DeviceBroken(
        f"{device} is there and does not start.",
        why=capabilities.first_line(error),
        fix="check the driver with nvidia-smi, or take the CPU on purpose: ANYTRAIN_DEVICE=cpu "
        "or cpu=True.",
    )


def _explain_memory(error: BaseException) -> str:
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    device = torch.device("cuda", torch.cuda.current_device())
    stats = torch.cuda.memory_stats(device)
    held = stats.get("allocated_bytes.all.current", 0)
    cached = stats.get("reserved_bytes.all.current", 0) - held
    free, total = torch.cuda.mem_get_info(device)
    return (
        f"Out of memory on {device}{f', asked for {asked.group(1)} more' if asked else ''}.\n"
        f"Of {total / _GIB:.1f} GiB, tensors of this process hold {held / _GIB:.1f}, its cache "
        f"{cached / _GIB:.1f}, and {free / _GIB:.1f} GiB are free.\n"
        'Try a smaller batch with more gradient accumulation steps, or mixed_precision="bf16".'
    )


def _leave_garbage_alone() -> None:
    """Let a forked worker's collector pass over what there was before the fork.

    It cannot let go of pinned memory of a parent that has used CUDA: to try ends it.
    """
    if torch.cuda._is_in_bad_fork():
        gc.freeze()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_garbage_alone)
