"""A run is saved whole, put back whole, and taken from others' folders as far as it goes."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import needs
from anytrain import Accelerator, ProjectConfiguration, set_seed
from anytrain.core import records
from anytrain.core.errors import CheckpointError, Notice
from anytrain.engine.checkpoint import files
from launching import child_environment, launch, run_command, run_script

ANYTRAIN = (sys.executable, "-m", "anytrain")


def parts() -> tuple:
    set_seed(2)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 30)
    loader = DataLoader(TensorDataset(torch.randn(24, 3)), batch_size=4, shuffle=True)
    return model, optimizer, scheduler, loader


def train(accelerator: object, prepared: tuple, num_steps: int) -> None:
    model, optimizer, scheduler, loader = prepared
    done = 0
    while done < num_steps:
        for (batch,) in loader:
            accelerator.backward(model(batch).pow(2).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            done += 1
            if done == num_steps:
                return


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_save_behind_the_loop_is_as_good(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(*parts())
    train(accelerator, prepared, 5)
    accelerator.save_state(tmp_path / "before")
    accelerator.save_state(tmp_path / "behind", blocking=False)
    train(accelerator, prepared, 4)  # changes what is being written, were it not copied
    accelerator.finish_saving()
    ends = []
    for name in ("before", "behind"):
        other = Accelerator(cpu=True)
        again = other.prepare(*parts())
        other.load_state(tmp_path / name)
        train(other, again, 4)
        ends.append(again[0])
    assert same(*ends)


def test_the_exit_waits_for_a_save_behind_the_loop(tmp_path: Path) -> None:
    run_script(
        """
        import sys, torch
        from anytrain import Accelerator
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(torch.nn.Linear(2000, 2000))
        accelerator.save_state(sys.argv[1], blocking=False)
        """,
        tmp_path / "last",
    )
    other = Accelerator(cpu=True)
    other.prepare(nn.Linear(2000, 2000))
    other.load_state(tmp_path / "last")


def test_a_save_that_fails_behind_the_loop_is_told_at_a_step(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(*parts())
    with torch.no_grad():
        prepared[0][0].weight[0, 0] = float("nan")
    accelerator.save_state(tmp_path / "poisoned", blocking=False)
    with pytest.warns(Notice, match="NaN"):
        accelerator.finish_saving()
    assert not (tmp_path / "poisoned").exists()


def test_a_poisoned_run_keeps_its_last_good_checkpoint(tmp_path: Path) -> None:
    config = ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(cpu=True, project_dir=tmp_path, project_config=config)
    prepared = accelerator.prepare(*parts())
    accelerator.save_state()
    good = [p.detach().clone() for p in prepared[0].parameters()]
    with torch.no_grad():
        prepared[0][0].weight[0, 0] = float("inf")
    with pytest.warns(Notice, match="inf"):
        accelerator.save_state()
    accelerator.load_state()
    assert all(torch.equal(a, b) for a, b in zip(good, prepared[0].parameters(), strict=True))


def test_registered_objects_and_hooks_travel_with_the_run(tmp_path: Path) -> None:
    class Counter:
        def __init__(self) -> None:
            self.seen = {("a", 1): [1, 2]}

        def state_dict(self) -> dict:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict) -> None:
            self.seen = state["seen"]

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*parts())
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    calls = []

    def on_save(models: list, weights: list, folder: str) -> None:
        calls.append(len(weights))
        Path(folder, "note.txt").write_text("mine")

    handle = accelerator.register_save_state_pre_hook(on_save)
    accelerator.register_load_state_pre_hook(
        lambda models, folder: calls.append(Path(folder, "note.txt").read_text())
    )
    accelerator.save_state(tmp_path / "one")
    counter.seen = {}
    accelerator.load_state(tmp_path / "one")
    assert counter.seen == {("a", 1): [1, 2]}
    assert calls == [1, "mine"]
    handle.remove()
    accelerator.save_state(tmp_path / "two")
    assert calls == [1, "mine"]


HOOKS = """
import sys
from pathlib import Path
import torch
from anytrain import Accelerator

class Net(torch.nn.Linear):
    def save_pretrained(self, folder):
        torch.save(self.state_dict(), folder)

accelerator = Accelerator(cpu=True)
net = Net(2, 1)
model = accelerator.prepare(net)
assert model is not net  # tied to the other process's
optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))

def save(models, weights, folder):
    assert models == [net]
    if accelerator.is_main_process:
        models[0].save_pretrained(Path(folder) / "net.pt")
    weights.pop()

def load(models, folder):
    assert models == [net]
    models.pop().load_state_dict(torch.load(Path(folder) / "net.pt"))

accelerator.register_save_state_pre_hook(save)
accelerator.register_load_state_pre_hook(load)
accelerator.save_state(sys.argv[1])
before = net.weight.detach().clone()
torch.nn.init.zeros_(net.weight)
accelerator.load_state(sys.argv[1])
assert torch.equal(net.weight, before)
accelerator.print("hooks saw the models that were given")
"""


def test_hooks_of_several_processes_see_the_models_that_were_given(tmp_path: Path) -> None:
    done = launch(HOOKS, 2, tmp_path / "state")
    assert "hooks saw the models that were given" in done.stdout


def test_a_checkpoint_s_model_is_a_model_for_transformers(tmp_path: Path) -> None:
    needs.tool("transformers")
    from transformers import AutoModel, BertConfig, BertModel

    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=20, intermediate_size=16, **size)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(BertModel(config))
    accelerator.save_state(tmp_path / "bert")
    assert same(model, AutoModel.from_pretrained(tmp_path / "bert"))


def test_a_folder_of_accelerate_is_taken(tmp_path: Path) -> None:
    needs.tool("accelerate")
    import accelerate

    theirs = accelerate.Accelerator(cpu=True)
    prepared = theirs.prepare(*parts())
    train(theirs, prepared, 3)
    theirs.save_state(str(tmp_path / "theirs"))
    ours = Accelerator(cpu=True)
    again = ours.prepare(*parts())
    with pytest.warns(Notice, match="position in the data"):
        ours.load_state(tmp_path / "theirs")
    assert same(prepared[0], again[0])
    assert again[2].get_last_lr() == prepared[2].get_last_lr()
    for mine, other in zip(
        again[1].state_dict()["state"].values(),
        prepared[1].state_dict()["state"].values(),
        strict=True,
    ):
        assert torch.equal(mine["exp_avg"], other["exp_avg"])
    fewer = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    fewer.prepare(model, nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match="1 of kind 'model', this run has 2"):
        fewer.load_state(tmp_path / "theirs")


RESUMABLE = """
import sys, time, torch
from torch.utils.data import DataLoader
from anytrain import Accelerator, ProjectConfiguration, set_seed
set_seed(0)
folder, pause = sys.argv[1], float(sys.argv[2])
accelerator = Accelerator(
    cpu=True, project_dir=folder, gradient_accumulation_steps=2,
    project_config=ProjectConfiguration(automatic_checkpoint_naming=True),
)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(torch.randn(64, 4), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()
while loader.iteration < 3:
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        print("step", flush=True)
        time.sleep(pause)
accelerator.save_model(model, folder + "/final")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_saves_between_two_steps_and_the_run_goes_on_exactly(
    tmp_path: Path, number: signal.Signals
) -> None:
    import subprocess

    script = tmp_path / "script.py"
    script.write_text(RESUMABLE)
    run_command([sys.executable, script, tmp_path / "whole", 0])
    process = subprocess.Popen(
        [sys.executable, script, tmp_path / "cut", "0.2"],
        env=child_environment({"ANYTRAIN_STOP_SIGNALS": "SIGTERM,SIGINT,SIGUSR1"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(7):
        assert process.stdout.readline() == "step\n"
    process.send_signal(number)
    _, told = process.communicate(timeout=240)
    assert process.returncode == 128 + number
    assert "saved" in told
    assert "Start the same command to go on." in told
    assert "Traceback" not in told
    run_command([sys.executable, script, tmp_path / "cut", 0])
    whole = (tmp_path / "whole/final/model.safetensors").read_bytes()
    assert (tmp_path / "cut/final/model.safetensors").read_bytes() == whole


def test_a_script_that_does_not_resume_is_told_how(tmp_path: Path) -> None:
    sends = "\n        import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    script = RESUMABLE.replace("accelerator.resume()\n", "").replace("time.sleep(pause)", sends)
    ended = run_script(script, tmp_path / "cut", 0, check=False)
    assert ended.returncode == 130
    assert "Start the same command" not in ended.stderr
    assert "the script must call resume() after prepare()" in ended.stderr
    script = script.replace(sends, "accelerator.save_state()")
    ended = run_script(script, tmp_path / "cut", 0, check=False)
    assert "checkpoint_0 exists already" in ended.stderr
    assert "call resume() after prepare() to go on with that run" in ended.stderr


def test_a_resume_says_from_where_and_nothing_where_there_is_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for step in (0, 2):
        accelerator = Accelerator(cpu=True, project_dir=tmp_path)
        prepared = accelerator.prepare(*parts())
        assert accelerator.resume() is bool(step)
        told = capfd.readouterr().err
        if step:
            assert f"anytrain: goes on from {tmp_path / 'state'} at step {step}\n" in told
        else:
            assert "goes on" not in told
            train(accelerator, prepared, step + 2)
            accelerator.save_state(tmp_path / "state")
        accelerator.end_training()


def test_a_run_goes_on_from_the_newest_whatever_its_name(tmp_path: Path) -> None:
    numbered = ProjectConfiguration(automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_dir=tmp_path, project_config=numbered)
    train(accelerator, accelerator.prepare(*parts()), 1)
    accelerator.save_state()
    other = Accelerator(cpu=True, project_dir=tmp_path)
    prepared = other.prepare(*parts())
    assert other.resume()
    train(other, prepared, 2)
    other.save_state(tmp_path / "mine")
    other.save_model(prepared[0], tmp_path / "export")
    third = Accelerator(cpu=True, project_dir=tmp_path)
    again = third.prepare(*parts())
    assert third.resume()
    assert again[1].state_dict()["state"][0]["step"] == 3
    assert same(prepared[0], again[0])


def test_after_a_damaged_checkpoint_the_run_goes_on_and_saves(tmp_path: Path) -> None:
    numbered = ProjectConfiguration(automatic_checkpoint_naming=True)

    def start() -> tuple:
        accelerator = Accelerator(cpu=True, project_dir=tmp_path, project_config=numbered)
        numbered.iteration = 0
        return accelerator, accelerator.prepare(*parts())

    accelerator, prepared = start()
    for _ in range(2):
        train(accelerator, prepared, 1)
        accelerator.save_state()
    (tmp_path / "checkpoints/checkpoint_1/model.safetensors").write_bytes(b"")
    accelerator, prepared = start()
    with pytest.warns(Notice, match="checkpoint_1"):
        assert accelerator.resume()
    train(accelerator, prepared, 1)
    accelerator.save_state()
    assert (tmp_path / "checkpoints/checkpoint_2/manifest.json").is_file()
    for name in ("checkpoint_0", "checkpoint_2"):
        (tmp_path / "checkpoints" / name / "model.safetensors").write_bytes(b"")
    accelerator, prepared = start()
    with pytest.warns(Notice, match="checkpoint_0"):
        assert not accelerator.resume()
    accelerator.save_state()
    assert (tmp_path / "checkpoints/checkpoint_3/manifest.json").is_file()


@pytest.mark.parametrize(("done", "left"), [(6, 6), (4, 2), (5, 1)])
def test_a_script_that_counts_epochs_itself_loses_none(
    tmp_path: Path, done: int, left: int
) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(24), batch_size=4))
    for count, _ in enumerate(loader, start=1):
        if count == done:
            accelerator.save_state(tmp_path / "saved")
    other = Accelerator(cpu=True)
    loader = other.prepare(DataLoader(torch.arange(24), batch_size=4))
    other.load_state(tmp_path / "saved")
    assert sum(1 for _ in loader) == left


def test_a_model_that_the_disk_has_no_room_for_is_told(tmp_path: Path) -> None:
    script = """
    import resource, signal, sys, torch
    from anytrain import Accelerator
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    Accelerator(cpu=True).save_model(torch.nn.Linear(200, 200), sys.argv[1])
    """
    told = run_script(script, tmp_path / "model", check=False).stderr
    assert f"Cannot write {tmp_path}/model/model.safetensors." in told
    assert "save to another disk" in told


def test_handlers_are_given_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    prepared = accelerator.prepare(*parts())
    train(accelerator, prepared, 2)
    assert signal.getsignal(signal.SIGTERM) is not before
    accelerator.end_training()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_save_in_the_middle_of_an_accumulated_step_keeps_its_gradients(tmp_path: Path) -> None:
    def build() -> tuple:
        set_seed(2)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(torch.arange(8.0)[:, None], batch_size=1)
        return accelerator, *accelerator.prepare(model, optimizer, loader)

    def walk(accelerator: object, model: nn.Module, optimizer: object, loader: object) -> None:
        for position, batch in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
            if position == 2 and not (tmp_path / "mid").exists():
                accelerator.save_state(tmp_path / "mid")

    whole = build()
    walk(*whole)
    resumed = build()
    resumed[0].load_state(tmp_path / "mid")
    walk(*resumed)
    assert same(whole[1], resumed[1])


def test_a_shuffle_with_its_own_generator_goes_on_after_an_epoch(tmp_path: Path) -> None:
    def build() -> tuple:
        accelerator = Accelerator(cpu=True)
        generator = torch.Generator().manual_seed(4)
        data = torch.arange(8)
        return accelerator, accelerator.prepare(
            DataLoader(data, batch_size=2, shuffle=True, generator=generator)
        )

    accelerator, loader = build()
    first = [batch.tolist() for batch in loader]
    accelerator.save_state(tmp_path / "epoch")
    second = [batch.tolist() for batch in loader]
    accelerator, loader = build()
    accelerator.load_state(tmp_path / "epoch")
    assert [batch.tolist() for batch in loader] == second != first


def test_an_epoch_saved_at_its_last_batch_is_ended_once(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    loader = accelerator.prepare(DataLoader(torch.arange(4), batch_size=2))
    for batch in loader:
        if batch.tolist() == [2, 3]:
            accelerator.save_state(tmp_path / "last")
    fresh = Accelerator(cpu=True, project_dir=tmp_path)
    loader = fresh.prepare(DataLoader(torch.arange(4), batch_size=2))
    assert fresh.resume()
    assert [batch.tolist() for batch in loader] == []
    assert loader.iteration == 1
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_a_loader_left_early_begins_again(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(6), batch_size=2))
    for _ in loader:
        break
    accelerator.save_state(tmp_path / "early")
    fresh = Accelerator(cpu=True)
    loader = fresh.prepare(DataLoader(torch.arange(6), batch_size=2))
    fresh.load_state(tmp_path / "early")
    assert len(list(loader)) == 3


def test_another_precision_than_the_saved_one_is_told(tmp_path: Path) -> None:
    Accelerator(cpu=True).save_state(tmp_path / "full")
    other = Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.warns(Notice, match="Saved in precision 'no', continued in 'bf16'"):
        other.load_state(tmp_path / "full")


def test_objects_of_an_earlier_run_follow_the_new_one() -> None:
    first = Accelerator(cpu=True, mixed_precision="bf16")
    model = nn.Linear(1, 1)
    prepared = first.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(torch.ones(4, 1))
    )
    second = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer, loader = second.prepare(*prepared)
    assert "forward" not in model.__dict__
    before = model.weight.item()
    for batch in loader:
        with second.accumulate(model):
            second.backward(model(batch).sum())
            optimizer.step()
        if not second.sync_gradients:
            assert model.weight.item() == before
    assert model.weight.item() != before


def test_a_resumed_run_takes_the_precision_of_its_checkpoint(tmp_path: Path) -> None:
    first = Accelerator(cpu=True, mixed_precision="bf16")
    model = first.prepare(nn.Linear(2, 2))
    first.save_state(tmp_path / "half")
    second = Accelerator(cpu=True)
    again = second.prepare(nn.Linear(2, 2))
    second.load_state(tmp_path / "half")
    assert second.mixed_precision == "bf16"
    assert "checkpoint half" in second.plan.precision.because
    assert torch.equal(model(torch.ones(1, 2)), again(torch.ones(1, 2)))
    assert second.state.mixed_precision == "bf16"


def test_a_save_that_failed_is_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    naming = ProjectConfiguration(automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_dir=tmp_path, project_config=naming)
    prepared = accelerator.prepare(*parts())
    train(accelerator, prepared, 2)
    accelerator.save_state()
    monkeypatch.setattr(files, "free_bytes", lambda path: 0)
    train(accelerator, prepared, 2)
    with pytest.warns(Notice, match="No room to save the checkpoint"):
        accelerator.save_state()
    accelerator.end_training()
    unsaved = records.open_run(tmp_path).unsaved
    assert unsaved is not None and unsaved[0] == "checkpoint_0"
    assert run_command([*ANYTRAIN, "watch", "--once", tmp_path], check=False).returncode == 1
    why = run_command([*ANYTRAIN, "why", tmp_path]).stdout
    assert "checkpoint_0 is in no checkpoint" in " ".join(why.split())
