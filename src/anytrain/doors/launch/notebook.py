"""Start a function in several processes, from a notebook or from a script."""

from __future__ import annotations

import math
import numbers
import os
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from anytrain.core import environment
from anytrain.core.errors import BadInput, BadType, Unsupported, WrongOrder
from anytrain.core.notices import give_notice
from anytrain.core.plan import Wish, Wishes, check_precision, wish
from anytrain.doors.launch.options import DEFAULT_PORT, claimed_port, free_port
from anytrain.machine.processes import spawn

_UNREAD = (
    "rdzv_conf and rdzv_id change nothing here: the processes meet at one address and port, "
    "without a service that would read them."
)
_FRESH = "leave start_method out: fresh processes need no untouched notebook. Or restart the kernel"


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str | None = "no",
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    start_method: str | None = None,
    timeout: float | None = None,
    downcast_bf16: bool = False,
    return_all: bool = False,
) -> Any:
    """Call the function in `num_processes` fresh processes; return what rank 0 returns.

    Without a number there is one process for each device. A single process is this one, unless
    a `start_method` or a `timeout` asks for a child. `num_processes` counts this machine's.
    The function, its arguments and the notebook's variables that it uses are handed over;
    tensors among them lie once in memory that all processes share until one writes to them. The
    error of the rank that fails first is raised here, and an interrupt ends them all.
    What the notebook has set up otherwise does not come along: seeds, torch's default dtype,
    the level of logging. Loading workers that are spawned (not forked, the default on Linux)
    know only what a module holds, not the notebook's own classes.

    `start_method="fork"` copies this process instead, if it has touched no device; each copy
    computes with one thread. `timeout` is how many seconds the call may take. `return_all` gives
    a list of what each process of this machine returned. Tensors come back on the CPU.

    Args:
        function: The function to call, defined in the notebook or in a module.
        args: What it is called with: a tuple, also for one thing: `(model,)`.
        num_processes: How many processes this machine starts. None: one for each GPU or TPU
            device; on a CPU, one.
        mixed_precision: "no", "bf16", "fp16" or "auto": what an Accelerator in the function
            takes where it is told nothing else.
        use_port: The port where the processes meet; "0" is a free one, and the default becomes
            one where there is one machine.
        master_addr: The address of machine 0.
        node_rank: This machine's number, from 0.
        num_nodes: How many machines take part; each calls notebook_launcher.
        rdzv_backend: "static". "c10d" is taken for one machine, where it makes no difference.
        rdzv_endpoint: Address and port in one, host:port, in place of `master_addr` and
            `use_port`.
        rdzv_conf: Changes nothing here, and a notice says so.
        rdzv_id: Changes nothing here, and a notice says so.
        max_restarts: How often a failed call is made again, with all processes.
        monitor_interval: Seconds between two looks at the processes.
        log_line_prefix_template: What each line of output begins with; ${rank}, ${local_rank}
            and ${role_name} are filled in.
        start_method: "spawn", which is the default, or "fork", below.
        timeout: Seconds that the whole call may take. None: as long as it takes.
        downcast_bf16: On TPUs: let float32 be bfloat16 in the compiler.
        return_all: Whether to return a list with the value of each process of this machine.
    """
    mixed_precision = str(mixed_precision or "no").lower()
    _check_function(function)
    _check(mixed_precision, num_processes, node_rank, num_nodes, rdzv_backend)
    _check_start(start_method, timeout)
    _check_watch(max_restarts, monitor_interval)
    args = _check_args(args)
    if rdzv_conf or rdzv_id != "none":
        give_notice(_UNREAD, stacklevel=2)
    from anytrain.doors.launch.target import choose_target, threads

    # "no" is the argument's default: it must not silence what the environment says.
    precision = None if mixed_precision == "no" else mixed_precision
    wishes = Wishes(
        precision=wish(precision, "notebook_launcher"),
        downcast_bf16=wish("yes" if downcast_bf16 else None, "notebook_launcher"),
    )
    variables = environment.launch_variables(wishes)
    everything = wishes.over(environment.read().wishes)
    target = choose_target(everything, num_processes)
    is_alone = target.num_processes * num_nodes == 1
    if is_alone and start_method is None and timeout is None:
        with _exported(variables):
            value = function(*args)
        return [value] if return_all else value
    if start_method == "fork":
        check_fork(function, args, target.backend.name)
    variables.update(threads(target.num_processes, None))
    variables.update(target.backend.launch_environment(target.num_processes, everything))
    if not rdzv_endpoint and (is_alone or (num_nodes == 1 and use_port == str(DEFAULT_PORT))):
        use_port = 0  # nobody else needs to know the number
    address, port = _meeting_point(rdzv_endpoint, master_addr, use_port)
    is_ours = node_rank == 0 and port != 0
    if port == 0:
        _check_one_machine(num_nodes)
        port = free_port()
    options = spawn.SpawnOptions(
        num_processes=target.num_processes,
        size=target.num_processes * num_nodes,
        first_rank=target.num_processes * node_rank,
        address=address,
        port=port,
        environ=variables,
        prefix=log_line_prefix_template,
        interval_s=monitor_interval,
        max_restarts=max_restarts,
        forks=start_method == "fork",
        timeout_s=timeout,
        brings_all=return_all,
        trains_on_host=target.backend.name == "cpu",
    )
    with claimed_port(port, "use_port") if is_ours else nullcontext():
        return spawn.call(function, args, options)


def debug_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2
) -> Any:
    """Call the function in `num_processes` CPU processes, to test it without a device.

    Args:
        function: The function to call.
        args: What it is called with: a tuple, also for one thing.
        num_processes: How many processes.
    """
    _check("no", num_processes, 0, 1, "static")
    args = _check_args(args)
    wishes = Wishes(device=Wish("cpu", "debug_launcher"))
    options = spawn.SpawnOptions(
        num_processes,
        num_processes,
        port=free_port(),
        environ={"OMP_NUM_THREADS": "1", **environment.launch_variables(wishes)},
    )
    return spawn.call(function, args, options)


def _check_function(function: Any) -> None:
    if not callable(function):
        raise BadType(
            f"Cannot call a {type(function).__name__} in other processes.",
            why="the first argument is the function itself, not what it returns.",
            fix="pass it without parentheses: notebook_launcher(train, (model,)).",
        )


def _check_start(start_method: str | None, timeout: float | None) -> None:
    if start_method not in (None, "spawn", "fork"):
        raise BadInput(
            f"Cannot start processes by {start_method!r}.",
            why="a fork server is one more process that knows nothing of the notebook: its forks "
            "would be fresh processes in all but name."
            if start_method == "forkserver"
            else 'there are two ways: "spawn" (fresh processes) and "fork" (copies of this one).',
            fix='pass start_method="spawn", or leave it out.',
        )
    if timeout is not None and not (isinstance(timeout, numbers.Real) and timeout > 0):
        raise BadInput(
            f"Cannot use timeout={timeout!r}.",
            why="it is the number of seconds that the whole call may take.",
            fix="pass a positive number, or leave it out to wait for as long as it takes.",
        )


def _check_nested() -> None:
    env = environment.read()
    if env.beats is not None or env.place.size > 1:
        raise WrongOrder(
            "Cannot launch processes from a process that was launched.",
            why=f"this one is rank {env.place.rank} of {env.place.size}; each of its peers would "
            "start as many again, on the same devices.",
            fix="call the function itself here, and launch once, from the notebook or script.",
        )


def _check(
    mixed_precision: str,
    num_processes: int | None,
    node_rank: int,
    num_nodes: int,
    rdzv_backend: str,
) -> None:
    _check_nested()
    check_precision(wish(mixed_precision, "argument"))
    is_whole = isinstance(num_processes, numbers.Integral)
    if num_processes is not None and (not is_whole or num_processes < 1):
        raise BadInput(
            f"Cannot start {num_processes!r} processes.",
            why="num_processes must be a whole number, at least 1.",
            fix="pass num_processes=1 or more, or leave it out for one per device.",
        )
    if not 0 <= node_rank < num_nodes:
        raise BadInput(
            f"Cannot use node_rank={node_rank} with num_nodes={num_nodes}.",
            why="nodes are counted from 0.",
            fix=f"pass a node_rank from 0 to {max(num_nodes, 1) - 1}.",
        )
    # One machine meets itself: whichever way was asked for, it is the same port.
    if rdzv_backend != "static" and (num_nodes > 1 or rdzv_backend != "c10d"):
        raise Unsupported(
            f"Cannot use rdzv_backend={rdzv_backend!r}.",
            why="the processes of a notebook meet at one address and port that all know.",
            fix='pass rdzv_backend="static" with master_addr and use_port.',
        )


def _check_watch(max_restarts: int, monitor_interval: float) -> None:
    if not isinstance(max_restarts, numbers.Integral) or max_restarts < 0:
        raise BadInput(
            f"Cannot use max_restarts={max_restarts!r}.",
            why="it is how often a failed call is made again.",
            fix="pass 0 or more.",
        )
    if not 0 < monitor_interval < math.inf:
        raise BadInput(
            f"Cannot use monitor_interval={monitor_interval}.",
            why="it is the number of seconds between two checks of the processes.",
            fix="pass a positive number, or leave it out for 0.1.",
        )


def _check_args(args: Sequence[Any]) -> tuple[Any, ...]:
    if not isinstance(args, (tuple, list)):
        raise BadType(
            f"Cannot use a {type(args).__name__} as args.",
            why="args holds what the function is called with, even if that is one thing.",
            fix="pass a tuple: (model,), with the comma.",
        )
    return tuple(args)


def _check_one_machine(num_nodes: int) -> None:
    if num_nodes > 1:
        raise BadInput(
            "Cannot pick a free port for several machines.",
            why=f"{num_nodes} machines are to meet, and each must know the port.",
            fix=f"pass the same use_port on all of them, such as {DEFAULT_PORT}.",
        )


def _meeting_point(endpoint: str, address: str, port: str | int) -> tuple[str, int]:
    """Return where rank 0 listens; port 0 stands for a free one."""
    given = "use_port"
    if endpoint:
        given = "rdzv_endpoint"
        address, _, port = endpoint.rpartition(":")
    digits = str(port)
    if not address or not digits.isdecimal() or len(digits) > 5 or int(digits) > 65535:
        raise BadInput(
            f"Cannot use {given}={reprlib.repr(endpoint or port)}.",
            why="a port is a number from 0 to 65535."
            if not endpoint
            else "it is an address and a port, a number up to 65535, with a colon between them.",
            fix='pass use_port="29500", or "0" for a free one.'
            if not endpoint
            else f'pass rdzv_endpoint="{address or endpoint}:{DEFAULT_PORT}".',
        )
    return address, int(port)


@contextmanager
def _exported(variables: Mapping[str, str]) -> Iterator[None]:
    """Let the function in this process see what children would be told."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def check_fork(function: Callable[..., Any], args: tuple[Any, ...], backend: str) -> None:
    """Refuse a fork after a device was used or a run begun; tell what it costs on a CPU."""
    if not hasattr(os, "fork"):
        raise Unsupported(
            "Cannot fork on this system.",
            why=f"{sys.platform} has no fork.",
            fix="leave start_method out for fresh processes.",
        )
    touched = _touched_device()
    if touched is not None:
        device, what = touched
        held = ", ".join(f"`{name}`" for name in _on_devices(function, args))
        raise WrongOrder(
            "Cannot fork this process.",
            why=f"{what}, and {device} does not survive a fork."
            + (f" These live there: {held}." if held else ""),
            fix=f"{_FRESH} and touch no device before the launch.",
        )
    _check_no_run()
    import torch

    if backend == "cpu" and torch.get_num_threads() > 1:
        give_notice(
            "Forked processes compute with one thread each: the threads of this process "
            f"({torch.get_num_threads()}) do not come along, and OpenMP would wait for them. "
            "Fresh processes share the cores.",
            stacklevel=3,
        )


def _touched_device() -> tuple[str, str] | None:
    """Return the device runtime that lives in this process, and what started it."""
    from anytrain.machine.backends import cuda

    if cuda.is_started():
        return "CUDA", "a GPU has been used here"
    if "torch_xla" in sys.modules:
        return "its runtime", "torch_xla has been imported here"
    if "torch_tpu" in sys.modules and _tpu_is_started():
        return "its runtime", "torch_tpu (loaded by `import torch`) has started the TPU here"
    return None


def _tpu_is_started() -> bool:
    import torch

    try:
        return bool(torch.get_device_module("tpu").is_initialized())
    except (AttributeError, RuntimeError):
        return True  # it does not say: a fork that hangs is worse than a refusal


def _check_no_run() -> None:
    """Refuse copies of a run: each would believe that it is alone."""
    current = sys.modules.get("anytrain.engine.assemble.current")
    if current is not None and current.get() is not None:
        raise WrongOrder(
            "Cannot fork this process.",
            why="an Accelerator or Trainer was made in it, and each copy would take over its "
            "world of one process.",
            fix="leave start_method out for fresh processes; or restart this one, and make it "
            "inside the function that is launched.",
        )


def _on_devices(function: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[str]:
    """Name the variables whose tensors live on a device."""
    for number, thing in enumerate(args):
        if _is_on_device(thing):
            yield f"args[{number}]"
    for name, thing in list(getattr(function, "__globals__", {}).items()):
        if not name.startswith("_") and _is_on_device(thing):
            yield name


def _is_on_device(thing: Any) -> bool:
    import torch

    if isinstance(thing, torch.nn.Module):
        thing = next(thing.parameters(), None)
    return isinstance(thing, torch.Tensor) and thing.device.type not in ("cpu", "meta")
