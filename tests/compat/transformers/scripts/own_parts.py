"""A Trainer with parts of one's own: evaluation, optimizer, loader, log, loss and callbacks."""

import argparse
import json
import time

import numpy as np
import torch
from datasets import Dataset
from torch.utils.data import DataLoader, WeightedRandomSampler
from transformers import (
    AutoModelForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_scheduler,
    is_torch_xla_available,
    set_seed,
)
from transformers.debug_utils import DebugOption
from transformers.trainer_pt_utils import get_parameter_names, nested_detach
from transformers.trainer_utils import (
    EvalLoopOutput,
    EvalPrediction,
    PredictionOutput,
    speed_metrics,
)


class AnswersTrainer(Trainer):
    """Judge answers after all of them are there, as question answering does."""

    def __init__(self, *args, eval_examples=None, post_process_function=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.eval_examples = eval_examples
        self.post_process_function = post_process_function
        self.micro_steps = 0

    def evaluate(
        self, eval_dataset=None, eval_examples=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        eval_dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        eval_dataloader = self.get_eval_dataloader(eval_dataset)
        eval_examples = self.eval_examples if eval_examples is None else eval_examples
        output = self._without_metrics(
            eval_dataloader, "Evaluation", ignore_keys, metric_key_prefix
        )
        steps = int(np.ceil(output.num_samples / self.args.eval_batch_size))
        output.metrics.update(
            speed_metrics(metric_key_prefix, time.time() - 1, output.num_samples, steps)
        )
        if self.compute_metrics is not None and self.args.should_save:
            answers = self.post_process_function(eval_examples, output.predictions)
            metrics = self.compute_metrics(answers)
            for key in list(metrics.keys()):
                if not key.startswith(f"{metric_key_prefix}_"):
                    metrics[f"{metric_key_prefix}_{key}"] = metrics.pop(key)
            metrics.update(output.metrics)
        else:
            metrics = output.metrics
        if self.args.should_log:
            self.log(metrics)
        if DebugOption.TPU_METRICS_DEBUG in self.args.debug and is_torch_xla_available():
            raise RuntimeError("no such device here")
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def predict(
        self, predict_dataset, predict_examples, ignore_keys=None, metric_key_prefix="test"
    ):
        loader = self.get_test_dataloader(predict_dataset)
        output = self._without_metrics(loader, "Prediction", ignore_keys, metric_key_prefix)
        answers = self.post_process_function(predict_examples, output.predictions)
        return PredictionOutput(answers.predictions, answers.label_ids, output.metrics)

    def _without_metrics(self, loader, description, ignore_keys, metric_key_prefix):
        compute_metrics, self.compute_metrics = self.compute_metrics, None
        try:
            output = self.evaluation_loop(
                loader,
                description=description,
                prediction_loss_only=False,
                ignore_keys=ignore_keys,
                metric_key_prefix=metric_key_prefix,
            )
        finally:
            self.compute_metrics = compute_metrics
        assert isinstance(output, EvalLoopOutput) or hasattr(output, "num_samples")
        return output

    def create_optimizer(self, model=None):
        decayed = get_parameter_names(self.model, [torch.nn.LayerNorm])
        decayed = {name for name in decayed if "bias" not in name}
        named = list(self.model.named_parameters())
        head = [p for n, p in named if n.startswith("classifier")]
        rest = [p for n, p in named if not n.startswith("classifier")]
        groups = [{"params": head, "lr": 2e-2}, {"params": rest, "weight_decay": 0.01}]
        assert decayed
        self.optimizer = torch.optim.SGD(groups, lr=self.args.learning_rate, momentum=0.9)
        return self.optimizer

    def create_scheduler(self, num_training_steps, optimizer=None):
        self.lr_scheduler = get_scheduler("linear", self.optimizer, 1, num_training_steps)
        return self.lr_scheduler

    def get_train_dataloader(self):
        generator = torch.Generator().manual_seed(3)
        weights = [1.0 + row["labels"] for row in self.train_dataset]
        sampler = WeightedRandomSampler(weights, len(weights), generator=generator)
        loader = DataLoader(
            self.train_dataset,
            batch_size=self._train_batch_size,
            sampler=sampler,
            collate_fn=self.data_collator,
        )
        return self.accelerator.prepare(loader)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels)
        loss = loss + 1e-3 * outputs.logits.pow(2).mean()
        inputs["labels"] = labels
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.micro_steps += 1
        return super().training_step(model, inputs, num_items_in_batch)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, logits, labels = super().prediction_step(
            model, inputs, prediction_loss_only, ignore_keys
        )
        return loss, nested_detach(logits), labels

    def log(self, logs, start_time=None):
        logs["micro_steps"] = self.micro_steps
        super().log(logs, start_time)


class Steering(TrainerCallback):
    """Ask for an evaluation after the second step, and stop after the fifth."""

    def __init__(self):
        self.told = []

    def on_step_end(self, args, state, control, **kwargs):
        self.told.append(sorted(kwargs))
        if state.global_step == 2:
            control.should_evaluate = True
            control.should_log = True
        if state.global_step == 5:
            control.should_training_stop = True
        return control

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):
        assert model is not None and "micro_steps" in logs


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--output_dir", required=True)
    options = parser.parse_args()
    set_seed(1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 20, (24, 6), generator=generator)
    rows = Dataset.from_dict({"input_ids": ids.tolist(), "labels": (ids[:, 0] % 2).tolist()})
    steering = Steering()
    trainer = AnswersTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2),
        args=TrainingArguments(
            output_dir=options.output_dir,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=8,
            num_train_epochs=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=rows,
        eval_dataset=rows,
        eval_examples=rows,
        post_process_function=lambda examples, found: EvalPrediction(
            found.argmax(-1), np.array(examples["labels"])
        ),
        compute_metrics=lambda p: {"exact": float((p.predictions == p.label_ids).mean())},
        callbacks=[steering],
    )
    result = trainer.train()
    trainer.save_metrics("train", result.metrics)
    trainer.save_metrics("eval", trainer.evaluate())
    trainer.save_state()
    answers = trainer.predict(rows, rows)
    told = {
        "steps": trainer.state.global_step,
        "answers": answers.predictions.tolist(),
        "rates": [group["lr"] for group in trainer.optimizer.param_groups],
        "last": trainer.lr_scheduler.get_last_lr(),
        "keys": [
            name for name in ("model", "optimizer", "lr_scheduler") if name in steering.told[0]
        ],
        "size": trainer.num_examples(trainer.get_eval_dataloader()),
        "trainable": trainer.get_num_trainable_parameters(),
        "learning": trainer.get_learning_rates(),
    }
    with open(f"{options.output_dir}/told.json", "w") as writer:
        json.dump(told, writer)


if __name__ == "__main__":
    main()
