"""What `anytrain launch` can be asked for, on its command line or in a file. Loads no torch.

Options of `accelerate launch` that a launch here has no use for, or cannot serve, are sifted out.
"""

from __future__ import annotations

import errno
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from anytrain.core.errors import BadInput, Unsupported
from anytrain.core.plan import Wish, Wishes, check_precision, check_strategy, wish

_AT_LEAST_ONE = (
    "num_processes",
    "num_machines",
    "gradient_accumulation_steps",
    "num_cpu_threads_per_process",
)
_AT_LEAST_ZERO = ("machine_rank", "main_process_port", "max_restarts", "stall_timeout")
DEFAULT_PORT = 29500
_HF_FLAGS = {
    *("same_network", "enable_cpu_affinity", "quiet", "q", "use_mps_device", "use_xpu", "ipex"),
    *("dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation"),
    "no_tpu_cluster",
}
"""What a run does without, with no value."""
_HF_VALUES = {
    *("rdzv_backend", "rdzv_conf", "tee", "t", "log_dir", "role", "monitor_interval"),
    *("main_training_function", "dynamo_mode"),
}
"""What a run does without, with a value."""
_HF_REFUSED = {
    "use_deepspeed": "DeepSpeed",
    "deepspeed_": "DeepSpeed",
    "zero_stage": "DeepSpeed",
    "zero3_": "DeepSpeed",
    "offload_": "DeepSpeed",
    "gradient_clipping": "DeepSpeed",
    "use_fsdp": "FSDP",
    "fsdp_": "FSDP",
    "use_megatron_lm": "Megatron-LM",
    "megatron_lm_": "Megatron-LM",
    "fp8_": "fp8 training",
    "use_parallelism_config": "several kinds of parallelism at once",
    "parallelism_config_": "several kinds of parallelism at once",
    "mpirun_": "starting through mpirun",
    "tpu_cluster": "starting a TPU pod over ssh",
    "tpu_use_sudo": "starting a TPU pod over ssh",
    "vm": "starting a TPU pod over ssh",
    "env": "starting a TPU pod over ssh",
    "aws_": "starting on SageMaker",
    "no_python": "starting programs that are not Python scripts",
}
"""What cannot be served, by how its name begins."""


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """One launch, as it was asked for; None means automatic."""

    num_processes: int | None = None
    """The number of processes on all machines together."""
    num_machines: int | None = None
    machine_rank: int | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    mixed_precision: str | None = None
    downcast_bf16: bool | None = None
    gradient_accumulation_steps: int | None = None
    cpu: bool | None = None
    multi_gpu: bool | None = None
    tpu: bool | None = None
    gpu_ids: str | None = None
    num_cpu_threads_per_process: int | None = None
    dynamo_backend: str | None = None
    max_restarts: int | None = None
    stall_timeout: float | None = None
    strategy: str | None = None
    resume_from_checkpoint: str | None = None
    module: bool | None = None
    debug: bool | None = None

    def over(self, lower: LaunchOptions) -> LaunchOptions:
        """Return these options, with `lower`'s where these are silent."""
        mine = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(lower, **{name: v for name, v in mine.items() if v is not None})

    def given(self) -> dict[str, Any]:
        """Return the options that were asked for, by name."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def machines(self) -> int:
        """The number of machines."""
        return self.num_machines or 1

    def device(self) -> Wish | None:
        """Return the device that an option names."""
        for given, device in ((self.cpu, "cpu"), (self.multi_gpu, "cuda"), (self.tpu, "tpu")):
            if given:
                return Wish(device, "launch option")
        return None

    def wishes(self) -> Wishes:
        """Return what the children are told."""
        source = "launch option"
        return Wishes(
            device=self.device(),
            precision=wish(self.mixed_precision, source),
            accumulation=wish(self.gradient_accumulation_steps, source),
            compile=wish(self.dynamo_backend, source),
            downcast_bf16=wish(self.downcast_bf16, source),
            stall_s=wish(self.stall_timeout, source),
            strategy=wish(self.strategy, source),
            resume_from_checkpoint=wish(self.resume_from_checkpoint, source),
        )

    def gpus(self) -> list[str] | None:
        """Return the ids of the chosen GPUs; None where all were meant."""
        if self.gpu_ids is None or self.gpu_ids.strip().lower() == "all":
            return None
        return [part.strip() for part in self.gpu_ids.split(",")]


def check(options: LaunchOptions) -> None:
    """Refuse what cannot work on any machine."""
    check_precision(wish(options.mixed_precision, "launch option"))
    check_strategy(wish(options.strategy, "launch option"))
    _check_numbers(options)
    _check_devices(options)
    _check_machines(options)


def check_port(port: int, option: str) -> None:
    """Refuse a port that another program listens on; `option` names where it was given."""
    for family, host in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):
        try:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
            return
        except OSError as error:
            if family is socket.AF_INET or error.errno == errno.EADDRINUSE:
                raise BadInput(
                    f"Cannot use port {port}.",
                    why=f"the ranks are to meet there: {error.strerror or error}.",
                    fix=f"pass another {option}; 0 picks a free one.",
                ) from None


def free_port() -> int:
    """Return a port that nobody listens on now, nor is given by the system to whoever asks.

    Rank 0 listens there once it has loaded torch: others may have asked for a port by then.
    """
    for port in (*(20_000 + secrets.randbelow(10_000) for _ in range(20)), 0):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise BadInput(
        "Found no port where the ranks could meet.",
        why="this machine lets no program listen on a port.",
        fix="pass use_port with one that is free.",
    )


@contextmanager
def claimed_port(port: int, option: str) -> Iterator[None]:
    """Keep a port for one launch of this machine, from before its ranks listen to its end.

    Only Linux has names that vanish with their process; elsewhere the port itself is looked at.
    """
    with socket.socket(socket.AF_UNIX) as claim:
        try:
            if sys.platform == "linux":
                claim.bind(f"\0anytrain-port-{port}")
        except OSError:
            raise BadInput(
                f"Cannot use port {port}.",
                why="another launch on this machine is using it.",
                fix=f"wait until it is done, or pass another {option}; 0 picks a free one.",
            ) from None
        check_port(port, option)
        yield


def _check_numbers(options: LaunchOptions) -> None:
    for least, names in ((1, _AT_LEAST_ONE), (0, _AT_LEAST_ZERO)):
        for name in names:
            value = getattr(options, name)
            if value is not None and not value >= least:  # NaN is neither
                raise BadInput(
                    f"Cannot use --{name} {value}.",
                    why=f"it must be at least {least}.",
                    fix=f"pass --{name} {max(least, 1)} or leave it out.",
                )
    if options.main_process_port is not None and options.main_process_port > 65535:
        raise BadInput(
            f"Cannot use --main_process_port {options.main_process_port}.",
            why="port numbers end at 65535.",
            fix="pass a smaller one; 0 picks a free one.",
        )


def _check_devices(options: LaunchOptions) -> None:
    named = [f"--{name}" for name in ("cpu", "multi_gpu", "tpu") if getattr(options, name)]
    if len(named) > 1:
        raise BadInput(
            f"Cannot use {' and '.join(named)} together.",
            why="a job runs on one kind of device.",
            fix=f"keep one of them, such as {named[0]}.",
        )
    ids = options.gpus()
    if ids is None:
        return
    if not all(part.isdigit() for part in ids) or len(set(ids)) != len(ids):
        raise BadInput(
            f"Cannot read --gpu_ids {options.gpu_ids}.",
            why="it lists the numbers of different GPUs, separated by commas, or says all.",
            fix="pass --gpu_ids 0,1 or --gpu_ids all.",
        )


def _check_machines(options: LaunchOptions) -> None:
    machines = options.machines
    if (options.machine_rank or 0) >= machines:
        raise BadInput(
            f"Cannot use --machine_rank {options.machine_rank} with {machines} machine(s).",
            why="machines are counted from 0.",
            fix=f"pass --machine_rank {machines - 1} or less, or a larger --num_machines.",
        )
    if machines == 1:
        return
    if not options.main_process_ip or options.main_process_port == 0:
        raise BadInput(
            f"Cannot launch on {machines} machines without a place to meet.",
            why="every machine must know the address and the port of machine 0.",
            fix=f"pass --main_process_ip and --main_process_port {DEFAULT_PORT} on each of them.",
        )
    if options.num_processes is not None and options.num_processes % machines:
        raise BadInput(
            f"Cannot share {options.num_processes} processes among {machines} machines.",
            why="each machine runs the same number; --num_processes counts all of them.",
            fix=f"pass a multiple of {machines}.",
        )


def sift_hf_options(words: list[str], own: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Return a command line without the options that a run here does without, and their names.

    `own` says of each of our options whether a value follows it. The first word that is no option
    is the script, and everything after it the script's.

    >>> words = ["--same_network", "--cpu", "--tee=3", "train.py", "--role", "x"]
    >>> sift_hf_options(words, {"cpu": False})
    (['--cpu', 'train.py', '--role', 'x'], ['same_network', 'tee'])
    """
    kept: list[str] = []
    unused: list[str] = []
    left = list(words)
    while left and left[0].startswith("-") and left[0] != "--":
        word = left.pop(0)
        spelt, is_joined, _ = word.partition("=")
        name = spelt.lstrip("-").replace("-", "_")
        takes = own.get(name, name in _HF_VALUES) and not is_joined
        value = [left.pop(0)] if takes and left else []
        if name in own:
            kept += [word, *value]
        elif name in _HF_FLAGS or name in _HF_VALUES:
            unused.append(name)
        else:
            _refuse_hf_option(spelt, name)
            kept.append(word)  # whoever reads it next says that there is no such option
    return kept + left, unused


def _refuse_hf_option(spelt: str, name: str) -> None:
    for begin, what in _HF_REFUSED.items():
        if name == begin or (begin.endswith("_") and name.startswith(begin)):
            raise Unsupported(
                f"Cannot launch with {spelt}.",
                why=f"anytrain does not do {what}.",
                fix=f"leave {spelt} out, or start the job with the tool it was made for.",
            )
