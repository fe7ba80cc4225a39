"""Fine-tune a model on sentences or pairs of sentences with a label, from json files."""

import logging
import os
import sys
from dataclasses import dataclass, field

import datasets
import numpy as np
import transformers
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import check_min_version
from transformers.utils.versions import require_version

check_min_version("4.40.0")
require_version("datasets>=1.8.0")

logger = logging.getLogger(__name__)


@dataclass
class DataArguments:
    train_file: str | None = field(default=None, metadata={"help": "Json lines to train on."})
    validation_file: str | None = field(default=None, metadata={"help": "Json lines to check."})
    max_seq_length: int = field(default=32, metadata={"help": "Longer inputs are cut."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Use only so many."})
    data_cache: str | None = field(default=None, metadata={"help": "Where datasets may write."})


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "A folder, or a name on the hub."})


def parse():
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        return parser.parse_json_file(json_file=os.path.abspath(sys.argv[1]))
    return parser.parse_args_into_dataclasses()


def set_up_logging(training_args):
    logging.basicConfig(format="%(asctime)s %(message)s", handlers=[logging.StreamHandler()])
    log_level = training_args.get_process_log_level()
    logger.setLevel(log_level)
    datasets.utils.logging.set_verbosity(log_level)
    transformers.utils.logging.set_verbosity(log_level)
    logger.warning(
        f"rank {training_args.local_process_index}, device {training_args.device}, "
        f"n_gpu {training_args.n_gpu}, mode {training_args.parallel_mode.value}"
    )


def compute_metrics(p: EvalPrediction):
    logits = p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions
    return {"accuracy": (np.argmax(logits, axis=1) == p.label_ids).astype(np.float32).mean()}


def train(trainer, checkpoint):
    result = trainer.train(resume_from_checkpoint=checkpoint)
    metrics = result.metrics
    metrics["train_samples"] = len(trainer.train_dataset)
    trainer.save_model()
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()


def predict(trainer, unlabelled):
    predictions = trainer.predict(unlabelled, metric_key_prefix="predict").predictions
    if trainer.is_world_process_zero():
        with open(os.path.join(trainer.args.output_dir, "predictions.txt"), "w") as writer:
            for number in np.argmax(predictions, axis=1):
                writer.write(f"{trainer.model.config.id2label[int(number)]}\n")


def main():
    model_args, data_args, training_args = parse()
    set_up_logging(training_args)
    last_checkpoint = None
    if os.path.isdir(training_args.output_dir) and training_args.do_train:
        last_checkpoint = get_last_checkpoint(training_args.output_dir)

    set_seed(training_args.seed)

    files = {"train": data_args.train_file, "validation": data_args.validation_file}
    raw = load_dataset("json", data_files=files, cache_dir=data_args.data_cache)
    labels = sorted(raw["train"].unique("label"))
    config = AutoConfig.from_pretrained(model_args.model_name_or_path, num_labels=len(labels))
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(
        model_args.model_name_or_path, config=config
    )
    model.config.label2id = {name: number for number, name in enumerate(labels)}
    model.config.id2label = dict(enumerate(labels))

    def preprocess(examples):
        texts = (examples["first"], examples["second"])
        encoded = tokenizer(*texts, max_length=data_args.max_seq_length, truncation=True)
        encoded["label"] = [model.config.label2id[name] for name in examples["label"]]
        return encoded

    with training_args.main_process_first(desc="dataset map pre-processing"):
        encoded = raw.map(preprocess, batched=True, desc="Tokenizing")
    train_dataset = encoded["train"]
    if data_args.max_train_samples is not None:
        train_dataset = train_dataset.select(range(data_args.max_train_samples))

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset if training_args.do_train else None,
        eval_dataset=encoded["validation"] if training_args.do_eval else None,
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8),
    )

    if training_args.do_train:
        checkpoint = training_args.resume_from_checkpoint or last_checkpoint
        train(trainer, checkpoint)
    if training_args.do_eval:
        metrics = trainer.evaluate(eval_dataset=encoded["validation"])
        metrics["eval_samples"] = len(encoded["validation"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if training_args.do_predict:
        predict(trainer, encoded["validation"].remove_columns("label"))

    card = {"finetuned_from": model_args.model_name_or_path, "tasks": "text-classification"}
    if training_args.push_to_hub:
        trainer.push_to_hub(**card)
    else:
        trainer.create_model_card(**card)


if __name__ == "__main__":
    main()
