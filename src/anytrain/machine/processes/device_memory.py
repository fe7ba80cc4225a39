"""Say in three lines what a GPU's allocator said when it had no memory left.

Out of the error's own text: whoever reads it may be another process, without torch.
"""

from __future__ import annotations

import re

_SIZE = r"([\d.]+ (?:[KMGT]?i?B|bytes))"
_NUMBERS = {
    "asked": rf"Tried to allocate {_SIZE}",
    "device": r"GPU (\d+) has a total capacity",
    "total": rf"total capacity of {_SIZE}",
    "free": rf"of which {_SIZE} is free",
    "held": rf"Of the allocated memory {_SIZE}",
    "pools": rf"with {_SIZE} allocated in private pools",
    "unused": rf"and {_SIZE} is reserved by PyTorch but unallocated",
}
_ADVICE = 'Try a smaller batch with more gradient accumulation steps, or mixed_precision="bf16"'


def explain(text: str) -> str | None:
    """Return the lines, what to do last, or None where the text is not an allocator's complaint.

    >>> print(explain("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity "
    ...     "of 15.77 GiB of which 512.00 MiB is free. Of the allocated memory 14.01 GiB is "
    ...     "allocated by PyTorch, and 600.00 MiB is reserved by PyTorch but unallocated."))
    GPU 1 has no memory left: 2.00 GiB more were asked for, 512.00 MiB of 15.77 GiB are free.
    PyTorch's tensors hold 14.01 GiB; 600.00 MiB more are reserved and unused.
    Try a smaller batch with more gradient accumulation steps, or mixed_precision="bf16"
    """
    if "out of memory" not in text or "Tried to allocate" not in text:
        return None
    found = {name: re.search(words, text) for name, words in _NUMBERS.items()}
    got = {name: match[1] for name, match in found.items() if match is not None}
    device = f"GPU {got['device']}" if "device" in got else "The device"
    first = f"{device} has no memory left: {got.get('asked', 'some')} more were asked for"
    if "free" in got and "total" in got:
        first += f", {got['free']} of {got['total']} are free"
    lines = [f"{first}."]
    if "held" in got and "unused" in got:
        recorded = f", {got['pools']} of it for recorded steps" if "pools" in got else ""
        lines.append(
            f"PyTorch's tensors hold {got['held']}{recorded}; {got['unused']} more are reserved "
            "and unused."
        )
    return "\n".join([*lines, _ADVICE])
