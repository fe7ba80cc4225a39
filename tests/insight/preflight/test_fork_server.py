"""A process that has loaded everything copies itself for each trace."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from anytrain.insight.preflight.targets import parse_target
from anytrain.insight.preflight.trace import Setting
from anytrain.insight.preflight.trace_process import ForkServer, trace_run

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="macOS traces in new processes")

SCRIPT = """
    import os
    import posix
    import sys
    # Below what keeps a script's files apart: this one is to be seen by the test.
    out = posix.open(sys.argv[1], posix.O_WRONLY | posix.O_CREAT | posix.O_APPEND)
    posix.write(out, f"{{'colorsys' in sys.modules}}\\n".encode())
    import colorsys
    import torch
    from torch import nn
    from anytrain import Trainer, TrainingArguments
    {more}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(50, 8), nn.Linear(8, 2)
            self.unused = nn.Linear(2, 2)

        def forward(self, input_ids, labels=None):
            logits = self.head(self.words(input_ids).mean(1))
            return {{"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}}

    def pad(rows):
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        ids = nn.utils.rnn.pad_sequence(ids, batch_first=True)
        return {{"input_ids": ids, "labels": torch.tensor([row["labels"] for row in rows])}}

    rows = [{{"input_ids": [1] * (3 + n % 7), "labels": n % 2}} for n in range(40)]
    args = TrainingArguments(sys.argv[1] + ".out", per_device_train_batch_size=4)
    Trainer(Net(), args, data_collator=pad, train_dataset=rows).train()
"""
TARGET = parse_target("mps:16GB")


@pytest.fixture(scope="module")
def warm() -> Iterator[ForkServer]:
    with ForkServer() as found:
        yield found


def written(folder: Path, more: str = "") -> list[str]:
    script = folder / "train.py"
    script.write_text(textwrap.dedent(SCRIPT).format(more=more))
    return [str(script), str(folder / "seen.txt")]


def test_a_copy_sees_what_a_new_process_sees_and_loads_nothing_twice(
    tmp_path: Path, warm: ForkServer
) -> None:
    command = written(tmp_path)
    afresh, *copies = (trace_run(TARGET, command, warm=each) for each in (None, warm, warm))
    seen = (tmp_path / "seen.txt").read_text().split()
    assert seen == ["False", "False", "True"]
    for copy in copies:
        assert (copy.ops, copy.held, copy.job) == (afresh.ops, afresh.held, afresh.job)


def test_a_copy_that_dies_takes_nobody_with_it(tmp_path: Path, warm: ForkServer) -> None:
    command = written(tmp_path, "import os; print('my last words', flush=True); os.abort()")
    died = trace_run(TARGET, command, warm=warm)
    assert "SIGABRT" in died.failure and "my last words" in died.failure
    assert died.failure_place is not None and died.failure_place.file == command[0]
    assert trace_run(TARGET, written(tmp_path), Setting(2), warm=warm).job.batch_size == 2


@pytest.mark.full
def test_modules_wait_for_a_script_that_sets_variables(tmp_path: Path) -> None:
    command = written(tmp_path, "import os; os.environ['HF_HOME'] = '/somewhere'")
    with ForkServer() as warm:
        for _ in range(2):
            assert not trace_run(TARGET, command, warm=warm).failure
    assert (tmp_path / "seen.txt").read_text().split() == ["False", "False"]


@pytest.mark.full
def test_where_nobody_can_make_copies_a_new_process_is_started(tmp_path: Path) -> None:
    with ForkServer(serves=False) as cold:
        assert not trace_run(TARGET, written(tmp_path), warm=cold).failure


def test_the_longest_batch_is_the_one_that_is_traced(tmp_path: Path, warm: ForkServer) -> None:
    trace = trace_run(TARGET, written(tmp_path), warm=warm)
    assert (trace.job.length, trace.job.num_samples, trace.job.batch_size) == (9, 40, 4)
    (found,) = {op.inputs[1].shape for op in trace.ops if op.name == "embedding"}
    assert found == (4, 9)


def test_lines_are_known_of_what_is_no_operation(tmp_path: Path, warm: ForkServer) -> None:
    command = written(tmp_path)
    job = trace_run(TARGET, command, warm=warm).job
    lines = Path(command[0]).read_text().splitlines()
    for place, text in (
        (job.unused_place, "self.unused ="),
        (job.loader_place, ".train()"),
        (job.output_place, "Trainer(Net()"),
    ):
        assert place is not None and place.file == command[0]
        assert text in lines[place.line - 1]
