"""Train a model that knows nothing of transformers, on batches that are dicts."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, set_seed


class Points(Dataset):
    """Points of the plane, inside or outside a circle."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.points = torch.randn(count, 2, generator=generator)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        point = self.points[index]
        return {"points": point, "labels": int(point.norm() > 1.2)}


class Circle(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, points, labels=None):
        logits = self.layers(points)
        if labels is None:
            return (logits,)
        return nn.functional.cross_entropy(logits, labels), logits


class WeightedTrainer(Trainer):
    """Points outside count twice."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        outputs = model(**inputs)
        weights = torch.tensor([1.0, 2.0], device=labels.device)
        loss = nn.functional.cross_entropy(outputs[1], labels, weight=weights)
        return (loss, outputs) if return_outputs else loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    options = parser.parse_args()
    set_seed(2)
    args = TrainingArguments(
        options.output_dir,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        num_train_epochs=3,
        learning_rate=5e-2,
        max_grad_norm=0.5,
        eval_strategy=IntervalStrategy.EPOCH,
        save_strategy=IntervalStrategy.EPOCH,
        load_best_model_at_end=True,
        metric_for_best_model="near_accuracy",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = WeightedTrainer(
        model=Circle(),
        args=args,
        train_dataset=Points(40, seed=0),
        eval_dataset={"near": Points(20, seed=1), "far": Points(20, seed=2)},
        compute_metrics=lambda p: {"accuracy": float(np.mean(p[0].argmax(-1) == p[1]))},
        callbacks=[EarlyStoppingCallback(early_stopping_patience=5)],
    )
    result = trainer.train()
    trainer.save_model()
    trainer.save_metrics("train", result.metrics)
    trainer.save_metrics("eval", trainer.evaluate(Points(20, seed=3)))
    trainer.save_state()


if __name__ == "__main__":
    main()
