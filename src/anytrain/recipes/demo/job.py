"""Train the demo's model: an ordinary user of Trainer, nothing hidden."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from anytrain.core import environment
from anytrain.core.errors import BadInput
from anytrain.doors.trainer import Trainer
from anytrain.doors.trainer.outputs import EvalPrediction, get_last_checkpoint, set_seed
from anytrain.doors.training_args import TrainingArguments
from anytrain.recipes import folder as folders
from anytrain.recipes.demo.data import NUM_PLACES, NUM_TOKENS, PADDING, Pair, PairSet, make_pairs


class SmallBert(nn.Module):
    """Embeddings of words and places, then layers that look both ways, as BERT has them."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_TOKENS, width, padding_idx=PADDING)
        self.places = nn.Embedding(NUM_PLACES, width)
        layer = nn.TransformerEncoderLayer(
            width,
            heads,
            2 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        # Words start well apart: with a smaller spread the first epochs see only word counts.
        nn.init.normal_(self.words.weight, std=0.3)
        nn.init.normal_(self.places.weight, std=0.1)

    def forward(self, sentences: torch.Tensor) -> torch.Tensor:
        """Return one vector a sentence: the mean over its words."""
        padded = sentences == PADDING
        places = torch.arange(sentences.shape[1], device=sentences.device)
        seen = self.words(sentences) + self.places(places)
        understood = self.encoder(seen, src_key_padding_mask=padded)
        weights = (~padded).unsqueeze(-1).to(understood.dtype)
        mean: torch.Tensor = (understood * weights).sum(dim=1) / weights.sum(dim=1)
        return mean


class SameMeaning(nn.Module):
    """Read both sentences with one small BERT and compare what it made of them."""

    def __init__(self, width: int = 96, heads: int = 4, layers: int = 1) -> None:
        super().__init__()
        self.bert = SmallBert(width, heads, layers)
        self.judge = nn.Sequential(
            nn.LayerNorm(2 * width),
            nn.Linear(2 * width, 2 * width),
            nn.ReLU(),
            nn.Linear(2 * width, 1),
        )

    def forward(
        self, first: torch.Tensor, second: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Return two logits a pair, for different and for the same, and the loss given labels."""
        one, other = self.bert(torch.cat([first, second])).chunk(2)
        compared = torch.cat([(one - other).abs(), one * other], dim=-1)
        same = self.judge(compared).squeeze(-1)
        logits = torch.stack([torch.zeros_like(same), same], dim=-1)
        if labels is None:
            return {"logits": logits}
        return {"loss": binary_cross_entropy_with_logits(same, labels.float()), "logits": logits}


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What can be changed about the demo."""

    epochs: int = 6
    pairs: int = 16_000
    dev_pairs: int = 1_000
    batch_size: int = 64
    learning_rate: float = 1.5e-3
    seed: int = 7


@dataclass(frozen=True, slots=True)
class Verdict:
    """A pair the model never trained on, and what it says of it."""

    pair: Pair
    says_same: bool


@dataclass(frozen=True, slots=True)
class DemoResult:
    """A run that is over: accuracy by epoch, from the untrained model on, and some verdicts."""

    history: tuple[tuple[float, float], ...]
    examples: tuple[Verdict, ...]

    @property
    def accuracy(self) -> float:
        """The share of held-out pairs that the trained model is right on."""
        return self.history[-1][1]


def train(
    settings: DemoSettings, folder: Path, tell: Callable[[str], None], resume: str | None = None
) -> DemoResult:
    """Train to the end, going on where the same run was cut short; `folder` holds the results.

    `resume` names a checkpoint to go on from, whatever is there: a folder, "true" or "auto".
    """
    kept = {"job": "demo", **asdict(settings)}
    resume = environment.resume_from(resume)
    start = look(folder, kept, resume)
    if start.said:
        tell(start.said)
    dev = make_pairs(settings.dev_pairs, seed=settings.seed + 1)
    trainer = _trainer(settings, folder, dev)
    size = sum(parameter.numel() for parameter in trainer.model.parameters())
    count = trainer.args.world_size
    tell(
        f"Do two sentences mean the same? A small BERT of {size:,} parameters learns it from "
        f"{settings.pairs:,} pairs.\nDevice: {trainer.args.device}, "
        f"{'1 process' if count == 1 else f'{count} processes'}."
    )
    with trainer._alone_in_folder():
        trainer.accelerator.wait_for_everyone()
        if trainer.is_world_process_zero():
            folders.begin(folder, start, kept)
        trainer.accelerator.wait_for_everyone()
        last = get_last_checkpoint(folder) if start.kind == "continue" else None
        last = resume if start.kind == "resume" else last
        # The untrained model is evaluated once, by the run's first life.
        trainer.args.eval_on_start = not last
        trainer.train(resume_from_checkpoint=last or False)
    trainer.save_model()
    finished = DemoResult(_history(trainer.state.log_history), _examples(trainer.model, dev))
    if trainer.is_world_process_zero():
        _write(folder, settings, finished)
        folders.finish(folder)
    return finished


def look(folder: Path, settings: Mapping[str, Any], resume: object = None) -> folders.RunStart:
    """Return how to begin: a demo that was cut short goes on, any other demo is replaced."""
    try:
        return folders.look(folder, settings, overwrite=False, resume=resume)
    except BadInput as taken:
        record = folders.read(folder) or {}
        if record.get("settings", {}).get("job") == "demo":
            return folders.RunStart("anew")
        raise BadInput(
            f"Cannot put the demo into {str(folder)!r}.",
            why="it holds something other than an older demo.",
            fix="choose another folder with --output.",
        ) from taken


def _trainer(settings: DemoSettings, folder: Path, dev: list[Pair]) -> Trainer:
    known = {(pair.first, pair.second) for pair in dev}
    pairs = make_pairs(settings.pairs, seed=settings.seed)
    unseen = [pair for pair in pairs if (pair.first, pair.second) not in known]
    args = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        warmup_steps=0.1,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=50,
        per_device_eval_batch_size=250,
        seed=settings.seed,
    )
    # The batch is shared out: however many processes there are, a step sees as many pairs.
    args.per_device_train_batch_size = max(1, settings.batch_size // args.world_size)
    set_seed(settings.seed)
    return Trainer(
        model=SameMeaning(),
        args=args,
        train_dataset=PairSet(unseen),
        eval_dataset=PairSet(dev),
        compute_metrics=_accuracy,
    )


def _accuracy(judged: EvalPrediction) -> dict[str, float]:
    right = judged.predictions.argmax(-1) == judged.label_ids
    return {"accuracy": float(right.mean())}


def _history(entries: list[dict[str, Any]]) -> tuple[tuple[float, float], ...]:
    """Return (epoch, accuracy) of every evaluation, one an epoch."""
    found = {e["epoch"] or 0.0: e["eval_accuracy"] for e in entries if "eval_accuracy" in e}
    return tuple(sorted(found.items()))


@torch.no_grad()
def _examples(model: torch.nn.Module, dev: list[Pair]) -> tuple[Verdict, ...]:
    """Judge the first paraphrase, and the first pair with swapped roles and with a denial."""
    wanted = ("none", "roles", "denial")
    shown = [next(pair for pair in dev if pair.difference == kind) for kind in wanted]
    rows, device = PairSet(shown), next(model.parameters()).device
    verdicts = model.eval()(rows.first.to(device), rows.second.to(device))["logits"].argmax(-1)
    return tuple(Verdict(pair, bool(says)) for pair, says in zip(shown, verdicts, strict=True))


def _write(folder: Path, settings: DemoSettings, finished: DemoResult) -> None:
    by_epoch = [accuracy for _, accuracy in finished.history]
    result = {
        "dev_accuracy": finished.accuracy,
        "dev_accuracy_by_epoch": by_epoch,
        **asdict(settings),
    }
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
