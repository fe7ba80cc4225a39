"""Saves that fail, in part or whole, end no run and leave no checkpoint that is not there."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from anytrain import Accelerator
from anytrain.cli.main import app
from anytrain.core.errors import CheckpointError, Notice
from anytrain.doors.callbacks import TrainerCallback
from anytrain.doors.reading import write
from anytrain.doors.trainer.saver import disk_errors
from doors.trainer.lives import Signals
from equivalence import twins
from launching import launch

# The guard tells of the first update that it leaves out; what follows is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:An update was skipped")


class FullAt(TrainerCallback):
    """Put a folder in the way of a step's checkpoint, so that its save fails."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        for step in self.steps:
            taken = Path(args.output_dir) / f"checkpoint-{step}"
            taken.write_text("in the way")


GIVEN: dict[str, Any] = {
    "model": twins.regression,
    "train_dataset": twins.points(22),
    "eval_dataset": twins.points(22),
    "eval_strategy": "steps",
    "eval_steps": 3,
    "save_strategy": "steps",
    "save_steps": 3,
    "metric_for_best_model": "loss",
    "load_best_model_at_end": True,
}


def losses(ran: twins.Ran) -> dict[int, float]:
    return {e["step"]: e["eval_loss"] for e in ran.history if "eval_loss" in e}


@pytest.mark.parametrize("behind", [True, False])
def test_a_best_model_that_could_not_be_saved_gives_way_to_the_best_that_was(
    tmp_path: Path, behind: bool
) -> None:
    whole = twins.train(twins.OURS, tmp_path / "whole", **GIVEN)
    found = losses(whole)
    best, second = sorted(found, key=lambda step: found[step])[:2]
    assert whole.trainer.state.best_global_step == best
    with pytest.warns(Notice) as told:
        ran = twins.train(
            twins.OURS, tmp_path / "cut", **GIVEN, async_save=behind, callbacks=[FullAt(best)]
        )
    words = " ".join(str(one.message) for one in told)
    assert f"The best model, of step {best}, was not saved." in words
    kept = tmp_path / "cut" / f"checkpoint-{second}"
    assert ran.trainer.state.best_model_checkpoint == str(kept)
    assert losses(ran) == found


@pytest.mark.parametrize("behind", [True, False])
def test_a_checkpoint_of_a_branch_that_was_left_is_not_its_best(
    tmp_path: Path, behind: bool
) -> None:
    given = {**GIVEN, "greater_is_better": False, "async_save": behind}
    twins.train(twins.OURS, tmp_path, **given)
    before = sorted(tmp_path.glob("checkpoint-*"))
    full = FullDisk(set(range(9)), OSError(errno.ENOSPC, "No space left on device"))
    with pytest.warns(Notice, match=r"The best model, of step \d+, was not saved"):
        ran = twins.train(
            twins.OURS,
            tmp_path,
            **given,
            resume=str(tmp_path / "checkpoint-3"),
            processing_class=full,
        )
    assert ran.trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-3")
    assert sorted(tmp_path.glob("checkpoint-*")) == before


def test_retention_spares_the_best_that_was_saved(tmp_path: Path) -> None:
    scores = iter([0.5, 0.9, 0.95, 0.1])
    with pytest.warns(Notice, match="checkpoint-9|step 9"):
        ran = twins.train(
            twins.OURS,
            tmp_path,
            **{**GIVEN, "metric_for_best_model": "score", "save_total_limit": 2},
            compute_metrics=lambda prediction: {"score": next(scores)},
            callbacks=[FullAt(9)],
        )
    assert ran.trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-6")
    assert (tmp_path / "checkpoint-6").is_dir()


def test_nothing_evaluated_is_told_where_the_best_was_to_be_loaded(tmp_path: Path) -> None:
    with pytest.warns(Notice, match="found no best model: nothing was evaluated"):
        twins.train(twins.OURS, tmp_path, **GIVEN, eval_delay=100)


def tensors(rows: twins.Rows) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


SAVES = {
    "model": twins.regression,
    "train_dataset": twins.points(22),
    "save_strategy": "steps",
    "save_steps": 4,
    "data_collator": tensors,
}


class FullDisk:
    """A tokenizer that a full disk keeps from being written at some saves."""

    def __init__(self, fails: set[int], error: Exception) -> None:
        self.fails, self.error, self.saves = fails, error, 0

    def save_pretrained(self, folder: str) -> None:
        self.saves += 1
        if self.saves in self.fails:
            raise self.error
        (Path(folder) / "words.txt").write_text("a b c")


@pytest.mark.parametrize("behind", [True, False])
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        Exception("No space left on device (os error 28)"),
    ],
)
def test_a_small_file_that_cannot_be_written_fails_the_save_alone(
    tmp_path: Path, behind: bool, error: Exception
) -> None:
    with pytest.warns(Notice, match="No room to save the checkpoint"):
        ran = twins.train(
            twins.OURS,
            tmp_path,
            **SAVES,
            async_save=behind,
            processing_class=FullDisk({2}, error),
        )
    assert ran.output.global_step == 12
    assert ran.folders == ["checkpoint-12", "checkpoint-4"]


@pytest.mark.parametrize("behind", [True, False])
@pytest.mark.parametrize(
    ("fails", "since"), [({2, 3}, "checkpoint-4"), ({1, 2, 3}, "the beginning")]
)
def test_an_end_that_is_in_no_checkpoint_is_told_while_it_can_be_saved(
    tmp_path: Path, behind: bool, fails: set[int], since: str
) -> None:
    full = FullDisk(fails, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.warns(Notice) as told:
        ran = twins.train(
            twins.OURS,
            tmp_path / "run",
            **SAVES,
            async_save=behind,
            processing_class=full,
        )
    closing = [str(one.message) for one in told if "The last save failed" in str(one.message)]
    assert len(closing) == 1
    assert f"what was learnt since {since} is in no checkpoint" in closing[0]
    assert "No space left on device" in closing[0]
    ran.trainer.save_model(str(tmp_path / "elsewhere"))
    assert (tmp_path / "elsewhere" / "model.safetensors").is_file()


def test_a_run_whose_end_is_in_no_checkpoint_does_not_look_like_a_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = FullDisk({2, 3}, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.warns(Notice):
        twins.train(twins.OURS, tmp_path, **SAVES, disable_tqdm=False, processing_class=full)
    words = "what was learnt since checkpoint-4 is in no checkpoint"
    closing = " ".join("".join(capsys.readouterr()).split())
    assert "not saved" in closing
    assert "the last save failed (the disk said: No space left on device)" in closing
    assert words in closing
    watched = CliRunner().invoke(app, ["watch", "--once", str(tmp_path)])
    assert watched.exit_code == 1
    assert f"Training done, but {words}." in watched.stdout
    told = CliRunner().invoke(app, ["why", str(tmp_path)]).stdout
    assert words in told.splitlines()[0]
    page = write(tmp_path)[0].read_text()
    assert "finished, end not saved" in page
    assert f", but {words}." in page
    # the same run again, with room: its end is saved
    twins.train(twins.OURS, tmp_path, **SAVES, resume=str(tmp_path / "checkpoint-4"))
    watched = CliRunner().invoke(app, ["watch", "--once", str(tmp_path)])
    assert watched.exit_code == 0
    assert "is in no checkpoint" not in watched.stdout


def test_a_checkpoint_of_a_branch_that_was_left_is_not_said_to_be_saved(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    twins.train(twins.OURS, tmp_path, **SAVES)
    full = FullDisk(set(range(9)), OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(SystemExit), pytest.warns(Notice, match="No room"):
        twins.train(
            twins.OURS,
            tmp_path,
            **SAVES,
            resume=str(tmp_path / "checkpoint-4"),
            processing_class=full,
            callbacks=[Signals(8, signal.SIGTERM)],
        )
    told = capfd.readouterr().err
    assert "could not be saved after step 8" in told
    assert "saved " + str(tmp_path) not in told
    with pytest.warns(Notice) as notices:
        twins.train(
            twins.OURS,
            tmp_path,
            **SAVES,
            resume=str(tmp_path / "checkpoint-4"),
            processing_class=full,
        )
    words = " ".join(str(one.message) for one in notices)
    assert "what was learnt since checkpoint-4 is in no checkpoint" in words


def test_a_saved_model_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = twins.regression()
    model.save_pretrained = lambda folder, **known: (  # as transformers' models do
        Path(folder, "config.json").write_text("{}"),
        save_file(model.state_dict(), Path(folder, "model.safetensors")),
    )
    trainer = twins.build(
        twins.OURS, tmp_path, model=model, processing_class=FullDisk(set(), OSError())
    )
    did: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        fsync(descriptor)
        did.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))

    def rename(source: Path, target: Path) -> None:
        replace(source, target)
        did.append(("rename", target.name))

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    trainer.save_model(str(tmp_path / "model"))
    for name in ("config.json", "model.safetensors", "words.txt", "training_args.json"):
        last = max(place for place, what in enumerate(did) if what == ("rename", name))
        assert ("sync", name) in did[:last], name
    assert did[-1] == ("sync", "model"), "the names are on the disk too"


class Poisons(TrainerCallback):
    """Make a weight no number before the last save."""

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        if state.global_step == 12:
            next(known["model"].parameters()).data.fill_(float("nan"))


def test_weights_that_are_no_numbers_are_not_said_to_be_worth_saving(tmp_path: Path) -> None:
    with pytest.warns(Notice) as told:
        twins.train(twins.OURS, tmp_path, **SAVES, callbacks=[Poisons()])
    words = " ".join(str(one.message) for one in told)
    assert "it would be poisoned" in words
    assert "The last save failed" not in words


def test_what_rust_says_of_a_disk_is_an_error_of_the_system() -> None:
    said = 'I/O error: IoError(Os { code: 28, kind: StorageFull, message: "No space left" })'
    with pytest.raises(OSError, match="No space left") as caught, disk_errors():
        raise RuntimeError(said)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(RuntimeError, match="another"), disk_errors():
        raise RuntimeError("another")


def test_a_save_between_logs_answers_a_bad_step_once(tmp_path: Path) -> None:
    data = twins.points(44)
    data[13] = {**data[13], "x": [float("nan")] * 4}
    with pytest.warns(Notice, match="went back to the weights") as told:
        ran = twins.train(
            twins.OURS,
            tmp_path,
            model=twins.regression,
            train_dataset=data,
            num_train_epochs=1,
            on_nonfinite="rewind",
            train_sampling_strategy="sequential",
            logging_steps=100,
            save_strategy="steps",
            save_steps=1,
        )
    assert len([one for one in told if "went back" in str(one.message)]) == 1
    assert ran.output.global_step == 11
    assert ran.output.training_loss == ran.output.training_loss


def test_a_rewind_takes_adapters_back(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    seen: list[torch.Tensor] = []

    def lora() -> torch.nn.Module:
        made: torch.nn.Module = get_peft_model(
            twins.bert(), LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
        )
        return made

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        seen.append(labels)
        found = torch.nn.functional.cross_entropy(outputs["logits"], labels)
        return found * float("nan") if len(seen) == 4 else found

    with pytest.warns(Notice, match="Step 4 was not finite: went back"):
        ran = twins.train(
            twins.OURS,
            tmp_path,
            model=lora,
            train_dataset=twins.sentences(22),
            num_train_epochs=1,
            compute_loss_func=loss,
            on_nonfinite="rewind",
            save_strategy="steps",
            save_steps=2,
        )
    assert ran.output.global_step == 6


RANKS = """
import errno, os, sys, warnings
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from equivalence import twins

class Fails:
    saves = 0

    def save_pretrained(self, folder):
        Fails.saves += 1
        if Fails.saves in (2, 3):
            raise OSError(errno.ENOSPC, "No space left on device")

def own(kind):
    class Own(kind):
        def _save(self, output_dir=None, state_dict=None):
            super()._save(output_dir, state_dict)
            (Path(output_dir) / "own.txt").write_text("own")
    return Own

from anytrain.engine.data.collate import collate
warnings.simplefilter("ignore")
trainer = twins.build(
    twins.OURS, sys.argv[1], kind=own, model=twins.regression(), train_dataset=twins.points(24),
    processing_class=Fails(), data_collator=collate, save_strategy="steps",
    save_steps=1, num_train_epochs=1, async_save=False,
)
trainer.train()
"""


@pytest.mark.full
def test_a_file_that_one_rank_cannot_write_fails_the_save_on_all(tmp_path: Path) -> None:
    launch(RANKS, 2, tmp_path, Path(__file__).parents[2])
    # The tokenizer is written with a subclass's files and again beside them.
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3"]
    assert (tmp_path / "checkpoint-3" / "own.txt").read_text() == "own"


def test_a_checkpoint_of_an_accelerator_is_refused_with_its_reason(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    accelerator.prepare(twins.regression())
    folder = accelerator.save_state(tmp_path / "state")
    accelerator.end_training()
    trainer = twins.build(
        twins.OURS, tmp_path / "out", model=twins.regression(), train_dataset=twins.points(8)
    )
    with pytest.raises(CheckpointError, match="no Trainer wrote it"):
        trainer.train(resume_from_checkpoint=folder)
