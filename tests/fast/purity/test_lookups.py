"""Values that change between two steps, in ordinary code: no recording may go on with old ones."""

from __future__ import annotations

import copy
import logging
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from anytrain.fast.purity.impurity import impurity, model_impurity
from anytrain.fast.purity.lookups import settings


@dataclass
class Fields:
    alpha: float = 1.0


class Slots:
    __slots__ = ("alpha",)

    def __init__(self) -> None:
        self.alpha = 1.0


class Shared:
    alpha = 1.0


class Heir(Shared):
    pass


ALPHA = 1.0
NAMESPACE, FIELDS, SLOTS, HEIR = SimpleNamespace(alpha=1.0), Fields(), Slots(), Heir()
ENTRIES: dict[str, Any] = {"alpha": 1.0, "deep": {"list": [1.0]}}
ROW = [1.0]
ARRAY = np.ones(3)
LOSS = functional.l1_loss
own_module = ModuleType("own_module")
own_module.ALPHA = 1.0  # type: ignore[attr-defined]


def raise_alpha() -> None:
    globals()["ALPHA"] += 1.0


def swap_loss() -> None:
    globals()["LOSS"] = functional.mse_loss if LOSS is functional.l1_loss else functional.l1_loss


def by_namespace(x: Any) -> Any:
    return x * NAMESPACE.alpha


def by_fields(x: Any) -> Any:
    return x * FIELDS.alpha


def by_slots(x: Any) -> Any:
    return x * SLOTS.alpha


def by_class(x: Any) -> Any:
    return x * Shared.alpha


def by_heir(x: Any) -> Any:
    return x * HEIR.alpha


def by_entry(x: Any) -> Any:
    return x * ENTRIES["alpha"]


def by_deep_entry(x: Any) -> Any:
    return x * ENTRIES["deep"]["list"][0]


def by_row(x: Any) -> Any:
    return x * ROW[0]


def by_array(x: Any) -> Any:
    return x * ARRAY[0]


def by_module(x: Any) -> Any:
    return x * own_module.ALPHA  # type: ignore[attr-defined]


def by_global(x: Any) -> Any:
    return x * ALPHA


def inside_a_generator(x: Any) -> Any:
    return sum(ALPHA * part for part in x)


def inside_a_function(x: Any) -> Any:
    def scaled(part: Any) -> Any:
        return ALPHA * part

    return scaled(x)


def by_default(x: Any, given: Any = ENTRIES) -> Any:  # noqa: B006
    return x * given["alpha"]


def by_argument(x: Any, given: Any) -> Any:
    return x * given.alpha


def by_loss(x: Any) -> Any:
    return LOSS(x, x)


@pytest.mark.parametrize(
    ("function", "change"),
    [
        (by_namespace, lambda: setattr(NAMESPACE, "alpha", NAMESPACE.alpha + 1)),
        (by_fields, lambda: setattr(FIELDS, "alpha", FIELDS.alpha + 1)),
        (by_slots, lambda: setattr(SLOTS, "alpha", SLOTS.alpha + 1)),
        (by_class, lambda: setattr(Shared, "alpha", Shared.alpha + 1)),
        (by_heir, lambda: setattr(Shared, "alpha", Shared.alpha + 1)),
        (by_entry, lambda: ENTRIES.update(alpha=ENTRIES["alpha"] + 1)),
        (by_deep_entry, lambda: ENTRIES["deep"]["list"].__setitem__(0, random.random())),
        (by_row, lambda: ROW.__setitem__(0, ROW[0] + 1)),
        (by_array, lambda: ARRAY.__setitem__(0, ARRAY[0] + 1)),
        (by_module, lambda: setattr(own_module, "ALPHA", random.random())),
        (by_global, raise_alpha),
        (inside_a_generator, raise_alpha),
        (inside_a_function, raise_alpha),
        (by_default, lambda: ENTRIES.update(alpha=ENTRIES["alpha"] + 1)),
        (
            partial(by_argument, given=NAMESPACE),
            lambda: setattr(NAMESPACE, "alpha", NAMESPACE.alpha + 1),
        ),
        (by_loss, swap_loss),
    ],
)
def test_a_value_that_a_loss_looks_up_is_seen_to_change(
    function: Callable[..., Any], change: Callable[[], Any]
) -> None:
    assert impurity(function) is None
    read = settings(function)
    before = read()
    assert before == read() and hash(before) == hash(read())
    change()
    assert read() != before


class Focal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.pow(self.gamma).mean()


class Centered(Focal):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.center = x.detach().mean()
        return x.mean() - self.center


class Meter:
    count = 0

    def push(self, x: Any) -> None:
        self.count += 1


class Base:
    def compute_loss(self, x: Any) -> Any:
        self.seen = x
        return x.mean()


class Trains(Base):
    """A trainer with what trainers of users hold."""

    def __init__(self) -> None:
        self.weights: dict[str, Any] = {"kl": 0.0}
        self.args = SimpleNamespace(kl=0.0)
        self.first, self.second = None, 1.0
        self.criterion, self.centered = Focal(), Centered()
        self.loss = functional.l1_loss
        self.host = torch.ones(2)
        self.alpha = 1.0
        self.numpys, self.pythons = np.random.default_rng(0), random.Random(0)
        self.torchs = torch.Generator()
        self.unlabelled = iter(range(9))
        self.meter = Meter()

    def by_entry(self, x: Any) -> Any:
        return x * self.weights["kl"]

    def by_args(self, x: Any) -> Any:
        return x * self.args.kl

    def by_either(self, x: Any) -> Any:
        return x * (self.first or self.second)

    def by_criterion(self, x: Any) -> Any:
        return self.criterion(x)

    def by_loss(self, x: Any) -> Any:
        return self.loss(x, x)

    def by_host(self, x: Any) -> Any:
        return x * self.host[0]

    def by_name(self, x: Any) -> Any:
        return x * getattr(self, "alpha")  # noqa: B009

    def inside(self, x: Any) -> Any:
        return sum(self.alpha * part for part in x)

    def stores(self, x: Any) -> Any:
        return self.centered(x)

    def counts(self, x: Any) -> Any:
        self.weights["kl"] += 1
        return x

    def pushes(self, x: Any) -> Any:
        self.meter.push(x)
        return x

    def draws_by_numpy(self, x: Any) -> Any:
        return x * self.numpys.beta(1, 1)

    def draws_by_python(self, x: Any) -> Any:
        return x * self.pythons.random()

    def draws_by_torch(self, x: Any) -> Any:
        return x * torch.rand((), generator=self.torchs)

    def takes(self, x: Any) -> Any:
        return x + next(self.unlabelled)

    def compute_loss(self, x: Any) -> Any:
        return super().compute_loss(x)

    def usual(self, model: Any, inputs: dict[str, Any]) -> Any:
        device = next(model.parameters()).device
        parts = []

        def add(part: Any) -> None:
            parts.append(part)

        for name in inputs:
            add(inputs[name].to(device))
        kept = {"sum": torch.stack(parts).sum()}
        kept["twice"] = kept["sum"] * 2
        kept["twice"] += 1
        return kept["twice"]


def swap(trains: Trains) -> None:
    trains.first, trains.second = trains.second, trains.first


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("by_entry", lambda trains: trains.weights.update(kl=0.5)),
        ("by_args", lambda trains: setattr(trains.args, "kl", 0.5)),
        ("by_either", swap),
        ("by_criterion", lambda trains: setattr(trains.criterion, "gamma", 1.0)),
        ("by_loss", lambda trains: setattr(trains, "loss", functional.mse_loss)),
        ("by_host", lambda trains: trains.host.__setitem__(0, 2.0)),
        ("by_name", lambda trains: setattr(trains, "alpha", 2.0)),
        ("inside", lambda trains: setattr(trains, "alpha", 2.0)),
    ],
)
def test_what_a_trainer_holds_is_seen_to_change(name: str, change: Callable[..., Any]) -> None:
    trains = Trains()
    function = getattr(trains, name)
    assert impurity(function) is None
    read = settings(function)
    before = read()
    assert before == read()
    change(trains)
    assert read() != before


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("stores", "keeps 'center'"),
        ("counts", "writes into"),
        ("pushes", "keeps 'count'"),
        ("draws_by_numpy", "'numpys'"),
        ("draws_by_python", "'pythons'"),
        ("draws_by_torch", "'torchs'"),
        ("takes", "the next of 'unlabelled'"),
        ("compute_loss", "keeps 'seen'"),
    ],
)
def test_what_a_trainer_does_besides_is_named(name: str, word: str) -> None:
    assert word in str(impurity(getattr(Trains(), name)))


def test_code_that_only_computes_is_left_alone() -> None:
    trains = Trains()
    assert impurity(trains.usual) is None
    read = settings(trains.usual)
    assert read() == read()


def test_a_loss_that_is_a_module_is_read_too() -> None:
    assert impurity(Focal()) is None
    assert "keeps 'center'" in str(impurity(Centered()))
    loss = Focal()
    read = settings(loss)
    before = read()
    loss.gamma = 1.0
    assert read() != before


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config, self.row = SimpleNamespace(alpha=1.0), [1.0]
        self.nested = {"deep": {"alpha": 1.0}}
        self.scale = torch.ones(())
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x) * self.config.alpha * self.row[0] * ALPHA
        return x * self.nested["deep"]["alpha"] * self.scale


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.config, "alpha", 2.0),
        lambda model: model.row.__setitem__(0, 2.0),
        lambda model: model.nested["deep"].update(alpha=2.0),
        lambda model: model.scale.add_(1),
        lambda model: raise_alpha(),
    ],
    ids=["config", "list", "nested", "tensor of the host", "global"],
)
def test_what_a_model_looks_up_is_seen_to_change(change: Callable[..., Any]) -> None:
    model = Configured()
    whole = nn.Sequential(model)
    assert model_impurity(whole) is None
    read = settings(model=whole)
    before = read()
    assert before == read()
    change(model)
    assert read() != before


def test_another_object_in_the_place_of_one_that_is_gone_is_another() -> None:
    trains = Trains()
    read = settings(trains.by_criterion)
    seen = [read()]
    for _ in range(50):
        trains.criterion = Focal()
        assert read() not in seen
        seen.append(read())


class Mode(Enum):
    A, B = 1, 2


class Once(type):
    """A metaclass that keeps what it has made."""

    made: dict[Any, Any] = {}  # noqa: RUF012

    def __call__(cls, *given: Any) -> Any:
        cls.made[cls] = cls.made.get(cls) or super().__call__(*given)
        return cls.made[cls]


class Single(metaclass=Once):
    alpha = 1.0


class Keyed:
    """A configuration whose attributes are entries; it has no others, and says so its own way."""

    def __init__(self, **entries: Any) -> None:
        self.__dict__["_entries"] = entries

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["_entries"][name]


MODE, SINGLE, KEYED = Mode.A, Single(), Keyed(alpha=1.0)
logger = logging.getLogger(__name__)
loss = 0.0
"""As a script or a notebook has one: no function here reads it."""


def by_mode(x: Any) -> Any:
    return x if MODE is Mode.A else -x


def by_single(x: Any) -> Any:
    return x * SINGLE.alpha


def by_key(x: Any) -> Any:
    return x * KEYED.alpha


def copies(x: Any) -> Any:
    return copy.copy(x)


def asks_the_logger(x: Any) -> Any:
    return -x if logger.isEnabledFor(99) else x


def of_outputs(model: Any, batch: Any) -> Any:
    return model(**batch).loss


def hides(labels: Any, tokenizer: Any) -> Any:
    labels[labels == tokenizer.pad_token_id] = -100
    return labels


def adds(outputs: Any) -> Any:
    return outputs.logits.add(1) + outputs.hidden[0].add(2)


@pytest.mark.parametrize(
    "function", [by_mode, by_single, by_key, copies, asks_the_logger, of_outputs, hides, adds]
)
def test_ordinary_code_is_neither_refused_nor_taken_for_another(
    function: Callable[..., Any],
) -> None:
    assert impurity(function) is None
    read = settings(function)
    before = read()
    globals()["loss"] += 1.0
    assert read() == before


class Averaged(nn.Module):
    """A teacher that counts its updates, which its forward does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.num_updates = nn.Linear(2, 2), 0

    def update(self) -> None:
        self.num_updates += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones([]))

    @property
    def noise(self) -> torch.Tensor:
        return torch.rand(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale.exp() + self.noise


def test_an_attribute_that_is_an_entry_is_seen_to_change() -> None:
    read = settings(by_key)
    before = read()
    KEYED.__dict__["_entries"]["alpha"] += 1
    assert read() != before


def test_what_a_step_changes_by_itself_is_no_change() -> None:
    teacher, criterion = Averaged(), Scaled()

    def loss_of(x: Any) -> Any:
        return criterion(teacher(x))

    assert impurity(loss_of) is None
    read = settings(loss_of)
    before = read()
    teacher.update()
    with torch.no_grad():
        criterion.scale.add_(1.0)
    assert read() == before


def test_a_property_is_read_and_not_called() -> None:
    state = torch.get_rng_state()
    settings(Scaled().forward)()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_scripted_model_is_a_library_s() -> None:
    teacher = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))

    def loss_of(x: Any) -> Any:
        return teacher(x)

    assert impurity(loss_of) is None
    assert settings(loss_of)() == settings(loss_of)()


def test_it_is_read_in_no_time() -> None:
    model = nn.Sequential(*(nn.Sequential(Configured(), Scaled()) for _ in range(24)))

    def loss_of(x: Any) -> Any:
        return model(x)

    read = settings(loss_of)
    read()
    calls = Counter[str]()
    sys.setprofile(lambda frame, event, found: calls.update([event]))
    try:
        read()
    finally:
        sys.setprofile(None)
    assert calls["call"] + calls["c_call"] < 48 * 75  # 48 modules of the user's own; it is 51 each
