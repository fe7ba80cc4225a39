"""Train an encoder-decoder to copy sentences, and judge what it generates."""

import sys
from dataclasses import dataclass, field

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)
from transformers.trainer_utils import EvalPrediction


@dataclass
class Options:
    model_name_or_path: str = field(metadata={"help": "A folder, or a name on the hub."})
    train_file: str = field(metadata={"help": "Json lines with the columns first and second."})
    data_cache: str = field(default=None, metadata={"help": "Where datasets may write."})
    num_beams: int = field(default=2, metadata={"help": "Beams at the last evaluation."})


def main():
    parser = HfArgumentParser((Options, Seq2SeqTrainingArguments))
    options, training_args = parser.parse_args_into_dataclasses(args=sys.argv[1:])
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model_name_or_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(options.model_name_or_path)
    raw = load_dataset("json", data_files=options.train_file, cache_dir=options.data_cache)
    rows = raw["train"].select(range(24)).train_test_split(test_size=8, seed=1)

    def preprocess(examples):
        encoded = tokenizer(examples["first"], return_token_type_ids=False)
        encoded["labels"] = tokenizer(text_target=examples["second"])["input_ids"]
        return encoded

    encoded = rows.map(preprocess, batched=True, remove_columns=rows["train"].column_names)

    def compute_metrics(found: EvalPrediction):
        predictions, labels = found
        written = np.where(predictions != -100, predictions, tokenizer.pad_token_id)
        wanted = np.where(labels != -100, labels, tokenizer.pad_token_id)
        texts = tokenizer.batch_decode(written, skip_special_tokens=True)
        goals = tokenizer.batch_decode(wanted, skip_special_tokens=True)
        exact = [text.strip() == goal.strip() for text, goal in zip(texts, goals, strict=True)]
        lengths = [np.count_nonzero(row != tokenizer.pad_token_id) for row in written]
        return {"exact": float(np.mean(exact)), "gen_len": round(float(np.mean(lengths)), 4)}

    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=encoded["train"],
        eval_dataset=encoded["test"],
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100),
        compute_metrics=compute_metrics if training_args.predict_with_generate else None,
    )
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    metrics = trainer.evaluate(max_length=10, num_beams=options.num_beams)
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    found = trainer.predict(encoded["test"], metric_key_prefix="predict", max_length=10)
    trainer.save_metrics("predict", found.metrics)
    np.save(f"{training_args.output_dir}/generated.npy", found.predictions)


if __name__ == "__main__":
    main()
