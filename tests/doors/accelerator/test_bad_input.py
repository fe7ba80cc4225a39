"""Bad input is refused before anything heavy happens, with why and fix."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from anytrain import (
    Accelerator,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    find_executable_batch_size,
    set_seed,
    tqdm,
)
from anytrain.core.errors import AnytrainError, NotFinite, Notice
from launching import launch, run_script

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


def test_a_run_that_skipped_every_update_ends_with_an_error(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=str(tmp_path))
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.warns(Notice, match="An update was skipped"):
        for _ in range(3):
            accelerator.backward(model(torch.tensor([[float("nan")]])).sum())
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(NotFinite, match="all 3 updates of this run were skipped"):
        accelerator.end_training()


def test_a_loop_that_skips_every_update_does_not_go_on_to_its_end() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with (
        pytest.warns(Notice, match="An update was skipped"),
        pytest.raises(NotFinite, match="all 200 updates of this run were skipped"),
    ):
        for _ in range(1000):
            accelerator.backward(model(torch.tensor([[float("nan")]])).sum())
            optimizer.step()
            optimizer.zero_grad()


def test_a_run_that_skipped_some_updates_ends_without_a_word(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=str(tmp_path))
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.warns(Notice, match="An update was skipped"):
        for value in (float("nan"), 1.0):
            accelerator.backward(model(torch.tensor([[value]])).sum())
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()


LOOP = """
import sys
import torch
from torch import nn
from torch.nn import functional
from anytrain import Accelerator

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(50, 4), nn.Embedding(16, 4)
        self.head = nn.Linear(4, 2)
    def forward(self, input_ids, labels=None):
        places = torch.arange(input_ids.shape[1])
        logits = self.head((self.words(input_ids) + self.places(places)).mean(1))
        return logits if labels is None else functional.cross_entropy(logits, labels)

length, wrong, own_loss = int(sys.argv[1]), eval(sys.argv[2]), eval(sys.argv[3])
rows = [{"input_ids": torch.full((length,), 1), "labels": n % 2} for n in range(24)]
rows[13].update(wrong)
accelerator = Accelerator(cpu=True)
model = Words()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(
    rows, batch_size=4, collate_fn=lambda found: torch.utils.data.default_collate(found)
)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    if own_loss:
        loss = functional.cross_entropy(model(batch["input_ids"]), batch["labels"])
    else:
        loss = model(**batch)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""
WRONG = {
    "label": (6, "{'labels': 7}", False, "step 4: 'labels' of sample 13 is 7, and the model has 2"),
    "label of a loss": (6, "{'labels': 7}", True, "step 4: 'labels' of sample 13 is 7, and the"),
    "token": (
        6,
        "{'input_ids': torch.full((6,), 99)}",
        False,
        "step 4: 'input_ids' of sample 13 holds 99, and words (Embedding) has 50 rows (0 to 49)",
    ),
    "text": (20, "{}", True, "step 1: 'input_ids' of sample 0 has 20 positions, and places"),
    "dtype": (6, "{'labels': 0.5}", False, "of samples 12, 13, 14, 15 (step 4)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_loop_of_the_users_own_names_the_sample_that_it_failed_on(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    length, wrong, own_loss, told = WRONG[name]
    monkeypatch.setattr(sys, "argv", ["loop.py", str(length), wrong, str(own_loss)])
    with pytest.raises((IndexError, RuntimeError)) as caught:
        exec(compile(LOOP, "loop.py", "exec"), {"__name__": "loop"})
    sys.excepthook(caught.type, caught.value, caught.tb)
    assert told in capsys.readouterr().err


def test_ranks_of_a_loop_of_the_users_own_look_into_the_wrapped_model() -> None:
    length, wrong, own_loss, told = WRONG["token"]
    ended = launch(LOOP, 2, length, wrong, own_loss, check=False)
    assert ended.returncode != 0
    assert told.replace("step 4", "step 2") in ended.stderr, ended.stderr


@pytest.mark.parametrize(("samples", "why"), [(0, "has no sample"), (3, "3 samples make no batch")])
def test_a_loader_without_a_batch_is_told(samples: int, why: str) -> None:
    data: list[Any] = [torch.ones(1)] * samples
    loader = torch.utils.data.DataLoader(data, batch_size=4, drop_last=True)
    with pytest.warns(Notice, match=why):
        Accelerator(cpu=True).prepare(loader)


def test_a_missing_loss_tells_of_the_labels() -> None:
    with pytest.raises(TypeError, match="no 'labels'"):
        backward_of(None)


ODD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "a longer row": ({"x": torch.ones(3)}, "'x': its rows have different lengths (2, 3)."),
    "nothing": ({"x": None}, "'x': number 2 of the batch's samples has None there."),
    "no column": ({"y": 1}, "'x': number 2 of the batch's samples does not have it."),
}


class Drawn(Dataset[Any]):
    """Rows that are drawn, so that each is remembered with its seed."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        random.random()
        return self.rows[index]


@pytest.mark.parametrize("kind", ["plain", "drawn", "by a worker"])
@pytest.mark.parametrize("name", ODD_ROWS)
def test_a_column_that_makes_no_batch_is_named_in_a_loop_of_ones_own(name: str, kind: str) -> None:
    row, said = ODD_ROWS[name]
    rows: Any = [{"x": torch.ones(2)}, row]
    rows = rows if kind == "plain" else Drawn(rows)
    given = DataLoader(rows, 2, num_workers=int(kind == "by a worker"))
    loader = Accelerator(cpu=True).prepare(given)
    with pytest.raises((RuntimeError, TypeError, KeyError, AttributeError)) as caught:
        next(iter(loader))
    assert f"Cannot collate {said}" in str(caught.value)
    if kind != "plain":
        assert "The batch is made of samples 0, 1." in str(caught.value)


def test_a_column_that_comes_first_as_none_is_named_in_a_loop_of_ones_own() -> None:
    rows: Any = [{"x": None}, {"x": torch.ones(2)}]
    with pytest.raises(TypeError, match=r"'x': number 1 of the batch's samples has None there\."):
        next(iter(Accelerator(cpu=True).prepare(DataLoader(rows, 2))))


def test_a_text_in_a_tensors_place_is_told_of_a_loop_of_ones_own() -> None:
    told = run_script(
        """
        import torch
        from torch.utils.data import DataLoader, Dataset
        from anytrain import Accelerator

        class Net(torch.nn.Linear):
            def forward(self, x, labels):
                return torch.nn.functional.cross_entropy(super().forward(x), labels)

        rows = [{"x": torch.ones(2), "labels": "yes"}] * 4
        model, loader = Accelerator(cpu=True).prepare(Net(2, 2), DataLoader(rows, 2))
        for batch in loader:
            model(**batch)
        """,
        check=False,
    )
    assert "batch: x float32 (2, 2), labels list of 2 str" in told.stderr
    assert "turn the column into numbers in the data set" in told.stderr
