"""The model that all contenders begin with: one file of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from anytrain.recipes.bench.settings import SIZES, Settings

_WEIGHTS = "weights.pt"


def write(settings: Settings, folder: Path) -> None:
    """Write the configuration and the weights to begin with."""
    import transformers

    torch.manual_seed(0)
    if settings.model:
        kind = transformers.AutoModelForSequenceClassification
        model = kind.from_pretrained(settings.model, num_labels=2, dtype=torch.float32)
    else:
        model = _new(settings)
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / _WEIGHTS)


def _new(settings: Settings) -> Any:
    import transformers

    size = SIZES[settings.size]
    if size.head == "causal":
        places = {"n_positions": settings.length, "bos_token_id": 1, "eos_token_id": 1}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**places, **size.config}))
    places = {"max_position_embeddings": max(512, settings.length)}
    config = transformers.BertConfig(**{**places, **size.config}, num_labels=2)
    return transformers.BertForSequenceClassification(config)


def load(settings: Settings, folder: Path) -> nn.Module:
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
