from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from anytrain.core.errors import HubError, Notice
from anytrain.doors.callbacks import TrainerCallback
from anytrain.doors.reading import write as write_report
from anytrain.doors.trainer import Trainer
from anytrain.doors.trainer.model_card import card_tags
from anytrain.doors.training_args import TrainingArguments
from local_hub import LocalHub, serving


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows(count: int) -> list[dict[str, Any]]:
    return [{"x": torch.tensor([float(i), 1.0]), "labels": i % 2} for i in range(count)]


class OpenAt(TrainerCallback):
    """Let the hub take what it was sent, once training is over."""

    def __init__(self, hub: LocalHub, step: int) -> None:
        self.hub, self.step = hub, step

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert state.global_step == self.step
        self.hub.gate.set()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    from huggingface_hub import constants

    with serving() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield found


def trainer(folder: Path, **options: Any) -> Trainer:
    usual = {
        "output_dir": str(folder / "tiny"),
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "hub_token": "hf_local",
    }
    args = TrainingArguments(**{**usual, **options})
    return Trainer(model=Tiny(), args=args, train_dataset=rows(8), eval_dataset=rows(4))


def header(card: str) -> dict[str, Any]:
    found = yaml.safe_load(card.split("---\n")[1])
    assert isinstance(found, dict)
    return found


def test_the_card_says_what_the_run_was(tmp_path: Path) -> None:
    made = trainer(tmp_path, eval_strategy="epoch", logging_steps=1, learning_rate=0.01)
    made.train()
    made.create_model_card(
        language="en",
        license="apache-2.0",
        tags="toy",
        finetuned_from="somebody/base",
        tasks="text-classification",
        dataset="GLUE MRPC",
        dataset_tags="glue",
        dataset_args="mrpc",
    )
    card = (tmp_path / "tiny" / "README.md").read_text()
    found = header(card)
    assert found["license"] == "apache-2.0"
    assert found["language"] == ["en"]
    assert found["base_model"] == "somebody/base"
    assert found["tags"] == ["generated_from_trainer", "toy"]
    assert found["datasets"] == ["glue"]
    assert "# tiny" in card
    assert "- learning_rate: 0.01" in card
    assert "- samples in one update: 4" in card
    assert "| training loss | epoch | step | eval loss |" in card
    assert f"- torch: {torch.__version__.split('+')[0]}" in card


def test_a_folder_is_no_base_model(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.create_model_card(finetuned_from=str(tmp_path))
    card = (tmp_path / "tiny" / "README.md").read_text()
    assert "base_model" not in header(card)
    assert "- precision: float32" in card


def test_a_card_written_again_keeps_its_tags(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.create_model_card(tags=["first"])
    made.create_model_card(tags=["second"])
    tags = card_tags(tmp_path / "tiny" / "README.md")
    assert tags == ["generated_from_trainer", "second", "first"]


def test_a_push_sends_the_model_and_its_card_but_no_checkpoint(
    tmp_path: Path, hub: LocalHub
) -> None:
    made = trainer(tmp_path, save_strategy="epoch")
    made.train()
    answer = made.push_to_hub("Well done", license="mit")
    assert answer is not None
    assert made.hub_model_id == "me/tiny"
    (commit,) = hub.commits
    assert commit.message == "Well done"
    assert commit.token == "Bearer hf_local"
    assert "model.safetensors" in commit.files
    assert header(commit.files["README.md"].decode())["license"] == "mit"
    assert not [name for name in commit.files if name.startswith(("checkpoint", "."))]
    assert not [name for name, data in commit.files.items() if b"hf_local" in data]


def test_a_push_may_be_waited_for_later(tmp_path: Path, hub: LocalHub) -> None:
    hub.gate.clear()
    pushed = trainer(tmp_path).push_to_hub(blocking=False, revision="draft")
    assert isinstance(pushed, Future)
    assert not hub.commits
    hub.gate.set()
    pushed.result(20)
    assert hub.commits[0].revision == "draft"


def test_a_named_private_repository_is_made_before_training(tmp_path: Path, hub: LocalHub) -> None:
    made = trainer(tmp_path, push_to_hub=True, hub_model_id="team/pair", hub_private_repo=True)
    assert made.hub_model_id == "team/pair"
    (asked,) = hub.repositories
    assert asked["name"] == "pair"
    assert asked["organization"] == "team"
    assert "private" in json.dumps(asked)


def test_a_hub_that_refuses_is_told_before_training(tmp_path: Path, hub: LocalHub) -> None:
    hub.refuses = True
    with pytest.raises(HubError, match="could not be opened") as caught:
        trainer(tmp_path, push_to_hub=True)
    assert "403" in caught.value.why
    assert "hub_token=" in caught.value.fix


def test_a_hub_that_nobody_answers_for_is_told_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(HubError, match="could not be opened"):
        trainer(tmp_path, push_to_hub=True)


@pytest.mark.parametrize(
    ("strategy", "folders"),
    [
        ("every_save", [set(), set()]),
        ("checkpoint", [{"last-checkpoint"}, {"last-checkpoint"}]),
        ("all_checkpoints", [{"checkpoint-1"}, {"checkpoint-2"}]),
    ],
)
def test_saves_are_pushed_as_the_strategy_says(
    tmp_path: Path, hub: LocalHub, strategy: str, folders: list[set[str]]
) -> None:
    made = trainer(
        tmp_path,
        push_to_hub=True,
        hub_strategy=strategy,
        hub_always_push=True,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,  # the first is gone from the disk before or while it is pushed
    )
    made.train()
    assert [c.message for c in hub.commits] == [
        "Training in progress, step 1",
        "Training in progress, step 2",
    ]
    for commit, expected in zip(hub.commits, folders, strict=True):
        assert "model.safetensors" in commit.files
        assert "manifest.json" not in commit.files
        inside = {name.split("/")[0] for name in commit.files if "/" in name}
        assert {f for f in inside if "checkpoint" in f} == expected
        for folder in expected:
            assert f"{folder}/manifest.json" in commit.files
    assert not list((tmp_path / "tiny").glob(".hub-*"))


def test_rows_of_the_data_and_names_of_the_host_stay_here(tmp_path: Path, hub: LocalHub) -> None:
    secret = [{**row, "text": "PATIENT NAME"} for row in rows(8)]
    with pytest.warns(Notice, match="earlier-1"):
        for number in range(2):
            made = trainer(
                tmp_path,
                push_to_hub=bool(number),
                hub_strategy="every_save",
                save_strategy="steps",
                save_steps=1,
            )
            made.evaluate(secret)
            made.evaluate(secret, metric_key_prefix="eval_dev")
            made.train()
    folder = tmp_path / "tiny"
    write_report(folder)
    (folder / "run.json.new").write_text("PATIENT NAME")
    made.push_to_hub()
    own = ("report", "timesheet", "run", "events", "evaluation", "earlier-", "checkpoint-")
    assert {part for path in folder.iterdir() if (part := path.name).startswith(own)} > {
        "report.html",
        "timesheet.jsonl",
        "run.json",
        "events.jsonl",
        "evaluation.json",
        "evaluation-dev.json",
        "earlier-1",
    }
    assert "PATIENT NAME" in (folder / "report.html").read_text()
    assert len(hub.commits) > 1
    host = socket.gethostname().encode()
    for commit in hub.commits:
        assert "metrics.jsonl" in commit.files
        assert not [name for name in commit.files if name.startswith(own)]
        held = {name for name, data in commit.files.items() if host in data or b"PATIENT" in data}
        assert not held


def test_nothing_is_pushed_at_saves_when_only_the_end_counts(tmp_path: Path, hub: LocalHub) -> None:
    made = trainer(tmp_path, push_to_hub=True, hub_strategy="end", save_strategy="epoch")
    made.train()
    assert not hub.commits


def test_a_push_that_fails_while_training_is_told_and_training_goes_on(
    tmp_path: Path, hub: LocalHub
) -> None:
    made = trainer(tmp_path, push_to_hub=True, save_strategy="epoch", num_train_epochs=2)
    hub.refuses = True
    with pytest.warns(Notice, match="A push to the hub failed"):
        result = made.train()
    assert result.global_step == 4
    assert (tmp_path / "tiny" / "checkpoint-4").is_dir()


def test_a_model_saved_by_hand_is_pushed(tmp_path: Path, hub: LocalHub) -> None:
    made = trainer(tmp_path, push_to_hub=True)
    made.save_model()
    assert [c.message for c in hub.commits] == ["Model save"]
    hub.refuses = True
    with pytest.warns(Notice, match="A push to the hub failed"):
        made.save_model()


def test_a_push_begun_while_another_goes_on_is_left_out_unless_asked_for(
    tmp_path: Path, hub: LocalHub
) -> None:
    hub.gate.clear()
    made = trainer(tmp_path, push_to_hub=True, save_strategy="steps", save_steps=1)
    made.add_callback(OpenAt(hub, step=2))
    made.train()
    assert [c.message for c in hub.commits] == ["Training in progress, step 1"]


def test_the_last_push_raises_what_went_wrong(tmp_path: Path, hub: LocalHub) -> None:
    made = trainer(tmp_path, push_to_hub=True)
    hub.refuses = True
    with pytest.raises(HubError, match=r"push to me/tiny failed"):
        made.push_to_hub()
    assert (tmp_path / "tiny" / "model.safetensors").exists()
