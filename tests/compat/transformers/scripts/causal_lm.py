"""Train a causal language model from scratch on a text file, in blocks of equal length."""

import argparse
import math
from itertools import chain

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


class CountSaves(TrainerCallback):
    """Count what happened, to be told at the end."""

    def __init__(self):
        self.saves = 0

    def on_save(self, args, state, control, **kwargs):
        self.saves += 1


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--data_cache")
    parser.add_argument("--block_size", type=int, default=16)
    return parser.parse_args()


def main():
    options = parse()
    set_seed(11)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=options.block_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.pad_token_id,
    )
    model = AutoModelForCausalLM.from_config(config)

    raw = load_dataset("text", data_files={"train": options.text}, cache_dir=options.data_cache)
    raw = raw["train"].train_test_split(test_size=0.2, seed=3)
    tokens = raw.map(
        lambda examples: tokenizer(examples["text"], return_token_type_ids=False),
        batched=True,
        remove_columns=["text"],
    )

    def group_texts(examples):
        joined = {key: list(chain(*rows)) for key, rows in examples.items()}
        size = options.block_size
        total = len(joined["input_ids"]) // size * size
        blocks = {
            key: [row[start : start + size] for start in range(0, total, size)]
            for key, row in joined.items()
        }
        blocks["labels"] = [list(block) for block in blocks["input_ids"]]
        return blocks

    blocks = tokens.map(group_texts, batched=True)
    counter = CountSaves()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=options.output_dir,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            num_train_epochs=2,
            learning_rate=1e-2,
            weight_decay=0.1,
            warmup_steps=2,
            lr_scheduler_type="cosine",
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=1,
            load_best_model_at_end=True,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=blocks["train"],
        eval_dataset=blocks["test"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
        callbacks=[counter],
    )
    result = trainer.train()
    trainer.save_model()
    metrics = {**result.metrics, "train_samples": len(blocks["train"]), "saves": counter.saves}
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
