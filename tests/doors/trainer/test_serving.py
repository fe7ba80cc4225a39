"""A subclass's own way to log, evaluate and save at a step's end is called where HF calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from anytrain.doors.callbacks import TrainerCallback
from anytrain.doors.trainer import Trainer
from equivalence import twins
from launching import launch

GIVEN = {
    "max_steps": 6,
    "logging_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "save_strategy": "steps",
    "save_steps": 3,
}


def trained(kind: type[Trainer], folder: Path, **given: Any) -> Any:
    data = twins.points(64)
    given = {"model": twins.regression(), "train_dataset": data, **GIVEN, **given}
    trainer = twins.build(twins.OURS, folder, kind=lambda made: kind, eval_dataset=data, **given)
    trainer.output = trainer.train()
    return trainer


def history(trainer: Any) -> list[dict[str, Any]]:
    timed = ("runtime", "per_second", "flos", "time")
    return [
        {k: v for k, v in entry.items() if not any(word in k for word in timed)}
        for entry in trainer.state.log_history
    ]


class Around(Trainer):
    """Log something more, and let anytrain do the rest."""

    def _maybe_log_save_evaluate(
        self, tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time,
        learning_rate=None,
    ):  # fmt: skip
        self.seen = [*getattr(self, "seen", []), (self.state.global_step, float(tr_loss))]
        assert model is self.model and grad_norm is not None and epoch == self.state.epoch
        super()._maybe_log_save_evaluate(
            tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate
        )


class Copied(Trainer):
    """What HF's method does, written down with an entry more, as many scripts have it."""

    def _maybe_log_save_evaluate(
        self, tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time,
        learning_rate=None,
    ):  # fmt: skip
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            since = self.state.global_step - self._globalstep_last_logged
            loss = self._nested_gather(tr_loss).mean().item()
            tr_loss -= tr_loss
            logs = {"loss": loss / since, "grad_norm": grad_norm.item()}
            logs["learning_rate"] = learning_rate
            self._total_loss_scalar += loss
            self._globalstep_last_logged = self.state.global_step
            self.store_flos()
            self.log({**logs, "mine": 1.0}, start_time)
        if self.control.should_evaluate:
            self._determine_best_metric(self._evaluate(trial, ignore_keys_for_eval), trial)
        if self.control.should_save:
            self._save_checkpoint(model, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)


class Older(Trainer):
    """As scripts of some years ago have it."""

    def _maybe_log_save_evaluate(self, tr_loss, model, trial, epoch, ignore_keys_for_eval):
        self.called = getattr(self, "called", 0) + 1
        super()._maybe_log_save_evaluate(tr_loss, model, trial, epoch, ignore_keys_for_eval)


class Silent(Trainer):
    """Nothing is logged, evaluated or saved."""

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        pass


def test_with_super_the_run_is_the_same(tmp_path: Path) -> None:
    plain, around = trained(Trainer, tmp_path / "a"), trained(Around, tmp_path / "b")
    assert history(around) == history(plain)
    assert around.output.training_loss == plain.output.training_loss
    assert [step for step, _ in around.seen] == [1, 2, 3, 4, 5, 6, 6]  # and the epoch's end
    losses = [loss for _, loss in around.seen]
    assert losses[1] > losses[0] > 0 and losses[6] == 0.0  # added up, and read
    for step in (3, 6):
        assert (tmp_path / "b" / f"checkpoint-{step}" / "manifest.json").exists()


def test_a_copy_of_hfs_method_does_what_it_does_there(tmp_path: Path) -> None:
    plain, copied = trained(Trainer, tmp_path / "a"), trained(Copied, tmp_path / "b")
    assert all(entry.pop("mine") == 1.0 for entry in copied.state.log_history if "loss" in entry)
    for ours, theirs in zip(history(plain), history(copied), strict=True):
        assert theirs == pytest.approx(ours, rel=1e-6)
    assert copied.output.training_loss == pytest.approx(plain.output.training_loss)
    assert torch.equal(*(one.model.state_dict()["inner.weight"] for one in (plain, copied)))
    assert (tmp_path / "b" / "checkpoint-6" / "manifest.json").exists()


def test_an_older_form_is_called_with_what_it_takes(tmp_path: Path) -> None:
    older, plain = trained(Older, tmp_path / "a"), trained(Trainer, tmp_path / "b")
    assert older.called == 7
    assert history(older) == history(plain)


def test_without_super_nothing_is_done_and_the_loss_is_still_known(tmp_path: Path) -> None:
    plain, silent = trained(Trainer, tmp_path / "a"), trained(Silent, tmp_path / "b")
    assert len(silent.state.log_history) == 1
    assert silent.output.training_loss == pytest.approx(plain.output.training_loss)
    assert not list((tmp_path / "b").glob("checkpoint-*"))


class StopAt4(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 4


@pytest.mark.parametrize("kind", [Around, Copied, Silent])
def test_who_asks_to_stop_is_heard(tmp_path: Path, kind: type[Trainer]) -> None:
    assert trained(kind, tmp_path, callbacks=[StopAt4()]).state.global_step == 4


RANKS = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from doors.trainer.test_serving import Copied, Trainer, history, trained

root = Path(sys.argv[1])
plain, copied = trained(Trainer, root / "a"), trained(Copied, root / "b")
losses = [[entry["loss"] for entry in history(one) if "loss" in entry] for one in (plain, copied)]
assert losses[0] and all(abs(a - b) < 1e-6 * a for a, b in zip(*losses, strict=True)), losses
print("alike")
"""


def test_several_ranks_log_the_mean_of_their_losses(tmp_path: Path) -> None:
    ran = launch(RANKS, 2, tmp_path, Path(__file__).parents[2])
    assert ran.stdout.count("alike") == 2
