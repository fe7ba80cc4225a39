"""Google's TPUs through torch_tpu, which gives torch a device of its own.

torch_tpu loads itself when torch is imported and finds a chip. Many of its own functions raise
when user code calls them, so what `torch.accelerator` offers is asked there. One process holds one
device for its whole life, and a process that was forked from one that held it holds none.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

import torch

from anytrain.core import environment
from anytrain.core.errors import BadInput, DeviceBroken
from anytrain.core.facts import Capabilities, Found, MemoryUse, NotFound
from anytrain.core.plan import Wishes
from anytrain.machine.backends import capabilities
from anytrain.machine.backends.capabilities import tpu_chips

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_ADDRESSES = "TORCH_TPU_SLICEBUILDER_ADDRESSES"
_FULL = ("RESOURCE_EXHAUSTED", "TPU ran out of memory")
_FORKED = "re-initialize TPU in a forked subprocess"
# Chips on a board are wired as a mesh, and only these counts are a whole part of it.
_COUNTS = {
    "TPU v4": (1, 2, 4, 8),
    "TPU v5p": (1, 2, 4, 8),
    "TPU v5e": (1, 4, 8),
    "TPU v6e": (1, 4, 8),
    "TPU v7": (2, 4, 8),
}
# torch_tpu remembers the first answer for the life of a process, and a notebook may launch twice
# with different counts: ask it in a process that ends.
# Of several hosts it would also name the meeting point, which a launcher of ours has named already.
_ASK_LAUNCH_ENVIRONMENT = """
import json, os, sys
import torch
torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=int(sys.argv[1]))
found = {name: value for name, value in os.environ.items() if name.startswith("TORCH_TPU_")}
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Tpu:
    """The TPU chips of this host."""

    index: int | None = None
    name: ClassVar[str] = "tpu"
    process_group: ClassVar[str | None] = "tpu_dist"

    def probe(self) -> Found | NotFound:
        """Ask torch which accelerator it has, without starting the TPU runtime."""
        chips = tpu_chips()
        if find_spec("torch_tpu") is None:
            return _not_installed(chips)
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and accelerator.type == "tpu":
            count = torch.accelerator.device_count()
            return Found(f"torch_tpu has {count} device(s): {_kind(chips)}", count)
        if not chips:
            return NotFound("torch_tpu is installed, and no TPU chip is on this host")
        return _did_not_load(chips)

    def process_counts(self) -> tuple[int, ...]:
        """Return the parts that this board's mesh can be cut into."""
        count = torch.accelerator.device_count()
        return tuple(n for n in _COUNTS.get(_kind(tpu_chips()), (1,)) if n <= count)

    def launch_environment(self, num_processes: int, wishes: Wishes) -> Mapping[str, str]:
        """Return torch_tpu's description of the mesh, which children read before they start."""
        if num_processes not in self.process_counts():
            raise BadInput(
                f"Cannot start {num_processes} processes on this TPU host.",
                why=f"{_kind(tpu_chips())} can be cut into "
                f"{', '.join(map(str, self.process_counts()))} processes.",
                fix="pass one of these as num_processes.",
            )
        ran = subprocess.run(
            [sys.executable, "-c", _ASK_LAUNCH_ENVIRONMENT, str(num_processes)],
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode != 0:
            raise DeviceBroken(
                "torch_tpu cannot describe this host to its processes.",
                why=(ran.stderr.strip().splitlines() or ["it said nothing"])[-1],
                fix="check the chips with `anytrain env`, or start one process.",
            )
        answer: dict[str, str] = json.loads(ran.stdout.strip().splitlines()[-1])
        _check_addresses(answer.get(_ADDRESSES, ""), num_processes)
        return answer

    def device(self, local_rank: int) -> torch.device:
        """Return the one device that this process holds."""
        try:
            # A first tensor would abort the process where the chip does not start; this raises.
            with _without_stage_warnings():
                getattr(torch.get_device_module(torch.device(self.name)), "default_generators", ())
            index = torch.accelerator.current_device_index()
        except RuntimeError as error:
            raise DeviceBroken(
                "torch_tpu is loaded, and the TPU does not start.",
                why=capabilities.first_line(error),
                fix="end other programs that hold the chips, and use fresh processes, not forked "
                "ones, where this one has used the TPU.",
            ) from error
        if self.index is not None and self.index != index:
            raise BadInput(
                f"Cannot use tpu:{self.index} in this process.",
                why=f"torch_tpu gave it tpu:{index}, and a process cannot change its device.",
                fix='pass "tpu"; `anytrain launch` gives each process its own.',
            )
        return torch.device("tpu", index)

    def capabilities(self, device: torch.device) -> Capabilities:
        """Return what the TPU computes in, found by computing."""
        dtypes = capabilities.working_dtypes(device)
        return Capabilities(
            backend=self.name,
            device=str(device),
            name=_kind(tpu_chips()),
            dtypes=dtypes,
            memory_bytes=_total_memory(device),
            process_group=self.process_group,
            # Each trial compiles: what nobody can use is not tried.
            scales_gradients="float16" in dtypes and capabilities.scales_gradients(device),
            fuses_optimizer=capabilities.fused_optimizer_skips(device),
        )

    def place(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        return tensor.to(device, non_blocking=non_blocking)

    def lane(self, device: torch.device) -> None:
        """Return None: the runtime orders copies itself."""

    def end_step(self) -> None:
        """Do nothing: torch_tpu runs eagerly and has no step to mark."""

    def synchronize(self, device: torch.device) -> None:
        torch.accelerator.synchronize(device)

    def is_idle(self, device: torch.device) -> bool:
        """Return True: the runtime does not say, so a wait counts as one."""
        return True

    def memory(self, device: torch.device) -> MemoryUse:
        """Return what the TPU's allocator counts."""
        stats = torch.accelerator.memory_stats(device)
        return MemoryUse(
            stats.get("allocated_bytes.all.current"),
            stats.get("allocated_bytes.all.peak"),
            _total_memory(device),
        )

    def is_out_of_memory(self, error: BaseException) -> bool:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        return isinstance(error, RuntimeError) and any(word in str(error) for word in _FULL)

    def explain(self, error: BaseException) -> str | None:
        """Say what to do when the TPU's memory is full, or a forked process asks for it."""
        if isinstance(error, RuntimeError) and _FORKED in str(error):
            return (
                "This process was forked from one that had used the TPU, and cannot use it.\n"
                'Start fresh processes: `anytrain launch`, notebook_launcher, or the "spawn" '
                "start method."
            )
        if not self.is_out_of_memory(error):
            return None
        return (
            f"Out of memory on the TPU: {capabilities.first_line(error)}\n"
            "Try a smaller batch with more gradient accumulation steps, or "
            'mixed_precision="bf16".'
        )

    def release(self) -> None:
        gc.collect()
        torch.accelerator.empty_cache()

    def rng_state(self, device: torch.device) -> torch.Tensor | None:
        generic = getattr(torch.accelerator, "random", None)  # absent in torch 2.13
        if generic is not None:
            state: torch.Tensor = generic.get_rng_state(device)
        else:
            with _without_stage_warnings():
                generators = torch.get_device_module(device).default_generators
            state = generators[device.index or 0].get_state()
        return state.cpu()

    def restore_rng(self, device: torch.device, state: torch.Tensor) -> None:
        with _without_stage_warnings():
            torch.get_device_module(device).set_rng_state(state.cpu(), device)

    def compilations(self) -> int | None:
        """Return the misses of torch_tpu's compile cache, where it tells them."""
        module = getattr(torch, "tpu", None)
        misses = getattr(module, "_get_cache_misses", None)
        return None if misses is None else int(misses())


def _kind(chips: tuple[str, ...]) -> str:
    return chips[0] if chips else "a TPU"


def _not_installed(chips: tuple[str, ...]) -> NotFound:
    if not chips:
        return NotFound("torch_tpu is not installed, and no TPU chip is on this host")
    # torch_xla may still serve the chips: then nothing is broken.
    return NotFound(
        f"{chips[0]} is here, but torch_tpu is not installed",
        broken=find_spec("torch_xla") is None,
        fix="install torch_tpu",
    )


def _total_memory(device: torch.device) -> int | None:
    try:
        with _without_stage_warnings():
            return int(torch.get_device_module(device).get_device_properties(device).total_memory)
    except (AttributeError, RuntimeError):
        return None


@contextmanager
def _without_stage_warnings() -> Iterator[None]:
    """Keep torch_tpu from telling users that a function which we call may change one day."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="<TorchTpu/ApiStage/")
        yield


def _did_not_load(chips: tuple[str, ...]) -> NotFound:
    what = f"{_kind(chips)} is here, but torch_tpu did not load itself"
    if environment.variable(_AUTOLOAD) == "0":
        return NotFound(f"{what}, with {_AUTOLOAD}=0", broken=True, fix=f"unset {_AUTOLOAD}")
    return NotFound(
        what,
        broken=True,
        fix="let this process see the chips (torch_tpu counts those under /dev/vfio), and install "
        f"the torch_tpu that fits torch {torch.__version__}",
    )


def _check_addresses(addresses: str, num_processes: int) -> None:
    """Refuse a mesh that was described from outside for another number of processes."""
    given = environment.variable(_ADDRESSES)
    if given is not None and len(addresses.split(",")) % num_processes:
        raise BadInput(
            f"Cannot start {num_processes} processes on this TPU host.",
            why=f"{_ADDRESSES} is set, and lists {len(addresses.split(','))} of them.",
            fix=f"unset {_ADDRESSES} and TORCH_TPU_TOPOLOGY: a launch finds them by itself.",
        )
