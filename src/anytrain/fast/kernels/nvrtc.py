"""CUDA's compiler at run time, asked directly.

torch's own way to ask it imports what builds extensions first (0.5 s on a host of an H200) and
lets it work in one thread; with one for each core it took half the time there.
"""

from __future__ import annotations

import ctypes
from typing import Any

_ON_ALL_CORES = "--split-compile=0"
_UNKNOWN_OPTION = 5
"""What the compiler answers to an option that it does not have: an old one, to that above."""


def compiled(source: str, chip: tuple[int, int]) -> bytes:
    """Return the source's kernels for a chip; a RuntimeError has what the compiler says."""
    from torch.cuda import _utils

    library: Any = _utils._get_gpu_rtc_library()
    program = ctypes.c_void_p()
    _check(
        library,
        library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"anytrain.cu", 0, None, None
        ),
    )
    try:
        wanted = f"--gpu-architecture=sm_{chip[0]}{chip[1]}"
        answer = _compile(library, program, wanted, _ON_ALL_CORES)
        if answer == _UNKNOWN_OPTION:
            answer = _compile(library, program, wanted)
        if answer:
            said = _text(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
            raise RuntimeError(f"CUDA's compiler: {said.rstrip(bytes(1)).decode() or answer}")
        return _text(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _compile(library: Any, program: ctypes.c_void_p, *options: str) -> int:
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    answer: int = library.nvrtcCompileProgram(program, len(options), given)
    return answer


def _text(size_of: Any, text_of: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    text_of(program, text)
    return text.raw


def _check(library: Any, answer: int) -> None:
    if answer:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"CUDA's compiler: {library.nvrtcGetErrorString(answer).decode()}")
