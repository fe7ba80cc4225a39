"""Two processes search, report and refuse together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launching import launch

SCRIPT = """
import json, os, sys
from pathlib import Path
import optuna, torch
from torch import nn
from anytrain.doors.trainer import Trainer
from anytrain.doors.training_args import TrainingArguments

optuna.logging.set_verbosity(optuna.logging.WARNING)
root = Path(sys.argv[1])

class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
    def forward(self, x, labels):
        guess = self.weight * x
        return {"loss": nn.functional.mse_loss(guess, labels), "logits": guess}

rows = [{"x": i / 8, "labels": 2 * i / 8} for i in range(8)]

def arguments(**more):
    return TrainingArguments(
        output_dir=str(root / "out"), per_device_train_batch_size=2, num_train_epochs=2,
        optim="sgd", lr_scheduler_type="constant", eval_strategy="epoch", save_strategy="no",
        report_to="none", disable_tqdm=True, use_cpu=True, **more)

from huggingface_hub import constants
from anytrain.core.errors import HubError
constants.ENDPOINT, constants.HF_HUB_OFFLINE = "http://127.0.0.1:9", False
try:
    pushing = arguments(push_to_hub=True, hub_token="hf_local")
    Trainer(Line(), pushing, train_dataset=rows, eval_dataset=rows)
except HubError as error:
    (root / f"refused{os.environ['RANK']}").write_text(str(error))

class GiveUpTheSecond(optuna.pruners.NopPruner):
    def prune(self, study, trial):
        return trial.number == 1

trainer = Trainer(args=arguments(), model_init=Line, train_dataset=rows, eval_dataset=rows)
values = [0.5, 1e-4, 1e-3]
best = trainer.hyperparameter_search(
    lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", values)},
    n_trials=3,
    sampler=optuna.samplers.GridSampler({"learning_rate": values}, seed=0),
    pruner=GiveUpTheSecond(),
)
trainer.log_metrics("eval", {"eval_loss": best.objective})
trainer.save_metrics("eval", {"eval_loss": best.objective})
rank = trainer.args.process_index
steps = trainer.state.global_step
weight = float(trainer.model.weight)
(root / f"rank{rank}.json").write_text(json.dumps([best.run_id, best.objective, steps, weight]))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where two ranks wrote, and what they printed."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, launch(SCRIPT, 2, folder).stdout


def test_every_rank_tries_the_same_trials_and_learns_the_best(found: tuple[Path, str]) -> None:
    folder, printed = found
    first, second = (json.loads((folder / f"rank{r}.json").read_text()) for r in range(2))
    assert first == second
    assert printed.count("***** eval metrics *****") == 1
    results = json.loads((folder / "out" / "eval_results.json").read_text())
    assert results == {"eval_loss": first[1]}


def test_a_hub_out_of_reach_is_every_ranks_error(found: tuple[Path, str]) -> None:
    for rank in range(2):
        assert "could not be opened" in (found[0] / f"refused{rank}").read_text()
