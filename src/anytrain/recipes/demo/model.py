"""A small transformer that says whether two sentences mean the same."""

from __future__ import annotations

import torch
from torch import nn

from anytrain.recipes.demo.data import LONGEST, PADDING
from anytrain.recipes.demo.grammar import vocabulary


class SameMeaning(nn.Module):
    """Read both sentences with one encoder and compare what it made of them."""

    def __init__(self, width: int = 96, heads: int = 4, layers: int = 1) -> None:
        super().__init__()
        self.words = nn.Embedding(1 + len(vocabulary()), width, padding_idx=PADDING)
        self.places = nn.Embedding(LONGEST, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.judge = nn.Sequential(
            nn.LayerNorm(2 * width),
            nn.Linear(2 * width, 2 * width),
            nn.ReLU(),
            nn.Linear(2 * width, 1),
        )
        # Words start well apart: with a smaller spread the first epochs see only word counts.
        nn.init.normal_(self.words.weight, std=0.3)
        nn.init.normal_(self.places.weight, std=0.1)

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Return one number a pair: above zero means the same."""
        one, other = self.read(torch.cat([first, second])).chunk(2)
        compared = torch.cat([(one - other).abs(), one * other], dim=-1)
        verdict: torch.Tensor = self.judge(compared).squeeze(-1)
        return verdict

    def read(self, sentences: torch.Tensor) -> torch.Tensor:
        """Return one vector a sentence."""
        padded = sentences == PADDING
        places = torch.arange(sentences.shape[1], device=sentences.device)
        seen = self.words(sentences) + self.places(places)
        understood = self.encoder(seen, src_key_padding_mask=padded)
        return _mean(understood, ~padded)


def _mean(rows: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    weights = counted.unsqueeze(-1).to(rows.dtype)
    return (rows * weights).sum(dim=1) / weights.sum(dim=1)
