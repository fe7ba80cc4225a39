"""What arguments know about the device and the processes of their run.

The device is found when it is first asked for, so that arguments can be made without torch.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from anytrain.core import environment
from anytrain.doors.training_args.fields import LOG_LEVELS, Fields, ParallelMode

if TYPE_CHECKING:
    import torch

    from anytrain.core.environment import RankPlace
    from anytrain.engine.assemble.session import Session
    from anytrain.machine.parallel.world import World


class WorldKind(StrEnum):
    """What kind of world a process is in; each equals HF's DistributedType of its name."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    XLA = "XLA"


class DistributedState:
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


class Processes(Fields):
    """Device, ranks and turn-taking."""

    # Truthful answers to what scripts ask: these engines are not here.
    deepspeed_plugin = None
    fsdp_plugin_args = None
    framework = "pt"

    def __getstate__(self) -> dict[str, Any]:
        # A session belongs to the process that opened it.
        return {name: value for name, value in self.__dict__.items() if name != "_opened"}

    @property
    def _session(self) -> Session:
        from anytrain.doors.training_args import session

        return session.kept_session(self)

    @property
    def _place(self) -> RankPlace | World:
        """Where this process stands: by the launcher's word, or by the group once torch is here."""
        place = environment.read().place
        if place.size == 1 and "torch" not in sys.modules:
            return place
        return self._session.world

    @property
    def device(self) -> torch.device:
        """The device of this process: the best one of the machine, or the CPU where asked."""
        return self._session.device

    @property
    def _setup_devices(self) -> torch.device:
        return self.device

    @property
    def distributed_state(self) -> DistributedState:
        """Where this process stands among the others, by HF's names."""
        return DistributedState(self)

    @property
    def n_gpu(self) -> int:
        """The accelerators of this process: one, or none on the CPU; never DataParallel's many."""
        return 0 if self.device.type in ("cpu", "xla") else 1

    @property
    def world_size(self) -> int:
        """The number of processes of the job."""
        return self._place.size

    @property
    def process_index(self) -> int:
        """This process's rank in the job."""
        return self._place.rank

    @property
    def local_process_index(self) -> int:
        """This process's rank on its machine."""
        return self._place.local_rank

    @property
    def parallel_mode(self) -> ParallelMode:
        """How the job is shared out."""
        if self.device.type == "xla":
            return ParallelMode.TPU
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def train_batch_size(self) -> int:
        """The samples that this process sees at once in training."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """The samples that this process sees at once in evaluation."""
        return self.per_device_eval_batch_size

    @property
    def mixed_precision(self) -> str:
        """The precision that is asked for: no, bf16, fp16 or auto."""
        asked = asked_precision(self)
        if asked is not None:
            return asked
        wish = environment.read().wishes.precision
        return "no" if wish is None else wish.value

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """How long a process waits for the others."""
        return timedelta(seconds=self.ddp_timeout)

    @property
    def should_log(self) -> bool:
        """Whether this process logs."""
        place = self._place
        return (place.local_rank if self.log_on_each_node else place.rank) == 0

    @property
    def should_save(self) -> bool:
        """Whether this process writes checkpoints and results."""
        place = self._place
        return (place.local_rank if self.save_on_each_node else place.rank) == 0

    @property
    def place_model_on_device(self) -> bool | None:
        """Whether a trainer places the model; None leaves it to the trainer. Made to override."""
        return None

    def get_process_log_level(self) -> int:
        """Return the log level of this process; "passive" keeps what the program has set.

        Scripts set it through transformers, where they use that.
        """
        level = LOG_LEVELS[self.log_level if self.should_log else self.log_level_replica]
        own = logging.getLogger("anytrain")
        theirs = "transformers" in sys.modules and own.level == logging.NOTSET
        passive = logging.getLogger("transformers") if theirs else own
        return passive.getEffectiveLevel() if level == -1 else level

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return the number of warm-up steps of a training of that length.

        Args:
            num_training_steps: Optimizer steps of the whole training.
        """
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * self.warmup_steps)

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Let the main process through the block before the others.

        `local` means the main process of each machine; pass False where machines share a disk.

        Args:
            local: Whether the main process of each machine goes first; False where
                machines share a disk.
            desc: What is done inside, for the message if it hangs.
        """
        if self.world_size == 1:
            yield
            return
        world = self._session.world
        first = (world.local_rank if local else world.rank) == 0
        why = f"main_process_first({desc!r})"
        if not first:
            world.barrier(why)
        try:
            yield
        finally:  # also after an error: the others must not wait for ever
            if first:
                world.barrier(why)


def asked_precision(args: Fields) -> str | None:
    """Return the precision that the arguments name, in whichever spelling; None for none."""
    if args.precision is not None:
        return args.precision
    if args.bf16:
        return "bf16"
    return "fp16" if args.fp16 else None
