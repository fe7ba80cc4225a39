"""Checkpoints that are whole and hold what no run has saved: refused by name, nothing touched."""

from __future__ import annotations

import copy
import json
import random
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from anytrain import Accelerator, Trainer, TrainingArguments
from anytrain.core.errors import CheckpointError, Notice
from anytrain.doors.callbacks import EarlyStoppingCallback
from anytrain.engine.assemble import current
from anytrain.engine.checkpoint import files, manifest

VALUES: list[Any] = [
    None,
    True,
    -1,
    2**70,
    -3.5,
    "text\x1b[31m",
    [],
    {},
    [1, "two", None],
    {"a": {"b": []}},
    {"~": "float", "value": "7ff8000000000000"},
    {"~": "tensor", "name": "no such tensor"},
    {"~": "scalar", "dtype": "<f4", "value": ""},
]
"""What is put in each field's place; GONE removes the field."""
GONE = object()
FEW = 1
"""How many of them a quick run puts there, other ones in each field."""
AFRESH = 30
"""After how many tries a run begins in an empty folder."""
SKIPPED = ("kind", "format", "files", "blake2b")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.dropout(self.body(x), 0.1, self.training))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


DATA = [{"x": torch.arange(3.0) * i / 12, "labels": torch.tensor(i % 2)} for i in range(12)]


class Door:
    """One way to train: makes its run anew for a folder, loads, steps, and tells its state."""

    quick_files: Sequence[str] = ["*.json"]

    def __init__(self, root: Path) -> None:
        self.root = root


class ByAccelerator(Door):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        current.clear()
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
                torch.optim.lr_scheduler.StepLR(optimizer, 2),
            ],
            [2],
        )
        loader = torch.utils.data.DataLoader(DATA, batch_size=2, shuffle=True)  # type: ignore[arg-type]
        self.registered = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        prepared = self.accelerator.prepare(model, optimizer, loader, schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared
        self.accelerator.register_for_checkpointing(self.registered)

    def make(self) -> Path:
        for number, batch in enumerate(self.loader):
            self.step(batch)
            if number == 2:  # in the middle of an accumulated step
                break
        for number, batch in enumerate(self.loader):
            self.step(batch)
            if number == 3:
                return Path(self.accelerator.save_state(self.root / "checkpoint"))
        raise AssertionError

    def step(self, batch: Any) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(**batch)["loss"])
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()

    def load(self, path: Path) -> None:
        self.accelerator.load_state(path)

    def go_on(self) -> None:
        for batch in self.loader:
            self.step(batch)

    def state(self) -> Any:
        parts = (self.model, self.optimizer, self.schedule, self.loader, self.registered)
        grads = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        return copy.deepcopy([[p.state_dict() for p in parts], grads, _generators()])


class ByTrainer(Door):
    quick_files = ("state.json",)

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.trainer = self._made(max_steps=2)  # it stands at its end: it does nothing but load

    def _made(self, max_steps: int) -> Trainer:
        current.clear()
        arguments = TrainingArguments(
            output_dir=str(self.root),
            max_steps=max_steps,
            save_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            logging_steps=3,
            per_device_train_batch_size=2,
            metric_for_best_model="loss",
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            async_save=False,
        )
        patience = EarlyStoppingCallback(5)
        return Trainer(
            Net(), arguments, train_dataset=DATA, eval_dataset=DATA[:2], callbacks=[patience]
        )

    def make(self) -> Path:
        self._made(max_steps=4).train()
        shutil.rmtree(self.root / "checkpoint-4")
        return self.root / "checkpoint-2"

    def load(self, path: Path) -> None:
        self.trainer.train(resume_from_checkpoint=str(path))

    def go_on(self) -> None:
        """Nothing: a Trainer's load is the beginning of its training."""

    def state(self) -> Any:
        return copy.deepcopy(self.trainer.model.state_dict())


def _generators() -> Any:
    return [random.getstate(), np.random.get_state(), torch.get_rng_state()]


@pytest.fixture(scope="module", params=[ByAccelerator, ByTrainer])
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[type[Any], Path]]:
    root = tmp_path_factory.mktemp("saved")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Notice)
        yield request.param, request.param(root / "run").make()
    current.clear()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every field; of a long list, or many alike, its ends alone."""
    if path:
        yield path
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = [item for item in value.items() if item[0] not in SKIPPED]
    elif isinstance(value, list):
        items = [(place, value[place]) for place in sorted({0, len(value) - 1}) if value]
    for key, item in items:
        yield from places(item, (*path, key))


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    made = copy.deepcopy(document)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    if value is GONE:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return made


def sign(folder: Path, contents: Any = None) -> None:
    """Write the manifest anew, so that every checksum matches."""
    if contents is None:
        contents = json.loads((folder / "manifest.json").read_bytes())
    contents.pop("blake2b", None)
    for name in contents.get("files", {}) if isinstance(contents, dict) else ():
        found = files.fingerprint(folder, name)
        contents["files"][name] = {"bytes": found.num_bytes, "blake2b": found.blake2b}
    body = manifest._dump(contents)
    (folder / "manifest.json").write_bytes(manifest._signed(body, manifest._checksum(body)))


def cases(folder: Path, files: Sequence[str]) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    for file in sorted(path for each in files for path in folder.glob(each)):
        document = json.loads(file.read_bytes())
        for path in places(document):
            for value in [*VALUES, GONE]:
                yield file.name, path, value


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, (torch.Tensor, np.ndarray)):
        return bool(np.array_equal(np.asarray(one), np.asarray(other)))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def judge(door: Any, folder: Path, before: Any, file: str, where: str) -> str | None:
    """Return what is wrong with how the door takes the folder; None where all is well."""
    try:
        door.load(folder)
    except CheckpointError as error:
        said = str(error)
        if "\x1b" in said:
            return "the error is not safe to print"
        if file not in said and not (file == "manifest.json" and ".json" in said):
            return f"the error does not name the file: {said}"
        return None if equal(door.state(), before) else f"refused, and the run has changed: {said}"
    except Exception as error:  # noqa: BLE001  # what the test is about
        return f"it ends in {type(error).__name__}: {error}"
    try:
        door.go_on()
    except Exception as error:  # noqa: BLE001  # likewise
        return f"it was loaded, and the next step ends in {type(error).__name__}: {error}"
    return "again"


def try_all(
    make: type[Any], original: Path, work: Path, files: Sequence[str], take: Callable[[int], bool]
) -> tuple[list[str], int]:
    shutil.copytree(original, work / "c")
    folder, wrong, door, num_tried = work / "c", [], None, 0
    for number, (file, path, value) in enumerate(cases(original, files)):
        if not take(number):
            continue
        num_tried += 1
        if num_tried % AFRESH == 0:  # each start of a run reads what earlier ones have written
            door = None
        if door is None:
            shutil.rmtree(work / "run", ignore_errors=True)
            door = make(work / "run")
            before = door.state()
        document = json.loads((original / file).read_bytes())
        made = changed(document, path, value)
        if file == "manifest.json":
            sign(folder, made)
        else:
            (folder / file).write_text(json.dumps(made))
            sign(folder)
        where = ".".join(map(str, path))
        said = judge(door, folder, before, file, where)
        if said == "again":
            door = None
        elif said is not None:
            shown = "gone" if value is GONE else json.dumps(value)
            wrong.append(f"{file}: {where} = {shown}: {said}")
            door = None
        shutil.copy(original / file, folder / file)
        shutil.copy(original / "manifest.json", folder / "manifest.json")
    return wrong, num_tried


@pytest.mark.filterwarnings("ignore::anytrain.core.errors.Notice")
def test_a_field_that_no_run_has_saved_is_refused_by_name_before_anything_is_touched(
    saved: tuple[type[Any], Path], tmp_path: Path
) -> None:
    make, original = saved
    every = len(VALUES) + 1
    wrong, num_tried = try_all(
        make,
        original,
        tmp_path,
        make.quick_files,
        lambda n: (n % every - n // every * FEW) % every < FEW,
    )
    assert num_tried > 40
    assert not wrong, "\n".join(wrong)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::anytrain.core.errors.Notice")
def test_every_field_is_refused_with_every_value_that_it_cannot_hold(
    saved: tuple[type[Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, original = saved
    monkeypatch.chdir(tmp_path)  # thousands of runs ask git for the state of the folder
    wrong, num_tried = try_all(make, original, tmp_path, ["*.json"], lambda n: True)
    assert num_tried > 1000
    assert not wrong, "\n".join(wrong)


BROKEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "holds NaN": lambda weight: weight.fill_(float("nan")),
    "holds infinity": lambda weight: weight.fill_(float("inf")),
    "is of torch.int32": lambda weight: weight.view(torch.int32),
}


@pytest.mark.parametrize("said", BROKEN)
@pytest.mark.filterwarnings("ignore::anytrain.core.errors.Notice")
def test_weights_that_no_run_has_saved_are_refused_before_anything_is_touched(
    saved: tuple[type[Any], Path], tmp_path: Path, said: str
) -> None:
    make, original = saved
    folder = shutil.copytree(original, tmp_path / "c")
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "head.weight": BROKEN[said](weights["head.weight"])}, file)
    sign(folder)
    door = make(tmp_path / "run")
    before = door.state()
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*") as caught:
        door.load(folder)
    assert f"head.weight {said}" in str(caught.value)
    assert equal(door.state(), before)


@pytest.mark.parametrize("said", BROKEN)
@pytest.mark.filterwarnings("ignore::anytrain.core.errors.Notice")
def test_what_an_optimizer_remembers_is_finite(
    saved: tuple[type[Any], Path], tmp_path: Path, said: str
) -> None:
    make, original = saved
    folder = shutil.copytree(original, tmp_path / "c")
    file, name = folder / "optimizer.safetensors", "optimizer/state.1.exp_avg"
    kept = load_file(file)
    save_file({**kept, name: BROKEN[said](kept[name])}, file)
    sign(folder)
    door = make(tmp_path / "run")
    before = door.state()
    with pytest.raises(CheckpointError, match=r"state\.1\.exp_avg is .* of finite floats"):
        door.load(folder)
    assert equal(door.state(), before)


@pytest.mark.filterwarnings("ignore::anytrain.core.errors.Notice")
def test_large_tensors_of_an_optimizer_are_read_before_the_weights(tmp_path: Path) -> None:
    def run() -> tuple[Accelerator, nn.Module]:
        current.clear()
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(64, 64)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        accelerator.backward(model(torch.ones(1, 64)).sum())
        optimizer.step()
        return accelerator, model

    folder = Path(run()[0].save_state(tmp_path / "checkpoint"))
    file, name = folder / "optimizer.safetensors", "optimizer/state.0.exp_avg"
    kept = load_file(file)
    save_file({**kept, name: kept[name].fill_(float("nan"))}, file)
    sign(folder)
    accelerator, model = run()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match=r"state\.0\.exp_avg is .* of finite floats"):
        accelerator.load_state(folder)
    assert equal(model.state_dict(), before)
    current.clear()


def _lacks(name: str) -> Callable[[Any], None]:
    return lambda parts: parts["optimizer"]["state"]["items"][0][1].pop(name)


def _group(**options: Any) -> Callable[[Any], None]:
    return lambda parts: parts["optimizer"]["param_groups"][0].update(options)


def _unpacked(parts: Any) -> None:
    del parts["optimizer"]["state"]["~"]


ALONE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a moment": (_lacks("exp_avg"), r"state\.0\.exp_avg is missing"),
    "a second moment": (_lacks("exp_avg_sq"), r"state\.0\.exp_avg_sq is missing"),
    "a step": (_lacks("step"), r"state\.0\.step is missing"),
    "no flag": (_group(amsgrad=None), r"param_groups\[0\]\.amsgrad is None"),
    "no flag either": (_group(maximize=None), r"param_groups\[0\]\.maximize is None"),
    "a huge rate": (_group(lr=1e30), r"param_groups\[0\]\.lr is 1e\+30"),
    "a huge decay": (_group(weight_decay=1e30), r"param_groups\[0\]\.weight_decay is 1e\+30"),
    "a state by another name": (_unpacked, r"state\.items is nothing that torch keeps"),
    "no place in the schedule": (
        lambda parts: parts["scheduler"].pop("last_epoch"),
        r"last_epoch is missing",
    ),
}
"""What is changed in a checkpoint of a single weight, which has no other to be compared with."""


@pytest.mark.parametrize("what", ALONE)
def test_what_a_lone_weight_needs_to_go_on_is_missed_by_name(tmp_path: Path, what: str) -> None:
    def run() -> tuple[Accelerator, nn.Module]:
        current.clear()
        accelerator, model = Accelerator(cpu=True), nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.AdamW(model.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        schedule.step()
        return accelerator, model

    change, said = ALONE[what]
    accelerator, _ = run()
    folder = Path(accelerator.save_state(str(tmp_path / "c")))
    parts = json.loads((folder / "state.json").read_text())
    change(parts)
    (folder / "state.json").write_text(json.dumps(parts))
    sign(folder)
    accelerator, model = run()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match=said):
        accelerator.load_state(str(folder))
    assert equal(model.state_dict(), before)
    current.clear()
