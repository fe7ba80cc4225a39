"""Say which samples were being loaded when loading failed, and how a loading worker died."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from multiprocessing import connection
from typing import Any

from torch.utils.data import default_collate

from anytrain.core import errors
from anytrain.core.errors import AnytrainError, WorkerLost, add_to_message
from anytrain.engine.data.collate import obstacle
from anytrain.engine.data.seeded import SeededCollate, SeededDataset, listed

_RAISED_THERE = re.compile(
    r"anytrain\.core\.errors\.(\w+): (.+?)\n  why: (.+?)\n  fix: (.+?)\s*\Z", re.DOTALL
)
_BROKEN = (ConnectionError, EOFError, FileNotFoundError)
"""What reading from a worker raises that has just died."""
_GRACE_S = 2.0

SamplesOf = Callable[[int], list[Any] | None]


def told(
    error: Exception, dataset: Any, batches: Iterator[Any], samples_of: SamplesOf, newest: int
) -> Exception:
    """Return the error that says what was being loaded; the same one where its message can.

    `newest` is the number of the batch whose samples were dealt last.
    """
    workers = getattr(batches, "_workers", None)
    if workers is None:
        samples = samples_of(newest)
        if samples is not None:
            _name(error, dataset, samples, _obstacle(dataset, batches, samples))
        return error
    if not str(error).startswith("Caught "):  # so begins what a worker has raised
        return _lost(error, batches, samples_of) or error
    samples = samples_of(batches._rcvd_idx - 1)  # type: ignore[attr-defined]  # torch's iterator
    known = _RAISED_THERE.search(str(error))
    kind = None if known is None else getattr(errors, known[1], None)
    if known is not None and isinstance(kind, type) and issubclass(kind, AnytrainError):
        error = kind(known[2], why=known[3], fix=known[4])
    if samples is not None:
        column = (
            "" if "Raised by the data set" in str(error) else _obstacle(dataset, batches, samples)
        )
        add_to_message(error, f"{column}The batch is made of {listed(samples)}.")
    return error


def told_column(error: Exception, batches: Iterator[Any]) -> Exception:
    """Return an error of torch's collating that says which column it was, where samples are not
    remembered: they are still in the frame that it was raised in.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not default_collate.__code__:
        trace = trace.tb_next
    found = None if trace is None else obstacle(trace.tb_frame.f_locals["batch"])
    if found is not None:
        add_to_message(error, found)
    return error


def _obstacle(dataset: Any, batches: Any, samples: list[Any]) -> str:
    """Say which column torch's own collating could not stack; "" where another collator failed."""
    collator = getattr(batches, "_collate_fn", None)
    while isinstance(collator, SeededCollate):
        collator = collator.collate
    if collator is not default_collate:
        return ""
    plain = dataset.dataset if isinstance(dataset, SeededDataset) else dataset
    try:
        found = obstacle([plain[index] for index in samples])
    except Exception:  # noqa: BLE001  the data set's trouble, which has its own words
        return ""
    return "" if found is None else f"{found} "


def _name(error: Exception, dataset: Any, samples: list[Any], column: str) -> None:
    """Name the sample that the data set raises this for; else those of the batch."""
    if "Raised by the data set, for sample" in str(error):
        return
    if not isinstance(dataset, SeededDataset):  # that one has named it, if it was the data set
        for index in samples:
            try:
                dataset[index]
            except type(error):
                add_to_message(error, f"Raised by the data set, for sample {index!r}.")
                return
            except Exception:  # noqa: BLE001, S112  another trouble than the one to explain
                continue
    add_to_message(error, f"{column}The batch is made of {listed(samples)}.")


def _lost(error: Exception, batches: Any, samples_of: SamplesOf) -> WorkerLost | None:
    """Return the error of a worker that died; None where all of them are alive."""
    workers = batches._workers
    ended = connection.wait([w.sentinel for w in workers], _GRACE_S * isinstance(error, _BROKEN))
    for worker in workers:
        if worker.sentinel in ended:
            worker.join(_GRACE_S)  # it closes its files a moment before it is gone
    number = next((n for n, each in enumerate(workers) if each.exitcode), None)
    if number is None:
        return None
    worker, at_work = workers[number], ""
    tasks = [task for task, held in batches._task_info.items() if held == (number,)]
    # What it had loaded and not yet handed over is lost with it.
    samples = [each for task in sorted(tasks) for each in samples_of(task) or ()]
    if samples:
        at_work = f" while it loaded {listed(samples)}"
    return WorkerLost(
        f"DataLoader worker (pid {worker.pid}) {_ending(worker.exitcode)}{at_work}.",
        why=_WHY.get(-worker.exitcode, _ANY),
        fix="load in this process to see the line (dataloader_num_workers=0, or num_workers=0 of "
        "your DataLoader).",
    )


def _ending(code: int) -> str:
    if code > 0:
        return f"exited unexpectedly with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name} ({signal.strsignal(-code)})"
    except ValueError:
        return f"was ended by signal {-code}"


_ANY = "a worker that ends like this raises no error that could be shown."
_WHY = {
    int(signal.SIGKILL): "somebody sends this signal, or the system does when memory runs out.",
    int(signal.SIGSEGV): "native code failed, in a library that the data set uses.",
    int(signal.SIGBUS): "shared memory (/dev/shm) may have run out.",
}
