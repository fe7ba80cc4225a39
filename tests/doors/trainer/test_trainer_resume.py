"""Two lives of a training are one: weights bit for bit, and one history."""

from __future__ import annotations

import html
import json
import re
import signal
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from anytrain.core import records
from anytrain.core.errors import CheckpointError, Notice
from anytrain.doors.callbacks import EarlyStoppingCallback, TrainerCallback
from anytrain.insight.report.page import page
from doors.trainer import lives
from equivalence import twins
from launching import run_command


def rare(value: Any) -> Any:
    """Return a parameter that the quick tests leave out."""
    return pytest.param(value, marks=pytest.mark.full)


class Died(Exception):
    """The end of a life."""


class Dies(TrainerCallback):
    """End a life after a step, as a full disk or a bug would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        if state.global_step == self.step:
            raise Died


def noisy(rows: twins.Rows) -> dict[str, torch.Tensor]:
    """Collate a regression's rows, with noise that is drawn anew each time."""
    x = torch.tensor([row["x"] for row in rows])
    labels = torch.tensor([row["labels"] for row in rows])
    return {"x": x + 0.1 * torch.randn_like(x), "labels": labels}


def two_lives(
    tmp_path: Path, dies: int, resume: Any = True, **given: Any
) -> tuple[twins.Ran, twins.Ran]:
    """Train in one life and in two; return both."""
    given = {
        "model": partial(twins.regression, dropout=0.3),
        "train_dataset": twins.points(22),
        "eval_dataset": twins.points(9),
        "save_strategy": "steps",
        "save_steps": 4,
        **given,
    }
    once = twins.train(twins.OURS, tmp_path / "once", **given)
    first = {**given, "callbacks": [*given.get("callbacks", []), Dies(dies)]}
    with pytest.raises(Died):
        twins.train(twins.OURS, tmp_path / "twice", **first)
    torch.manual_seed(12345)  # a new life knows nothing of the old one's draws
    twice = twins.train(twins.OURS, tmp_path / "twice", resume=resume, **given)
    return once, twice


def assert_one_life(once: twins.Ran, twice: twins.Ran) -> None:
    assert twice.history == once.history
    assert twice.output.training_loss == once.output.training_loss
    mine, whole = twice.weights, once.weights
    for name in whole:
        assert torch.equal(mine[name], whole[name]), name
    assert twice.folders == once.folders
    journals = [_journal(ran.folder / "metrics.jsonl") for ran in (once, twice)]
    assert journals[0] == journals[1]


def _journal(path: Path) -> list[dict[str, Any]]:
    entries = records.open_run(path.parent).metrics
    left_out = ("time", "at", "seconds")
    return [{k: v for k, v in twins.untimed(e).items() if k not in left_out} for e in entries]


@pytest.mark.parametrize(
    "wish",
    [
        {},
        {"logging_steps": 3},
        {"gradient_accumulation_steps": 2, "save_steps": 2, "dies": 5},
        {"data_collator": noisy},
        {"dataloader_num_workers": 2, "data_collator": noisy},
        rare({"async_save": False}),
        rare({"save_steps": 6, "dies": 8}),
        rare({"save_strategy": "epoch", "dies": 7}),
        {"save_strategy": "epoch", "dies": 11, "num_train_epochs": 3, "eval_strategy": "epoch"},
        {"max_steps": 9, "lr_scheduler_type": "cosine", "warmup_steps": 6},
        rare(
            {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2}
        ),
        rare({"optim": "adafactor"}),
        rare({"include_num_input_tokens_seen": "all", "logging_steps": 3}),
        rare({"save_total_limit": 1, "save_steps": 2}),
    ],
    ids=lambda wish: ", ".join(f"{k}={_shown(v)}" for k, v in wish.items()) or "plain",
)
def test_two_lives_are_one_bit_for_bit(tmp_path: Path, wish: dict[str, Any]) -> None:
    wish = {"dies": 7, **wish}
    assert_one_life(*two_lives(tmp_path, **wish))


@pytest.mark.parametrize("kind", [twins.Stream, twins.SizedStream])
def test_two_lives_on_a_stream_are_one(tmp_path: Path, kind: Any) -> None:
    with pytest.warns(Notice, match="samples again to get back to where the stream was"):
        lives = two_lives(tmp_path, 7, train_dataset=kind(twins.points(22)), max_steps=9)
    assert_one_life(*lives)


def _shown(value: Any) -> str:
    return (
        getattr(value, "__name__", type(value).__name__)
        if not isinstance(value, (str, int, float))
        else str(value)
    )


def test_operations_and_tokens_are_counted_over_both_lives(tmp_path: Path) -> None:
    # Saves come between two log points, where nothing was read yet.
    once, twice = two_lives(
        tmp_path,
        7,
        model=twins.bert,
        train_dataset=twins.sentences(22),
        eval_dataset=twins.sentences(5),
        include_num_input_tokens_seen="all",
        logging_steps=3,
    )
    assert_one_life(once, twice)
    assert once.trainer.state.total_flos > 0
    assert once.trainer.state.num_input_tokens_seen == 2 * 22 * 8


def test_the_best_so_far_is_known_to_the_second_life(tmp_path: Path) -> None:
    once, twice = two_lives(
        tmp_path,
        7,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        learning_rate=0.3,
    )
    assert_one_life(once, twice)
    mine, whole = twice.trainer.state, once.trainer.state
    assert mine.best_metric == whole.best_metric
    assert mine.best_global_step == whole.best_global_step


@pytest.mark.full
def test_patience_is_carried_over(tmp_path: Path) -> None:
    once, twice = two_lives(
        tmp_path,
        3,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        learning_rate=0.5,
        num_train_epochs=5,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=4)],
        restore_callback_states_from_checkpoint=True,
    )
    assert once.output.global_step < once.trainer.state.max_steps
    assert_one_life(once, twice)


@pytest.mark.full
def test_a_named_checkpoint_is_gone_on_from(tmp_path: Path) -> None:
    folder = tmp_path / "twice" / "checkpoint-4"
    assert_one_life(*two_lives(tmp_path, 10, resume=str(folder)))


def test_a_finished_training_that_is_resumed_says_so_and_trains_no_more(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = {"model": twins.regression, "train_dataset": twins.points(22), "save_strategy": "steps"}
    once = twins.train(twins.OURS, tmp_path, **given)
    assert "nothing left to do" not in capfd.readouterr().err
    again = twins.train(twins.OURS, tmp_path, resume=True, **given)
    step, (told,) = once.output.global_step, capfd.readouterr().err.splitlines()
    assert f"nothing left to do: the run is at its end, step {step} of {step}." in told
    assert "pass num_train_epochs above" in told
    assert again.output.global_step == once.output.global_step
    assert "on_step_end" not in [event[0] for event in again.events]
    for name, weight in once.weights.items():
        assert torch.equal(again.weights[name], weight)


@pytest.mark.full
def test_more_epochs_go_on_from_the_end(tmp_path: Path) -> None:
    given = {
        "model": partial(twins.regression, dropout=0.3),
        "train_dataset": twins.points(22),
        "save_strategy": "epoch",
        "lr_scheduler_type": "constant",
    }
    once = twins.train(twins.OURS, tmp_path / "once", **given, num_train_epochs=3)
    twins.train(twins.OURS, tmp_path / "twice", **given, num_train_epochs=2)
    twice = twins.train(twins.OURS, tmp_path / "twice", resume=True, **given, num_train_epochs=3)
    for name, weight in once.weights.items():
        assert torch.equal(twice.weights[name], weight)
    steps = [[(e["step"], e["loss"]) for e in r.history if "loss" in e] for r in (once, twice)]
    assert steps[0] == steps[1]


# -- other libraries' checkpoints ------------------------------------------------------------------


@pytest.mark.parametrize(
    "wish",
    [{}, {"save_steps": 6}, {"gradient_accumulation_steps": 2, "save_steps": 2}],
    ids=["mid-epoch", "epoch's end", "accumulated"],
)
def test_a_checkpoint_of_transformers_goes_on_with_the_same_losses(
    tmp_path: Path, wish: dict[str, Any]
) -> None:
    given = {
        "model": twins.regression,
        "train_dataset": twins.points(24),
        "save_strategy": "steps",
        "save_steps": 4,
        **wish,
    }
    theirs = twins.train(twins.THEIRS, tmp_path / "theirs", **given)
    step = given["save_steps"]
    with pytest.warns(Notice, match="training_args.bin was not taken"):
        ours = twins.train(
            twins.OURS,
            tmp_path / "ours",
            resume=str(tmp_path / "theirs" / f"checkpoint-{step}"),
            **given,
        )
    assert ours.events[1][:2] == ("on_train_begin", step)
    left_out = {"train_loss", "total_flos"}  # transformers means over the second life alone
    histories = [
        [{k: v for k, v in entry.items() if k not in left_out} for entry in ran.history]
        for ran in (ours, theirs)
    ]
    twins.assert_same_history(*histories)
    twins.assert_same_weights(ours.weights, theirs.weights, atol=1e-5)


def test_the_epoch_begins_again_where_data_is_not_to_be_skipped(tmp_path: Path) -> None:
    given = {
        "model": twins.regression,
        "train_dataset": twins.points(22),
        "save_strategy": "steps",
        "save_steps": 4,
    }
    both = []
    for library in twins.LIBRARIES:
        twins.train(library, tmp_path / library, **given)
        both.append(
            twins.train(
                library,
                tmp_path / f"{library}-again",
                resume=str(tmp_path / library / "checkpoint-4"),
                ignore_data_skip=True,
                **given,
            )
        )
    ours, theirs = both
    assert ours.events == theirs.events
    losses = [[(e["step"], e["epoch"]) for e in r.history if "loss" in e] for r in both]
    assert losses[0] == losses[1]
    kept = [[{k: v for k, v in e.items() if k != "train_loss"} for e in r.history] for r in both]
    twins.assert_same_history(*kept)
    twins.assert_same_weights(ours.weights, theirs.weights, atol=1e-5)


# -- what a checkpoint holds -----------------------------------------------------------------------


def test_a_checkpoint_loads_as_a_model(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    ran = twins.train(
        twins.OURS,
        tmp_path,
        model=twins.bert,
        train_dataset=twins.sentences(8),
        save_strategy="epoch",
        num_train_epochs=1,
    )
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint-2")
    for name, weight in ran.weights.items():
        assert torch.equal(loaded.state_dict()[name], weight)


def test_the_model_alone_is_saved_and_no_run_goes_on_from_it(tmp_path: Path) -> None:
    given = {
        "model": twins.regression,
        "train_dataset": twins.points(22),
        "save_strategy": "steps",
        "save_steps": 4,
        "save_only_model": True,
    }
    first = twins.train(twins.OURS, tmp_path / "a", **given)
    names = {path.name for path in (tmp_path / "a" / "checkpoint-4").rglob("*")}
    assert "trainer_state.json" in names
    assert not any("optim" in name for name in names), names
    assert first.folders == ["checkpoint-12", "checkpoint-4", "checkpoint-8"]
    with pytest.raises(CheckpointError, match="it holds the model alone"):
        twins.train(twins.OURS, tmp_path / "a", **given, resume=True)


def lora() -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        found: torch.nn.Module = get_peft_model(
            twins.bert(dropout=0.2),
            LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS"),
        )
    return found


def test_adapters_alone_are_saved_and_resumed(tmp_path: Path) -> None:
    once, twice = two_lives(
        tmp_path,
        7,
        model=lora,
        train_dataset=twins.sentences(22),
        eval_dataset=twins.sentences(9),
    )
    assert_one_life(once, twice)
    folder = once.folder / "checkpoint-4"
    assert (folder / "adapter_model.safetensors").exists()
    assert (folder / "adapter_config.json").exists()
    assert not (folder / "model.safetensors").exists()
    assert not (folder / "model").exists()


# -- processes that end ----------------------------------------------------------------------------


def live(folder: Path, *words: object, ranks: int = 1, check: bool = True) -> Any:
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return run_command([*launcher, lives.__file__, folder, *words], timeout=240, check=check)


def left(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "end.json").read_text()))


def test_a_process_that_is_terminated_then_killed_ends_as_if_left_alone(tmp_path: Path) -> None:
    lives.live(tmp_path / "once")
    folder = tmp_path / "thrice"
    ended = live(folder, "--terminate", 6, check=False)
    assert ended.returncode == 143, ended.stderr
    assert "checkpoint-6" in ended.stderr + ended.stdout
    assert (folder / "checkpoint-6").is_dir()
    killed = live(folder, "--resume", "--kill", 11, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    live(folder, "--resume")
    assert left(folder) == left(tmp_path / "once")


@pytest.mark.full
def test_two_ranks_that_were_killed_go_on_bit_for_bit(tmp_path: Path) -> None:
    live(tmp_path / "once", ranks=2)
    live(tmp_path / "twice", "--kill", 11, ranks=2, check=False)
    live(tmp_path / "twice", "--resume", ranks=2)
    assert left(tmp_path / "twice") == left(tmp_path / "once")


def test_a_rate_that_the_checkpoint_has_settled_is_told(tmp_path: Path) -> None:
    given = {"model": twins.regression, "train_dataset": twins.points(24), "save_strategy": "steps"}
    given |= {"save_steps": 2, "max_steps": 2, "lr_scheduler_type": "constant"}
    twins.train(twins.OURS, tmp_path, **given, learning_rate=1e-3)
    given |= {"resume": True, "max_steps": 4, "learning_rate": 5e-2}
    told = r"its checkpoint's learning_rate 0.001 \(given: 0.05\): an optimizer's settings"
    with pytest.warns(Notice, match=told):
        ran = twins.train(twins.OURS, tmp_path, **given)
    assert [entry["learning_rate"] for entry in ran.history if "learning_rate" in entry][-1] == 1e-3


def test_a_resume_with_other_arguments_tells_what_was_used_and_what_changed(
    tmp_path: Path,
) -> None:
    given = {"model": twins.regression, "train_dataset": twins.points(24), "save_strategy": "steps"}
    given |= {"save_steps": 2, "max_steps": 2, "lr_scheduler_type": "constant"}
    twins.train(twins.OURS, tmp_path, **given, learning_rate=1e-3, seed=42)
    given |= {"resume": True, "learning_rate": 5e-2, "seed": 7}
    with pytest.warns(Notice, match=r"learning_rate 0.001 \(given: 0.05\)"):
        twins.train(twins.OURS, tmp_path, **{**given, "max_steps": 4})
    with pytest.warns(Notice, match=r"learning_rate 0.001 \(given: 0.05\)"):  # of the third start
        twins.train(twins.OURS, tmp_path, **{**given, "max_steps": 6})
    run = records.open_run(tmp_path)
    assert [start.get("used") for start in run.starts] == [
        None,
        *[{"learning_rate": 1e-3}] * 2,
    ]
    text = html.unescape(re.sub("<[^>]+>", " ", page(run)))
    assert "The starts differ in max_steps, seed (see Arguments)." in text
    assert "Its checkpoint's learning_rate counted, not what was given." in text
    assert re.search(r"Given, and not used.*learning_rate +0\.05 +0\.001", text)
    assert re.search(r"max_steps +start 3 +4 +4 +6", text)
    assert "The seed was 42 first, then 7 from step 2 on." in text


def saved_of(tmp_path: Path, **given: Any) -> dict[str, Any]:
    """Train on 24 samples until after a save; return what goes on from there."""
    given = {"model": twins.regression, "save_strategy": "steps", "save_steps": 4, **given}
    given |= {"num_train_epochs": 2, "eval_dataset": twins.points(9)}
    first = {**given, "callbacks": [Dies(5)]}
    with pytest.raises(Died):
        twins.train(twins.OURS, tmp_path, **{"train_dataset": twins.points(24), **first})
    return {**given, "train_dataset": twins.points(24), "resume": True}


def test_other_data_than_the_checkpoint_was_made_with_is_told(tmp_path: Path) -> None:
    given = saved_of(tmp_path) | {"train_dataset": twins.points(40)}
    told = r"The saved run had 24 training samples, this one has 40: it goes on after batch \d+ of"
    with pytest.warns(Notice, match=told):
        twins.train(twins.OURS, tmp_path, **given)


def test_the_data_that_the_checkpoint_was_made_with_needs_no_word(tmp_path: Path) -> None:
    given = saved_of(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)
        twins.train(twins.OURS, tmp_path, **given)


def test_another_schedule_than_the_checkpoints_is_told(tmp_path: Path) -> None:
    given = saved_of(tmp_path) | {"lr_scheduler_type": "cosine"}
    with pytest.warns(Notice, match="lr_scheduler_type is linear, this run's is cosine"):
        twins.train(twins.OURS, tmp_path, **given)


def test_a_schedule_that_cannot_read_the_saved_one_is_explained(tmp_path: Path) -> None:
    moved = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2}
    given = saved_of(tmp_path, **moved) | {"lr_scheduler_type": "linear"}
    with pytest.raises(CheckpointError, match="schedule of the learning rate is not of this run's"):
        twins.train(twins.OURS, tmp_path, **given)


class Seen(TrainerCallback):
    """Nothing but a note of the samples that a training's batches held, in order."""

    def __init__(self) -> None:
        self.samples: list[float] = []

    def collate(self, rows: twins.Rows) -> dict[str, torch.Tensor]:
        """Stack the rows, and note them."""
        self.samples += [row["x"][0] for row in rows]
        names = ("x", "labels")
        return {name: torch.tensor([row[name] for row in rows]) for name in names}


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
@pytest.mark.parametrize("changed", [{"seed": 7}, {"data_seed": 7}], ids=["seed", "data_seed"])
def test_an_epoch_ends_in_the_order_it_began_with_under_another_seed(
    tmp_path: Path, changed: dict[str, int], strategy: str
) -> None:
    rows = [{**row, "input_ids": [0] * (n % 5 + 1)} for n, row in enumerate(twins.points(24))]
    given: dict[str, Any] = {"model": twins.regression, "train_dataset": rows, "max_steps": 9}
    given |= {"save_strategy": "steps", "save_steps": 2, "train_sampling_strategy": strategy}
    given |= {"per_device_train_batch_size": 4, "remove_unused_columns": False}
    whole, rest, last = Seen(), Seen(), Seen()
    twins.train(twins.OURS, tmp_path / "once", data_collator=whole.collate, **given)
    first = {**given, "callbacks": [Dies(3)]}
    with pytest.raises(Died):
        twins.train(twins.OURS, tmp_path / "two", data_collator=Seen().collate, **first)
    begun = {**given, **changed, "callbacks": [Dies(5)]}  # another life, of the same epoch
    told = r"seed .*7.*This epoch ends in the order that it began with"
    with pytest.warns(Notice, match=told), pytest.raises(Died):
        twins.train(twins.OURS, tmp_path / "two", resume=True, data_collator=rest.collate, **begun)
    twins.train(
        twins.OURS,
        tmp_path / "two",
        resume=True,
        data_collator=last.collate,
        **{**given, **changed},
    )
    per_epoch = 24
    assert rest.samples[:12] == whole.samples[8:20]
    assert last.samples[:8] == whole.samples[16:per_epoch]
    assert last.samples[8:] != whole.samples[per_epoch:]
    assert sorted(last.samples[8:]) != sorted(whole.samples[per_epoch:32])


def test_a_resumed_run_says_where_it_goes_on_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = saved_of(tmp_path, disable_tqdm=True)
    assert "goes on from" not in capsys.readouterr().err
    twins.train(twins.OURS, tmp_path, **given)
    (line,) = [each for each in capsys.readouterr().err.splitlines() if "goes on" in each]
    assert line == f"anytrain: goes on from {tmp_path / 'checkpoint-4'} at step 4 of 12"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"max_steps": 30}, "to end at step 12, this one ends at step 30: the learning rate goes"),
        ({"num_train_epochs": 3}, "was to end at step 12, this one ends at step 18"),
        ({"save_steps": 3}, "had save_steps 4, this one has 3"),
        ({"eval_steps": 5}, "had eval_steps 2, this one has 5"),
    ],
)
def test_another_end_or_interval_than_the_checkpoints_is_told_once(
    tmp_path: Path, changed: dict[str, int], told: str
) -> None:
    given = saved_of(tmp_path, eval_strategy="steps", eval_steps=2) | changed
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", Notice)
        twins.train(twins.OURS, tmp_path, **given)
    (notice,) = [str(each.message) for each in caught if issubclass(each.category, Notice)]
    assert told in notice


@pytest.mark.parametrize("now", ["sequential", "group_by_length"])
@pytest.mark.parametrize("was", ["random", "group_by_length"])
def test_a_run_goes_on_with_another_kind_of_order(tmp_path: Path, was: str, now: str) -> None:
    rows = [{**row, "input_ids": [0] * (n % 5 + 1)} for n, row in enumerate(twins.points(24))]
    given: dict[str, Any] = {"model": twins.regression, "train_dataset": rows, "max_steps": 9}
    given |= {"save_strategy": "steps", "save_steps": 2, "data_collator": Seen().collate}
    given |= {"per_device_train_batch_size": 4, "remove_unused_columns": False}
    first = {**given, "train_sampling_strategy": was, "callbacks": [Dies(3)]}
    with pytest.raises(Died):
        twins.train(twins.OURS, tmp_path, **first)
    twins.train(twins.OURS, tmp_path, resume=True, **given, train_sampling_strategy=now)
    assert (tmp_path / "checkpoint-9").is_dir()
