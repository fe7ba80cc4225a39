"""Time steps of a Llama with HF Trainer and with ours, on a GPU: mean ms of ten, after twenty.

Random weights, made-up words, bf16; each training is a process of its own.

    python benchmarks/llama.py [--width 2048 --layers 16 --heads 32 --batch 8 --length 1024]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from typing import Any

WORDS = 32_000
BEFORE, TIMED, STEPS = 20, 10, 40


def train(asked: argparse.Namespace) -> None:
    """Train with one library, and print what a step takes."""
    import torch
    import transformers

    import anytrain

    library: Any = {"anytrain": anytrain, "transformers": transformers}[asked.library]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=asked.width,
        intermediate_size=asked.width * 11 // 4,
        num_hidden_layers=asked.layers,
        num_attention_heads=asked.heads,
        num_key_value_heads=asked.heads // 4,
    )
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config)
    dice = torch.Generator().manual_seed(0)
    texts = torch.randint(5, WORDS, (asked.batch * STEPS, asked.length), generator=dice)
    rows = [{"input_ids": words, "labels": words} for words in texts]
    at: dict[int, float] = {}

    class Clock(library.TrainerCallback):  # type: ignore[misc]  # of the library that is timed
        def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            if state.global_step in (BEFORE, BEFORE + TIMED):
                torch.cuda.synchronize()
                at[state.global_step] = time.perf_counter()

    args = library.TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=STEPS,
        per_device_train_batch_size=asked.batch,
        bf16=True,
        logging_steps=10 * STEPS,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    library.Trainer(model, args, train_dataset=rows, callbacks=[Clock()]).train()
    took = (at[BEFORE + TIMED] - at[BEFORE]) / TIMED
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"{asked.library}: {took * 1e3:.1f} ms a step, peak {peak:.2f} GiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--library", choices=["anytrain", "transformers"])
    asked = parser.parse_args()
    if asked.library is not None:
        train(asked)
        return
    for library in ("transformers", "anytrain"):
        subprocess.run([sys.executable, *sys.argv, "--library", library], check=True)


if __name__ == "__main__":
    main()
