"""What a contender is handed: the model, the rows, the clock. The same for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from anytrain.machine.backends import probe
from anytrain.machine.backends.base import Backend
from anytrain.recipes.bench.settings import SIZES, BenchSettings
from anytrain.recipes.glue.encode import Encoded, Pad

_WEIGHTS = "weights.pt"


def write_model(settings: BenchSettings, folder: Path) -> None:
    """Write the configuration and the weights to begin with."""
    import transformers

    torch.manual_seed(0)
    if settings.model:
        kind = transformers.AutoModelForSequenceClassification
        model = kind.from_pretrained(settings.model, num_labels=2, dtype=torch.float32)
    else:
        model = _new_model(settings)
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / _WEIGHTS)


def _new_model(settings: BenchSettings) -> Any:
    import transformers

    size = SIZES[settings.size]
    if size.head == "causal":
        places = {"n_positions": settings.length, "bos_token_id": 1, "eos_token_id": 1}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**places, **size.config}))
    places = {"max_position_embeddings": max(512, settings.length)}
    config = transformers.BertConfig(**{**places, **size.config}, num_labels=2)
    return transformers.BertForSequenceClassification(config)


def load_model(settings: BenchSettings, folder: Path) -> nn.Module:
    """Return the model with the weights to begin with."""
    import transformers

    causal = settings.head == "causal"
    name = "AutoModelForCausalLM" if causal else "AutoModelForSequenceClassification"
    config = transformers.AutoConfig.from_pretrained(folder)
    model: nn.Module = getattr(transformers, name).from_config(config).float()
    model.load_state_dict(torch.load(folder / _WEIGHTS, weights_only=True))
    return model.train()


def flops_per_step(model: nn.Module, rows: int, length: int) -> float:
    """Return the floating point operations that one training step needs at least.

    Six for each weight that multiplies and each token (forward once, backward twice), and the
    attention's two products; what a causal mask hides is not counted.
    """
    config: Any = model.config
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    weights = sum(p.numel() for p in model.parameters() if id(p) not in looked_up)
    causal = config.model_type == "gpt2"
    if causal:  # the head multiplies with the weights that the embedding looks up
        weights += config.vocab_size * config.hidden_size
    attention = 12 * config.num_hidden_layers * config.hidden_size * length
    return float(rows * length * (6 * weights + (attention / 2 if causal else attention)))


MAX_GRAD_NORM = 1.0
_EVAL_BATCH = 64
_ROWS_SORTED_TOGETHER = 50  # batches; as HF's group_by_length does


class OnStep(Protocol):
    """Who is told of every step that is done."""

    def __call__(self) -> None:
        """Note one more step."""


@dataclass
class Trained:
    """What a contender leaves behind."""

    model: nn.Module
    mean_loss: float
    """The mean of the training loss over all steps."""
    precision: str
    plan: dict[str, str] = field(default_factory=dict)
    """What was decided and why, where the library tells."""


@dataclass
class BenchTask:
    """One training: everything a contender needs, and nothing it may choose."""

    settings: BenchSettings
    folder: Path
    train: Encoded
    precision: str
    padding: str
    seed: int
    num_steps: int
    batch_size: int
    length: int
    backend: Backend
    device: torch.device
    watch: OnStep | None = None
    seconds: float = 0.0

    def model(self) -> nn.Module:
        """Return the model with the weights that all begin with, on the CPU."""
        return load_model(self.settings, self.folder)

    def collator(self, multiple: int = 1) -> Pad:
        """Return what makes a batch of rows; peers are given the same one."""
        return Pad(token=0, length=self.length if self.padding == "max" else None,
                   multiple=1 if self.padding == "max" else multiple)  # fmt: skip

    def loader(self, multiple: int = 8) -> DataLoader[Any]:
        """Return a shuffled loader for a loop that is written by hand."""
        draw = torch.Generator().manual_seed(self.seed)
        rows: dict[str, Any] = {"batch_size": self.batch_size, "shuffle": True, "generator": draw}
        if self.padding == "sorted":
            rows = {"batch_sampler": _LikeLengths(self.train, self.batch_size, self.seed)}
        pin = self.device.type == "cuda"
        return DataLoader(self.train, **rows, collate_fn=self.collator(multiple), pin_memory=pin)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of the hand-written loops: as HF Trainer's default."""
        rate = self.settings.learning_rate
        return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """Return a rate that falls to zero over the run."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / self.num_steps)

    def run(self, loader: Any, step: Callable[[Any], torch.Tensor]) -> float:
        """Run a hand-written loop's steps under the clock; return the mean of their losses."""
        total = torch.zeros((), device=self.device)
        done = 0
        with self.timed():
            while done < self.num_steps:
                for batch in loader:
                    total += step(batch)
                    self.step_done()
                    done += 1
                    if done == self.num_steps:
                        break
        return float(total) / done

    def step_done(self) -> None:
        """Tell the watch of a step that is done."""
        if self.watch is not None:
            self.watch()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure the block; the device has done all of it at the end."""
        self.backend.synchronize(self.device)
        began = time.perf_counter()
        yield
        self.backend.synchronize(self.device)
        self.seconds = time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class _LikeLengths:
    """Batches of rows of like length, in random order: what people write by hand."""

    rows: Encoded
    size: int
    seed: int

    def __iter__(self) -> Iterator[list[int]]:
        random = np.random.default_rng(self.seed)
        lengths = self.rows.lengths.tolist()
        order = random.permutation(len(lengths)).tolist()
        many = self.size * _ROWS_SORTED_TOGETHER
        batches: list[list[int]] = []
        for begin in range(0, len(order), many):
            part = sorted(order[begin : begin + many], key=lengths.__getitem__)
            batches += [part[n : n + self.size] for n in range(0, len(part), self.size)]
        for place in random.permutation(len(batches)):
            yield batches[place]

    def __len__(self) -> int:
        return -(-len(self.rows) // self.size)


def place(settings: BenchSettings) -> tuple[Backend, torch.device]:
    """Return the device that all contenders take."""
    backend = probe.get("cpu") if settings.cpu else probe.choose(None)
    return backend, backend.device(0)


@torch.no_grad()
def evaluate(task: BenchTask, model: nn.Module, rows: Encoded) -> dict[str, float]:
    """Return loss, accuracy and F1 on rows held out: the same code and float32 for all."""
    model = model.to(task.device).float().eval()
    collate, causal = Pad(token=0), task.settings.head == "causal"
    losses: list[float] = []
    said: list[Any] = []
    for begin in range(0, len(rows), _EVAL_BATCH if not causal else 8):
        end = min(begin + (_EVAL_BATCH if not causal else 8), len(rows))
        batch = collate([rows[n] for n in range(begin, end)])
        batch = {name: tensor.to(task.device) for name, tensor in batch.items()}
        out: Any = model(**batch)
        losses += [float(out.loss)] * (end - begin)
        if not causal:
            said += out.logits.argmax(-1).tolist()
    found = {"eval_loss": float(np.mean(losses))}
    return found if causal else {**found, **_scores(said, rows.labels)}


def _scores(said: Sequence[int], true: Sequence[int]) -> dict[str, float]:
    given, right = np.asarray(said), np.asarray(true)
    hits = float(((given == 1) & (right == 1)).sum())
    named = float((given == 1).sum() + (right == 1).sum())
    return {"accuracy": float((given == right).mean()), "f1": 2 * hits / named if named else 0.0}
