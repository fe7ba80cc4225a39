"""Time attention kernels by shape, ours and torch's, forward and backward, as recorded steps run.

Which of them is taken where is in anytrain/fast/kernels/attention.py. Milliseconds for
12 layers, in bfloat16 with dropout; a dash where the kernel does not take the case.

    python benchmarks/attention.py        # on an NVIDIA GPU
"""

from __future__ import annotations

import sys
import warnings

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from anytrain.fast.kernels.short_attention import ShortAttention, Wanted, attend, fits

LAYERS, REPLAYS = 12, 15
OURS = "ours"
KERNELS = {
    OURS: None,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
}
CASES = {"mask": (True, False), "none": (False, False), "causal": (False, True)}
SHAPES = [(32, 12, 64), (32, 12, 32), (8, 12, 64), (128, 12, 64), (16, 16, 128), (64, 8, 96)]
LENGTHS = (16, 32, 48, 64, 72, 96, 128, 1024)
MANY = 20_000
"""Tokens from which on a shape is left out."""


def milliseconds(work: object) -> float:
    """Return what a replay of the work takes, recorded once for each layer."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAYERS):
            work()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / REPLAYS


def measured(
    own: ShortAttention, shape: tuple[int, int, int], length: int, case: str, kernel: str
) -> str:
    rows, heads, width = shape
    masked, causal = CASES[case]
    wanted = Wanted(0.1, causal, width**-0.5)

    def some() -> torch.Tensor:
        made = torch.randn(rows, length, heads, width, device="cuda", dtype=torch.bfloat16)
        return made.transpose(1, 2)

    given, gradient = [some().requires_grad_() for _ in range(3)], some()
    mask = torch.ones(rows, 1, length, length, dtype=torch.bool, device="cuda") if masked else None

    def attended() -> torch.Tensor:
        if kernel == OURS:
            return attend(own, tuple(given), mask, wanted)
        with sdpa_kernel(KERNELS[kernel]):
            return functional.scaled_dot_product_attention(
                *given, attn_mask=mask, dropout_p=wanted.dropout, is_causal=causal
            )

    def work() -> None:
        torch.autograd.grad(attended(), given, gradient)

    if kernel == OURS and not fits(*given, mask):
        return "-"
    try:
        return f"{milliseconds(work):.2f}"
    except RuntimeError:  # the kernel does not take the case
        return "-"


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("This needs an NVIDIA GPU, and torch sees none.")
    warnings.simplefilter("ignore")  # torch says at length why a kernel is not taken
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    columns = [f"{case} {kernel}" for case in CASES for kernel in KERNELS]
    print(f"| rows x heads x length x width | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    own = ShortAttention(torch.device("cuda", 0))
    if not own.are_there():
        sys.exit(f"Our kernels cannot be compiled here: {own.problem}")
    for shape in SHAPES:
        rows, heads, width = shape
        for length in (each for each in LENGTHS if rows * each < MANY):
            figures = [
                measured(own, shape, length, case, kernel) for case in CASES for kernel in KERNELS
            ]
            print(f"| {rows}x{heads}x{length}x{width} | {' | '.join(figures)} |", flush=True)


if __name__ == "__main__":
    main()
