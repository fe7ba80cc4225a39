"""What every test gets: a world put back as it was, and honest skips."""

from __future__ import annotations

import atexit
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator

import pytest

import needs

# Children inherit it too: two gloo processes with two threads each would fight over two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# `nohup make test &` starts with signals ignored; children of a process that ignores one do so too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)
# What a user's own runs have kept must not answer for a test, nor a test's for them.
_CACHE = tempfile.mkdtemp(prefix="anytrain-cache-")
os.environ["XDG_CACHE_HOME"] = _CACHE
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)


@pytest.fixture(autouse=True)
def _environment_put_back() -> Iterator[None]:
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def _random_state_put_back() -> Iterator[None]:
    import numpy
    import torch

    python, legacy, cpu = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(python)
    numpy.random.set_state(legacy)
    torch.set_rng_state(cpu)


@pytest.fixture(autouse=True)
def _transformers_as_loud_as_before() -> Iterator[None]:
    # Its TrainingArguments' own defaults follow how much it is told to say.
    before = sys.modules.get("transformers.utils.logging")
    level = None if before is None else before.get_verbosity()
    yield
    logs = sys.modules.get("transformers.utils.logging")
    if logs is not None:
        logs.set_verbosity(logs.WARNING if level is None else level)
        logs.enable_progress_bar()


@pytest.fixture(autouse=True)
def _no_run_left_behind() -> Iterator[None]:
    yield
    current = sys.modules.get("anytrain.engine.assemble.current")
    if current is not None:
        current.clear()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture
def needs_tool() -> Callable[[str], str]:
    """Skip unless the named command or module is here; return where a command lies."""
    return needs.tool


# Workers that end together waste nothing: folders whose tests start many processes come first.
_LONG = (
    "packaging", "notebooks", "docs", "browser", "crash", "cli", "laws", "equivalence", "recipes",
    "machine", "compat", "insight", "doors",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        found = [name for name in _LONG if name in item.nodeid.split("/")[:2]]
        return _LONG.index(found[0]) if found else len(_LONG)

    items.sort(key=place)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device here: torch.cuda.is_available() is False")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    needs.refuse_absent_tool(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Iterator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    needs.refuse_absent_tool(report)
    return report
