"""Train on MRPC with HF's Trainer, in the shape of HF's run_glue: what `start.py` compares with.

python benchmarks/hf_glue.py --model FOLDER --data FOLDER --max_steps 1 --logging_steps 1
"""

from __future__ import annotations

import argparse
import csv
import gzip
import tempfile
from pathlib import Path

import transformers
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


def rows(path: Path, tokenizer: object) -> list[dict[str, object]]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as lines:
        table = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    first, second = ([row[name] for row in table] for name in ("sentence1", "sentence2"))
    found = tokenizer(first, second, padding="max_length", max_length=128, truncation=True)
    return [
        {**{name: column[n] for name, column in found.items()}, "label": int(table[n]["label"])}
        for n in range(len(table))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--max_steps", type=int, default=-1)
    parser.add_argument("--logging_steps", type=int, default=500)
    asked = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            per_device_train_batch_size=32,
            learning_rate=2e-5,
            num_train_epochs=3,
            max_steps=asked.max_steps,
            logging_steps=asked.logging_steps,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        set_seed(args.seed)
        config = AutoConfig.from_pretrained(asked.model, num_labels=2, finetuning_task="mrpc")
        tokenizer = AutoTokenizer.from_pretrained(asked.model)
        model = AutoModelForSequenceClassification.from_pretrained(asked.model, config=config)
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=rows(asked.data / "train.tsv.gz", tokenizer),
            eval_dataset=rows(asked.data / "dev.tsv.gz", tokenizer),
            processing_class=tokenizer,
            data_collator=default_data_collator,
        )
        print(trainer.train().metrics, flush=True)


if __name__ == "__main__":
    main()
