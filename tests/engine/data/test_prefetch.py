"""Batches come early and whole, and nobody can tell that they were read ahead."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from anytrain import Accelerator, set_seed
from anytrain.core.clock import Ledger
from anytrain.engine.data.prefetch import Placement, Prefetcher
from anytrain.machine.backends.cpu import Cpu
from anytrain.machine.backends.fake import Fake

HOST = torch.device("cpu")


@pytest.fixture(params=["cpu", "fake"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device with nothing beside it, and one on which copies take their time."""
    monkeypatch.setenv("ANYTRAIN_DEVICE", request.param)
    return str(request.param)


def ahead_of(batches: Iterator[Any], backend: Any, reached: Callable[[], Any] = int) -> Prefetcher:
    return Prefetcher(batches, Placement(backend, HOST), Ledger(), reached)


@pytest.mark.parametrize(("backend", "depth"), [(Cpu(), 1), (Fake(), 2)])
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_each_batch_is_handed_out_once_with_the_next_ones_read(
    backend: Any, depth: int, count: int
) -> None:
    read: list[int] = []

    def batches() -> Iterator[torch.Tensor]:
        for number in range(count):
            read.append(number)
            yield torch.full((2,), number + 1)

    walk = ahead_of(batches(), backend, lambda: len(read))
    seen = []
    for batch in walk:
        seen.append(batch.tolist())
        assert len(read) == min(len(seen) + depth, count)
        assert walk.reached == len(seen)
        assert walk.is_last == (len(seen) == count)
    assert seen == [[n + 1, n + 1] for n in range(count)]


def test_what_was_left_is_waited_for_before_its_memory_is_free() -> None:
    arrived: list[int] = []

    class Slow:
        def send(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor

        def sent(self) -> Callable[[], None]:
            return lambda: arrived.append(1)

    placement = Placement(Fake(), HOST)
    placement._lane = Slow()
    walk = Prefetcher(iter([torch.ones(1)] * 9), placement, Ledger())
    next(walk)
    assert len(arrived) == 1
    walk.close()
    assert len(arrived) == 3


def test_a_lost_device_says_nothing_where_a_walk_is_left() -> None:
    class Lost:
        def send(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor

        def sent(self) -> Callable[[], None]:
            def arrive() -> None:
                raise RuntimeError("CUDA error: device-side assert triggered")

            return arrive

    placement = Placement(Fake(), HOST)
    placement._lane = Lost()
    walk = Prefetcher(iter([torch.ones(1)] * 9), placement, Ledger())
    walk.fill()
    with pytest.raises(IndexError, match="the cause"):
        try:
            raise IndexError("the cause")
        finally:
            walk.close()


def test_a_tokenizers_batch_keeps_its_class_and_what_it_holds_besides() -> None:
    class Encoding(UserDict):  # type: ignore[type-arg]
        def to(self, device: torch.device) -> Encoding:
            raise AssertionError("it would wait for every copy")

    given = Encoding({"input_ids": torch.ones(2), "names": ["a", "b"]})
    given.notes = "kept"  # type: ignore[attr-defined]
    (batch,) = ahead_of(iter([given]), Fake())
    assert type(batch) is Encoding
    assert batch.notes == "kept"
    assert batch["names"] == ["a", "b"]
    assert batch["input_ids"].tolist() == [1, 1]


def test_the_wait_for_a_batch_is_in_the_ledger() -> None:
    ledger = Ledger()
    walk = Prefetcher(iter([torch.ones(1)] * 3), Placement(Fake(), HOST), ledger)
    list(walk)
    assert ledger.span("data").uses == 4
    assert ledger.span("transfer").uses == 3


class Drawing(IterableDataset):  # type: ignore[type-arg]
    """A stream that moves the generator that the model draws from too."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(12):
            torch.rand(())
            yield torch.tensor([0.5, float(number)])


class Counted(Drawing):
    """The same, and it can tell and take its place."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.place < 12:
            self.place += 1
            yield torch.tensor([0.5, float(self.place)])
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Plain(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.stack([torch.rand(()), torch.tensor(float(index))])


@pytest.mark.filterwarnings("ignore:Reading .* samples again")
@pytest.mark.parametrize("stop", [1, 2, 4, 5, 6])
@pytest.mark.parametrize("kind", [Drawing, Counted, Plain])
def test_a_walk_that_was_cut_short_goes_on_as_if_it_had_not_been(
    device: str, kind: type[Any], stop: int
) -> None:
    def prepared() -> Any:
        set_seed(3)
        options = {"shuffle": True} if kind is Plain else {}
        return Accelerator().prepare(DataLoader(kind(), batch_size=2, **options))

    def run(loader: Any) -> Iterator[Any]:
        while loader.iteration < 2:
            for batch in loader:
                yield batch.tolist(), torch.rand(()).item()  # what a model would draw

    whole = list(run(prepared()))
    loader = prepared()
    walk = run(loader)
    before = [next(walk) for _ in range(stop)]
    place, generator = loader.state_dict(), torch.get_rng_state()
    fresh = prepared()
    torch.set_rng_state(generator)
    fresh.load_state_dict(place)
    assert before + list(run(fresh)) == whole
