"""A folder with a tiny BERT's configuration and vocabulary, and data it can learn from.

Import it as `from tiny_bert import model_folder, write_pairs`; tests/ is on the path.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

_TEXT = "the a cat dog bird fish sees likes hears not never big small red blue old new"
WORDS = _TEXT.split()
OVERRIDES = "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64"


def model_folder(path: Path) -> Path:
    """Write a configuration of BERT and a WordPiece vocabulary, and no weights."""
    from transformers import BertConfig, BertTokenizer

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    path.mkdir(parents=True, exist_ok=True)
    (path / "vocab.txt").write_text("\n".join([*special, *WORDS]) + "\n")
    vocab = {word: number for number, word in enumerate([*special, *WORDS])}
    BertTokenizer(vocab=vocab, model_max_length=64).save_pretrained(path)
    BertConfig(vocab_size=len(vocab), max_position_embeddings=64).save_pretrained(path)
    return path


def sentence(rng: random.Random) -> str:
    """Return a few words of the vocabulary."""
    return " ".join(rng.choices(WORDS, k=rng.randint(3, 8)))


def pairs(count: int, seed: int = 0) -> list[dict[str, object]]:
    """Return pairs: every second one says the same sentence twice."""
    rng = random.Random(seed)
    rows: list[dict[str, object]] = []
    for index in range(count):
        first = sentence(rng)
        second = first if index % 2 else sentence(rng)
        rows.append({"sentence1": first, "sentence2": second, "label": index % 2})
    return rows


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    """Write rows as tsv, csv or json, by the file's name."""
    if path.suffix == ".json":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
        return path
    between = "\t" if path.suffix == ".tsv" else ","
    lines = [between.join(rows[0]), *(between.join(map(str, row.values())) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path
