"""Bad input is refused before anything heavy happens, with why and fix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from anytrain import (
    Accelerator,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    find_executable_batch_size,
    set_seed,
    tqdm,
)
from anytrain.core.errors import AnytrainError

CONSTRUCTIONS: dict[str, dict[str, Any]] = {
    "unknown precision": {"mixed_precision": "int3"},
    "fp8": {"mixed_precision": "fp8"},
    "fp16 on the cpu": {"mixed_precision": "fp16", "cpu": True},
    "no accumulation": {"gradient_accumulation_steps": 0},
    "negative accumulation": {"gradient_accumulation_steps": -2},
    "accumulation that is no number": {"gradient_accumulation_steps": "many"},
    "accumulation said twice": {
        "gradient_accumulation_steps": 2,
        "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=3),
    },
    "deepspeed": {"deepspeed_plugin": object()},
    "fsdp": {"fsdp_plugin": object()},
    "megatron": {"megatron_lm_plugin": object()},
    "tensor parallel": {"torch_tp_plugin": object()},
    "parallelism": {"parallelism_config": object()},
    "unknown handler": {"kwargs_handlers": [object()]},
    "unknown tracker": {"log_with": "paper"},
    "refused tracker": {"log_with": "clearml"},
    "downcast on the cpu": {"downcast_bf16": True, "cpu": True},
    "flag that is none": {"cpu": "yes"},
}


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_a_bad_construction_is_refused(name: str) -> None:
    with pytest.raises(AnytrainError) as caught:
        Accelerator(**CONSTRUCTIONS[name])
    assert caught.value.why
    assert caught.value.fix


def backward_of(loss: Any) -> None:
    Accelerator(cpu=True).backward(loss)


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "a number for a loss": (lambda: backward_of(0.5), "float"),
    "an output for a loss": (lambda: backward_of({"loss": torch.ones(())}), "dict"),
    "a loss of many": (lambda: backward_of(torch.ones(3, requires_grad=True)), "(3,)"),
    "a loss without gradient": (lambda: backward_of(torch.ones(())), "requires no gradient"),
    "an optimizer of another model": (
        lambda: Accelerator(cpu=True).prepare(
            nn.Linear(1, 1), torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        ),
        "none of the prepared model's parameters",
    ),
    "placements that do not match": (
        lambda: Accelerator(cpu=True).prepare(nn.Linear(1, 1), device_placement=[True, False]),
        "1 objects by 2",
    ),
    "an unknown reduction": (lambda: Accelerator(cpu=True).reduce(torch.ones(1), "max?"), "max?"),
    "gathering no tensor": (lambda: Accelerator(cpu=True).gather("text"), "str"),
    "a seed out of range": (lambda: set_seed(-1), "-1"),
    "a step without a model": (lambda: Accelerator(cpu=True).step(lambda m, b: m(b)), "0 models"),
    "a missing checkpoint": (
        lambda: Accelerator(cpu=True).load_state("/nowhere/at/all"),
        "/nowhere/at/all",
    ),
    "nowhere to save": (lambda: Accelerator(cpu=True).save_state(), "where checkpoints are"),
    "no checkpoints to keep": (lambda: ProjectConfiguration(total_limit=0), "total_limit=0"),
    "a rank that is not said": (
        lambda: Accelerator(cpu=True).on_process(lambda: 1),
        "process_index=None",
    ),
    "a registered function": (
        lambda: Accelerator(cpu=True).register_for_checkpointing(print),
        "Cannot register",
    ),
    "a tracker that was not started": (
        lambda: Accelerator(cpu=True, log_with="jsonl", project_dir=".").get_tracker("jsonl"),
        "jsonl",
    ),
    "dispatching what is not placed": (
        lambda: Accelerator(
            cpu=True,
            device_placement=False,
            dataloader_config=DataLoaderConfiguration(dispatch_batches=True),
        ).prepare(DataLoader(range(4))),
        "dispatch",
    ),
    "skipping backwards": (
        lambda: Accelerator(cpu=True).skip_first_batches(DataLoader(range(4)), -1),
        "-1",
    ),
    "no batch size to start with": (
        lambda: find_executable_batch_size(lambda size: size, starting_batch_size=0)(),
        "No executable batch size",
    ),
    "a flag for an iterable": (lambda: tqdm(True), "True"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_bad_call_is_refused(name: str) -> None:
    call, words = CALLS[name]
    with pytest.raises(AnytrainError) as caught:
        call()
    assert words in caught.value.what
    assert caught.value.why
    assert caught.value.fix


def test_an_object_whose_state_no_file_can_hold_is_refused_by_path() -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"inner": [1, lambda: None]}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    with pytest.raises(AnytrainError, match="inner"):
        Accelerator(cpu=True).register_for_checkpointing(Odd())


def test_a_file_is_no_folder_to_save_a_model_to(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("")
    with pytest.raises(AnytrainError, match="file"):
        Accelerator(cpu=True).save_model(nn.Linear(1, 1), tmp_path / "model")


def test_a_checkpoint_of_other_objects_is_refused(tmp_path: Path) -> None:
    first = Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    first.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    first.save_state(tmp_path / "one")
    second = Accelerator(cpu=True)
    second.prepare(nn.Linear(2, 2))
    with pytest.raises(AnytrainError, match="optimizer"):
        second.load_state(tmp_path / "one")


def test_the_errors_are_the_built_in_ones_that_people_catch() -> None:
    with pytest.raises(ValueError, match="int3"):
        Accelerator(mixed_precision="int3")
    with pytest.raises(NotImplementedError, match="fsdp"):
        Accelerator(fsdp_plugin=object())


def test_an_optimizer_may_hold_what_belongs_to_no_model_yet() -> None:
    accelerator = Accelerator(cpu=True)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    learnt = nn.Parameter(torch.zeros(3, 2))
    frozen, optimizer = accelerator.prepare(frozen, torch.optim.SGD([learnt], lr=0.1))
    accelerator.backward(frozen(learnt).square().sum())
    optimizer.step()
    assert learnt.abs().sum() > 0


def test_an_optimizer_may_be_prepared_before_its_model() -> None:
    accelerator = Accelerator(cpu=True)
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, other)]
    accelerator.prepare(one)
    for optimizer in optimizers:
        accelerator.prepare(optimizer)
    accelerator.prepare(other)


def test_mixed_precision_ends_where_native_amp_is_assigned() -> None:
    seen: list[torch.dtype] = []

    class Net(nn.Linear):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            made = super().forward(given)
            seen.append(made.dtype)
            return made

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(Net(2, 2))
    model(torch.ones(1, 2))
    accelerator.native_amp = False
    model(torch.ones(1, 2))
    assert seen == [torch.bfloat16, torch.float32]
    assert accelerator.plan.precision.because == "native_amp=False was assigned"
    accelerator.native_amp = True  # names no precision, and changes nothing, as in accelerate
    assert not accelerator.native_amp
