"""Time loops that users write themselves: HF Accelerate's, and the same lines with anytrain.

Each case runs in a process of its own: `accelerate`, `anytrain` (the loop as it stands),
`anytrain-eager` (op by op) and, for loops of one model, `anytrain-step` (`accelerator.step`).
Weights, batches and optimizer are the same; the losses of the last steps stand beside the times.

    PYTHONPATH=src python3 benchmarks/loops.py [--loops guide,accumulate,...] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

LOOPS = ("guide", "clipped", "logits", "accumulate", "pairs", "two models", "gan", "llama")
WHO = ("accelerate", "anytrain-eager", "anytrain", "anytrain-step")
STEPS, TIMED, KEPT = 140, 60, 5
LENGTHS = (48, 56, 64, 72, 80)


def main() -> None:
    """Run all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loops", default=",".join(LOOPS))
    parser.add_argument("--who", default=",".join(WHO))
    parser.add_argument("--output")
    parser.add_argument("--cpu", action="store_true", help="a tiny model: does it run here?")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case:
        print(json.dumps(run(*asked.case, cpu=asked.cpu)))
        return
    lines = [
        "| loop | who | ms a step | peak GiB | last losses | step |",
        "|---|---|---|---|---|---|",
    ]
    for loop in asked.loops.split(","):
        for who in asked.who.split(","):
            if who == "anytrain-step" and loop not in ("guide", "clipped", "accumulate", "llama"):
                continue
            line = _row(loop, who, asked.cpu)
            print(line, flush=True)
            lines.append(line)
    if asked.output:
        import torch

        where = "CPU" if asked.cpu else torch.cuda.get_device_name()
        head = f"{where}, torch {torch.__version__}, Python {platform.python_version()}, "
        text = "\n".join(["# Loops of one's own", "", f"{head}{date.today()}.", "", *lines, ""])
        Path(asked.output).write_text(text, encoding="utf-8")


def _row(loop: str, who: str, cpu: bool) -> str:
    command = [sys.executable, __file__, "--case", loop, who, *(["--cpu"] if cpu else [])]
    how = "eager" if who == "anytrain-eager" else "cuda_graph"
    env = {**os.environ, "ANYTRAIN_STEP": how}
    told = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if told.returncode:
        return f"| {loop} | {who} | failed: {told.stderr.strip().splitlines()[-1:]} | | | |"
    found = json.loads(told.stdout.splitlines()[-1])
    losses = " ".join(f"{loss:.5f}" for loss in found["losses"])
    return (
        f"| {loop} | {who} | {found['ms']:.2f} | {found['gib']:.2f} | {losses} | {found['step']} |"
    )


def run(loop: str, who: str, *, cpu: bool) -> dict[str, Any]:
    """Run one case and return its figures."""
    import torch

    if who == "accelerate":
        from accelerate import Accelerator
    else:
        from anytrain import Accelerator  # type: ignore[assignment]
    torch.manual_seed(0)
    options = {"gradient_accumulation_steps": 4} if loop == "accumulate" else {}
    accelerator = Accelerator(mixed_precision="bf16", cpu=cpu, **options)
    take = _loop(loop, accelerator, cpu, by_step=who == "anytrain-step")
    losses, began = [], 0.0
    steps = 24 if cpu else STEPS
    for step in range(steps):
        if step == steps - TIMED:
            _wait(cpu)
            began = time.perf_counter()
        losses.append(take(step))
    _wait(cpu)
    ms = (time.perf_counter() - began) / TIMED * 1e3
    plan = getattr(accelerator, "plan", None)
    return {
        "ms": ms,
        "gib": 0.0 if cpu else torch.cuda.max_memory_allocated() / 2**30,
        "losses": [float(loss) for loss in losses[-KEPT:]],
        "step": "" if plan is None else f"{plan.step.value}: {plan.step.because}",
    }


def _wait(cpu: bool) -> None:
    import torch

    if not cpu:
        torch.cuda.synchronize()


def _bert(cpu: bool) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {**small, "intermediate_size": 128} if cpu else {}
    return BertForSequenceClassification(BertConfig(num_labels=2, **more))


def _llama(cpu: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    wide, layers = (64, 2) if cpu else (512, 8)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=wide,
        intermediate_size=4 * wide,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    return LlamaForCausalLM(config)


def _batches(device: Any, cpu: bool) -> list[dict[str, Any]]:
    import torch

    draw = torch.Generator().manual_seed(1)
    rows = 4 if cpu else 32
    made = []
    for number in range(200):
        length = LENGTHS[number % len(LENGTHS)]
        ids = torch.randint(5, 20000, (rows, length), generator=draw)
        mask = torch.ones_like(ids)
        mask[0, length // 2 :] = 0
        labels = (ids[:, 0] % 2).long()
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        made.append({name: value.to(device) for name, value in batch.items()})
    return made


def _adamw(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=2e-5)


def _loop(name: str, accelerator: Any, cpu: bool, *, by_step: bool) -> Any:
    """Return what runs one step of a loop and returns its loss."""
    import torch

    if name in ("pairs", "two models", "gan"):
        return _of_several(name, accelerator, cpu)
    model = (_llama if name == "llama" else _bert)(cpu)
    optimizer = _adamw(model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 1000)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    batches = _batches(accelerator.device, cpu)
    if name == "llama":
        ids = torch.randint(5, 32000, (200, 8, 256), device=accelerator.device)
        batches = [{"input_ids": each, "labels": each} for each in ids]
    model.train()
    bound = 1.0 if name in ("clipped", "llama") else None
    if by_step:
        whole = accelerator.step(lambda model, batch: model(**batch).loss, max_grad_norm=bound)
        return lambda step: whole(batches[step]).loss
    right = torch.zeros((), device=accelerator.device)

    def take(step: int) -> Any:
        batch = batches[step]
        with accelerator.accumulate(model):
            if name == "logits":
                logits = model(
                    input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
                ).logits
                loss = torch.nn.functional.cross_entropy(logits, batch["labels"])
                right.add_((logits.argmax(-1) == batch["labels"]).sum())
            else:
                loss = model(**batch).loss
            accelerator.backward(loss)
            if bound is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), bound)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return loss.detach()

    return take


def _of_several(name: str, accelerator: Any, cpu: bool) -> Any:
    import torch

    batches = _batches(accelerator.device, cpu)
    if name == "pairs":
        model = _bert(cpu)
        model, optimizer = accelerator.prepare(model, _adamw(model))
        model.train()

        def contrast(step: int) -> Any:
            batch = {k: v for k, v in batches[step].items() if k != "labels"}
            one, other = model(**batch).logits, model(**batch).logits
            loss = (one - other).pow(2).sum() - one.sum()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return contrast
    if name == "two models":
        one, other = _bert(cpu), _bert(cpu)
        one, other, first, second = accelerator.prepare(one, other, _adamw(one), _adamw(other))
        for each in (one, other):
            each.train()

        def both(step: int) -> Any:
            batch = batches[step]
            loss = one(**batch).loss
            accelerator.backward(loss)
            first.step()
            first.zero_grad()
            more = other(**batch).loss
            accelerator.backward(more)
            second.step()
            second.zero_grad()
            return (loss + more).detach()

        return both
    wide = 64 if cpu else 2048
    layers = lambda a, b: torch.nn.Sequential(  # noqa: E731
        torch.nn.Linear(a, wide), torch.nn.GELU(), *[
            x for _ in range(6) for x in (torch.nn.Linear(wide, wide), torch.nn.GELU())
        ], torch.nn.Linear(wide, b),
    )  # fmt: skip
    make, judge = layers(128, 784), layers(784, 1)
    make, judge, first, second = accelerator.prepare(make, judge, _adamw(make), _adamw(judge))
    draw = torch.Generator(accelerator.device).manual_seed(1)
    score = torch.nn.functional.binary_cross_entropy_with_logits

    def play(step: int) -> Any:
        device = accelerator.device
        real = torch.randn(256, 784, device=device, generator=draw)
        noise = torch.randn(256, 128, device=device, generator=draw)
        yes, no = torch.ones(256, 1, device=device), torch.zeros(256, 1, device=device)
        fake = make(noise)
        loss = score(judge(real), yes) + score(judge(fake.detach()), no)
        accelerator.backward(loss)
        second.step()
        second.zero_grad()
        fooled = score(judge(fake), yes)
        accelerator.backward(fooled)
        first.step()
        first.zero_grad()
        second.zero_grad()
        return (loss + fooled).detach()

    return play


if __name__ == "__main__":
    main()
