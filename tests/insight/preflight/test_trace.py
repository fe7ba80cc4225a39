"""Whole scripts, each in a process of its own, on devices that are not here."""

from __future__ import annotations

import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from anytrain.insight.preflight.targets import parse_target
from anytrain.insight.preflight.trace import Trace
from anytrain.insight.preflight.trace_process import trace_run

TRAINER = """
    import sys
    import torch
    from torch import nn
    from anytrain import Trainer, TrainingArguments

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(16, 32)
            self.unused = nn.Linear(2, 2)
            self.head = nn.Linear(32, 2)

        def forward(self, x, labels=None):
            hidden = torch.relu(self.first(x))
            scale = hidden.max()
            if scale > 0:
                scale.item()
            logits = self.head(hidden)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    rows = [{"x": torch.randn(16), "labels": n % 2} for n in range(64)]
    args = TrainingArguments(output_dir=sys.argv[1], save_strategy="steps", save_steps=1)
    trainer = Trainer(Net(), args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    open(f"{sys.argv[1]}.txt", "w")
"""
LOOP = """
    import sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader
    from anytrain import Accelerator

    accelerator = Accelerator(
        mixed_precision="bf16", gradient_accumulation_steps=2, project_dir=sys.argv[1]
    )
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.Sequential(nn.Embedding(5000, 64), layer, nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    rows = [{"ids": torch.randint(0, 5000, (12,)), "labels": n % 2} for n in range(64)]
    rows.append({"ids": rows[0]["ids"], "labels": 0, "why": lambda: None})
    train = DataLoader(rows[:64], 8, True, None, None, 2)
    model, optimizer, train = accelerator.prepare(model, optimizer, train)
    evaluation = accelerator.prepare(DataLoader(rows[:64], batch_size=16))
    accelerator.load_state("an earlier run's folder")
    for epoch in range(3):
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch["ids"]).mean(1), batch["labels"])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            accelerator.save_state(f"{sys.argv[1]}/state")
            accelerator.log({"loss": 1.0}, step=1)
        if accelerator.is_main_process:
            accelerator.save_model(model, f"{sys.argv[1]}/model")
        model.eval()
        for batch in evaluation:
            with torch.no_grad():
                found = model(batch["ids"]).mean(1).argmax(-1)
            print(accelerator.gather_for_metrics(found).tolist())
    torch.save(model.state_dict(), f"{sys.argv[1]}.pt")
"""
FAILS = """
    import torch

    x = torch.ones(3, device="mps")
    x + torch.ones(3)
"""
ABORTS = """
    import os

    print("my last words", flush=True)
    os.abort()
"""
WRONG_LABEL = TRAINER.replace("n % 2", "7").replace("if scale > 0:", "if not hidden.ndim:")
OWN = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader
    from anytrain import Accelerator

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(50, 4), nn.Linear(4, 2)

        def forward(self, ids):
            return self.head(self.words(ids).mean(1))

    accelerator = Accelerator()
    model = Net()
    rows = [{"ids": torch.arange(6), "labels": 1} for n in range(64)]
    parts = (model, torch.optim.AdamW(model.parameters()), DataLoader(rows, 8))
    model, optimizer, loader = accelerator.prepare(*parts)
    for batch in loader:
        labels = batch.pop("labels")
        accelerator.backward(nn.functional.cross_entropy(model(**batch), labels))
        optimizer.step()
        optimizer.zero_grad()
"""
OWN_WRONG = {
    "own": OWN,
    "own label": OWN.replace('"labels": 1', '"labels": 7'),
    "own id": OWN.replace("torch.arange(6)", "torch.arange(46, 52)"),
    "own key": OWN.replace('"ids"', '"words"'),
    "own shape": OWN.replace('"labels": 1', '"labels": torch.ones(3).long()'),
}
SCRIPTS = {"trainer": TRAINER, "label": WRONG_LABEL, "loop": LOOP, "fails": FAILS}
SCRIPTS |= {"aborts": ABORTS, **OWN_WRONG}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Trace, Path]]:
    folders = {name: tmp_path_factory.mktemp(name) for name in SCRIPTS}

    def run(name: str) -> Trace:
        script = folders[name] / "train.py"
        script.write_text(textwrap.dedent(SCRIPTS[name]))
        target = parse_target("cuda:24GB" if name == "loop" else "mps:16GB")
        return trace_run(target, [str(script), str(folders[name] / "out")])

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(SCRIPTS, pool.map(run, SCRIPTS), strict=True))
    return {name: (trace, folders[name]) for name, trace in found.items()}


def line_of(script: str, text: str) -> int:
    lines = textwrap.dedent(script).splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_a_trainers_script_is_seen_from_its_first_step_to_its_evaluation(traces):
    trace, _ = traces["trainer"]
    assert trace.failure == ""
    assert {op.phase for op in trace.ops} >= {"data", "forward", "backward", "clip", "optimizer"}
    assert any(op.phase == "evaluate" for op in trace.ops)
    assert trace.parts["updates"] == 2


def test_a_trainers_host_read_is_at_the_users_line(traces):
    trace, folder = traces["trainer"]
    read = [op for op in trace.ops if op.host_read and not op.place.is_ours]
    found = next(op for op in read if ".item()" in op.place.text)
    assert found.place.file == str(folder / "train.py")
    assert found.place.line == line_of(TRAINER, ".item()")
    assert (found.host_read, found.phase, found.calls) == ("item", "forward", 1)


def test_a_watched_trainer_writes_nothing(traces):
    trace, folder = traces["trainer"]
    assert [path.name for path in folder.iterdir()] == ["train.py"]
    assert trace.job.output_dir == str(folder / "out")


def test_the_job_knows_its_parameters_batch_and_what_is_unused(traces):
    job = traces["trainer"][0].job
    assert job.num_parameters == job.num_trainable == 16 * 32 + 32 + 6 + 66
    assert job.unused_parameters == ("unused.weight", "unused.bias")
    assert (job.batch_size, job.optimizer, job.precision) == (8, "AdamW", "no")


def test_an_own_loop_is_seen_with_its_accumulation_and_evaluation(traces):
    trace, folder = traces["loop"]
    assert trace.failure == ""
    assert (trace.job.precision, trace.job.accumulation) == ("bf16", 2)
    assert (trace.job.loader_workers, trace.job.batch_size) == (2, 8)
    embeddings = [op for op in trace.ops if op.name == "embedding" and op.phase == "forward"]
    assert sum(op.calls for op in embeddings) == 2
    assert any(op.phase == "evaluate" for op in trace.ops)
    assert [path.name for path in folder.iterdir()] == ["train.py"]


def test_a_branch_that_hangs_on_a_value_is_named(traces):
    trace, folder = traces["trainer"]
    line = line_of(TRAINER, "if scale")
    said = f"Only one branch of `if scale > 0:` at {folder / 'train.py'}:{line} was followed."
    assert trace.notes == (said,)


def test_autocast_narrows_products_and_not_sums_on_a_claimed_device(traces):
    trace, _ = traces["loop"]
    products = [op for op in trace.ops if op.name == "addmm" and op.phase == "forward"]
    assert products and all(op.outputs[0].dtype == "bfloat16" for op in products)
    norms = [op for op in trace.ops if op.name == "native_layer_norm" and op.phase == "forward"]
    assert norms and all(op.outputs[0].dtype == "float32" for op in norms)


def test_attention_on_cuda_is_one_kernel_and_the_update_fused(traces):
    names = {op.name for op in traces["loop"][0].ops}
    assert "_scaled_dot_product_flash_attention" in names
    assert any(name.startswith("_fused_adamw_") for name in names)
    assert "native_dropout" in names


def test_a_script_that_fails_says_where_and_why(traces):
    trace, folder = traces["fails"]
    assert "same device" in trace.failure
    assert trace.failure_place is not None
    assert trace.failure_place.file == str(folder / "train.py")
    assert trace.failure_place.line == line_of(FAILS, "x + torch.ones")


def test_a_label_beyond_the_classes_is_named_though_no_batch_has_values(traces):
    trace, _ = traces["label"]
    assert "Cannot compute step 1: 'labels' of sample" in trace.failure
    assert "is 7, and the model has 2 classes (0 to 1)" in trace.failure


def test_a_script_that_ends_the_process_is_a_failure_that_is_explained(traces):
    trace, folder = traces["aborts"]
    assert "SIGABRT" in trace.failure
    assert "my last words" in trace.failure
    assert trace.failure_place is not None
    assert trace.failure_place.file == str(folder / "train.py")
    assert trace.failure_place.line == line_of(ABORTS, "os.abort()")
    assert trace.ops == ()


def test_values_outside_their_tables_are_named_in_a_loop_of_ones_own(traces):
    assert traces["own"][0].failure == ""
    label, wrong_id = (traces[name][0].failure for name in ("own label", "own id"))
    assert "'labels' of row 0 of batch 0 (and of 7 more in its batch) is 7" in label
    assert "'ids' of row 0 of batch 0 (and of 7 more in its batch) holds 50, and words" in wrong_id


def test_a_batch_that_does_not_suit_the_model_is_told_in_a_loop_of_ones_own(traces):
    key, shape = (traces[name][0].failure for name in ("own key", "own shape"))
    assert "Net.forward does not take 'words', which the batch has." in key
    assert "the batch has words; the model takes ids." in key
    assert "labels int64 (8, 3) (step 1)" in shape
    assert "labels of shape (batch,)" in shape
