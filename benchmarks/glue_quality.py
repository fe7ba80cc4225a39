"""Score anytrain's GLUE command and HF's Trainer on MRPC, seed by seed, in one run.

Both train the same model folder on the same files with the same settings: batch 32, length 128,
3 epochs, bf16 where the device computes in it.

    python benchmarks/glue_quality.py --model FOLDER --data FOLDER [--seeds 5] [--output FILE]

FOLDER of --data holds train.tsv.gz and dev.tsv.gz with the columns sentence1, sentence2, label.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

RATES = ("2e-5", "5e-5")
# HF Trainer on one GPU, as measured before: mean and standard deviation over 5 seeds.
KNOWN = {"2e-5": ((0.732, 0.016), (0.827, 0.009)), "5e-5": ((0.775, 0.009), (0.849, 0.006))}


def options(args: argparse.Namespace, rate: str, seed: int, folder: str) -> list[str]:
    return [
        *("--model_name_or_path", args.model, "--task_name", "mrpc"),
        *("--train_file", f"{args.data}/train.tsv.gz"),
        *("--validation_file", f"{args.data}/dev.tsv.gz"),
        *("--do_train", "--do_eval", "--max_seq_length", "128"),
        *("--per_device_train_batch_size", "32", "--learning_rate", rate),
        *("--num_train_epochs", "3", "--save_strategy", "no", "--seed", str(seed)),
        *("--output_dir", folder, "--overwrite_output_dir"),
        *(("--max_train_samples", str(args.samples)) if args.samples else ()),
    ]


def ours(args: argparse.Namespace, rate: str, seed: int) -> dict[str, float]:
    from anytrain.recipes.glue import command

    with tempfile.TemporaryDirectory() as folder:
        command.run(options(args, rate, seed, folder))
        return json.loads(Path(folder, "all_results.json").read_text())


def theirs(args: argparse.Namespace, rate: str, seed: int) -> dict[str, float]:
    import transformers
    from sklearn.metrics import accuracy_score, f1_score

    from anytrain.recipes.glue.arguments import parse
    from anytrain.recipes.glue.job import GlueRun, check

    with tempfile.TemporaryDirectory() as folder:
        work = GlueRun(check(parse(options(args, rate, seed, folder))))  # the same rows and padding
        transformers.set_seed(seed)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            args.model,
            dtype=torch.float32,  # as anytrain glue: weights of a fp16 file learn nothing
        )
        trainer = transformers.Trainer(
            model,
            transformers.TrainingArguments(
                folder,
                per_device_train_batch_size=32,
                learning_rate=float(rate),
                num_train_epochs=3,
                seed=seed,
                bf16=torch.cuda.is_available(),
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                remove_unused_columns=False,
            ),
            train_dataset=work.train_set,
            eval_dataset=work.eval_sets[0][1],
            data_collator=work.trainer.data_collator,
            compute_metrics=lambda p: {
                "accuracy": accuracy_score(p.label_ids, p.predictions.argmax(-1)),
                "f1": f1_score(p.label_ids, p.predictions.argmax(-1)),
            },
        )
        result = trainer.train().metrics
        return {**result, **trainer.evaluate()}


def row(name: str, rate: str, results: list[dict[str, float]]) -> str:
    def spread(key: str) -> str:
        values = [result[key] for result in results]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        return f"{statistics.mean(values):.3f} +- {spread:.3f}"

    seconds = statistics.mean(result["train_runtime"] for result in results)
    cells = [name, rate, spread("eval_accuracy"), spread("eval_f1"), f"{seconds:.1f}"]
    return "| " + " | ".join(cells) + " |"


def report(rows: list[str], verdicts: list[str]) -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    names = ("torch", "transformers")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return "\n".join(
        [
            "# MRPC scores of the GLUE command",
            "",
            f"{datetime.date.today()}, {device}, Python {platform.python_version()}, {versions}.",
            "MiniLM-L6 (a 6-layer BERT, weights from a fp16 copy), 3,668 training and 408 dev",
            "pairs, batch 32, length 128, 3 epochs, bf16 on both sides; mean and deviation over",
            "seeds; train seconds without evaluation. Made by benchmarks/glue_quality.py.",
            "",
            "| library | learning rate | accuracy | F1 | train s |",
            "|---|---|---|---|---|",
            *rows,
            "",
            *verdicts,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--rates", default=",".join(RATES), help="learning rates, with commas")
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    rows, verdicts = [], []
    for rate in args.rates.split(","):
        found: dict[str, list[dict[str, float]]] = {"anytrain glue": [], "HF Trainer": []}
        for seed in range(1, args.seeds + 1):
            for name, run in (("anytrain glue", ours), ("HF Trainer", theirs)):
                began = time.time()
                found[name].append(run(args, rate, seed))
                took = time.time() - began
                print(rate, seed, name, found[name][-1], f"{took:.1f} s", file=sys.stderr)
        rows += [row(name, rate, results) for name, results in found.items()]
        for key, (mean, spread) in zip(("accuracy", "f1"), KNOWN[rate], strict=True):
            own = statistics.mean(result[f"eval_{key}"] for result in found["anytrain glue"])
            verdict = "reached" if own >= mean - spread else "missed"
            verdicts.append(f"- lr {rate}, {key}: {own:.3f}; goal {mean - spread:.3f}: {verdict}.")
    text = report(rows, verdicts)
    print(text)
    if args.output:
        Path(args.output).write_text(text)


if __name__ == "__main__":
    main()
