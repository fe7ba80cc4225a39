"""Start a function in several processes, from a notebook or from a script."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from anytrain.core import environment
from anytrain.core.errors import BadInput, Unsupported, WrongOrder
from anytrain.core.plan import Wish, Wishes, check_precision, wish
from anytrain.doors.launch import forking
from anytrain.doors.launch.options import check_port
from anytrain.machine.processes import spawn


def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
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

    `start_method="fork"` copies this process instead, if it has touched no device; each copy
    computes with one thread. `timeout` is how many seconds the call may take. `return_all` gives
    a list of what each process of this machine returned. Tensors come back on the CPU.
    """
    _check(mixed_precision, num_processes, node_rank, num_nodes, rdzv_backend)
    _check_start(start_method, timeout)
    from anytrain.doors.launch.counts import choose, threads

    # "no" is the argument's default: it must not silence what the environment says.
    precision = None if mixed_precision == "no" else mixed_precision
    wishes = Wishes(
        precision=wish(precision, "notebook_launcher"),
        downcast_bf16=wish("yes" if downcast_bf16 else None, "notebook_launcher"),
    )
    variables = environment.launch_variables(wishes)
    everything = wishes.over(environment.read().wishes)
    crowd = choose(everything, num_processes)
    is_alone = crowd.num_processes * num_nodes == 1
    if is_alone and start_method is None and timeout is None:
        with _exported(variables):
            value = function(*args)
        return [value] if return_all else value
    if start_method == "fork":
        forking.check(function, args, crowd.backend.name)
    variables.update(threads(crowd.num_processes, None))
    variables.update(crowd.backend.launch_environment(crowd.num_processes, everything))
    if is_alone and not rdzv_endpoint:
        use_port = 0  # nobody else is to be met
    address, port = _meeting_point(rdzv_endpoint, master_addr, use_port, node_rank, num_nodes)
    crew = spawn.Crew(
        num_processes=crowd.num_processes,
        size=crowd.num_processes * num_nodes,
        first_rank=crowd.num_processes * node_rank,
        address=address,
        port=port,
        environ=variables,
        prefix=log_line_prefix_template,
        interval_s=monitor_interval,
        max_restarts=max_restarts,
        forks=start_method == "fork",
        timeout_s=timeout,
        brings_all=return_all,
        trains_on_host=crowd.backend.name == "cpu",
    )
    return spawn.call(function, args, crew)


def debug_launcher(
    function: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2
) -> Any:
    """Call the function in `num_processes` CPU processes, to test it without a device."""
    _check("no", num_processes, 0, 1, "static")
    wishes = Wishes(device=Wish("cpu", "debug_launcher"))
    crew = spawn.Crew(
        num_processes,
        num_processes,
        port=_free_port(),
        environ={"OMP_NUM_THREADS": "1", **environment.launch_variables(wishes)},
    )
    return spawn.call(function, args, crew)


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
    if timeout is not None and timeout <= 0:
        raise BadInput(
            f"Cannot use timeout={timeout}.",
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
    check_precision(wish(mixed_precision.lower(), "argument"))
    if num_processes is not None and num_processes < 1:
        raise BadInput(
            f"Cannot start {num_processes} processes.",
            why="num_processes must be at least 1.",
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


def _meeting_point(
    endpoint: str, address: str, port: str | int, node_rank: int, num_nodes: int
) -> tuple[str, int]:
    """Return where rank 0 listens; port 0 picks a free one on a single machine."""
    if endpoint:
        address, _, port = endpoint.rpartition(":")
    if not str(port).isdigit():
        raise BadInput(
            f"Cannot use port {port!r}.",
            why="a port is a number.",
            fix='pass use_port="29500", or "0" for a free one.',
        )
    if int(port) == 0 and num_nodes == 1:
        return address, _free_port()
    if node_rank == 0:
        check_port(int(port), "use_port")
    return address, int(port)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


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
