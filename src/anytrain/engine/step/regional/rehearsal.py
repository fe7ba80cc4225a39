"""Compile a block in a process of its own, so that torch's caches on disk hold it.

Why not in a thread: when Dynamo ends it puts back the random state that it began with, which
undoes what the training thread has drawn since; and it holds the interpreter most of the time.
"""

from __future__ import annotations

import copy
import copyreg
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import nn

from anytrain.engine.step.regional.example import Example
from anytrain.engine.step.watch import tensors

_CALL = (
    "import json, sys; sys.path[:] = json.load(open(sys.argv[1] + '/path.json'));"
    "from anytrain.engine.step.regional import rehearsal; rehearsal.main(sys.argv[1])"
)
_JOB, _PATH, _OUTCOME, _LOG = "job.pkl", "path.json", "outcome.json", "log.txt"
_RUNS = 5
_NICENESS = 10
_MATMULS: Any = torch.backends.cuda.matmul
_SETTINGS = (
    "fp32_precision",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
)
"""What torch's caches tell code apart by, besides the code; it must be the same in the child."""
Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rehearsal went."""

    compile_s: float = 0.0
    """Seconds from the start of the process to compiled code on disk."""
    gain: float = 0.0
    """The share of a block's time that compiled code saves."""
    failed: str | None = None
    """Why there is no compiled code."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What is compiled: two blocks of one kind, and calls of them."""

    blocks: tuple[nn.Module, ...]
    examples: tuple[Example, ...]
    device: torch.device

    def hollow(self) -> Piece:
        """Return a copy whose parameters have no values: the compiler does not look at them."""
        return Piece(tuple(map(_hollow, self.blocks)), self.examples, self.device)

    def filled(self) -> Piece:
        """Return a hollow copy with some values, on the device."""
        for block in self.blocks:
            _fill(block, self.device)
        return self


def _hollow(block: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in block.parameters()
    }
    memo |= {id(buffer): buffer.detach().cpu() for buffer in block.buffers()}
    return copy.deepcopy(block, memo)


def _fill(block: nn.Module, device: torch.device) -> None:
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in block.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in made:
                values = torch.randn(parameter.shape, device=device) * 0.02
                like = torch.empty_like(parameter, device=device).copy_(values)
                made[parameter] = nn.Parameter(like, requires_grad=parameter.requires_grad)
            if parameter is not None:
                module._parameters[name] = made[parameter]
    block.to(device)
    block.train()


@contextmanager
def tracing() -> Iterator[None]:
    """Let the block compile code that serves all sizes and all copies of a block.

    Two sizes that happen to be equal (32 rows of 32 words) stay two sizes, and a dropout's share
    is a constant: as a variable, it makes Dynamo begin again. Memory formats are pickled by name:
    by itself, pickle names the first module loaded that holds them, so that the keys of torch's
    caches would hang on the order of a process's imports.
    """
    import torch._dynamo
    from torch.fx.experimental import _config as shapes

    with ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(specialize_float=True))
        stack.enter_context(shapes.patch(use_duck_shape=False))  # type: ignore[attr-defined]
        formats = copyreg.dispatch_table.get(torch.memory_format)
        copyreg.pickle(torch.memory_format, _by_name)
        try:
            yield
        finally:
            del copyreg.dispatch_table[torch.memory_format]
            if formats is not None:
                copyreg.dispatch_table[torch.memory_format] = formats


def _by_name(memory_format: torch.memory_format) -> tuple[Any, tuple[str]]:
    return memory_format_named, (str(memory_format).removeprefix("torch."),)


def memory_format_named(name: str) -> Any:
    """Return a memory format of torch."""
    return getattr(torch, name)


def compiled(kind: type[nn.Module]) -> Forward:
    """Return the compiled forward of a class of blocks; nothing is compiled before it is called.

    It draws the random numbers that the block draws by itself: the same dropout, step for step.
    """
    forward: Forward = torch.compile(kind.forward, dynamic=True, options={"fallback_random": True})
    return forward


def num_compiled(kind: type[nn.Module]) -> int:
    """Return how often the class's forward has been compiled."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return len(_debug_get_cache_entry_list(kind.forward.__code__))


def call(forward: Forward, block: nn.Module, example: Example, device: torch.device) -> None:
    """Run a block forward and backward; no gradient is left behind."""
    args, kwargs = example.make(device)
    with torch.enable_grad():
        with example.precision():
            output = forward(block, *args, **kwargs)
        ends = [tensor for tensor in tensors(output) if tensor.requires_grad]
        held = [*block.parameters(), *tensors([args, kwargs])]
        wanted = [tensor for tensor in held if tensor.requires_grad]
        torch.autograd.grad(ends, wanted, [torch.ones_like(end) for end in ends], allow_unused=True)


def rehearse(piece: Piece) -> Outcome:
    """Compile the piece, look whether one compilation serves all of it, and measure the gain."""
    piece = piece.filled()
    kind, first, device = type(piece.blocks[0]), piece.blocks[0], piece.device
    forward = compiled(kind)
    began = time.perf_counter()
    with tracing():
        call(forward, first, piece.examples[0], device)
    took = time.perf_counter() - began
    if not num_compiled(kind):
        return Outcome(failed="torch compiled nothing of it")
    for block in piece.blocks:
        for example in piece.examples:
            call(forward, block, example, device)
    if num_compiled(kind) > 1:
        return Outcome(failed="each copy or size would be compiled anew")
    last = piece.examples[-1]
    eager, fast = (
        _busy_s(partial(call, run, first, last, device), device) for run in (kind.forward, forward)
    )
    return Outcome(took, 1 - fast / eager if eager else 0.0)


def _busy_s(run: Callable[[], None], device: torch.device) -> float:
    """Return how long the device is busy with a run; of the host, the quickest of some."""
    if device.type == "cpu":
        return min(_timed(run) for _ in range(_RUNS))
    run()
    torch.accelerator.synchronize(device)
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        for _ in range(_RUNS):
            run()
        torch.accelerator.synchronize(device)
    busy_us = sum(each.self_device_time_total for each in profile.key_averages())
    return float(busy_us) / _RUNS / 1e6


def _timed(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _settings() -> dict[str, Any]:
    return {name: getattr(_MATMULS, name) for name in _SETTINGS}


class Rehearsal:
    """A rehearsal in a process that yields to all others and ends with this one."""

    def __init__(self, piece: Piece) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="anytrain-region-"))
        job = (piece.hollow(), _settings(), torch.get_default_dtype())
        (self._folder / _JOB).write_bytes(cloudpickle.dumps(job))
        (self._folder / _PATH).write_text(json.dumps(sys.path))
        self._began = time.monotonic()
        with (self._folder / _LOG).open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CALL, str(self._folder)],
                stdin=subprocess.PIPE,  # its end tells the child that nobody waits for it
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._finalizer = weakref.finalize(self, _end, self._process, self._folder)

    def poll(self) -> Outcome | None:
        """Return how it went; None while it goes on."""
        if self._process.poll() is None:
            return None
        took = time.monotonic() - self._began
        try:
            found = json.loads((self._folder / _OUTCOME).read_text())
            outcome = Outcome(**{**found, "compile_s": took})
        except (OSError, ValueError):
            outcome = Outcome(failed=self._last_words())
        self.close()
        return outcome

    def close(self) -> None:
        """End it, if it goes on, and what it has started."""
        self._finalizer()

    def _last_words(self) -> str:
        with suppress(OSError):
            lines = (self._folder / _LOG).read_text(errors="replace").strip().splitlines()
            if lines:
                return lines[-1][:200]
        return f"its process ended with {self._process.returncode}"


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    shutil.rmtree(folder, ignore_errors=True)


def main(folder: str) -> None:
    """Rehearse what the folder holds, and leave the outcome there."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(_NICENESS)
    job = cloudpickle.loads((Path(folder) / _JOB).read_bytes())
    piece, settings, dtype = job
    for name, value in settings.items():
        if getattr(_MATMULS, name) != value:
            setattr(_MATMULS, name, value)
    torch.set_default_dtype(dtype)
    try:
        outcome = rehearse(piece)
    except Exception as error:  # noqa: BLE001  whatever it is, the block stays as it is
        text = str(error).strip().splitlines() or [""]
        outcome = Outcome(failed=f"{type(error).__name__}: {text[0]}"[:200])
    (Path(folder) / _OUTCOME).write_text(json.dumps(asdict(outcome)))


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)
