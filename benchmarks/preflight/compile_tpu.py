"""Compile BERT's training step for TPUs that are not here, and print what a chip must hold.

    python benchmarks/preflight/compile_tpu.py tpu:v5e tpu:v5p
    python benchmarks/preflight/compile_tpu.py --size base tpu:v5e tpu:v5e:2x2

It needs `python -m anytrain.insight.preflight.tpu.environment` once. With --train it is the
training that is compiled.
"""

from __future__ import annotations

import argparse
import resource
import sys

SIZES = {"small": (2, 128, 2), "base": (12, 768, 12), "large": (24, 1024, 16)}
BATCH, LENGTH = 8, 128


def train(size: str) -> None:
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    from anytrain import Trainer, TrainingArguments

    layers, width, heads = SIZES[size]
    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
    )
    row = {"input_ids": torch.arange(LENGTH), "labels": torch.tensor(1)}
    args = TrainingArguments("out", per_device_train_batch_size=BATCH, max_steps=4, bf16=True)
    Trainer(BertForSequenceClassification(config), args, train_dataset=[row] * 4 * BATCH).train()


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--size", choices=SIZES, default="small")
    asked.add_argument("--train", action="store_true")
    asked.add_argument("targets", nargs="*")
    told = asked.parse_args()
    if told.train:
        train(told.size)
        return
    from anytrain.insight.preflight.targets import parse_targets
    from anytrain.insight.preflight.tpu.compile import Compiler

    compiler = Compiler([__file__, "--size", told.size, "--train"], print)
    for target in parse_targets(tuple(told.targets or ["tpu:v5e"])):
        print(target.name, compiler.compile(target), sep="\n")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"The largest process held {peak:.2f} GiB.", file=sys.stderr)


if __name__ == "__main__":
    main()
