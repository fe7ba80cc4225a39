"""CUDA kernels of our own, compiled by the driver's compiler when they are first wanted.

That takes a second or less and needs no toolkit; what was compiled is kept in the user's cache.
"""

from __future__ import annotations

import ctypes
import hashlib
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import resources
from pathlib import Path
from struct import Struct
from typing import Any

import torch

from anytrain.core import environment
from anytrain.fast.kernels import nvrtc

_PREFIX = "step_"  # CUDA has functions of its own of such names
_THREADS = 256
_MOST_SHARED = 48 * 1024
"""What a block may have of shared memory without asking for it."""

_loaded: dict[tuple[int, str, str], Any] = {}
"""What this process has given to each GPU, once for all its trainings: it stays there."""


class Compiled:
    """The kernels of one file, for one GPU; they are compiled behind the run that will want them.

    `more` is put behind the file's own text.
    """

    def __init__(
        self, device: torch.device, file: str, names: Sequence[str], more: str = ""
    ) -> None:
        self._device, self._file, self._more = device, file, more
        self._names = [_PREFIX + name for name in names]
        self._found: dict[str, Any] | None = None
        self.problem: str | None = None
        """Why they are not there."""
        self._thread = threading.Thread(target=self._compile, name="anytrain-nvrtc", daemon=True)
        self._thread.start()

    def _compile(self) -> None:
        try:
            if torch.version.cuda is None:
                raise RuntimeError("written for NVIDIA's GPUs: warps of 32 threads")
            from torch.cuda import _utils

            torch.cuda.set_device(self._device)
            key = torch.cuda.current_device(), self._file, self._more
            if key not in _loaded:
                _loaded[key] = _utils._cuda_load_module(self._binary(), self._names)
            self._found = _loaded[key]
        except Exception as error:  # noqa: BLE001  torch's own kernels do it all too, slower
            self.problem = str(error)

    def _binary(self) -> bytes:
        """Return the compiled kernels, from the user's cache where they were made before."""
        source = resources.files("anytrain.fast.kernels").joinpath(self._file).read_text()
        source += self._more
        chip = torch.cuda.get_device_capability(self._device)
        key = hashlib.sha256(f"{source}{chip}{torch.version.cuda}".encode()).hexdigest()[:24]
        kept = environment.cache_folder() / "kernels" / f"{key}.cubin"
        with suppress(OSError):
            return kept.read_bytes()
        binary = nvrtc.compiled(source, chip)
        with suppress(OSError):  # a cache that cannot be written is no error
            kept.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as made:
                made.write(binary)
            Path(made.name).replace(kept)
        return binary

    def is_done(self) -> bool:
        """Whether the compiler has come to an end, good or bad."""
        return not self._thread.is_alive()

    def are_there(self) -> bool:
        """Whether they can be used; waits for the compiler."""
        self._thread.join()
        return self._found is not None

    def launch(
        self,
        name: str,
        grid: tuple[int, int],
        args: Sequence[Any],
        threads: int = _THREADS,
        shared_bytes: int = 0,
    ) -> None:
        """Start a kernel on the current stream."""
        assert self._found is not None
        _enter_context(self._device)
        kernel = self._found[_PREFIX + name]
        if shared_bytes >= _MOST_SHARED and shared_bytes > kernel._max_shared_mem_bytes:
            kernel.set_shared_memory_config(shared_bytes)
        _start(kernel.func, (*grid, threads), packed(args), shared_bytes)


# -- launching: torch's own way takes ten times as long, which steps that run op by op would feel --

_BUFFER, _SIZE, _END = 1, 2, 0
"""What comes next in the list of a launch's options, as the driver calls it."""
_LETTERS = {int: "i", bool: "i", float: "d"}
_layouts: dict[str, Struct] = {}


def packed(args: Sequence[Any]) -> bytes:
    """Return a kernel's arguments as they lie in memory: pointers, 32-bit numbers, doubles.

    >>> len(packed([1, 2, 0.5])), len(packed([1, 0.5]))
    (16, 16)
    """
    letters = "".join([_LETTERS.get(type(arg), "P") for arg in args])
    layout = _layouts.get(letters)
    if layout is None:
        layout = _layouts[letters] = Struct(letters)
    return layout.pack(*[arg if type(arg) in _LETTERS else arg.data_ptr() for arg in args])


def _start(function: Any, grid: tuple[int, int, int], arguments: bytes, shared_bytes: int) -> None:
    """Start a kernel on the current stream of the current GPU; `grid` ends with its threads."""
    size = ctypes.c_size_t(len(arguments))
    buffer = ctypes.create_string_buffer(arguments, len(arguments))
    options = (ctypes.c_void_p * 5)(
        _BUFFER, ctypes.addressof(buffer), _SIZE, ctypes.addressof(size), _END
    )
    across, down, threads = grid
    stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
    told = _driver().cuLaunchKernel(
        function, across, down, 1, threads, 1, 1, shared_bytes, stream, None, options
    )
    if told:
        from torch.cuda import _utils

        _utils._check_cuda(told)


@cache
def _driver() -> Any:
    """Return the driver's library, with what a launch is given."""
    from torch.cuda import _utils

    driver: Any = _utils._get_gpu_runtime_library()
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    driver.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
    return driver


_entered = threading.local()


def _enter_context(device: torch.device) -> None:
    """Let this thread use the GPU: in a new one torch puts that off until its own first kernel.

    The backward pass has threads of its own, and a kernel of ours may be the first thing there.
    """
    if getattr(_entered, "has", False):
        return
    from torch.cuda import _utils

    driver = _driver()
    context = ctypes.c_void_p()
    _utils._check_cuda(driver.cuCtxGetCurrent(ctypes.byref(context)))
    if not context.value:
        index = torch.cuda.current_device() if device.index is None else device.index
        _utils._check_cuda(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), index))
        _utils._check_cuda(driver.cuCtxSetCurrent(context))
    _entered.has = True
