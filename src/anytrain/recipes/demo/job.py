"""Train the demo's model: an ordinary loop of a user of Accelerator, nothing hidden.

The loop yields what happens, so that a terminal, a notebook or a test can show it its own way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from anytrain import Accelerator, set_seed
from anytrain.recipes.demo.data import PairSet
from anytrain.recipes.demo.grammar import Pair, make_pairs
from anytrain.recipes.demo.model import SameMeaning

Batches = DataLoader[dict[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Settings:
    """What can be changed about the demo."""

    epochs: int = 8
    pairs: int = 16_000
    dev_pairs: int = 1_000
    batch_size: int = 64
    learning_rate: float = 1.5e-3
    seed: int = 7


@dataclass(frozen=True, slots=True)
class Begun:
    """The run is set up: where, how long, and how good a guess is."""

    device: str
    num_processes: int
    num_steps: int
    num_parameters: int
    accuracy: float


@dataclass(frozen=True, slots=True)
class Stepped:
    """One optimizer step is done; the loss stays on its device until somebody reads it."""

    step: int
    loss: torch.Tensor


@dataclass(frozen=True, slots=True)
class Scored:
    """An epoch is over."""

    epoch: int
    accuracy: float


@dataclass(frozen=True, slots=True)
class Judged:
    """A pair the model never trained on, and what it says of it."""

    pair: Pair
    says_same: bool


@dataclass(frozen=True, slots=True)
class Finished:
    """The run is over and its results are written."""

    accuracy: float
    folder: Path
    examples: tuple[Judged, ...]


Moment = Begun | Stepped | Scored | Finished


def train(settings: Settings, folder: Path) -> Iterator[Moment]:
    """Train, telling what happens; at the end `folder` holds the model and its history."""
    set_seed(settings.seed)
    accelerator = Accelerator()
    dev = make_pairs(settings.dev_pairs, seed=settings.seed + 1)
    train_loader, dev_loader = _loaders(settings, dev, accelerator.num_processes)
    model = SameMeaning()
    optimizer = AdamW(model.parameters(), lr=settings.learning_rate)
    scheduler = _warm_up_then_down(optimizer, settings.epochs * len(train_loader))
    model, optimizer, train_loader, dev_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, dev_loader, scheduler
    )
    history = [_accuracy(accelerator, model, dev_loader)]
    yield Begun(
        device=str(accelerator.device),
        num_processes=accelerator.num_processes,
        num_steps=settings.epochs * len(train_loader),
        num_parameters=sum(p.numel() for p in model.parameters()),
        accuracy=history[0],
    )
    step = 0
    for epoch in range(1, settings.epochs + 1):
        model.train()
        for batch in train_loader:
            verdict = model(batch["first"], batch["second"])
            loss = binary_cross_entropy_with_logits(verdict, batch["same"])
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            yield Stepped(step, loss.detach())
        history.append(_accuracy(accelerator, model, dev_loader))
        yield Scored(epoch, history[-1])
    plain = accelerator.unwrap_model(model)
    examples = _examples(plain, dev, accelerator.device)
    if accelerator.is_main_process:
        _write(folder, settings, history)
    accelerator.save_model(model, folder)
    accelerator.end_training()
    yield Finished(history[-1], folder, examples)


def _loaders(settings: Settings, dev: list[Pair], num_processes: int) -> tuple[Batches, Batches]:
    # The batch is shared out: however many processes there are, a step sees as many pairs.
    share = max(1, settings.batch_size // num_processes)
    known = {(pair.first, pair.second) for pair in dev}
    pairs = make_pairs(settings.pairs, seed=settings.seed)
    unseen = PairSet([pair for pair in pairs if (pair.first, pair.second) not in known])
    return (
        DataLoader(unseen, batch_size=share, shuffle=True),
        DataLoader(PairSet(dev), batch_size=250),
    )


def _warm_up_then_down(optimizer: AdamW, num_steps: int) -> LambdaLR:
    warm_up = max(1, num_steps // 10)

    def share_of_peak(step: int) -> float:
        return min(
            (step + 1) / warm_up, max(0.02, 1 - (step - warm_up) / (num_steps - warm_up + 1))
        )

    return LambdaLR(optimizer, share_of_peak)


@torch.no_grad()
def _accuracy(accelerator: Accelerator, model: torch.nn.Module, loader: Batches) -> float:
    model.eval()
    right = total = 0
    for batch in loader:
        says_same = model(batch["first"], batch["second"]) > 0
        says_same, same = accelerator.gather_for_metrics((says_same, batch["same"] > 0))
        right += int((says_same == same).sum())
        total += len(same)
    return right / total


@torch.no_grad()
def _examples(model: torch.nn.Module, dev: list[Pair], device: torch.device) -> tuple[Judged, ...]:
    """Judge the first paraphrase, and the first pair with swapped roles and with a denial."""
    wanted = ("none", "roles", "denial")
    shown = [next(pair for pair in dev if pair.difference == kind) for kind in wanted]
    rows = PairSet(shown)
    verdicts = model(rows.first.to(device), rows.second.to(device)) > 0
    return tuple(Judged(pair, bool(says)) for pair, says in zip(shown, verdicts, strict=True))


def _write(folder: Path, settings: Settings, history: list[float]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    told = {"dev_accuracy": history[-1], "dev_accuracy_by_epoch": history, **asdict(settings)}
    (folder / "result.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
