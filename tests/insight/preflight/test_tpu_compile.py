"""A training step compiled for TPUs that are not here, by their own compiler."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from anytrain.insight.preflight.targets import CHIPS, parse_target
from anytrain.insight.preflight.tpu import environment, start
from anytrain.insight.preflight.tpu.compile import Compiled, Compiler, NotCompiled, _told
from anytrain.insight.preflight.tpu.libtpu import CapturedStep, CompiledGraph, Graph, described
from launching import child_environment, run_command
from tiny_bert import OVERRIDES, model_folder, pairs, write_rows

_WIDE = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from anytrain import Accelerator

width, rows = map(int, sys.argv[1:])
accelerator = Accelerator(gradient_accumulation_steps={steps})
model = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 64))
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.zeros(4 * rows, 64)), batch_size=rows)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (x,) in loader:
    with accelerator.accumulate(model):
        loss = (model(x) ** 2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if loss.item() > 1e9 or not torch.isfinite(loss):
        raise RuntimeError("a loss that nobody has computed was believed")
torch.save(model.state_dict(), "weights.pt")
"""
_BERT = """
import torch
from transformers import BertConfig, BertForSequenceClassification
from anytrain import Trainer, TrainingArguments

config = BertConfig(
    vocab_size=512, hidden_size=64, num_hidden_layers=1, num_attention_heads=2,
    intermediate_size=128, max_position_embeddings=32,
)
row = {"input_ids": torch.arange(16), "labels": torch.tensor(1)}
args = TrainingArguments("out", per_device_train_batch_size=8, max_steps=4, bf16=True)
Trainer(BertForSequenceClassification(config), args, train_dataset=[row] * 32).train()
"""
_PARAMETERS = 93_442  # of that BERT
_SHORT = "E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for "
_SHORT += "HLO temporaries (24.14G) exceeds available HBM (15.75G)."
_LONG = "Ran out of memory in memory space hbm. Used 24.14G of 15.75G hbm. Exceeded by 8.39G."

CACHE = "ANYTRAIN_TEST_TPU_CACHE"
"""Names the cache that holds the compiler: the tests' own is empty."""


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the variables that lead to the compiler; skip where there is none."""
    cache = os.environ.get(CACHE)
    if cache is None:
        pytest.skip(f"{CACHE} is not set; `make test-xla` makes the compiler's environment")
    monkeypatch.setenv("ANYTRAIN_CACHE", cache)
    return {"ANYTRAIN_CACHE": cache}


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(text)
        return str(path)

    return write


# -- without the compiler -----------------------------------------------------------------------


def test_a_compiler_that_is_not_installed_is_told_with_the_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYTRAIN_CACHE", str(tmp_path))
    found = Compiler(["train.py"]).compile(parse_target("tpu:v5e"))
    assert isinstance(found, NotCompiled)
    assert found.fits is None
    assert "an estimate" in str(found)
    if not environment.trouble():
        assert environment.COMMAND in found.fix


def test_a_step_of_a_running_program_is_sent_to_the_command() -> None:
    found = Compiler([]).compile(parse_target("tpu:v5e"))
    assert isinstance(found, NotCompiled)
    assert "anytrain preflight --target tpu:v5e" in found.fix


@pytest.mark.parametrize("words", [_SHORT, _LONG])
def test_a_refusal_for_memory_is_an_answer(words: str) -> None:
    built = CompiledGraph(0, 0, 0, 0, 0, 1.0, failure=f"RESOURCE_EXHAUSTED: {words}")
    found = _told(parse_target("tpu:v5e"), CapturedStep((), batch_size=8), [built])
    assert isinstance(found, Compiled)
    assert found.fits is False
    assert (found.needed_bytes, found.usable_bytes) == (int(24.14 * 2**30), int(15.75 * 2**30))
    assert "24.14 GiB of 15.75 GiB" in found.findings()[0].what


def test_every_chip_has_a_limit_and_a_smaller_one_can_be_asked_for() -> None:
    built, graph = CompiledGraph(2**30, 0, 0, 0, 0, 1.0), Graph(b"", (), (), 2**30)
    for chip in CHIPS["tpu"]:
        found = _told(parse_target(f"tpu:{chip}"), CapturedStep((graph,)), [built])
        assert isinstance(found, Compiled)
        assert found.fits
        assert found.needed_bytes == 2 * 2**30  # with what lies beside it
        less = _told(parse_target(f"tpu:{chip}:1GB"), CapturedStep((graph,)), [built])
        assert less.fits is False


def test_another_refusal_is_none() -> None:
    built = CompiledGraph(0, 0, 0, 0, 0, 1.0, failure="INVALID_ARGUMENT: no such topology")
    found = _told(parse_target("tpu:v5e"), CapturedStep(()), [built])
    assert isinstance(found, NotCompiled)
    assert "no such topology" in found.why


def test_topologies_have_the_compilers_names() -> None:
    assert described("v6e", "2x4") == ("v6e:2x4", {})
    assert described("v4", "2x2") == ("v4:2x2x1", {"chip_config_name": "megacore"})
    assert described("v5p", "")[0] == "v5p:1x1x1"


def test_what_an_environment_lacks_is_borrowed_unless_it_is_tied_to_torch(tmp_path: Path) -> None:
    for name in ("lent_by_another", "torchvision"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("VALUE = 3")
        (tmp_path / f"{name}-1.5.dist-info").mkdir()
        (tmp_path / f"{name}-1.5.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 1.5")
    borrowed = start.BorrowedModules([str(tmp_path)])
    assert borrowed.find_spec("lent_by_another") is not None
    assert borrowed.find_spec("torchvision") is None
    names = [
        [found.version for found in borrowed.find_distributions(_named(name))]
        for name in ("lent-by-another", "torchvision")
    ]
    assert names == [["1.5"], []]


def _named(name: str) -> metadata.DistributionFinder.Context:
    return metadata.DistributionFinder.Context(name=name)


# -- with the compiler --------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.usefixtures("compiler")
def test_a_small_bert_is_compiled_for_three_chips_and_holds_each_weight_three_times(
    script: Callable[..., str],
) -> None:
    compiler = Compiler([script(_BERT)])
    for chip in ("v5e", "v5p", "v6e"):
        found = compiler.compile(parse_target(f"tpu:{chip}"))
        assert isinstance(found, Compiled), str(found)
        assert found.fits
        assert (found.precision, found.batch_size, found.num_graphs) == ("bf16", 8, 1)
        # Weights and AdamW's two moments; a chip pads them to its tiles.
        least = 3 * 4 * _PARAMETERS
        assert least <= found.argument_bytes < 1.5 * least
        assert found.result_bytes < 2**14  # the rest takes its argument's place
        assert found.scratch_bytes > 0
        assert found.code_bytes > 0
    assert not (Path.cwd() / "out").exists()


@pytest.mark.full
def test_a_step_that_is_too_large_fails_the_command_and_fits_a_larger_chip(
    script: Callable[..., str], compiler: dict[str, str]
) -> None:
    path = script(_WIDE.format(steps=1))
    asked = [sys.executable, "-m", "anytrain", "preflight", "--quick", "--json", "told.json"]
    asked += ["--fail-on", "error", "--target", "tpu:v5e", "--target", "tpu:v5p", path]
    ran = run_command(
        [*asked, "65536", "65536"], env=child_environment(compiler), timeout=280, check=False
    )
    assert ran.returncode == 1, ran.stderr
    small, large = json.loads(Path("told.json").read_text())["targets"]
    assert small["verdict"] == "fails, does not fit"
    assert large["verdict"] == "runs, fits"
    assert 15 * 2**30 < small["compiled"]["usable_bytes"] < 16 * 2**30
    assert small["compiled"]["needed_bytes"] == pytest.approx(
        large["compiled"]["needed_bytes"], rel=0.02
    )
    assert "Compiled by libtpu for a v5p" in ran.stdout
    assert not Path("weights.pt").exists()


@pytest.mark.full
@pytest.mark.usefixtures("compiler")
def test_four_chips_hold_what_one_holds_and_meet_once_a_step(script: Callable[..., str]) -> None:
    compiler = Compiler([script(_WIDE.format(steps=1)), "256", "512"])
    one, four = (compiler.compile(parse_target(f"tpu:{name}")) for name in ("v5e", "v5e:2x2"))
    assert isinstance(one, Compiled)
    assert isinstance(four, Compiled)
    assert (one.num_chips, four.num_chips) == (1, 4)
    assert four.argument_bytes == one.argument_bytes
    assert (one.num_exchanges, four.num_exchanges) == (0, 1)


@pytest.mark.full
@pytest.mark.usefixtures("compiler")
def test_a_step_of_several_graphs_counts_what_lies_beside_each(script: Callable[..., str]) -> None:
    found = Compiler([script(_WIDE.format(steps=2)), "256", "512"]).compile(parse_target("tpu:v4"))
    assert isinstance(found, Compiled), str(found)
    assert found.num_graphs == 2
    weights = 4 * (2 * 64 * 256)
    assert found.argument_bytes + found.beside_bytes >= 3 * weights


@pytest.mark.full
@pytest.mark.usefixtures("compiler")
def test_a_script_that_fails_there_says_so_and_the_estimate_stands(
    script: Callable[..., str],
) -> None:
    found = Compiler([script("import no_such_library")]).compile(parse_target("tpu:v5e"))
    assert isinstance(found, NotCompiled)
    assert "No module named 'no_such_library'" in found.why


@pytest.mark.full
def test_glue_is_compiled_from_its_own_command(tmp_path: Path, compiler: dict[str, str]) -> None:
    model_folder(tmp_path / "tiny")
    write_rows(tmp_path / "train.tsv", pairs(32, seed=1))
    told = (
        f"--model_name_or_path {tmp_path / 'tiny'} --config_overrides {OVERRIDES} "
        f"--task_name mrpc --train_file {tmp_path / 'train.tsv'} --do_train --max_seq_length 24 "
        f"--per_device_train_batch_size 8 --pad_to_max_length --output_dir {tmp_path / 'out'} "
        "--preflight tpu:v6e"
    ).split()
    ran = run_command(
        [sys.executable, "-m", "anytrain", "glue", *told], env=child_environment(compiler)
    )
    assert "Compiled by libtpu for a v6e: bf16, a batch of 8. It fits." in ran.stdout
