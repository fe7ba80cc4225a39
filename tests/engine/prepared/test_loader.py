"""The position a loader reports is that of what was handed out, and it can be gone back to."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from anytrain import Accelerator, DataLoaderConfiguration, set_seed
from anytrain.core.errors import Notice


def prepared(
    shuffle: bool = True, num_workers: int = 0, **config: object
) -> tuple[Accelerator, DataLoader]:
    set_seed(5)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
    data = torch.arange(23)
    loader = DataLoader(data, batch_size=4, shuffle=shuffle, num_workers=num_workers)
    return accelerator, accelerator.prepare(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("stop", [1, 3, 5, 6])
def test_a_restored_loader_yields_the_rest_of_the_epoch_and_the_next(
    num_workers: int, seedable: bool, stop: int
) -> None:
    def run(loader: DataLoader, first: int | None = None) -> Iterator[list[int]]:
        while loader.iteration < 3:
            for batch in loader:
                torch.rand(1)  # the model's randomness is interleaved with the order's
                yield batch.tolist()

    whole = list(run(prepared(num_workers=num_workers, use_seedable_sampler=seedable)[1]))
    _, loader = prepared(num_workers=num_workers, use_seedable_sampler=seedable)
    walk = run(loader)
    before = [next(walk) for _ in range(6 + stop)]
    place, generators = loader.state_dict(), torch.get_rng_state()
    _, fresh = prepared(num_workers=num_workers, use_seedable_sampler=seedable)
    torch.set_rng_state(generators)
    fresh.load_state_dict(place)
    after = list(run(fresh))
    assert before + after == whole


def test_skipping_by_hand_takes_the_interrupted_epoch_s_order() -> None:
    accelerator, loader = prepared()
    walk = iter(loader)
    taken = [next(walk).tolist() for _ in range(2)]
    place = loader.state_dict()
    rest = [batch.tolist() for batch in walk]
    accelerator, fresh = prepared()
    torch.rand(100)
    fresh.load_state_dict(place)
    assert [b.tolist() for b in accelerator.skip_first_batches(fresh, 2)] == rest
    assert taken[0] not in rest


def test_a_skipped_epoch_counts_as_an_epoch() -> None:
    accelerator, loader = prepared(use_seedable_sampler=True)
    list(accelerator.skip_first_batches(loader, 2))
    assert loader.iteration == 1


def test_leaving_early_closes_the_loader() -> None:
    accelerator, loader = prepared()
    for _ in loader:
        assert accelerator.gradient_state.in_dataloader
        break
    assert not accelerator.gradient_state.in_dataloader


def test_an_evaluation_inside_the_loop_does_not_disturb_it() -> None:
    accelerator, loader = prepared()
    inner = accelerator.prepare(DataLoader(torch.arange(3), batch_size=1))
    seen = []
    for _ in loader:
        for _ in inner:
            assert accelerator.gradient_state.active_dataloader is inner
        assert accelerator.gradient_state.active_dataloader is loader
        seen.append(accelerator.gradient_state.end_of_dataloader)
    assert seen == [False] * 5 + [True]


def test_a_loader_subclass_keeps_its_own_iteration() -> None:
    class Doubling(DataLoader):
        def __iter__(self) -> Iterator[torch.Tensor]:
            for batch in super().__iter__():
                yield batch * 2

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(Doubling(torch.arange(4), batch_size=2))
    assert [batch.tolist() for batch in loader] == [[0, 2], [4, 6]]
    assert isinstance(loader, DataLoader)


def test_batches_of_any_make_are_placed() -> None:
    class Own:
        def __init__(self) -> None:
            self.where = "host"

        def to(self, device: torch.device) -> Own:
            self.where = str(device)
            return self

    accelerator = Accelerator(cpu=True)
    rows = [{"x": torch.ones(2), "name": "a", "nested": (torch.zeros(1), [torch.ones(1)])}]
    loader = accelerator.prepare(DataLoader(rows, batch_size=None))
    assert next(iter(loader))["name"] == "a"
    own = accelerator.prepare(DataLoader([0], batch_size=None, collate_fn=lambda _: Own()))
    assert next(iter(own)).where == "cpu"


def test_a_stream_is_fast_forwarded() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(10))

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Stream(), batch_size=2))
    walk = iter(loader)
    next(walk)
    next(walk)
    place = loader.state_dict()
    fresh = Accelerator(cpu=True).prepare(DataLoader(Stream(), batch_size=2))
    fresh.load_state_dict(place)
    with pytest.warns(Notice, match="Reading 4 samples again"):
        assert [batch.tolist() for batch in fresh] == [[4, 5], [6, 7], [8, 9]]
    skipped = accelerator.skip_first_batches(DataLoader(Stream(), batch_size=2), 3)
    assert [batch.tolist() for batch in skipped] == [[6, 7], [8, 9]]


def test_a_prepared_loader_can_be_sent_to_another_process() -> None:
    _, loader = prepared()
    assert len(pickle.loads(pickle.dumps(loader.base_dataloader))) == len(loader)


class Augmented(torch.utils.data.Dataset):
    """Samples with noise from every generator that people use."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = [random.random(), np.random.rand(), torch.rand(()).item()]
        return torch.tensor([float(index), *noise])


def masked(samples: list[torch.Tensor]) -> torch.Tensor:
    """Collate and mask at random, as language models do."""
    batch = torch.stack(samples)
    return torch.where(torch.rand(batch.shape) < 0.3, 0.0, batch)


def augmented(num_workers: int, collate: object = masked) -> DataLoader:
    set_seed(11)
    loader = DataLoader(
        Augmented(), batch_size=3, shuffle=True, num_workers=num_workers, collate_fn=collate
    )
    return Accelerator(cpu=True).prepare(loader)


def walk(loader: DataLoader, epochs: int = 2) -> list[torch.Tensor]:
    seen = []
    while loader.iteration < epochs:
        for batch in loader:
            seen.append(batch)
            random.random(), np.random.rand(), torch.rand(1)  # what training draws
    return seen


def test_augmentation_is_the_same_for_any_number_of_workers() -> None:
    in_process = walk(augmented(0))
    assert len(in_process) == 8
    assert not torch.equal(in_process[0], in_process[4]), "each epoch draws anew"
    for num_workers in (1, 2):
        again = walk(augmented(num_workers))
        assert all(torch.equal(a, b) for a, b in zip(in_process, again, strict=True))


def test_loading_leaves_the_process_s_generators_alone() -> None:
    loader = augmented(0)
    batches = iter(loader)
    next(batches)
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    next(batches)
    assert random.getstate() == before[0]
    assert (np.random.get_state()[1] == before[1]).all()
    assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 2), (2, 0)])
@pytest.mark.parametrize("stop", [1, 3, 6])
def test_augmentation_is_continued_exactly(first: int, second: int, stop: int) -> None:
    whole = walk(augmented(0))
    loader = augmented(first)
    before: list[torch.Tensor] = []
    while len(before) < stop:
        for batch in loader:
            before.append(batch)
            random.random(), np.random.rand(), torch.rand(1)
            if len(before) == stop:
                place, generators = loader.state_dict(), torch.get_rng_state()
                break
    fresh = augmented(second)
    torch.set_rng_state(generators)
    fresh.load_state_dict(place)
    after = walk(fresh)
    assert all(torch.equal(a, b) for a, b in zip(whole, before + after, strict=True))


def test_the_user_sees_the_objects_that_were_given() -> None:
    loader = augmented(0)
    assert isinstance(loader.dataset, Augmented)
    assert loader.collate_fn is masked
    assert len(loader.dataset) == 10


class Counted(IterableDataset):
    """A stream that can tell and take its place, and counts what is read."""

    def __init__(self) -> None:
        self.place = 0
        self.reads = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < 10:
            self.place += 1
            self.reads += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def test_a_stream_that_knows_its_place_is_not_read_again() -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(Counted(), batch_size=2))
    batches = iter(loader)
    next(batches)
    next(batches)
    place = loader.state_dict()
    assert place["stream"] == {"place": 4}, "what was handed out, not what was read ahead"
    stream = Counted()
    fresh = Accelerator(cpu=True).prepare(DataLoader(stream, batch_size=2))
    fresh.load_state_dict(place)
    assert [batch.tolist() for batch in fresh] == [[4, 5], [6, 7], [8, 9]]
    assert stream.reads == 6


def test_the_last_batches_can_be_read_again_also_those_of_the_epoch_before() -> None:
    loader = augmented(0)
    handed = {(epoch, n): b for epoch in range(2) for n, b in enumerate(loader)}
    walk = iter(loader)
    handed[2, 0] = next(walk)
    next(walk)
    read = {(each.epoch, each.number): each for each in loader.read_before()}
    assert list(read)[: len(handed)] == list(handed), "the oldest first"
    for place, batch in handed.items():
        assert torch.equal(read[place].on_host(), batch), "with what was drawn while loading it"
    walk.close()
    list(loader)
    read_again = [(each.epoch, each.number) for each in loader.read_before()]
    assert len(set(read_again)) == len(read_again), "a walk that was left early is forgotten"
