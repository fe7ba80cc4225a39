from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch import nn

from anytrain.core.errors import BadInput, BadType, Unsupported, WrongOrder
from anytrain.core.records import open_sweep
from anytrain.doors.callbacks import TrainerCallback
from anytrain.doors.trainer import Trainer
from anytrain.doors.trainer.outputs import BestRun, HPSearchBackend
from anytrain.doors.training_args import TrainingArguments

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Line(nn.Module):
    """y = w x: one weight, so that the best learning rate is known."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([start]))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        guess = self.weight * x
        return {"loss": nn.functional.mse_loss(guess, labels), "logits": guess}


def rows(count: int) -> list[dict[str, float]]:
    return [{"x": i / count, "labels": 2 * i / count} for i in range(count)]


def trainer(folder: Path, **given: Any) -> Trainer:
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "learning_rate": 0.5,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    kwargs = {k: given.pop(k) for k in ("model_init", "model", "compute_metrics") if k in given}
    if "model" not in kwargs:
        kwargs.setdefault("model_init", Line)
    args = TrainingArguments(**{**options, **given})
    return Trainer(args=args, train_dataset=rows(8), eval_dataset=rows(8), **kwargs)


def rates(trial: Any) -> dict[str, Any]:
    return {"learning_rate": trial.suggest_categorical("learning_rate", [1e-4, 0.5])}


def grid(**values: list[Any]) -> Any:
    return optuna.samplers.GridSampler(values)


def test_the_best_trial_is_found_and_the_arguments_are_as_before(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    best = made.hyperparameter_search(
        rates, n_trials=2, sampler=grid(learning_rate=[1e-4, 0.5]), backend="optuna"
    )
    assert isinstance(best, BestRun)
    assert best.hyperparameters == {"learning_rate": 0.5}
    assert isinstance(best.objective, float)
    assert made.args.learning_rate == 0.5
    assert made.hp_search_backend is None


def test_each_trial_has_its_own_folder_and_its_own_values(tmp_path: Path) -> None:
    made = trainer(tmp_path, save_strategy="epoch")
    space = {"learning_rate": [0.1, 0.2], "per_device_train_batch_size": [2, 4]}

    def both(trial: Any) -> dict[str, Any]:
        return {name: trial.suggest_categorical(name, kept) for name, kept in space.items()}

    best = made.hyperparameter_search(both, n_trials=4, sampler=grid(**space))
    assert isinstance(best, BestRun)
    for run in range(4):
        checkpoints = [p.name for p in (tmp_path / f"run-{run}").glob("checkpoint-*")]
        assert checkpoints in (["checkpoint-4"], ["checkpoint-2"])
    assert not list(tmp_path.glob("checkpoint-*"))


def test_trials_may_be_named(tmp_path: Path) -> None:
    made = trainer(tmp_path, save_strategy="epoch")
    made.hyperparameter_search(rates, n_trials=1, hp_name=lambda trial: f"try{trial.number}")
    assert (tmp_path / "try0").is_dir()


def test_several_goals_give_every_trial_that_is_not_beaten(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    best = made.hyperparameter_search(
        rates,
        compute_objective=lambda metrics: [metrics["eval_loss"], 1.0],
        direction=["minimize", "maximize"],
        n_trials=2,
        sampler=grid(learning_rate=[1e-4, 0.5]),
    )
    assert isinstance(best, list)
    (only,) = best
    assert only.hyperparameters == {"learning_rate": 0.5}
    assert isinstance(only.objective, list)


def test_a_hopeless_trial_is_given_up_early(tmp_path: Path) -> None:
    made = trainer(tmp_path, num_train_epochs=4, eval_strategy="epoch")
    steps = []

    class Counting(optuna.pruners.MedianPruner):
        def prune(self, study: optuna.Study, trial: Any) -> bool:
            steps.append((trial.number, trial.last_step))
            return trial.number == 1

    best = made.hyperparameter_search(
        rates, n_trials=2, sampler=grid(learning_rate=[1e-4, 0.5]), pruner=Counting()
    )
    assert isinstance(best, BestRun)
    assert [step for number, step in steps if number == 0] == [2, 4, 6, 8]
    assert [step for number, step in steps if number == 1] == [2]


def test_a_search_whose_every_trial_was_given_up_says_so(tmp_path: Path) -> None:
    class Never(optuna.pruners.NopPruner):
        def prune(self, study: optuna.Study, trial: Any) -> bool:
            return True

    made = trainer(tmp_path, eval_strategy="epoch")
    with pytest.raises(WrongOrder, match="no best run"):
        made.hyperparameter_search(rates, n_trials=2, pruner=Never())


def test_model_init_may_read_the_trial(tmp_path: Path) -> None:
    starts = []

    def model_init(trial: Any) -> Line:
        start = 0.0 if trial is None else trial.params["start"]
        starts.append(start)
        return Line(start)

    def space(trial: Any) -> dict[str, Any]:
        return {"start": trial.suggest_categorical("start", [0.0, 2.0])}

    made = trainer(tmp_path, model_init=model_init, learning_rate=1e-6)
    best = made.hyperparameter_search(space, n_trials=2, sampler=grid(start=[0.0, 2.0]))
    assert isinstance(best, BestRun)
    assert best.hyperparameters == {"start": 2.0}
    assert set(starts) == {0.0, 2.0}


class Watching(Trainer):
    """Note what each trial trains with."""

    seen: list[tuple[Any, ...]]

    def create_optimizer(self, model: Any = None) -> Any:
        args = self.args
        note = (args.gradient_accumulation_steps, self.accelerator.mixed_precision, args.bf16)
        self.seen.append((*note, self.state.max_steps))
        return super().create_optimizer(model)


def test_a_trial_may_change_how_steps_are_taken(tmp_path: Path) -> None:
    space = {"gradient_accumulation_steps": [1, 2.0], "bf16": [False, True]}

    def both(trial: Any) -> dict[str, Any]:
        return {name: trial.suggest_categorical(name, kept) for name, kept in space.items()}

    args = trainer(tmp_path).args
    made = Watching(args=args, model_init=Line, train_dataset=rows(8), eval_dataset=rows(8))
    made.seen = []
    made.hyperparameter_search(both, n_trials=4, sampler=grid(**space))
    assert sorted(made.seen) == [
        (1, "bf16", True, 2),
        (1, "no", False, 2),
        (2, "bf16", True, 1),
        (2, "no", False, 1),
    ]
    assert (args.gradient_accumulation_steps, args.bf16) == (1, False)


def test_a_value_that_only_one_trial_sets_does_not_stay(tmp_path: Path) -> None:
    def sometimes(trial: Any) -> dict[str, Any]:
        return {"learning_rate": 0.25} if trial.number == 0 else {"weight_decay": 0.1}

    rates = []
    made = trainer(tmp_path)
    made.add_callback(Noting(rates))
    made.hyperparameter_search(sometimes, n_trials=2)
    assert rates == [(0.25, 0.0), (0.5, 0.1)]


class Noting(TrainerCallback):
    def __init__(self, notes: list[tuple[float, float]]) -> None:
        self.notes = notes

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.notes.append((args.learning_rate, args.weight_decay))


def test_a_name_that_nothing_uses_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="suggests learning_rat, which nothing uses"):
        trainer(tmp_path).hyperparameter_search(lambda trial: {"learning_rat": 0.1}, n_trials=1)


def test_half_a_batch_is_an_error(tmp_path: Path) -> None:
    space = {"per_device_train_batch_size": 2.5}
    with pytest.raises(BadType, match=r"per_device_train_batch_size=2\.5"):
        trainer(tmp_path).hyperparameter_search(lambda trial: space, n_trials=1)


def test_a_search_needs_a_model_init(tmp_path: Path) -> None:
    with pytest.raises(WrongOrder, match="no model_init"):
        trainer(tmp_path, model=Line()).hyperparameter_search(rates)


@pytest.mark.parametrize("backend", ["ray", HPSearchBackend.WANDB, "sigopt"])
def test_other_backends_are_refused_by_name(tmp_path: Path, backend: str) -> None:
    with pytest.raises(Unsupported, match=str(backend)):
        trainer(tmp_path).hyperparameter_search(rates, backend=backend)


def test_trials_do_not_run_at_once(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="2 trials at once"):
        trainer(tmp_path).hyperparameter_search(rates, n_jobs=2)


@pytest.mark.parametrize("kind", ["tensorboard", "jsonl"])
def test_files_of_each_run_and_each_trial_have_a_folder_of_their_own(
    tmp_path: Path, kind: str
) -> None:
    logs = tmp_path / "logs"
    shared = {"report_to": kind, "logging_dir": str(logs), "max_steps": 1}
    for name in ("one", "b/../two"):
        trainer(tmp_path / "out", run_name=name, **shared).train()
    searching = trainer(tmp_path / "out", run_name="found", **shared)
    searching.hyperparameter_search(rates, n_trials=2)
    folders = sorted(str(found.parent.relative_to(logs)) for found in logs.rglob("*metrics*.jsonl"))
    if kind == "tensorboard":
        trainer(tmp_path / "out", **shared).train()  # as in transformers
        folders = sorted(str(f.parent.relative_to(logs)) for f in logs.rglob("*tfevents*"))
        assert folders.pop(0) == "."
    assert folders == ["b-..-two", "found/run-0", "found/run-1", "one"]


def test_each_trial_says_where_it_is_and_is_kept_with_its_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Second(optuna.pruners.NopPruner):
        def prune(self, study: optuna.Study, trial: Any) -> bool:
            return bool(trial.number == 1)

    def third_fails(trial: Any) -> nn.Module:
        if trial is not None and trial.number == 2:
            raise ZeroDivisionError
        return Line()

    made = trainer(tmp_path, model_init=third_fails, eval_strategy="epoch")
    options = {"sampler": grid(learning_rate=[1e-4, 0.5, 0.25]), "catch": ZeroDivisionError}
    made.hyperparameter_search(rates_of_three, n_trials=3, pruner=Second(), **options)
    lines = [each for each in capfd.readouterr().err.splitlines() if "anytrain: trial" in each]
    assert [line.partition(":  ")[0].split(": learning_rate ")[0] for line in lines] == [
        f"anytrain: trial {n} in {tmp_path}/run-{n}" for n in range(3)
    ]
    sweep = open_sweep(tmp_path)
    assert sweep is not None and sweep.best is not None
    assert [found.state for found in sweep.trials] == ["complete", "pruned", "failed"]
    assert sweep.best.folder == tmp_path / "run-0"
    assert {found.parameters["learning_rate"] for found in sweep.trials} == {1e-4, 0.5, 0.25}


def rates_of_three(trial: Any) -> dict[str, Any]:
    return {"learning_rate": trial.suggest_categorical("learning_rate", [1e-4, 0.5, 0.25])}


def test_a_search_that_goes_on_keeps_the_trials_of_before(tmp_path: Path) -> None:
    storage = optuna.storages.InMemoryStorage()
    stored = {"storage": storage, "study_name": "one", "load_if_exists": True}
    for _ in range(2):
        trainer(tmp_path).hyperparameter_search(rates, n_trials=1, **stored)
    sweep = open_sweep(tmp_path)
    assert sweep is not None
    assert [found.folder.name for found in sweep.recorded()] == ["run-0", "run-1"]
    trainer(tmp_path).hyperparameter_search(rates, n_trials=1)
    again = open_sweep(tmp_path)
    assert again is not None and len(again.trials) == 1
