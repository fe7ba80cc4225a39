"""Turn sentence pairs into tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.data import Dataset

from anytrain.recipes.demo.grammar import Pair, vocabulary

LONGEST = 10  # words in the longest sentence of the grammar
PADDING, START = 0, 1
NUM_PLACES = 1 + LONGEST
NUM_TOKENS = 2 + len(vocabulary())


class PairSet(Dataset[dict[str, torch.Tensor]]):
    """Sentence pairs as rows of word numbers, each after a start mark, padded to one length."""

    class_names = ("different", "same")

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.pairs = pairs
        number = {word: index for index, word in enumerate(vocabulary(), start=START + 1)}
        self.first = _rows([pair.first for pair in pairs], number)
        self.second = _rows([pair.second for pair in pairs], number)
        self.labels = torch.tensor([int(pair.same) for pair in pairs])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {
            "first": self.first[index],
            "second": self.second[index],
            "labels": self.labels[index],
        }

    def in_words(self, index: int) -> dict[str, str]:
        """Return the two sentences of a pair."""
        pair = self.pairs[index]
        return {"sentence1": pair.first, "sentence2": pair.second}


def _rows(sentences: Sequence[str], number: dict[str, int]) -> torch.Tensor:
    rows = torch.full((len(sentences), NUM_PLACES), PADDING)
    for row, sentence in zip(rows, sentences, strict=True):
        words = [START, *(number[word] for word in sentence.split())]
        row[: len(words)] = torch.tensor(words)
    return rows
