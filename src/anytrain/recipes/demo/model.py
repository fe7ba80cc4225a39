"""A small BERT, and a head that says whether two sentences mean the same."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from anytrain.recipes.demo.data import NUM_PLACES, NUM_TOKENS, PADDING


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
