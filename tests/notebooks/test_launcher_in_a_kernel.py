"""`notebook_launcher` in a real kernel: the guide's cells, errors, interrupts, nothing left."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")

from jupyter_kernel import Kernel
from written_runs import write_run

GLOBALS = """
import os, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import BertConfig, BertForSequenceClassification
from anytrain import Accelerator, notebook_launcher

hyperparameters = {"learning_rate": 1e-3, "num_epochs": 2, "batch_size": 4, "seed": 42}

def make_model():
    torch.manual_seed(hyperparameters["seed"])
    return BertForSequenceClassification(BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))

def create_dataloaders(train_batch_size, eval_batch_size):
    seeded = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(1, 40, (8,), generator=seeded), "labels": i % 2}
            for i in range(32)]
    return DataLoader(rows, shuffle=True, batch_size=train_batch_size), DataLoader(
        rows, batch_size=eval_batch_size)
"""
MODEL = "model = make_model()"
TRAINING = """
def training_function(model):
    accelerator = Accelerator(cpu=True)
    train_dataloader, eval_dataloader = create_dataloaders(hyperparameters["batch_size"], 8)
    if model is None:
        model = make_model()
    torch.manual_seed(hyperparameters["seed"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=hyperparameters["learning_rate"])
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader)
    steps = hyperparameters["num_epochs"] * len(train_dataloader)
    progress_bar = tqdm(range(steps), disable=not accelerator.is_main_process)
    for epoch in range(hyperparameters["num_epochs"]):
        model.train()
        for batch in train_dataloader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress_bar.update(1)
        model.eval()
        seen = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            seen += len(accelerator.gather_for_metrics(predictions))
        accelerator.print(f"epoch {epoch}: {seen} évaluated by {accelerator.num_processes}")
    return accelerator.unwrap_model(model).state_dict()
"""

LAUNCH = "passed_in = notebook_launcher(training_function, (model,), num_processes=2)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernel")


@pytest.fixture(scope="module")
def kernel(folder):
    found = Kernel({"TMPDIR": str(folder), "ANYTRAIN_DEVICE": "cpu"})
    assert found.run(GLOBALS).error is None
    yield found
    found.close()


def pids(folder: Path, count: int = 2) -> list[int]:
    """Return the children's processes, once all of them have begun the call."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        found = [path.read_text() for path in folder.glob("pid-*")]
        if len(found) == count and all(found):
            for path in folder.glob("pid-*"):
                path.unlink()
            return [int(text) for text in found]
        time.sleep(0.05)
    raise AssertionError("the children did not begin")


def wait_gone(processes: list[int]) -> None:
    begun = time.monotonic()
    while any(map(psutil.pid_exists, processes)):
        assert time.monotonic() - begun < 240, "children outlive the launch"
        time.sleep(0.05)


def left_behind(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("anytrain-*")]


def test_the_guides_cells_train_with_a_bar_and_bring_the_value_back(kernel, folder):
    for cell in (MODEL, TRAINING):
        assert kernel.run(cell).error is None
    shown = kernel.run(LAUNCH)
    assert shown.error is None, shown.traceback
    for epoch in (0, 1):
        assert f"epoch {epoch}: 32 évaluated by 2\n" in shown.stdout
    assert "100%" in shown.line("stderr")
    assert "8/8" in shown.line("stderr")
    assert len(re.findall("it/s|s/it", shown.line("stderr"))) == 1  # one bar, written over in place
    assert kernel.run("print(len(passed_in) == len(model.state_dict()))").stdout == "True\n"
    assert left_behind(folder) == []


@pytest.mark.full
def test_a_model_handed_over_trains_to_the_weights_of_one_made_inside(kernel):
    cells = (MODEL, TRAINING, LAUNCH, "inside" + LAUNCH.removeprefix("passed_in"))
    for cell in (*cells[:3], cells[3].replace("(model,)", "(None,)")):
        shown = kernel.run(cell)
        assert shown.error is None, shown.traceback
    compared = kernel.run(
        "fresh = make_model().state_dict()\n"
        "print(all(torch.equal(passed_in[k], inside[k]) for k in inside),\n"
        "      any(not torch.equal(fresh[k], inside[k]) for k in inside),\n"
        "      all(torch.equal(fresh[k], v) for k, v in model.state_dict().items()))"
    )
    assert compared.stdout == "True True True\n"


def test_rank_ones_error_shows_its_own_lines_and_keeps_its_class(kernel):
    kernel.run(
        "class NoSuchColumn(Exception):\n"
        "    pass\n"
        "def find(name):\n"
        "    raise NoSuchColumn(name)\n"
        "def broken():\n"
        "    if os.environ['RANK'] == '1':\n"
        "        find('label')\n"
        "    time.sleep(600)\n"
    )
    begun = time.monotonic()
    shown = kernel.run("notebook_launcher(broken, num_processes=2)")
    assert time.monotonic() - begun < 300
    assert shown.error == "NoSuchColumn"
    assert "Cell In[" in shown.traceback
    assert "----> 7         find('label')" in shown.traceback
    assert "----> 4     raise NoSuchColumn(name)" in shown.traceback
    assert "raised by rank 1 of 2" in shown.traceback
    caught = kernel.run(
        "try:\n"
        "    notebook_launcher(broken, num_processes=2)\n"
        "except NoSuchColumn as error:\n"
        "    print('caught', error)\n"
    )
    assert caught.stdout == "caught label\n"


def test_an_interrupt_ends_the_children_at_once_and_leaves_nothing(kernel, folder):
    kernel.run(
        f"folder = {str(folder)!r}\n"
        "def stay():\n"
        "    Path(folder, 'pid-' + os.environ['RANK']).write_text(str(os.getpid()))\n"
        "    time.sleep(1000)\n"
    )
    shared, begun = set(os.listdir("/dev/shm")), time.monotonic()
    request = kernel.begin("notebook_launcher(stay, num_processes=2)")
    children = pids(folder)
    kernel.manager.interrupt_kernel()
    wait_gone(children)
    shown = kernel.finish(request)
    assert shown.error == "KeyboardInterrupt"
    assert "Traceback" not in shown.stderr  # the children leave without a word
    assert left_behind(folder) == []
    while new := set(os.listdir("/dev/shm")) - shared:  # other tests use it too, for a moment
        assert time.monotonic() - begun < 240, new
        time.sleep(0.1)
    after = kernel.run("print(notebook_launcher(lambda: 'well', num_processes=2))")
    assert after.stdout == "well\n"


SCRIPT = """
import os, sys
import beside
from anytrain import notebook_launcher

class Result:
    def __init__(self, *values):
        self.values = values

def train(number):
    return Result(beside.scaled(number), sys.argv[1:], os.environ["LATER"])

if __name__ == "__main__":
    found = notebook_launcher(train, (7,), num_processes=2)
    print(type(found) is Result, found.values)
"""


def test_a_script_that_a_cell_runs_launches_its_own_functions(kernel, folder):
    home = folder / "elsewhere"
    home.mkdir()
    (home / "beside.py").write_text("def scaled(number):\n    return 3 * number\n")
    (home / "script.py").write_text(SCRIPT)
    kernel.run("os.environ['LATER'] = 'set'")
    shown = kernel.run(f"%run {home / 'script.py'} --lr 1")
    assert shown.error is None, shown.traceback
    assert shown.stdout == "True (21, ['--lr', '1'], 'set')\n"


def test_why_and_report_are_shown_and_print_nothing(kernel, folder):
    write_run(folder / "read")
    for call, kind in (("why", "<table>"), ("report", "<iframe ")):
        shown = kernel.run(f"import anytrain\nanytrain.{call}({str(folder / 'read')!r})")
        assert (shown.stdout, shown.stderr, shown.error) == ("", "", None)
        (page,) = shown.pages
        assert kind in page["text/html"]
        assert str(folder / "read") in page["text/plain"]


@pytest.mark.full
def test_a_trainers_bar_is_a_page_that_changes_in_place(kernel, folder):
    shown = kernel.run(
        "from anytrain import Trainer, TrainingArguments\n"
        "def with_trainer():\n"
        "    rows = [{'input_ids': torch.arange(1, 9), 'labels': i % 2} for i in range(32)]\n"
        f"    args = TrainingArguments({str(folder / 'run')!r}, max_steps=4, logging_steps=2,\n"
        "        report_to='none', save_strategy='no', per_device_train_batch_size=4)\n"
        "    return Trainer(make_model(), args, train_dataset=rows).train().global_step\n"
        "print(notebook_launcher(with_trainer, num_processes=2))\n"
    )
    assert shown.error is None, shown.traceback
    assert len(shown.pages) == 1
    assert "<progress" in shown.pages[0]["text/html"]
    assert "Training done" in shown.updates[-1]["text/html"]
    assert "<polyline" in shown.updates[-1]["text/html"]
    assert shown.stdout == "4\n"


def test_a_fork_is_made_where_it_is_asked_for(kernel):
    kernel.run("word = 'inherited'\nlock = __import__('threading').Lock()")
    shown = kernel.run(
        "torch.set_num_threads(1)\n"
        "def work():\n"
        "    ones = torch.ones(300, 300)\n"
        "    print('rank', os.environ['RANK'], (ones @ ones)[0, 0])\n"
        "    return word, lock.locked(), torch.ones(2)\n"
        "print(notebook_launcher(work, num_processes=2, start_method='fork', return_all=True))\n"
    )
    assert shown.error is None, shown.traceback
    assert "rank 0 tensor(300.)\n" in shown.stdout
    assert "rank 1 tensor(300.)\n" in shown.stdout
    assert shown.stdout.count("('inherited', False, tensor([1., 1.]))") == 2
    failed = kernel.run("notebook_launcher(broken, num_processes=2, start_method='fork')")
    assert failed.error == "NoSuchColumn"
    assert "----> 4     raise NoSuchColumn(name)" in failed.traceback


def test_children_of_a_killed_kernel_end_by_themselves(tmp_path):
    kernel = Kernel({"TMPDIR": str(tmp_path), "ANYTRAIN_DEVICE": "cpu"})
    try:
        kernel.begin(
            "import os, time\n"
            "from pathlib import Path\n"
            "from anytrain import notebook_launcher\n"
            "def stay():\n"
            f"    path = Path({str(tmp_path)!r}, 'pid-' + os.environ['RANK'])\n"
            "    path.write_text(str(os.getpid()))\n"
            "    time.sleep(1000)\n"
            "notebook_launcher(stay, num_processes=2)\n"
        )
        children = pids(tmp_path)
        os.kill(kernel.pid, signal.SIGKILL)
        wait_gone(children)
        assert left_behind(tmp_path) == []
    finally:
        kernel.close()
