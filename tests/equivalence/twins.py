"""Tiny models and data, trained by anytrain's Trainer and by transformers' in one process.

Import it as `from equivalence import twins`; tests/ is on the path.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

OURS, THEIRS = "anytrain", "transformers"
LIBRARIES = (OURS, THEIRS)
# What depends on the clock; the last, only transformers tells, where no training came first.
TIMED = ("_runtime", "_per_second", "_model_preparation_time")
Rows = list[dict[str, Any]]


def parts(library: str) -> tuple[Any, Any, Any]:
    """Return a library's Trainer, TrainingArguments and TrainerCallback."""
    if library == OURS:
        from anytrain.doors.callbacks import TrainerCallback
        from anytrain.doors.trainer import Trainer
        from anytrain.doors.training_args import TrainingArguments

        return Trainer, TrainingArguments, TrainerCallback
    import transformers

    return transformers.Trainer, transformers.TrainingArguments, transformers.TrainerCallback


# -- models ---------------------------------------------------------------------------------------

_BERT = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "num_labels": 3,
}


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def bert(head: str = "SequenceClassification", dropout: float = 0.0, **more: Any) -> nn.Module:
    """Return a tiny BERT with the named head."""
    import transformers

    config = transformers.BertConfig(
        **{**_BERT, **more}, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )
    return _seeded(lambda: getattr(transformers, f"BertFor{head}")(config))


def gpt2(dropout: float = 0.0) -> nn.Module:
    """Return a tiny GPT-2: a causal language model."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=40,
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=1,
        eos_token_id=1,
    )
    return _seeded(lambda: transformers.GPT2LMHeadModel(config))


def llama() -> nn.Module:
    """Return a tiny Llama: a causal language model whose class name says so."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    return _seeded(lambda: transformers.LlamaForCausalLM(config))


def t5() -> nn.Module:
    """Return a tiny T5: an encoder-decoder."""
    import transformers

    config = transformers.T5Config(
        vocab_size=40,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return _seeded(lambda: transformers.T5ForConditionalGeneration(config))


class Regression(nn.Module):
    """A plain module; `gives` says in what form it returns its loss."""

    def __init__(self, gives: str = "dict", dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.drop = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(6)
        self.outer = nn.Linear(6, 1)
        self.gives = gives

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        """Return the loss, the predictions, or both."""
        found = self.outer(self.norm(torch.tanh(self.drop(self.inner(x))))).squeeze(-1)
        if labels is None:
            return {"logits": found} if self.gives == "dict" else (found,)
        loss = nn.functional.mse_loss(found, labels)
        if self.gives == "dict":
            return {"loss": loss, "logits": found}
        return (loss, found) if self.gives == "tuple" else loss


def regression(gives: str = "dict", dropout: float = 0.0) -> nn.Module:
    """Return the same plain module each time."""
    return _seeded(lambda: Regression(gives, dropout))


# -- data -----------------------------------------------------------------------------------------


def sentences(count: int, length: int = 8, *, ragged: bool = False) -> Rows:
    """Return rows of words with a class; ragged ones have 3 to `length` words."""
    dice = torch.Generator().manual_seed(count)
    rows = []
    for _ in range(count):
        size = int(torch.randint(3, length + 1, (1,), generator=dice)) if ragged else length
        words = torch.randint(1, 40, (size,), generator=dice).tolist()
        label = int(torch.randint(0, 3, (1,), generator=dice))
        rows.append({"input_ids": words, "attention_mask": [1] * size, "labels": label})
    return rows


def tagged(count: int, length: int = 8) -> Rows:
    """Return rows with a label a word; a varying number of them does not count."""
    rows = sentences(count, length)
    for number, row in enumerate(rows):
        classes = [word % 3 for word in row["input_ids"]]
        row["labels"] = [-100] * (number % 5) + classes[number % 5 :]
    return rows


def texts(count: int, length: int = 8) -> Rows:
    """Return rows whose labels are their words; a varying number of them does not count.

    The first never does: of GPT-2's labels transformers counts it though nothing predicts it.
    """
    rows = sentences(count, length)
    for number, row in enumerate(rows):
        hidden = 1 + number % 5
        row["labels"] = [-100] * hidden + row["input_ids"][hidden:]
    return rows


def points(count: int) -> Rows:
    """Return rows of a regression."""
    dice = torch.Generator().manual_seed(count)
    return [
        {"x": torch.randn(4, generator=dice).tolist(), "labels": float(number % 7) / 3 - 1}
        for number in range(count)
    ]


class Mapped(Dataset[dict[str, Any]]):
    """A torch data set over rows."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


class Stream(IterableDataset[dict[str, Any]]):
    """A stream of rows with no length."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from self.rows


class SizedStream(Stream):
    """A stream of rows that knows its length."""

    def __len__(self) -> int:
        return len(self.rows)


def pad(rows: Rows) -> dict[str, torch.Tensor]:
    """Collate rows of unlike lengths, padding words with 0 and labels with -100."""
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    batch = {}
    for name in rows[0]:
        values = [torch.as_tensor(row[name]) for row in rows]
        if values[0].ndim == 0:
            batch[name] = torch.stack(values)
        else:
            batch[name] = nn.utils.rnn.pad_sequence(
                values, batch_first=True, padding_value=fill[name]
            )
    return batch


# -- runs -----------------------------------------------------------------------------------------


@dataclass
class Ran:
    """What a training left behind."""

    trainer: Any
    output: Any
    folder: Path
    events: list[tuple[str, int, float | None]]

    @property
    def history(self) -> list[dict[str, Any]]:
        """The log, less what depends on the clock."""
        return [untimed(entry) for entry in self.trainer.state.log_history]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The weights by name."""
        return {name: p.detach().clone() for name, p in self.trainer.model.named_parameters()}

    @property
    def folders(self) -> list[str]:
        """The checkpoints that are left."""
        return sorted(path.name for path in self.folder.glob("checkpoint-*"))


def untimed(values: dict[str, Any]) -> dict[str, Any]:
    """Return what does not depend on the clock."""
    return {name: value for name, value in values.items() if not name.endswith(TIMED)}


def recorder(kind: Any) -> Any:
    """Return a callback of this class that takes down each event with its position."""
    moments = [name for name in dir(kind) if name.startswith("on_")]
    told: list[tuple[str, int, float | None]] = []

    def listen(name: str) -> Callable[..., None]:
        def method(self: Any, args: Any, state: Any, control: Any, **known: Any) -> None:
            told.append((name, state.global_step, state.epoch))

        return method

    made = type("Recorder", (kind,), {name: listen(name) for name in moments})()
    made.told = told
    return made


DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "num_train_epochs": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}


def build(
    library: str,
    folder: Path | str | None = None,
    *,
    kind: Callable[[Any], Any] | None = None,
    **given: Any,
) -> Any:
    """Return a Trainer of the library; `given` are its own parameters and TrainingArguments'.

    A value that is wrapped in `Each` is made for each library; `kind` derives a class of Trainer.
    """
    made, arguments, _ = parts(library)
    where = tempfile.mkdtemp(prefix="twins-") if folder is None else str(folder)
    own = {name: given.pop(name) for name in _PARAMETERS if name in given}
    own = {n: v.make(library) if isinstance(v, Each) else v for n, v in own.items()}
    args = arguments(**{"output_dir": where, **DEFAULTS, **given})
    return (kind(made) if kind is not None else made)(args=args, **own)


@dataclass(frozen=True)
class Each:
    """A parameter that each library gets its own of."""

    make: Callable[[str], Any]


_PARAMETERS = (
    "model",
    "data_collator",
    "train_dataset",
    "eval_dataset",
    "processing_class",
    "model_init",
    "compute_loss_func",
    "compute_metrics",
    "callbacks",
    "optimizers",
    "optimizer_cls_and_kwargs",
    "preprocess_logits_for_metrics",
)


def train(library: str, folder: Path | None = None, *, resume: Any = None, **given: Any) -> Ran:
    """Train with the library and return what was left."""
    _, _, callback = parts(library)
    watcher = recorder(callback)
    given = {name: given[name]() if name == "model" else given[name] for name in given}
    asked = given.pop("callbacks", None)
    asked = asked.make(library) if isinstance(asked, Each) else asked or []
    trainer = build(library, folder, callbacks=[*asked, watcher], **given)
    output = trainer.train(resume_from_checkpoint=resume)
    return Ran(trainer, output, Path(trainer.args.output_dir), watcher.told)


def both(tmp_path: Path, **given: Any) -> tuple[Ran, Ran]:
    """Train the same thing with each library."""
    ours, theirs = (train(name, tmp_path / name, **given) for name in LIBRARIES)
    return ours, theirs


# What the two libraries may differ by: the order of float32 additions in a norm.
RTOL, ATOL = 1e-5, 1e-6


def assert_same_history(
    ours: list[dict[str, Any]], theirs: list[dict[str, Any]], *, rtol: float = RTOL
) -> None:
    """Every entry has the same keys, steps, epochs and values to rounding."""
    shown = f"\nours   {ours}\ntheirs {theirs}"
    assert [sorted(e) for e in ours] == [sorted(e) for e in theirs], shown
    for mine, yours in zip(ours, theirs, strict=True):
        for name in yours:
            assert _near(mine[name], yours[name], rtol), f"{name}: {mine} != {yours}"


def _near(mine: Any, yours: Any, rtol: float) -> bool:
    if isinstance(yours, float) and isinstance(mine, (int, float)):
        return abs(mine - yours) <= ATOL + rtol * abs(yours)
    return bool(mine == yours)


def assert_same_weights(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], *, atol: float = ATOL
) -> None:
    """Every weight is the same to rounding."""
    assert list(ours) == list(theirs)
    for name, weight in theirs.items():
        # Attention does not see the bias of its keys: Adam steps on rounding noise there.
        if name.endswith(("key.bias", "c_attn.bias")):
            continue
        torch.testing.assert_close(
            ours[name], weight, rtol=RTOL, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_same_run(ours: Ran, theirs: Ran, *, rtol: float = RTOL, atol: float = 1e-6) -> None:
    """The log, the weights and the end are the same to rounding."""
    assert_same_history(ours.history, theirs.history, rtol=rtol)
    assert_same_weights(ours.weights, theirs.weights, atol=atol)
    assert ours.output.global_step == theirs.output.global_step
    assert abs(ours.output.training_loss - theirs.output.training_loss) <= 1e-5
