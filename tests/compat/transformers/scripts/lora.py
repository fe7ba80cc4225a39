"""Train low-rank adapters of a classifier, stop, and go on from the last checkpoint."""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_callback import TrainerCallback


class StopAt(TrainerCallback):
    """End the first training in the middle, as a lost machine would."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_training_stop = True
        return control


def build(options, callbacks=()):
    set_seed(5)
    model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2)
    lora = LoraConfig(
        task_type=TaskType.SEQ_CLS, r=2, lora_alpha=4, lora_dropout=0.0, target_modules=["query"]
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 20, (16, 6), generator=generator)
    rows = {"input_ids": ids.tolist(), "labels": (ids.sum(1) % 2).tolist()}
    args = TrainingArguments(
        output_dir=options.output_dir,
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=1e-2,
        save_steps=3,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    return Trainer(
        model=get_peft_model(model, lora),
        args=args,
        train_dataset=Dataset.from_dict(rows),
        eval_dataset=Dataset.from_dict(rows),
        callbacks=list(callbacks),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--output_dir", required=True)
    options = parser.parse_args()
    build(options, [StopAt(3)]).train()
    trainer = build(options)
    result = trainer.train(resume_from_checkpoint=True)
    trainer.save_model()
    trainer.save_metrics("train", result.metrics)
    trainer.save_metrics("eval", trainer.evaluate())
    trainer.save_state()


if __name__ == "__main__":
    main()
