"""Time torch's attention kernels by shape, forward and backward, as a recorded step runs them.

Which of them is taken where is in anytrain/machine/backends/cuda_attention.py. Milliseconds for
12 layers, in bfloat16 with dropout; a dash where the kernel does not take the case.

    python benchmarks/attention.py        # on an NVIDIA GPU
"""

from __future__ import annotations

import sys
import warnings

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

LAYERS, REPLAYS = 12, 15
KERNELS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
}
CASES = {"mask": (True, False), "none": (False, False), "causal": (False, True)}
SHAPES = [(32, 12, 64), (32, 12, 32), (8, 12, 64), (128, 12, 64), (16, 16, 128), (64, 8, 96)]
LENGTHS = (16, 32, 48, 64, 72, 96, 128)


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


def measured(shape: tuple[int, int, int], length: int, case: str, kernel: str) -> str:
    rows, heads, width = shape
    masked, causal = CASES[case]

    def some() -> torch.Tensor:
        made = torch.randn(rows, length, heads, width, device="cuda", dtype=torch.bfloat16)
        return made.transpose(1, 2)

    given, gradient = [some().requires_grad_() for _ in range(3)], some()
    mask = torch.ones(rows, 1, length, length, dtype=torch.bool, device="cuda") if masked else None

    def work() -> None:
        with sdpa_kernel(KERNELS[kernel]):
            made = functional.scaled_dot_product_attention(
                *given, attn_mask=mask, dropout_p=0.1, is_causal=causal
            )
        torch.autograd.grad(made, given, gradient)

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
    for shape in SHAPES:
        for length in LENGTHS:
            figures = [
                measured(shape, length, case, kernel) for case in CASES for kernel in KERNELS
            ]
            rows, heads, width = shape
            print(f"| {rows}x{heads}x{length}x{width} | {' | '.join(figures)} |", flush=True)


if __name__ == "__main__":
    main()
