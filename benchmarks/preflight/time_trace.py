"""Time `anytrain preflight` on a training of BERT-base and on one of seven billion weights.

Whole commands are timed, start of Python included. "trace" is what the report itself calls the
time of one trace; "holds" is the largest process of the command.

    python benchmarks/preflight/time_trace.py
    python benchmarks/preflight/time_trace.py --repeats 1 bert-base
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

TARGET = "cuda:80GB"
MODELS = ("bert-base", "llama-7b")


def train(name: str) -> None:
    """Train the model, as a user's script would."""
    import torch
    import transformers

    from anytrain import Trainer, TrainingArguments

    if name == "bert-base":
        model = transformers.BertForSequenceClassification(transformers.BertConfig())
        batch, row = 32, {"input_ids": torch.arange(128), "labels": torch.tensor(1)}
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig())
        batch, row = 1, {"input_ids": torch.arange(256), "labels": torch.arange(256)}
    args = TrainingArguments("out", per_device_train_batch_size=batch, max_steps=4, bf16=True)
    Trainer(model, args, train_dataset=[row] * 4 * batch).train()


def timed(name: str, *options: str) -> tuple[float, float, float]:
    """Return the seconds of the command and of one trace, and GiB of its largest process."""
    command = [sys.executable, "-m", "anytrain", "preflight", "--target", TARGET, *options]
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "told.json")
        began = time.perf_counter()
        process = psutil.Popen(
            [*command, "--json", told, __file__, "--train", name],
            cwd=folder,
            stdout=subprocess.DEVNULL,
        )
        largest = 0
        while process.poll() is None:
            largest = max(largest, _largest(process))
            time.sleep(0.1)
        took = time.perf_counter() - began
        if process.returncode:
            raise SystemExit(f"preflight of {name} exited {process.returncode}")
        (report,) = json.loads(told.read_text())["targets"]
    return took, report["trace_s"], largest / 2**30


def _largest(process: psutil.Process) -> int:
    sizes = []
    for each in (process, *process.children(recursive=True)):
        try:
            sizes.append(each.memory_info().rss)
        except psutil.NoSuchProcess:
            continue
    return max(sizes, default=0)


def main() -> None:
    """Print a row for each model, with and without the search for the largest batch."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    asked.add_argument("--repeats", type=int, default=3)
    asked.add_argument("models", nargs="*", default=list(MODELS))
    told = asked.parse_args()
    if told.train:
        train(*told.models)
        return
    print("| model | | trace | command | holds |", "|---|---|---|---|---|", sep="\n")
    for name in told.models:
        for words in (("--quick",), ()):
            runs = [timed(name, *words) for _ in range(told.repeats)]
            took, trace_s, gib = (statistics.median(each) for each in zip(*runs, strict=True))
            what = "quick" if words else "with the search for the largest batch"
            row = f"| {name} | {what} | {trace_s:.1f} s | {took:.1f} s | {gib:.2f} GiB |"
            print(row, flush=True)


if __name__ == "__main__":
    main()
