"""Train models of many families with HF Trainer and with ours: is a step recorded, is it faster?

Random weights, made-up rows, the same settings for both, on a GPU. Each training is a process of
its own, one after the other; it trains a few steps first, so that libraries are loaded. Losses are
the mean of the last steps: they show that both train the same.

    python benchmarks/models.py [--only bart,whisper] [--steps 60] [--output FILE]
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
import transformers.trainer  # it and ours before processes are forked: each would import them

import anytrain
import anytrain.doors.trainer

WORDS = 32_000
WARM_UP, LIMIT_S = 8, 120
Row = dict[str, Any]


class Case(NamedTuple):
    """A model, what it is trained on, and how."""

    model: str
    config: Row
    row: Callable[[torch.Generator], Row]
    batch: int = 16
    more: Row = {"bf16": True}  # noqa: RUF012


def text(length: int) -> Callable[[torch.Generator], Row]:
    """Return what makes rows of words, each of which is to be told from those before it."""

    def row(dice: torch.Generator) -> Row:
        words = torch.randint(5, WORDS, (length,), generator=dice)
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}

    return row


def labelled(length: int) -> Callable[[torch.Generator], Row]:
    """Return what makes rows of words with a class."""
    return lambda dice: {**text(length)(dice), "labels": int(torch.rand(1, generator=dice) < 0.5)}


def values(name: str, *shape: int) -> Callable[[torch.Generator], Row]:
    """Return what makes rows of numbers with a class: pictures, sound."""
    return lambda dice: {
        name: torch.randn(shape, generator=dice),
        "labels": int(torch.randint(4, (1,), generator=dice)),
    }


def spoken(dice: torch.Generator) -> Row:
    """Return a row of sound with its words."""
    return {**values("input_features", 80, 3000)(dice), "labels": text(64)(dice)["labels"]}


DEEP = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": WORDS,
}
SMALL = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "vocab_size": WORDS,
}
BOTH_WAYS = {
    "vocab_size": WORDS,
    "d_model": 384,
    **{f"{side}_layers": 4 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 6 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 1536 for side in ("encoder", "decoder")},
}
PICTURES = values("pixel_values", 3, 224, 224)
DEBERTA = {
    **{**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    **{"position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True},
    "problem_type": "single_label_classification",
}
CASES = {
    "llama": Case("LlamaForCausalLM", DEEP, text(256)),
    "llama fp32": Case("LlamaForCausalLM", DEEP, text(256), more={}),
    "llama fp16": Case("LlamaForCausalLM", DEEP, text(256), more={"fp16": True}),
    "llama checkpointed": Case(
        "LlamaForCausalLM", DEEP, text(256), more={"bf16": True, "gradient_checkpointing": True}
    ),
    "llama 4 micro-batches": Case(
        *("LlamaForCausalLM", DEEP, text(256), 4),
        {"bf16": True, "gradient_accumulation_steps": 4},
    ),
    "qwen3": Case("Qwen3ForCausalLM", {**DEEP, "head_dim": 64}, text(256)),
    "opt": Case("OPTForCausalLM", {**DEEP, "ffn_dim": 2048}, text(256)),
    "mixtral": Case("MixtralForCausalLM", {**DEEP, "num_local_experts": 4}, text(128), 8),
    "t5": Case(
        "T5ForConditionalGeneration",
        {"vocab_size": WORDS, "num_layers": 6, "decoder_start_token_id": 0},
        text(128),
    ),
    "bart": Case("BartForConditionalGeneration", BOTH_WAYS, text(128)),
    "whisper": Case(
        "WhisperForConditionalGeneration",
        {**BOTH_WAYS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        | {"decoder_start_token_id": 1},
        spoken,
        8,
    ),
    "wav2vec2": Case(
        "Wav2Vec2ForSequenceClassification",
        {**SMALL, "vocab_size": 32, "num_labels": 4},
        values("input_values", 16_000),
        8,
    ),
    "roberta": Case("RobertaForSequenceClassification", SMALL, labelled(128), 32),
    "albert": Case("AlbertForSequenceClassification", SMALL, labelled(128), 32),
    "deberta": Case("DebertaV2ForSequenceClassification", DEBERTA, labelled(128), 32),
    "vit": Case(
        "ViTForImageClassification",
        {**{n: v for n, v in SMALL.items() if n != "vocab_size"}, "num_labels": 4},
        PICTURES,
        32,
    ),
    "resnet": Case("ResNetForImageClassification", {"num_labels": 4}, PICTURES, 32),
    "convnext": Case("ConvNextForImageClassification", {"num_labels": 4}, PICTURES, 32),
}


class Trained(NamedTuple):
    """How a training went."""

    seconds: float = 0.0
    loss: float = float("nan")
    step: str = ""
    """How its steps ran, where that is told."""
    error: str = ""


def wait_for_compilers() -> None:
    """Let our kernels be compiled, which is done once on a machine."""
    for thread in threading.enumerate():
        if thread.name == "anytrain-nvrtc":
            thread.join()


def train(name: str, library: Any, steps: int) -> Trained:
    """Train a few steps, then so many, and time those."""
    case, dice = CASES[name], torch.Generator().manual_seed(0)
    kind = getattr(transformers, case.model)
    rows = [case.row(dice) for _ in range(case.batch * steps)]
    found = Trained()
    with tempfile.TemporaryDirectory() as folder:
        for length in (WARM_UP, steps):
            torch.manual_seed(1)
            args = library.TrainingArguments(
                f"{folder}/{length}",
                max_steps=length,
                per_device_train_batch_size=case.batch,
                logging_steps=20,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                learning_rate=1e-4,
                **case.more,
            )
            model = kind(kind.config_class(**case.config))
            trainer = library.Trainer(model, args, train_dataset=rows)
            began = time.perf_counter()
            trainer.train()
            seconds = time.perf_counter() - began
            loss = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1:]
            plan = getattr(trainer.accelerator, "plan", None)
            told = "" if plan is None else f"{plan.step.value} ({plan.step.because})"
            found = Trained(seconds, *(loss or [float("nan")]), told)
            del model, trainer
            wait_for_compilers()
    return found


def work(answers: Any, name: str, library: Any, steps: int) -> None:
    """Train quietly, in a process of its own."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        answers.put(train(name, library, steps))
    except Exception:  # noqa: BLE001  the table says what went wrong
        answers.put(Trained(error=traceback.format_exc().strip().splitlines()[-1][:200]))


def trained(*given: Any) -> Trained:
    """Train in a process of its own."""
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    process = fork.Process(target=work, args=(answers, *given))
    process.start()
    try:
        found: Trained = answers.get(timeout=LIMIT_S)
    except Exception:  # noqa: BLE001  it hangs, or was killed
        found = Trained(error=f"no answer within {LIMIT_S} s")
    process.join(5)
    process.kill()
    return found


def line(name: str, theirs: Trained, ours: Trained) -> str:
    """Return a row of the table."""
    wrong = ours.error or theirs.error
    if wrong:
        return f"| {name} | {theirs.seconds:.2f} | {ours.seconds:.2f} | - | - | {wrong} |"
    cells = f"{theirs.seconds:.2f} | {ours.seconds:.2f} | {theirs.seconds / ours.seconds:.2f}x"
    return f"| {name} | {cells} | {theirs.loss:.4f}, {ours.loss:.4f} | {ours.step} |"


def device_name() -> str:
    """Return what the GPU is called; nothing where there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    names = [name.strip() for name in asked.only.split(",") if name.strip()] or list(CASES)
    unknown = [name for name in names if name not in CASES]
    if unknown:
        sys.exit(f"unknown: {', '.join(unknown)}; there are {', '.join(CASES)}")
    with multiprocessing.get_context("fork").Pool(1) as pool:  # here it would keep forks from CUDA
        device = pool.apply(device_name)
    if not device:
        sys.exit("no CUDA device here: steps are recorded there alone")
    lines = [
        "# Models of many families beside HF Trainer, random weights, made-up rows",
        "",
        f"{datetime.date.today()}, {device}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, anytrain {anytrain.__version__}. {asked.steps} steps after "
        f"{WARM_UP}, which are not timed, with our kernels compiled; bf16 where nothing else is "
        "said.",
        "Seconds are all of `train()`, recording and compiling included. Made by",
        "`benchmarks/models.py`, which has the sizes.",
        "",
        "| model | HF s | anytrain s | times as fast | loss at the end: HF, anytrain | step |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for name in names:
        both = [trained(name, lib, asked.steps) for lib in (transformers, anytrain)]
        lines.append(line(name, *both))
        print(lines[-1], flush=True)
        if asked.output is not None:
            asked.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
