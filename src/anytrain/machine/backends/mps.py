"""Apple's GPUs, through Metal.

What surprises people here is written down once: no float64, no pinned memory, one process, and a
CPU fallback that only a variable set before torch is loaded can switch on.
"""

from __future__ import annotations

import gc
import platform
import re
import subprocess
import sys
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import ClassVar

import torch

from anytrain.core import environment
from anytrain.core.errors import AnytrainError, BadInput
from anytrain.core.facts import Capabilities, Found, MemoryUse, NotFound
from anytrain.core.notices import give_notice
from anytrain.core.plan import Wishes
from anytrain.machine.backends import capabilities

_OLDEST_MACOS = (12, 3)
_NARROWER = {torch.float64: torch.float32, torch.complex128: torch.complex64}
_FALLBACK_WARNING = r"The operator '.*' .*on the MPS backend"
_GIB = 2**30


@dataclass(frozen=True)
class Mps:
    """The GPU of an Apple computer."""

    index: int | None = None
    name: ClassVar[str] = "mps"
    process_group: ClassVar[str | None] = None

    def probe(self) -> Found | NotFound:
        """Check macOS, the chip and the torch build, without touching Metal."""
        if sys.platform != "darwin":
            return NotFound("this is not macOS")
        if platform.machine() != "arm64":
            return NotFound("this Mac has no Apple silicon, and torch no longer serves others")
        version = platform.mac_ver()[0]
        if _numbers(version) < _OLDEST_MACOS:
            return NotFound(
                f"macOS {version} is too old: mps needs macOS 12.3 or newer",
                broken=True,
                fix="update macOS",
            )
        if not torch.backends.mps.is_built():
            return NotFound(
                f"this torch ({torch.__version__}) is built without mps",
                broken=True,
                fix="install the arm64 build of torch",
            )
        if not torch.backends.mps.is_available():
            return NotFound(
                f"torch {torch.__version__} finds no Metal device on macOS {version}",
                broken=True,
                fix="update macOS; in a virtual machine, give it a GPU",
            )
        return Found(f"{chip()}, macOS {version}", num_devices=1)

    def process_counts(self) -> tuple[int, ...]:
        """Return one: neither gloo nor nccl serves mps."""
        return (1,)

    def launch_environment(self, num_processes: int, wishes: Wishes) -> Mapping[str, str]:
        """Return the switch for the CPU fallback, unless the user has set it."""
        if environment.variable(environment.MPS_FALLBACK) is not None:
            return {}
        return {environment.MPS_FALLBACK: "1"}

    def device(self, local_rank: int) -> torch.device:
        """Return the GPU, and see to it that each fallback to the CPU is shown once."""
        if self.index or local_rank:
            raise BadInput(
                f"There is no mps:{self.index or local_rank}.",
                why="a Mac has one GPU for torch, and it serves one process.",
                fix='pass "mps", and start one process.',
            )
        show_fallback_once()
        return torch.device("mps", 0)

    def capabilities(self, device: torch.device) -> Capabilities:
        """Return what the GPU computes in, found by computing."""
        return Capabilities(
            backend=self.name,
            device=str(device),
            name=f"{chip()}, macOS {platform.mac_ver()[0]}",
            dtypes=capabilities.working_dtypes(device),
            memory_bytes=torch.mps.recommended_max_memory(),
            process_group=self.process_group,
            scales_gradients=capabilities.scales_gradients(device),
            fuses_optimizer=capabilities.fused_optimizer_skips(device),
        )

    def place(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        """Return the tensor on the GPU, float64 as float32; the copy always waits."""
        # Host and GPU share memory: there is nothing to pin, and a copy that does not wait may
        # read a host tensor after it has changed.
        narrower = _NARROWER.get(tensor.dtype)
        if narrower is None:
            return tensor.to(device)
        _tell_narrowed(tensor.dtype, narrower)
        return tensor.to(narrower).to(device)

    def lane(self, device: torch.device) -> None:
        """Return None: copies are in the order of what is computed."""

    def end_step(self) -> None:
        """Do nothing: Metal's queue needs no cut."""

    def synchronize(self, device: torch.device) -> None:
        torch.mps.synchronize()

    def is_idle(self, device: torch.device) -> bool:
        """Return True: the runtime does not say, so a wait counts as one."""
        return True

    def memory(self, device: torch.device) -> MemoryUse:
        """Return what Metal's driver holds for this process, and what it advises at most."""
        used = torch.mps.driver_allocated_memory()
        return MemoryUse(used, None, torch.mps.recommended_max_memory())

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether Metal's allocator gave up."""
        return isinstance(error, RuntimeError) and "MPS backend out of memory" in str(error)

    def explain(self, error: BaseException) -> str | None:
        """Say what is known of an error that came out of mps, ready to be reported."""
        if isinstance(error, AnytrainError) or not _from_mps(error):
            return None
        if self.is_out_of_memory(error):
            return _explain_memory(error)
        missing = re.search(r"operator '([^']+)' is not currently implemented", str(error))
        if isinstance(error, NotImplementedError) and missing:
            return _explain_missing(missing.group(1))
        return _report(error)

    def release(self) -> None:
        gc.collect()
        torch.mps.empty_cache()

    def rng_state(self, device: torch.device) -> torch.Tensor | None:
        return torch.mps.get_rng_state()

    def restore_rng(self, device: torch.device, state: torch.Tensor) -> None:
        torch.mps.set_rng_state(state.cpu())

    def compilations(self) -> int | None:
        """Return None: Metal does not count its graphs for us."""
        return None


def show_fallback_once() -> None:
    """Show torch's warning that an op runs on the CPU once for each op, and never lose one."""
    # torch gives this warning once in a process, for the first op alone; set_warn_always lifts
    # that, and the filter then keeps each op to one line.
    torch.set_warn_always(True)
    warnings.filterwarnings("once", message=_FALLBACK_WARNING, category=UserWarning)


@cache
def chip() -> str:
    """Return the chip's name, such as "Apple M2 Pro"."""
    try:
        ran = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return platform.machine()
    return ran.stdout.strip() or platform.machine()


@cache
def _tell_narrowed(wide: torch.dtype, narrow: torch.dtype) -> None:
    """Say once per process that a dtype was narrowed."""
    give_notice(
        f"mps has no {str(wide).removeprefix('torch.')}: such inputs are cast to "
        f"{str(narrow).removeprefix('torch.')} when they are placed on the device.",
        stacklevel=3,
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _from_mps(error: BaseException) -> bool:
    return isinstance(error, RuntimeError | TypeError) and bool(
        re.search(r"\bmps\b|metal", str(error), re.IGNORECASE)
    )


def _explain_missing(op: str) -> str:
    fallback = environment.mps_fallback()
    flag = environment.MPS_FALLBACK
    if environment.variable(flag) == "0":
        why = f"{flag}=0 forbids running it on the CPU instead."
    elif environment.torch_came_first():
        why = (
            "It was not run on the CPU instead, because torch was imported before anytrain, and "
            f"torch reads {flag} only while it is loaded."
        )
    else:
        why = f"It was not run on the CPU instead: {fallback.because}."
    return (
        f"mps has no {op} in torch {torch.__version__}.\n{why}\n"
        f"Import anytrain before torch, or start the program with {flag}=1; the op then runs on "
        "the CPU, slowly."
    )


def _explain_memory(error: BaseException) -> str:
    used, total = torch.mps.driver_allocated_memory(), torch.mps.recommended_max_memory()
    return (
        f"Out of memory on mps: {capabilities.first_line(error)}\n"
        f"Metal holds {used / _GIB:.1f} GiB for this process and advises {total / _GIB:.1f} GiB.\n"
        "Try a smaller batch with more gradient accumulation steps, and few distinct shapes: "
        "Metal keeps memory for each."
    )


def _report(error: BaseException) -> str:
    """Return a block to paste into a PyTorch issue."""
    op = re.search(r"aten::[\w.]+", str(error))
    where, tensors = _innermost(error.__traceback__)
    lines = [
        "An error came out of torch's mps backend. To report it to PyTorch, paste this block:",
        "```",
        f"error: {type(error).__name__}: {capabilities.first_line(error)}",
        f"op: {op.group(0) if op else where}",
        *(f"tensor: {tensor}" for tensor in tensors),
        f"torch: {torch.__version__}",
        f"macOS: {platform.mac_ver()[0] or 'unknown'} on {chip()}",
        f"python: {platform.python_version()}",
        "```",
    ]
    return "\n".join(lines)


def _innermost(tb: TracebackType | None) -> tuple[str, list[str]]:
    """Return the deepest Python line, and the tensors that it could see."""
    if tb is None:
        return "unknown", []
    while tb.tb_next is not None:
        tb = tb.tb_next
    line = traceback.extract_tb(tb)[0]
    tensors = [
        f"{name} {str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
        for name, value in tb.tb_frame.f_locals.items()
        if isinstance(value, torch.Tensor)
    ]
    return f"in {line.name}: {line.line or f'line {line.lineno}'}", tensors
