"""A run leaves the process as it found it, however it ends."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anytrain.doors.accelerator import Accelerator
from anytrain.doors.trainer import Trainer
from doors.trainer import own_code

_UNTOUCHABLE = (signal.SIGKILL, signal.SIGSTOP)


def process() -> dict[str, Any]:
    cudnn = torch.backends.cudnn
    return {
        "environment": dict(os.environ),
        "signals": {s: signal.getsignal(s) for s in signal.valid_signals() - {*_UNTOUCHABLE}},
        "warnings": list(warnings.filters),
        "shown by": (warnings.showwarning, sys.excepthook, threading.excepthook, sys.stderr),
        "matmuls": torch.get_float32_matmul_precision(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
        "torch": (
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_anomaly_enabled(),
        ),
        "hooks": [
            len(held)
            for name, held in vars(torch.nn.modules.module).items()
            if name.startswith("_global_") and hasattr(held, "__len__")
        ],
        "seeding": (random.seed, np.random.seed, torch.manual_seed, torch.Tensor.backward),
        "folder": os.getcwd(),
        "logging": (logging.root.level, list(logging.root.handlers)),
        "threads": {thread.name for thread in threading.enumerate()},
    }


class Asked(Trainer):
    """Note how torch is set while it trains and evaluates; fail when told."""

    fails: type[BaseException] | None = None

    def compute_loss(self, *given: Any, **named: Any) -> Any:
        found = process()
        self.seen = (found["matmuls"], found["deterministic"])
        if self.fails is not None:
            raise self.fails("no such row")
        return super().compute_loss(*given, **named)


def trained(folder: Path, *, fails: type[BaseException] | None) -> None:
    told = own_code.arguments(folder, max_steps=2, tf32=False, full_determinism=True, bf16=True)
    trainer = Asked(
        own_code.Line(), told, train_dataset=own_code.rows(8), eval_dataset=own_code.rows(4)
    )
    for work in (trainer.train, trainer.evaluate, lambda: trainer.predict(own_code.rows(4))):
        trainer.fails, trainer.seen = fails, None
        if fails is not None:
            with pytest.raises(fails):
                work()
        else:
            work()
        assert trainer.seen == ("highest", (True, False))


def looped(folder: Path, *, fails: type[BaseException] | None) -> None:
    accelerator = begun(folder)
    try:
        walk(accelerator, fails)
        accelerator.save_state(str(folder / "state"), blocking=False)
    except (KeyError, KeyboardInterrupt):
        assert fails is not None
    finally:
        accelerator.end_training()


def begun(folder: Path) -> Accelerator:
    return Accelerator(cpu=True, mixed_precision="bf16", project_dir=str(folder))


def walk(accelerator: Accelerator, fails: type[BaseException] | None = None) -> None:
    model = own_code.Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(own_code.rows(4), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**{k: v.float() for k, v in batch.items()})["loss"])
        optimizer.step()
        if fails is not None:
            raise fails("no such row")


@pytest.fixture(autouse=True)
def _own_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    looped(tmp_path_factory.mktemp("first"), fails=None)  # torch loads parts that set things
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "fails",
    [None, KeyError, KeyboardInterrupt],
    ids=["to its end", "by an exception", "by Ctrl-C"],
)
@pytest.mark.parametrize("run", [trained, looped])
def test_a_run_leaves_the_process_as_it_found_it(
    tmp_path: Path, run: Callable[..., None], fails: type[BaseException] | None
) -> None:
    before = process()
    for number in range(2):
        run(tmp_path / str(number), fails=fails)
        assert process() == before


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["the first first", "the last first"])
def test_two_accelerators_leave_the_process_as_they_found_it(
    tmp_path: Path, order: tuple[int, int]
) -> None:
    before = process()
    both = [begun(tmp_path / str(number)) for number in range(2)]
    for accelerator in both:
        walk(accelerator)
    for number in order:
        both[number].end_training()
    assert process() == before
