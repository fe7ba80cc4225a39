"""A subclass's own ways to save and load the pieces of a checkpoint are called in HF's places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from anytrain.core.errors import CheckpointError, Unsupported, WrongOrder
from anytrain.doors.callbacks import EarlyStoppingCallback, TrainerState
from anytrain.doors.trainer import Trainer
from anytrain.doors.training_args import TrainingArguments

DATA = [{"labels": float(i)} for i in range(32)]


class Point(nn.Module):
    """One number, drawn to the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(()))

    def forward(self, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.at - labels) ** 2).mean()}


def made(kind: type[Trainer], folder: Path, **given: Any) -> Any:
    given = {"max_steps": 4, "save_steps": 2, "learning_rate": 0.5, "report_to": "none", **given}
    arguments = TrainingArguments(output_dir=str(folder), **given)
    return kind(Point(), arguments, train_dataset=DATA, eval_dataset=DATA[:8])


def second(folder: Path) -> str:
    return str(folder / "checkpoint-2")


class Telling(Trainer):
    """Note which piece is loaded when, and let anytrain do the work."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.told: list[Any] = []

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
        before = self.model.at.item()
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        loaded = before == 0.0 != self.model.at.item()
        self.told.append(("model", resume_from_checkpoint, loaded, self.optimizer is None))

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        before = self.lr_scheduler.last_epoch
        super()._load_optimizer_and_scheduler(checkpoint)
        self.told.append(("optimizer", checkpoint, before, self.lr_scheduler.last_epoch))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        (Path(output_dir) / "beside.json").write_text(json.dumps(self.state.global_step))


def test_overridden_pieces_are_called_and_super_does_the_work(tmp_path: Path) -> None:
    whole = made(Telling, tmp_path)
    whole.train()
    assert not whole.told
    assert json.loads((tmp_path / "checkpoint-2" / "beside.json").read_text()) == 2
    again = made(Telling, tmp_path)
    again.train(resume_from_checkpoint=second(tmp_path))
    assert again.told == [
        ("model", second(tmp_path), True, True),
        ("optimizer", second(tmp_path), 0, 2),
    ]
    assert torch.equal(again.model.at, whole.model.at)


def test_what_is_put_on_a_trainer_to_load_with_is_called_too(tmp_path: Path) -> None:
    made(Trainer, tmp_path).train()
    again = made(Trainer, tmp_path)
    own, called = again._load_from_checkpoint, []

    def load(path: str, model: Any = None) -> None:
        called.append(path)
        own(path, model)

    again._load_from_checkpoint = load
    again.train(resume_from_checkpoint=second(tmp_path))
    assert called == [second(tmp_path)]


class Library(Trainer):
    """Write and read a model in a layout of another library, under anytrain's file name."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(str(output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        from safetensors.torch import save_file

        save_file({"renamed": self.model.at.detach().clone()}, folder / "model.safetensors")
        (folder / "modules.json").write_text("[]")

    def _load_from_checkpoint(self, checkpoint_path: str) -> None:  # type: ignore[override]
        from safetensors.torch import load_file

        held = load_file(Path(checkpoint_path) / "model.safetensors")
        self.model.load_state_dict({"at": held["renamed"]})

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))


def test_a_model_that_a_subclass_saves_and_loads_itself_is_saved_by_it_alone(
    tmp_path: Path,
) -> None:
    whole = made(Library, tmp_path)
    whole.train()
    from safetensors.torch import load_file

    assert set(load_file(tmp_path / "checkpoint-2" / "model.safetensors")) == {"renamed"}
    assert (tmp_path / "checkpoint-2" / "modules.json").is_file()
    again = made(Library, tmp_path)
    again.train(resume_from_checkpoint=second(tmp_path))
    assert torch.equal(again.model.at, whole.model.at)


@pytest.mark.parametrize("overrides", [True, False])
def test_the_best_model_is_loaded_the_subclasss_way(tmp_path: Path, overrides: bool) -> None:
    body = {} if overrides else {"_load_best_model": Trainer._load_best_model}
    trained = made(
        type("Mine", (Library,), body),
        tmp_path,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # the first evaluation is the worst, so the best here
    )
    trained.train()
    assert trained.state.best_model_checkpoint == second(tmp_path)
    from safetensors.torch import load_file

    held = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert torch.equal(trained.model.at, held["renamed"])


class Forgetful(Trainer):
    """Leave the optimizer out of checkpoints."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None: ...


class Fresh(Forgetful):
    """Begin with a new optimizer where a run goes on."""

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None: ...


def test_an_optimizer_that_a_subclass_leaves_out_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    made(Forgetful, tmp_path).train()
    with pytest.raises(CheckpointError, match="0 of kind 'optimizer'"):
        made(Forgetful, tmp_path).train(resume_from_checkpoint=second(tmp_path))
    again = made(Fresh, tmp_path)
    again.train(resume_from_checkpoint=second(tmp_path))
    assert again.state.global_step == 4
    assert next(iter(again.optimizer.state.values()))["step"] == 2


def test_an_optimizer_is_saved_with_a_checkpoint_only(tmp_path: Path) -> None:
    with pytest.raises(WrongOrder, match="outside a checkpoint"):
        made(Trainer, tmp_path)._save_optimizer_and_scheduler(str(tmp_path))


def test_callbacks_are_made_again_from_a_state_that_was_read(tmp_path: Path) -> None:
    given = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    first = made(Trainer, tmp_path, **given)
    first.add_callback(EarlyStoppingCallback(5, 0.2))
    first.train()
    other = made(Trainer, tmp_path, restore_callback_states_from_checkpoint=True, **given)
    other.add_callback(EarlyStoppingCallback())
    other.state = TrainerState.load_from_json(tmp_path / "checkpoint-4" / "trainer_state.json")
    other._load_callback_state()
    assert other.control.should_training_stop
    assert other.callback_handler.callbacks[-1].early_stopping_patience == 5


class Around(Trainer):
    """Do something before the loop, which knows where it goes on from, and after."""

    told: list[Any]

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.told = [kwargs["resume_from_checkpoint"]]
        output = super()._inner_training_loop(*args, **kwargs)
        self.told.append(output.global_step)
        return output


def test_what_goes_around_the_loop_is_called(tmp_path: Path) -> None:
    whole = made(Around, tmp_path)
    whole.train()
    assert whole.told == [None, 4]
    again = made(Around, tmp_path)
    again.train(resume_from_checkpoint=True)
    assert again.told == [str(tmp_path / "checkpoint-4"), 4]


def test_a_loop_in_place_of_ours_is_refused() -> None:
    with pytest.raises(Unsupported, match="overrides _inner_training_loop, to no effect"):

        class Copied(Trainer):
            def _inner_training_loop(self, **kwargs: Any) -> Any:
                return self.get_batch_samples(iter([]), 1, "cpu")  # type: ignore[func-returns-value]


def test_code_put_on_a_trainer_that_would_never_run_is_refused(tmp_path: Path) -> None:
    trainer = made(Trainer, tmp_path)
    trainer.get_batch_samples = print
    with pytest.raises(Unsupported, match="This Trainer overrides get_batch_samples"):
        trainer.train()


@pytest.mark.parametrize(
    "name", ["get_batch_samples", "_get_num_items_in_batch", "_clip_grad_norm", "_run_epoch"]
)
def test_code_put_on_the_class_that_would_never_run_is_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, name, print, raising=False)
    with pytest.raises(Unsupported, match=f"This Trainer overrides {name}"):
        made(Trainer, tmp_path).train()


def test_code_of_another_base_that_would_never_run_is_refused() -> None:
    class Mixed:
        def _run_epoch(self) -> None: ...

    with pytest.raises(Unsupported, match="overrides _run_epoch, to no effect"):
        type("Mine", (Mixed, Trainer), {})


def test_a_batch_and_a_rate_go_through_what_is_overridden_of_them(tmp_path: Path) -> None:
    class Own(Trainer):
        seen: ClassVar[list[Any]] = []

        def _prepare_input(self, data: Any) -> Any:
            self.seen.append(type(data))
            return super()._prepare_input(data)

        def _get_learning_rate(self) -> float:
            return 7.0

    trainer = made(Own, tmp_path, logging_steps=1)
    trainer.train()
    assert dict in trainer.seen and torch.Tensor in trainer.seen
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates == [7.0] * 4


def test_a_method_put_on_the_class_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = made(Trainer, tmp_path)
    assert not trainer._is_own("_load_from_checkpoint")
    monkeypatch.setattr(Trainer, "_load_from_checkpoint", print)
    assert trainer._is_own("_load_from_checkpoint")


def test_a_piece_of_the_loop_that_is_never_called_is_still_refused() -> None:
    for name in ("_load_rng_state", "_run_epoch"):
        with pytest.raises(Unsupported, match=f"overrides {name}, to no effect"):
            type("Mine", (Trainer,), {name: None})
