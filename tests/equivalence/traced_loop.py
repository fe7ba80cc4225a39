"""Run the same loops through anytrain or HF Accelerate and write down what each rank saw.

python traced_loop.py {anytrain|accelerate} OUTPUT_FOLDER
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

LIBRARY, FOLDER = sys.argv[1], Path(sys.argv[2])
warnings.simplefilter("ignore")
if LIBRARY == "anytrain":
    from anytrain import (
        Accelerator,
        DataLoaderConfiguration,
        GradientAccumulationPlugin,
        set_seed,
    )
    from anytrain.doors.accelerator.states import AcceleratorState, GradientState
else:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, set_seed


class Stream(IterableDataset):
    """Numbers, one after the other."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        return iter(torch.arange(self.size, dtype=torch.float32))


class Uneven(BatchSampler):
    """Batches of 3 and 5 in turn: their size is not known beforehand."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        numbers = iter(range(self.size))
        for wanted in itertools.cycle((3, 5)):
            batch = list(itertools.islice(numbers, wanted))
            if not batch:
                return
            yield batch

    def __len__(self) -> int:
        return len(list(iter(self)))


def loader_of(case: dict) -> DataLoader:
    data = torch.arange(case["size"], dtype=torch.float32)
    kind = case.get("kind", "map")
    if kind == "stream":
        return DataLoader(
            Stream(case["size"]), batch_size=6, drop_last=case.get("drop_last", False)
        )
    if kind == "uneven":
        return DataLoader(data, batch_sampler=Uneven(case["size"]))
    return DataLoader(
        data,
        batch_size=6,
        shuffle=case.get("shuffle", False),
        drop_last=case.get("drop_last", False),
    )


def run(case: dict) -> dict:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    set_seed(case.get("seed", 7))
    config = DataLoaderConfiguration(**case.get("config", {}))
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=config,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=case.get("accumulation", 1), **case.get("plugin", {})
        ),
        step_scheduler_with_optimizer=case.get("with_optimizer", True),
    )
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=40)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, loader_of(case), scheduler
    )
    seen = {"batches": [], "losses": [], "rates": [], "sync": [], "gathered": [], "length": None}
    with contextlib.suppress(TypeError):
        seen["length"] = len(loader)
    for _ in range(case.get("epochs", 2)):
        for batch in loader:
            with accelerator.accumulate(model):
                seen["batches"].append(batch.tolist())
                loss = ((model(batch[:, None]) - 1) ** 2).mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients and case.get("clip"):
                    accelerator.clip_grad_norm_(model.parameters(), case["clip"])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen["losses"].append(loss.item())
            seen["rates"].append(float(scheduler.get_last_lr()[0]))
            seen["sync"].append(accelerator.sync_gradients)
            if case.get("gather", True):
                seen["gathered"].append(accelerator.gather_for_metrics(batch).tolist())
    inner = accelerator.unwrap_model(model)
    seen["weights"] = [inner.weight.item(), inner.bias.item()]
    return seen


def cases() -> dict[str, dict]:
    found = {}
    for size, config in itertools.product(
        (36, 35, 31, 23, 5, 3), ({}, {"split_batches": True}, {"use_seedable_sampler": True})
    ):
        for shuffle, drop_last in itertools.product((False, True), (False, True)):
            name = f"map-{size}-{'-'.join(config) or 'plain'}-{shuffle}-{drop_last}"
            found[name] = {
                "size": size,
                "config": config,
                "shuffle": shuffle,
                "drop_last": drop_last,
            }
    for size, accumulation in itertools.product((48, 44, 25), (2, 3)):
        found[f"accumulate-{size}-{accumulation}"] = {"size": size, "accumulation": accumulation}
    found["accumulate-no-adjust"] = {
        "size": 22,
        "accumulation": 3,
        "plugin": {"adjust_scheduler": False},
    }
    found["accumulate-no-sync-at-end"] = {
        "size": 22,
        "accumulation": 3,
        "plugin": {"sync_with_dataloader": False},
    }
    found["scheduler-alone"] = {"size": 44, "accumulation": 2, "with_optimizer": False}
    found["clipped"] = {"size": 23, "clip": 0.5}
    for size, drop_last in itertools.product((36, 40, 23, 3), (False, True)):
        if size < 18 and drop_last:  # no whole round: HF Accelerate raises, anytrain has none
            continue
        found[f"stream-{size}-{drop_last}"] = {
            "size": size,
            "kind": "stream",
            "drop_last": drop_last,
        }
        found[f"stream-each-{size}-{drop_last}"] = {
            "size": size,
            "kind": "stream",
            "drop_last": drop_last,
            "config": {"dispatch_batches": False},
            "gather": False,
        }
        found[f"dispatch-map-{size}-{drop_last}"] = {
            "size": size,
            "drop_last": drop_last,
            "config": {"dispatch_batches": True},
        }
        found[f"dispatch-split-{size}-{drop_last}"] = {
            "size": size,
            "drop_last": drop_last,
            "config": {"dispatch_batches": True, "split_batches": True},
        }
    found["uneven"] = {
        "size": 32,
        "kind": "uneven",
        "config": {"even_batches": True},
        "gather": False,
    }
    return found


def main() -> None:
    results = {name: run(case) for name, case in cases().items()}
    rank = int(os.environ.get("RANK", "0"))
    (FOLDER / f"{LIBRARY}-{rank}.json").write_text(json.dumps(results))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        if LIBRARY == "accelerate":
            torch.distributed.destroy_process_group()


main()
