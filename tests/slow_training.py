"""A training that takes its time, for those who look at a run while it goes.

Import it as `from slow_training import TRAINING`; tests/ is on the path. Run it with its
output_dir and its number of steps: some forty a second, every tenth of them logged.
"""

TRAINING = """
import sys, time
import torch
from anytrain import Trainer, TrainingArguments

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(0.002)
        return {"x": torch.full((4,), index / 64.0), "labels": torch.tensor(index % 2)}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def forward(self, x, labels=None):
        logits = self.layer(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

settings = TrainingArguments(
    output_dir=sys.argv[1], report_to="none", use_cpu=True, max_steps=int(sys.argv[2]),
    save_strategy="no", logging_steps=10, disable_tqdm=True,
)
Trainer(Model(), settings, train_dataset=Slow()).train()
"""
