"""Folders that HF's own libraries have just written, read without running anything in them."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from anytrain.core.errors import CheckpointError
from anytrain.engine.checkpoint import Snapshot, huggingface, load_weights, save
from checkpoints import same_bits


class Counter:
    def state_dict(self) -> dict[str, Any]:
        return {"count": 3, "seen": torch.arange(2), "mean": np.float64(0.25)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


@pytest.fixture(scope="module", params=[True, False], ids=["safetensors", "pickled weights"])
def accelerated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder of Accelerate's save_state, and the objects it was made of."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    accelerator = accelerate.Accelerator(cpu=True)
    models = [nn.Linear(3, 2), nn.Linear(2, 2)]
    optimizer = torch.optim.AdamW([*models[0].parameters(), *models[1].parameters()])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=2)
    one, two, optimizer, scheduler, loader = accelerator.prepare(
        *models, optimizer, scheduler, loader
    )
    accelerator.register_for_checkpointing(Counter())
    for (batch,) in loader:
        accelerator.backward(two(one(batch)).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("accelerate") / "state"
    accelerator.save_state(str(folder), safe_serialization=request.param)
    return folder, models, optimizer, scheduler, random.random(), np.random.rand()


def test_an_accelerate_folder_is_taken_whole(accelerated: Any) -> None:
    folder, models, optimizer, scheduler, next_python, next_numpy = accelerated
    found = huggingface.read(folder)
    assert found.not_taken == []
    for index, model in enumerate(models):
        other = nn.Linear(model.in_features, model.out_features)
        load_weights(other, found.models[index])
        assert torch.equal(other.weight, model.weight)
    assert same_bits(found.optimizers[0], optimizer.state_dict())
    assert found.schedulers[0] == scheduler.state_dict()
    assert found.custom[0]["count"] == 3
    assert found.custom[0]["mean"] == 0.25
    random.setstate(found.rng[0]["python"])
    np.random.set_state(found.rng[0]["numpy"])
    torch.set_rng_state(found.rng[0]["torch"])
    assert (random.random(), np.random.rand()) == (next_python, next_numpy)
    assert found.counters == {"step": 0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that Trainer has written."""
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    sizes = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 16}
    model = BertForSequenceClassification(
        BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=16)
    )
    rows = [{"input_ids": torch.arange(6), "labels": torch.tensor(0)} for _ in range(4)]
    root = tmp_path_factory.mktemp("trainer")
    settings = {"max_steps": 2, "save_steps": 2, "per_device_train_batch_size": 2}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    args = TrainingArguments(output_dir=str(root), **settings, **quiet)
    Trainer(model=model, args=args, train_dataset=rows).train()
    return root / "checkpoint-2"


def test_a_trainers_folder_is_taken_but_for_its_pickled_arguments(trained: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    found = huggingface.read(trained)
    assert [left.file for left in found.not_taken] == ["training_args.bin"]
    assert "pickled" in found.not_taken[0].why
    model = BertForSequenceClassification(BertConfig.from_pretrained(trained))
    assert load_weights(model, found.models[0]) == ([], [])
    assert len(found.optimizers[0]["state"]) == len(list(model.parameters()))
    assert found.schedulers[0]["last_epoch"] == 2
    assert found.counters["global_step"] == 2
    assert {"python", "numpy", "torch"} <= set(found.rng[0])
    np.random.set_state(found.rng[0]["numpy"])


def test_weights_in_shards_are_joined(tmp_path: Path, trained: Path) -> None:
    from transformers import BertForSequenceClassification

    model = BertForSequenceClassification.from_pretrained(trained)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="2KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    found = huggingface.read(tmp_path / "sharded")
    assert load_weights(model, found.models[0]) == ([], [])
    next((tmp_path / "sharded").glob("model-00002*")).unlink()
    again = huggingface.read(tmp_path / "sharded")
    assert again.models == {}
    assert again.not_taken[0].file == "model.safetensors.index.json"


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/hostname", "a/b.safetensors"])
def test_an_index_cannot_name_a_file_elsewhere(tmp_path: Path, name: str) -> None:
    index = {"weight_map": {"weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = huggingface.read(tmp_path)
    assert found.models == {}
    assert "not" in found.not_taken[0].why


class Sampler:
    """Something that only running it brings back."""


def test_what_would_have_to_be_run_is_left_and_said(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    torch.save(Sampler(), tmp_path / "sampler.bin")
    torch.save({"f": print}, tmp_path / "scheduler.bin")
    (tmp_path / "optimizer_0").mkdir()
    (tmp_path / "extra_state.pt").write_bytes(b"")
    (tmp_path / "scaler.pt").write_bytes(b"not a file of torch's")
    found = huggingface.read(tmp_path)
    why = {left.file: left.why for left in found.not_taken}
    assert "Sampler, which would have to be run" in why["sampler.bin"]
    assert "print" in why["scheduler.bin"]
    assert "folder" in why["optimizer_0"]
    assert "no part" in why["extra_state.pt"]
    assert "cannot be read" in why["scaler.pt"]
    assert torch.equal(found.models[0]["w"], torch.ones(1))
    assert found.samplers == found.schedulers == found.scalers == {}


def test_a_folder_of_ours_or_of_nobody_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "ours", Snapshot(step=1, models=[nn.Linear(1, 1)]))
    (tmp_path / "nobody").mkdir()
    for name, why in (("ours", "anytrain's own"), ("nobody", "no file that they write")):
        assert not huggingface.is_hf_folder(tmp_path / name)
        with pytest.raises(CheckpointError, match=why):
            huggingface.read(tmp_path / name)


# Payloads.


class Payload:
    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.args


def _plant(path: Path, marker: Path, how: str) -> None:
    payload = Payload(os.system, f"touch '{marker}'")
    if how == "plain pickle":
        path.write_bytes(pickle.dumps(payload))
    elif how == "torch's zip":
        torch.save({"state": payload}, path)
    elif how == "torch's old format":
        torch.save({"state": payload}, path, _use_new_zipfile_serialization=False)
    else:
        torch.save(Payload(np.ndarray, (2,), np.dtype(object), payload), path)


HOW = ["plain pickle", "torch's zip", "torch's old format", "through numpy"]


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("how", HOW)
def test_no_payload_in_any_file_of_such_folders_runs(
    accelerated: Any, trained: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Somebody who has asked torch to trust every file has not asked us.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    marker = tmp_path / "it ran"
    for source in (accelerated[0], trained):
        for file in sorted(p.name for p in source.iterdir()):
            folder = tmp_path / "copy"
            shutil.copytree(source, folder)
            _plant(folder / file, marker, how)
            found = huggingface.read(folder)
            assert not marker.exists(), file
            left = {left.file for left in found.not_taken}
            assert file in left or file == "config.json", file
            shutil.rmtree(folder)


def test_arrays_of_plain_numbers_are_taken_and_no_others(tmp_path: Path) -> None:
    """An array of objects over raw bytes would let a file choose addresses to follow."""
    before = set(torch.serialization.get_safe_globals())
    torch.save({"w": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    torch.save({"a": np.arange(3), "b": np.float32(2)}, tmp_path / "custom_checkpoint_0.pkl")
    torch.save({"a": np.array([None])}, tmp_path / "custom_checkpoint_1.pkl")
    torch.save({"a": np.array(["text"])}, tmp_path / "custom_checkpoint_2.pkl")
    found = huggingface.read(tmp_path)
    assert np.array_equal(found.custom[0]["a"], np.arange(3))
    assert found.custom[0]["b"] == np.float32(2)
    assert sorted(left.file for left in found.not_taken) == [
        "custom_checkpoint_1.pkl",
        "custom_checkpoint_2.pkl",
    ]
    assert set(torch.serialization.get_safe_globals()) == before
