"""Measure how long `anytrain glue` takes to its first step, and to its help, beside HF's Trainer.

Whole processes are timed from outside, in turns: from the start until the first line that tells a
loss. Each side logs every step, so that line comes right after the first one.

    python benchmarks/start.py --model FOLDER --data FOLDER [--rounds 5] [--output FILE]
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from overhead import facts

HERE = Path(__file__).parent
TOLD = "'loss'", '"loss"', "loss "


def ours(args: argparse.Namespace, folder: str) -> list[str]:
    return [
        *(sys.executable, "-m", "anytrain", "glue", "--model_name_or_path", args.model),
        *("--task_name", "mrpc", "--train_file", f"{args.data}/train.tsv.gz"),
        *("--validation_file", f"{args.data}/dev.tsv.gz", "--do_train", "--do_eval"),
        *("--per_device_train_batch_size", "32", "--learning_rate", "2e-5", "--seed", "42"),
        *("--max_steps", "1", "--logging_steps", "1", "--save_strategy", "no"),
        *("--output_dir", folder, "--overwrite_output_dir", "--disable_tqdm", "True"),
    ]


def theirs(args: argparse.Namespace) -> list[str]:
    words = [sys.executable, str(HERE / "hf_glue.py"), "--model", args.model, "--data", args.data]
    return [*words, "--max_steps", "1", "--logging_steps", "1"]


def first_loss(words: list[str], env: dict[str, str]) -> tuple[float, float]:
    """Return wall and processor seconds from the start until a loss is told."""
    began, used = time.perf_counter(), cpu_s()
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    ) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if any(word in line for word in TOLD):
                print("   ", line.strip())
                break
        else:
            sys.exit(f"{' '.join(words)} told no loss:\n{''.join(said)}")
        took = time.perf_counter() - began
        # What it has used of the processor so far; the rest of it is not waited for.
        spent = Path(f"/proc/{process.pid}/stat")
        if spent.exists():
            ticks = spent.read_text().rpartition(")")[2].split()
            cpu = (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")
        else:
            cpu = cpu_s() - used
        process.kill()
    return took, cpu


def help_s() -> float:
    began = time.perf_counter()
    words = [sys.executable, "-m", "anytrain", "glue", "--help"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def import_s() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "from transformers import Trainer"], check=True)
    return time.perf_counter() - began


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    cache = tempfile.mkdtemp(prefix="anytrain-cache-")
    plain = {**os.environ, "PYTHONUNBUFFERED": "1", "ANYTRAIN_CACHE": cache}
    found: dict[str, list[tuple[float, float]]] = {}
    for turn in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            runs = {"HF Trainer, in the shape of run_glue": theirs(args)}
            runs["anytrain glue, nothing kept from before"] = ours(args, f"{folder}/a")
            runs["anytrain glue, a second time"] = ours(args, f"{folder}/b")
            shutil.rmtree(cache, ignore_errors=True)
            for name in list(runs) if turn % 2 == 0 else [*list(runs)[1:], list(runs)[0]]:
                found.setdefault(name, []).append(first_loss(runs[name], plain))
                print(name, found[name][-1], flush=True)
    base = found["HF Trainer, in the shape of run_glue"]
    middle = statistics.median(wall for wall, _ in base)
    lines = [
        "| start to first step | wall s, median | lowest | processor s, median | of HF's wall |",
        "|---|---|---|---|---|",
    ]
    for name, times in found.items():
        walls, cpus = [wall for wall, _ in times], [cpu for _, cpu in times]
        typical = statistics.median(walls)
        lines.append(
            f"| {name} | {typical:.2f} | {min(walls):.2f} | {statistics.median(cpus):.2f} "
            f"| {typical / middle:.2f} |"
        )
    helps, imports = ([each() for _ in range(args.rounds)] for each in (help_s, import_s))
    lines += [
        "",
        "| | s, median | lowest |",
        "|---|---|---|",
        f"| `anytrain glue --help` | {statistics.median(helps):.2f} | {min(helps):.2f} |",
        f"| `from transformers import Trainer` | {statistics.median(imports):.2f} "
        f"| {min(imports):.2f} |",
    ]
    print("\n".join(lines))
    if args.output:
        text = "# Start to first step\n\n" + "\n".join(lines) + "\n\nMiniLM on MRPC's 3,668 rows, "
        text += "batch 32. `benchmarks/start.py`.\n\n" + facts(rounds=args.rounds)
        args.output.write_text(text)


if __name__ == "__main__":
    main()
