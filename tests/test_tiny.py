"""The whole public API in a few seconds, readable as a tour."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from anytrain import (
    Accelerator,
    AcceleratorState,
    DataLoaderConfiguration,
    GradientState,
    PartialState,
    ProjectConfiguration,
    find_executable_batch_size,
    get_logger,
    release_memory,
    set_seed,
    skip_first_batches,
    tqdm,
)
from anytrain.core.errors import Notice


def parts(size: int = 40) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader, object]:
    set_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(size, 4), torch.randint(0, 2, (size,)))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
    return model, optimizer, loader, scheduler


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    features, labels = batch
    return nn.functional.cross_entropy(model(features), labels)


def test_a_loop_trains() -> None:
    accelerator = Accelerator()
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())
    losses = []
    for _ in range(6):
        for batch in loader:
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert sum(losses[-5:]) < sum(losses[:5])
    assert accelerator.num_skipped_steps == 0


def test_the_plan_says_why() -> None:
    accelerator = Accelerator()
    for name, choice in accelerator.plan.reasons().items():
        assert choice.value, name
        assert choice.because, name
    assert str(accelerator.device).startswith(accelerator.plan.device.value.split(":")[0])


def test_one_function_runs_the_whole_step() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, _, loader, scheduler = accelerator.prepare(*parts())
    before = [p.detach().clone() for p in model.parameters()]
    step = accelerator.step(loss_of, max_grad_norm=1.0)
    outputs = [step(batch) for batch in loader]
    assert [output.grad_norm is not None for output in outputs] == [False, True, False, True, True]
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert scheduler.scheduler.last_epoch == 3


def test_a_nan_gradient_changes_nothing() -> None:
    accelerator = Accelerator()
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())
    batch = next(iter(loader))
    for poison in (1.0, float("nan"), 1.0):
        if poison != 1.0:
            before = [p.detach().clone() for p in model.parameters()]
            count = [float(s["step"]) for s in optimizer.state.values()]
            rate = scheduler.get_last_lr()
            with warnings.catch_warnings():  # where the host decides, it says so
                warnings.simplefilter("ignore", Notice)
                accelerator.backward(loss_of(model, batch) * poison)
                optimizer.step()
            scheduler.step()
            assert accelerator.optimizer_step_was_skipped
            assert scheduler.get_last_lr() == rate
            assert [float(s["step"]) for s in optimizer.state.values()] == count
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        else:
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad()
    assert accelerator.num_skipped_steps == 1


def test_bf16_computes_in_bfloat16_and_answers_in_float32() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    model, optimizer, loader, _ = accelerator.prepare(*parts())
    seen = []
    handle = model[0].register_forward_hook(lambda module, given, out: seen.append(out.dtype))
    loss = loss_of(model, next(iter(loader)))
    accelerator.backward(loss)
    optimizer.step()
    handle.remove()
    assert seen == [torch.bfloat16]
    assert loss.dtype == torch.float32
    assert accelerator.mixed_precision == "bf16"
    assert next(model.parameters()).dtype == torch.float32


def test_a_saved_run_continues_as_if_nothing_had_happened(tmp_path: Path) -> None:
    def train(stop_after: int | None, resume: bool) -> list[torch.Tensor]:
        accelerator = Accelerator()
        model, optimizer, loader, scheduler = accelerator.prepare(*parts())
        if resume:
            accelerator.load_state(tmp_path / "saved")
        done = 0
        while loader.iteration < 3:
            for batch in loader:
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                done += 1
                if done == stop_after:
                    accelerator.save_state(tmp_path / "saved")
                    return []
        return [p.detach().clone() for p in model.parameters()]

    whole = train(None, resume=False)
    train(7, resume=False)
    resumed = train(None, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def test_checkpoints_are_numbered_and_old_ones_go(tmp_path: Path) -> None:
    config = ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_dir=tmp_path, project_config=config)
    accelerator.prepare(*parts())
    for _ in range(4):
        accelerator.save_state()
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.name[0] != ".")
    assert kept == ["checkpoint_2", "checkpoint_3"]
    accelerator.load_state()


def test_states_are_views_of_the_current_run() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=3)
    assert PartialState().device == accelerator.device
    assert AcceleratorState().mixed_precision == "no"
    assert GradientState().num_steps == 3
    accelerator.end_training()
    Accelerator(mixed_precision="bf16")
    assert AcceleratorState().mixed_precision == "bf16"
    assert GradientState().num_steps == 1


def test_a_loader_knows_its_end_its_length_and_its_place() -> None:
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1)
    )
    loader = accelerator.prepare(parts(36)[2])
    ends = [accelerator.gradient_state.end_of_dataloader for _ in loader]
    assert ends == [False, False, False, False, True]
    assert len(skip_first_batches(loader, 2)) == 3
    assert len(list(accelerator.skip_first_batches(loader, 2))) == 3


def test_collectives_in_a_world_of_one() -> None:
    accelerator = Accelerator()
    value = torch.arange(3, device=accelerator.device)
    assert torch.equal(accelerator.gather(value), value)
    assert torch.equal(accelerator.reduce(value), value)
    assert torch.equal(accelerator.pad_across_processes(value), value)
    assert accelerator.gather_for_metrics(["a", "b"]) == ["a", "b"]
    with accelerator.split_between_processes([1, 2, 3]) as own:
        assert own == [1, 2, 3]
    with accelerator.main_process_first():
        pass
    accelerator.wait_for_everyone()
    accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()


def test_only_the_main_process_runs_decorated_functions() -> None:
    accelerator = Accelerator()
    assert accelerator.on_main_process(lambda: "ran")() == "ran"
    assert accelerator.on_process(process_index=1)(lambda: "ran")() is None


def test_a_loss_repeated_for_a_batch_counts_for_the_rows_of_the_last() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(5.0), batch_size=4))
    told = [accelerator.gather_for_metrics(rows.mean().repeat(4)).tolist() for rows in loader]
    assert told == [[1.5] * 4, [4.0]]


def test_the_batch_size_is_lowered_by_a_tenth_until_it_fits() -> None:
    tried = []

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size > 14:
            raise torch.OutOfMemoryError("out of memory")
        if batch_size > 12:
            raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. No algorithm was found.")
        return batch_size

    assert train() == 12
    assert tried == [16, 14, 12]
    assert train() == 12, "what was learnt is remembered"


def test_trackers_get_what_is_logged(tmp_path: Path) -> None:
    accelerator = Accelerator(log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("tour", config={"lr": 0.1})
    accelerator.log({"loss": torch.tensor(0.5)}, step=1)
    accelerator.end_training()
    lines = [json.loads(line) for file in tmp_path.rglob("*.jsonl") for line in file.open()]
    assert any(line.get("loss") == 0.5 for line in lines)


def test_small_helpers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator()
    assert list(tqdm(range(3), disable=True)) == [0, 1, 2]
    get_logger("tour", log_level="INFO").info("hello")
    assert "hello" in caplog.text
    model, *_ = accelerator.prepare(*parts())
    accelerator.save_model(model, tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").exists()
    accelerator.save(accelerator.get_state_dict(model), tmp_path / "weights.pt")
    assert (
        torch.load(tmp_path / "weights.pt", weights_only=True).keys() == model.state_dict().keys()
    )
    assert accelerator.unwrap_model(model) is model
    (model,) = release_memory(model)
    accelerator.free_memory()
    assert accelerator._models == []
