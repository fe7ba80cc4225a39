"""What is foretold without a GPU is what one H200 held when `anytrain bench` trained there.

The measured peaks are those of benchmarks/results, of torch 2.11; each script is traced anew.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from anytrain.insight.preflight.memory import forecast
from anytrain.insight.preflight.targets import parse_target
from anytrain.insight.preflight.trace_process import trace_run

pytestmark = pytest.mark.full

SCRIPT = """
    import sys
    import torch
    import transformers as hf
    from anytrain import Trainer, TrainingArguments

    name, folder = sys.argv[1:]
    if name == "gpt2-small-1024":
        size, ids = 8, torch.arange(1024)
        model = hf.GPT2LMHeadModel(hf.GPT2Config())
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    else:
        size, ids = 32, torch.arange(512)
        wide = dict(hidden_size=1024, num_attention_heads=16, intermediate_size=4096)
        config = hf.BertConfig(num_hidden_layers=24, **wide)
        model = hf.BertForSequenceClassification(config)
        row = {"input_ids": ids, "attention_mask": (ids < 400).long(), "labels": 0}
    args = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=size, max_steps=4, precision="bf16"
    )
    Trainer(model=model, args=args, train_dataset=[row] * 4 * size).train()
"""


@pytest.mark.parametrize(
    ("name", "measured_bytes"),
    [("gpt2-small-1024", 13_333_482_496), ("bert-large-512", 22_562_764_288)],
)
def test_the_peak_is_the_one_that_was_measured(
    name: str, measured_bytes: int, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    target = parse_target("cuda:h200")
    trace = trace_run(target, [str(script), name, str(tmp_path / "out")])
    assert not trace.failure
    told = forecast(trace, target, is_recorded=True)
    assert told.peak_bytes == pytest.approx(measured_bytes, rel=0.01)
