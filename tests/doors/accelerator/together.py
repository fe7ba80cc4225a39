"""Checks that two ranks run together; each function is one, run in the order of its name.

torchrun --nproc-per-node 2 together.py OUTPUT_FOLDER
"""

from __future__ import annotations

import inspect
import io
import json
import logging
import os
import sys
import time
import traceback
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from anytrain import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    PartialState,
    get_logger,
    set_seed,
    synchronize_rng_states,
)
from anytrain.compat.accelerate.local_sgd import LocalSGD
from anytrain.core.errors import Notice

FOLDER = Path(sys.argv[1])


def check_gather_joins_in_rank_order() -> None:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    assert accelerator.gather(torch.tensor([rank])).tolist() == [0, 1]
    assert accelerator.gather(torch.tensor(rank)).tolist() == [0, 1]
    tree = accelerator.gather({"a": torch.tensor([rank]), "b": (torch.tensor([rank + 5]),)})
    assert tree["b"][0].tolist() == [5, 6]


def check_reduce_and_pad() -> None:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    assert accelerator.reduce(torch.tensor([1.0 + rank])).tolist() == [3.0]
    assert accelerator.reduce(torch.tensor([1.0 + rank]), "mean", scale=2).tolist() == [3.0]
    padded = accelerator.pad_across_processes(torch.ones(2 + rank), pad_index=-1)
    assert padded.tolist() == ([1, 1, -1] if rank == 0 else [1, 1, 1])
    first = accelerator.pad_across_processes(torch.ones(2 + rank), pad_first=True)
    assert first.tolist() == ([0, 1, 1] if rank == 0 else [1, 1, 1])


def check_metrics_count_every_sample_once() -> None:
    for config in ({}, {"split_batches": True}, {"dispatch_batches": True}):
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
        for size in (16, 17, 21, 3, 1):
            loader = accelerator.prepare(DataLoader(torch.arange(size), batch_size=4))
            seen = [v for b in loader for v in accelerator.gather_for_metrics(b).tolist()]
            assert sorted(seen) == list(range(size)), (config, size, seen)


def check_metrics_of_a_stream_lose_no_sample_that_was_dealt() -> None:
    for dispatching in (False, True):
        config = DataLoaderConfiguration(dispatch_batches=dispatching)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        loader = accelerator.prepare(DataLoader(Stream(22), batch_size=4, drop_last=True))
        seen = [v for b in loader for v in accelerator.gather_for_metrics(b).tolist()]
        assert sorted(seen) == list(range(16)), (dispatching, seen)


def check_metrics_of_one_object_each_keep_them_all() -> None:
    accelerator = Accelerator(cpu=True)
    for _ in accelerator.prepare(DataLoader(torch.arange(9), batch_size=4)):
        seen = accelerator.gather_for_metrics({"of": accelerator.process_index})
        assert seen == [{"of": 0}, {"of": 1}], seen


def check_one_of_a_machine_writes_models() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.should_save_model == (accelerator.process_index == 0)


def check_what_is_one_thing_is_not_split() -> None:
    accelerator = Accelerator(cpu=True)
    for padding in (False, True):
        with accelerator.split_between_processes("a dog", apply_padding=padding) as part:
            assert part == "a dog"


def check_metrics_of_objects_count_every_sample_once() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(11), batch_size=4))
    words = [
        w for b in loader for w in accelerator.gather_for_metrics([str(v) for v in b.tolist()])
    ]
    assert sorted(words, key=int) == [str(v) for v in range(11)]


class Stream(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        return iter(torch.arange(self.size))


def check_metrics_of_streams_count_every_sample_once() -> None:
    for dispatch in (None, False):
        config = DataLoaderConfiguration(dispatch_batches=dispatch)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        for size in (16, 17, 3):
            loader = accelerator.prepare(DataLoader(Stream(size), batch_size=4))
            seen = [v for b in loader for v in accelerator.gather_for_metrics(b).tolist()]
            assert sorted(seen) == list(range(size)), (dispatch, size, seen)


def check_the_shuffled_order_is_one_order() -> None:
    for seedable in (False, True):
        set_seed(3, device_specific=True)  # ranks' own generators differ
        config = DataLoaderConfiguration(use_seedable_sampler=seedable, data_seed=4)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        loader = accelerator.prepare(DataLoader(torch.arange(16), batch_size=4, shuffle=True))
        epochs = [[v for b in loader for v in accelerator.gather(b).tolist()] for _ in range(2)]
        assert all(sorted(epoch) == list(range(16)) for epoch in epochs), epochs
        assert epochs[0] != epochs[1]


def check_turns_are_taken() -> None:
    accelerator = Accelerator(cpu=True)
    stamp = FOLDER / "first"
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            time.sleep(0.3)
            stamp.write_text("done")
        assert stamp.exists()


def check_an_error_in_the_first_turn_does_not_hang_the_others() -> None:
    accelerator = Accelerator(cpu=True)
    try:
        with accelerator.main_process_first():
            if accelerator.is_main_process:
                raise KeyError("own")
    except KeyError:
        assert accelerator.is_main_process
    accelerator.wait_for_everyone()


def check_decorators_choose_ranks() -> None:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    assert (accelerator.on_main_process(lambda: True)() is True) == (rank == 0)
    assert (accelerator.on_last_process(lambda: True)() is True) == (rank == 1)
    assert (accelerator.on_process(lambda: True, process_index=1)() is True) == (rank == 1)
    assert (accelerator.on_local_main_process(lambda: True)() is True) == (rank == 0)


def check_inputs_are_split_in_order() -> None:
    with PartialState().split_between_processes([1, 2, 3]) as own:
        assert own == ([1, 2] if PartialState().process_index == 0 else [3])
    with PartialState().split_between_processes({"a": [1, 2, 3]}, apply_padding=True) as own:
        assert own == ({"a": [1, 2]} if PartialState().process_index == 0 else {"a": [3, 3]})


def check_a_trigger_on_one_rank_is_seen_on_all() -> None:
    accelerator = Accelerator(cpu=True)
    if accelerator.is_last_process:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()


def check_no_sync_keeps_gradients_local_until_the_update() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    rank = accelerator.process_index
    for turn in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.tensor([[float(rank + 1)]])).sum())
        grads = accelerator.gather(model.module.weight.grad.reshape(1)).tolist()
        assert (grads[0] == grads[1]) == (turn == 1), grads


def check_a_gradient_that_is_bad_on_one_rank_skips_on_all() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    factor = float("nan") if accelerator.is_last_process else 1.0
    accelerator.backward(model(torch.ones(1, 1)).sum() * factor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Notice)
        optimizer.step()
    assert accelerator.gather(torch.tensor([accelerator.num_skipped_steps])).tolist() == [1, 1]


def check_ranks_may_run_out_at_different_times() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(torch.ones(3, 1))
    )
    seen = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for batch in loader:
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
            seen += 1
    assert seen == (2 if accelerator.is_main_process else 1)
    assert loader.batch_sampler.even_batches, "the override ends with the block"


def check_ddp_takes_its_options() -> None:
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    model = accelerator.prepare(nn.Linear(1, 1))
    assert model.find_unused_parameters
    assert accelerator.unwrap_model(model).weight.shape == (1, 1)


def check_evaluation_mode_makes_no_replica() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    assert accelerator.prepare_model(model, evaluation_mode=True) is model


def check_generators_can_be_made_the_same() -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)
    synchronize_rng_states(["torch"])
    values = accelerator.gather(torch.rand(1)).tolist()
    assert values[0] == values[1]


def check_only_the_main_process_prints_and_logs() -> None:
    accelerator = Accelerator(cpu=True)
    text = io.StringIO()
    with redirect_stdout(text):
        accelerator.print("hello")
    assert ("hello" in text.getvalue()) == accelerator.is_main_process
    logger, records = get_logger("together", "INFO"), []
    handler = logging.Handler()
    handler.emit = records.append
    logger.logger.addHandler(handler)
    logger.info("main")
    logger.info("all", main_process_only=False)
    logger.info("turns", in_order=True)
    expected = ["main"] * accelerator.is_main_process + ["all", "turns"]
    assert [record.getMessage() for record in records] == expected


def check_a_run_of_two_is_saved_and_put_back() -> None:
    def build() -> tuple:
        set_seed(1)
        accelerator = Accelerator(cpu=True)
        model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        loader = DataLoader(torch.arange(16.0)[:, None], batch_size=2, shuffle=True)
        return accelerator, *accelerator.prepare(model, optimizer, loader)

    def train(accelerator, model, optimizer, loader, save_at: int | None = None) -> torch.Tensor:
        done = 0
        while loader.iteration < 2:
            for batch in loader:
                accelerator.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                if done == save_at:
                    accelerator.save_state(FOLDER / "two")
                    return torch.zeros(0)
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    whole = train(*build())
    train(*build(), save_at=3)
    parts = build()
    parts[0].load_state(FOLDER / "two")
    assert torch.equal(whole, train(*parts))


def check_local_steps_are_averaged() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local:
        for turn in range(2):
            value = torch.tensor([[float(accelerator.process_index)]])
            accelerator.backward(model(value).sum())
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            weights = accelerator.gather(model.module.weight.detach().reshape(1)).tolist()
            assert weights == ([1.0, 0.0] if turn == 0 else [0.0, 0.0]), weights


def check_gathering_different_shapes_is_explained_when_debugging() -> None:
    os.environ["ANYTRAIN_DEBUG"] = "1"
    accelerator = Accelerator(cpu=True)
    del os.environ["ANYTRAIN_DEBUG"]
    try:
        accelerator.gather(torch.ones(1 + accelerator.process_index))
    except ValueError as error:
        assert "rank 1: [(2,)]" in str(error), error
    else:
        raise AssertionError("not refused")


def main() -> None:
    checks = {
        n: f
        for n, f in sorted(globals().items())
        if n.startswith("check_") and inspect.isfunction(f)
    }
    results = {}
    for name, check in checks.items():
        try:
            check()
            results[name] = "ok"
        except Exception:
            results[name] = traceback.format_exc()
    rank = os.environ["RANK"]
    (FOLDER / f"results-{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
