"""HF's loader classes: made by hand, or what `prepare` returns."""

from __future__ import annotations

import gc
import pickle
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from anytrain.compat.accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from anytrain.compat.accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    DataLoaderStateMixin,
    SkipDataLoader,
    get_sampler,
    prepare_data_loader,
)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher])
def test_a_loader_made_by_hand_knows_its_last_batch_in_every_epoch(kind: type) -> None:
    loader = kind(list(range(16)), batch_size=4)
    for _ in range(2):
        assert [loader.end_of_dataloader for _ in loader] == [False, False, False, True]
    assert isinstance(loader, DataLoader)
    assert isinstance(loader, DataLoaderStateMixin)
    assert type(loader.base_dataloader) is DataLoader


def test_a_loader_made_by_hand_skips_its_first_batches_in_every_epoch() -> None:
    loader = SkipDataLoader(list(range(16)), batch_size=4, skip_batches=2)
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert len(loader) == 2


@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher])
def test_skipping_keeps_the_epoch(kind: type) -> None:
    loader = kind(list(range(16)), batch_size=4)
    loader.set_epoch(3)
    assert skip_first_batches(loader, 2).iteration == 3


@pytest.mark.parametrize("split_batches", [False, True])
def test_the_seats_of_a_world_share_every_sample(split_batches: bool) -> None:
    seen = []
    for rank in range(2):
        loader = prepare_data_loader(
            DataLoader(list(range(16)), batch_size=4),
            num_processes=2,
            process_index=rank,
            split_batches=split_batches,
        )
        assert isinstance(loader.batch_sampler, BatchSamplerShard)
        seen += [sample for batch in loader for sample in batch.tolist()]
    assert sorted(seen) == list(range(16))


def test_without_a_seat_the_loader_is_this_process_alone() -> None:
    loader = prepare_data_loader(DataLoader(Stream(), batch_size=None))
    assert list(loader) == list(range(10))


@pytest.mark.parametrize(
    ("dataset", "dispatch", "kind"),
    [
        (list(range(8)), None, DataLoaderShard),
        (list(range(8)), True, DataLoaderDispatcher),
        (Stream(), None, DataLoaderDispatcher),
        (Stream(), False, DataLoaderShard),
    ],
)
def test_a_prepared_loader_is_of_the_class_that_scripts_ask_for(
    dataset: object, dispatch: bool | None, kind: type
) -> None:
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch)
    )
    loader = accelerator.prepare(DataLoader(dataset, batch_size=2))
    assert type(loader) is kind
    assert loader._is_accelerate_prepared
    assert loader.gradient_state.num_steps == 1


def test_an_abandoned_run_is_freed_at_once_though_a_loader_was_being_walked() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(list(range(8)), batch_size=2))
    walked = iter(loader)
    next(walked)
    gone = [weakref.ref(accelerator), weakref.ref(loader)]
    gc.disable()  # a cycle would wait for the collector, with the model in the device's memory
    try:
        del accelerator, loader, walked
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


def test_a_pickled_run_brings_its_loaders_with_it(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    data = torch.utils.data.TensorDataset(torch.arange(10))
    loader = accelerator.prepare(DataLoader(data, batch_size=2))
    loader.set_epoch(2)
    next(iter(loader))
    twin = pickle.loads(pickle.dumps(accelerator))
    (copied,) = twin._dataloaders
    assert type(copied) is DataLoaderShard
    assert copied.iteration == 2
    assert [b[0].tolist() for b in copied] == [b[0].tolist() for b in loader]
    assert twin.state.mixed_precision == accelerator.state.mixed_precision


def test_the_sampler_can_be_found_and_replaced() -> None:
    loader = DataLoaderShard(list(range(6)), batch_size=2, shuffle=True)
    loader.set_sampler(SequentialSampler(range(6)))
    assert isinstance(get_sampler(loader), SequentialSampler)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    batches = BatchSampler(SequentialSampler(range(6)), batch_size=2, drop_last=False)
    assert get_sampler(DataLoader(range(6), sampler=batches, batch_size=None)) is batches.sampler


def test_a_loader_walked_by_hand_is_the_active_one() -> None:
    accelerator = Accelerator(cpu=True)
    loader = DataLoaderShard(list(range(6)), batch_size=2)
    loader.begin()
    assert accelerator.gradient_state.active_dataloader is loader
    loader.end()
    assert accelerator.gradient_state.active_dataloader is None
