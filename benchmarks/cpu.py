"""Measure everything that has a figure on a CPU, and write it to a folder. About half an hour.

Run it on a machine that does nothing else.

    python benchmarks/cpu.py --model FOLDER --data FOLDER [--output benchmarks/results]

--model holds MiniLM's weights and tokenizer, --data MRPC's train.tsv.gz and dev.tsv.gz.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# As it comes, its best, ours as `anytrain glue` comes, ours like for like, and loops by hand.
CONTENDERS = "anytrain,anytrain-fp32-padded,hf,hf-bf16-dynamic,raw-fp32,raw-bf16-sorted"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--max_steps", default="30", help="of every training")
    parser.add_argument("--seeds", default="2")
    args = parser.parse_args()
    where = ["--model", args.model, "--data", args.data]
    glue = ["-m", "anytrain", "bench", "glue", *where, "--cpu", "--contenders", CONTENDERS]
    for words, name in (
        ([*glue, "--max_steps", args.max_steps, "--seeds", args.seeds], "glue-cpu.md"),
        ([str(HERE / "overhead.py")], "overhead.md"),
        ([str(HERE / "start.py"), *where], "start-cpu.md"),
    ):
        subprocess.run([sys.executable, *words, "--output", str(args.output / name)], check=True)


if __name__ == "__main__":
    main()
