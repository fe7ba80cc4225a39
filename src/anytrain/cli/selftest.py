"""`anytrain test`: a short self-check on the chosen device and world.

The command launches this file as a module, so that what is checked is what a script gets.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import typer

from anytrain.cli import launch as options
from anytrain.doors.launch.config import with_file

if TYPE_CHECKING:
    from anytrain import Accelerator

_STEPS = 12


def selftest(
    num_processes: int | None = options.PROCESSES,
    mixed_precision: str | None = options.PRECISION,
    cpu: bool = options.CPU,
    multi_gpu: bool = options.MULTI_GPU,
    tpu: bool = options.TPU,
    config_file: str | None = options.CONFIG,
) -> None:
    """Check that processes start, talk, train and save here; a few seconds."""
    asked = options.given(locals())
    from anytrain.doors.launch import elastic

    everything = replace(with_file(asked, config_file), module=True)
    raise typer.Exit(elastic.launch(everything, "anytrain.cli.selftest", []))


def main() -> int:
    """Run every check on every rank; rank 0 tells. Return the exit code."""
    from anytrain import Accelerator, InitProcessGroupKwargs

    # Rather a failed check after a minute than the half hour that torch waits by itself.
    patience = InitProcessGroupKwargs(timeout=timedelta(seconds=60))
    accelerator = Accelerator(kwargs_handlers=[patience])
    plan = accelerator.plan
    accelerator.print(
        f"{accelerator.num_processes} process(es) on {plan.device}, "
        f"precision {plan.precision}, strategy {plan.strategy}"
    )
    failures = sum(not _passes(accelerator, name, check) for name, check in _CHECKS)
    verdict = f"{failures} check(s) failed." if failures else "Everything works."
    accelerator.print(verdict)
    accelerator.end_training()
    return 1 if failures else 0


def _passes(accelerator: Accelerator, name: str, check: Callable[[Accelerator], str]) -> bool:
    """Run one check on all ranks, and print what came of it once."""
    begun = time.perf_counter()
    try:
        result = (True, check(accelerator))
    except Exception as error:  # noqa: BLE001  a check's failure is its result
        result = (False, f"{type(error).__name__}: {error}")
    results = accelerator.gather_for_metrics([result], use_gather_object=True)
    bad = {rank: text for rank, (good, text) in enumerate(results) if not good}
    detail = "; ".join(f"rank {rank}: {text}" for rank, text in bad.items()) or results[0][1]
    seconds = time.perf_counter() - begun
    accelerator.print(f"{'FAIL' if bad else 'ok  '}  {name:<14} {seconds:5.1f} s  {detail}")
    return not bad


def _talk(accelerator: Accelerator) -> str:
    """Gather, reduce and wait, and compare with what must come out."""
    import torch

    size, rank = accelerator.num_processes, accelerator.process_index
    mine = torch.tensor([rank], device=accelerator.device)
    _expect(accelerator.gather(mine).tolist() == list(range(size)), "gather lost a rank")
    mean = accelerator.reduce(mine.float(), reduction="mean")
    _expect(mean.item() == (size - 1) / 2, f"the mean of the ranks came out as {mean.item()}")
    accelerator.wait_for_everyone()
    return f"gather, reduce and barrier among {size}"


def _train(accelerator: Accelerator) -> str:
    """Fit a line for a few steps; the loss must fall, and all ranks must hold one model."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    inputs = torch.randn(_STEPS * 8 * accelerator.num_processes, 4)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 8))
    losses = []
    for features, targets in loader:
        loss = torch.nn.functional.mse_loss(model(features).float(), targets.float())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
    _expect(losses[-1] < losses[0] / 2, f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")
    weights = accelerator.gather(next(accelerator.unwrap_model(model).parameters()).detach())
    _expect(bool((weights == weights[0]).all()), "the ranks hold different models")
    return f"{len(losses)} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}"


def _save(accelerator: Accelerator) -> str:
    """Save the state, change it, load it, and find it as it was."""
    import torch

    model = accelerator.prepare(torch.nn.Linear(2, 2))
    weight = next(accelerator.unwrap_model(model).parameters())
    before = weight.detach().clone()
    with tempfile.TemporaryDirectory(prefix="anytrain-test-") as own:
        folder = accelerator.gather_for_metrics([own], use_gather_object=True)[0]
        accelerator.save_state(folder)
        with torch.no_grad():
            weight.zero_()
        accelerator.load_state(folder)
        accelerator.wait_for_everyone()
    _expect(torch.equal(weight, before), "the weights that came back are different")
    return "save_state and load_state"


def _expect(true: bool, otherwise: str) -> None:
    if not true:
        raise RuntimeError(otherwise)


_CHECKS: tuple[tuple[str, Callable[[Accelerator], str]], ...] = (
    ("processes talk", _talk),
    ("training", _train),
    ("checkpoints", _save),
)

if __name__ == "__main__":
    sys.exit(main())
