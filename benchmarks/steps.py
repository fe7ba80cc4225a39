"""Time steps of one shape in several trainings of one process, and look at the gaps in a graph.

From about the third training on, the gaps between a recorded step's kernels are longer. The same
is seen in a graph of plain torch once a few streams have been used: the last line shows it.

    python benchmarks/steps.py [--size bert-base] [--shapes 32x128,32x48] [--trainings 4]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from anytrain.recipes.bench import child, task
from anytrain.recipes.bench.comparison import CONTENDERS
from anytrain.recipes.bench.settings import SIZES, BenchSettings, read_shapes

BEFORE, TIMED, PROFILED = 12, 100, 15
STREAMS = 12
REPLAYS = 60


def replays(graph: torch.cuda.CUDAGraph) -> float:
    """Return the milliseconds of one replay among many."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / REPLAYS


def gaps() -> list[float]:
    """Return a graph's milliseconds, each time after one more stream has run a kernel."""
    left = torch.randn(4096, 768, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(768, 768, device="cuda", dtype=torch.bfloat16) / 40
    torch.relu(left @ right)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = left
        for _ in range(300):
            made = torch.relu(made @ right)
    found, streams = [replays(graph)], []
    for _ in range(STREAMS):
        streams.append(torch.cuda.Stream())
        with torch.cuda.stream(streams[-1]):
            left.add(1)
        torch.cuda.synchronize()
        found.append(replays(graph))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="bert-base", choices=SIZES)
    parser.add_argument("--trainings", type=int, default=4)
    parser.add_argument("--shapes", default="32x128,32x48")
    asked = parser.parse_args()
    size = SIZES[asked.size]
    settings = BenchSettings(
        size=asked.size,
        model=None,
        data=None,
        length=size.length,
        batch_size=size.batch_size,
        epochs=size.epochs,
        learning_rate=size.learning_rate,
        max_steps=0,
        warm_up_steps=0,
        cpu=False,
        shapes=read_shapes(asked.shapes),
        shape_steps=(BEFORE, TIMED, PROFILED),
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings.save(folder / "settings.json")
        child.prepare(folder)
        ours = child.Child(folder, CONTENDERS["anytrain"], 1)
        flops = ours.flops(task.load_model(settings, folder))
        rate = child.matmul_rate(ours.backend, ours.device)
        for number in range(asked.trainings):
            for shape in flops:
                found = ours.steps(shape, flops, rate)
                print(
                    f"training {number + 1}, {found['shape']}: {found['step_s'] * 1e3:.2f} ms, "
                    f"busy {found['busy_s'] * 1e3:.2f} ms, idle {found['idle']:.1%}",
                    flush=True,
                )
    print("a graph of plain torch, ms after 0, 1, 2, ... streams:", *(f"{ms:.3f}" for ms in gaps()))


if __name__ == "__main__":
    main()
