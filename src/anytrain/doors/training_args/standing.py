"""Where a process stands among those of its job, as scripts ask their arguments for it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from anytrain.doors.training_args.processes import Processes


class WorldKind(StrEnum):
    """What kind of world a process is in; each equals HF's DistributedType of its name."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    XLA = "XLA"


class Standing:
    """A view of a run's processes; it holds nothing itself."""

    def __init__(self, args: Processes) -> None:
        self._args = args

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._args.device

    @property
    def num_processes(self) -> int:
        """The number of processes of the job."""
        return self._args.world_size

    @property
    def process_index(self) -> int:
        """This process's rank in the job."""
        return self._args.process_index

    @property
    def local_process_index(self) -> int:
        """This process's rank on its machine."""
        return self._args.local_process_index

    @property
    def is_main_process(self) -> bool:
        """Whether it is the first of the job."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether it is the first on its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether it is the last of the job."""
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there are several."""
        return self.num_processes > 1

    @property
    def distributed_type(self) -> WorldKind:
        """What kind of world this is."""
        kind = self._args._session.backend.name
        if kind in ("tpu", "xla"):
            return WorldKind.XLA
        if not self.use_distributed:
            return WorldKind.NO
        return WorldKind.MULTI_GPU if kind == "cuda" else WorldKind.MULTI_CPU

    @property
    def backend(self) -> str | None:
        """The transport between processes; None where there is one process."""
        return self._args._session.world.transport

    def wait_for_everyone(self) -> None:
        """Go on when all processes are here."""
        self._args._session.world.barrier("wait_for_everyone()")

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let the job's first process through the block before the others."""
        return self._args.main_process_first(local=False)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Let each machine's first process through the block before its others."""
        return self._args.main_process_first(local=True)

    def print(self, *words: Any, **how: Any) -> None:
        """Print on the machine's first process alone."""
        if self.is_local_main_process:
            print(*words, **how)  # noqa: T201
