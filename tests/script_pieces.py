"""Small models, a tokenizer and texts that scripts can work with, without a network."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

TEXT = "the a red blue green cat dog bird sees likes big small and then runs here there"
WORDS = TEXT.split()


@dataclass(frozen=True)
class Pieces:
    bert: Path
    t5: Path
    pairs: Path
    checks: Path
    text: Path


def make(root: Path) -> Pieces:
    """Write everything below a folder."""
    made = Pieces(*(root / name for name in ("bert", "t5", "train.json", "dev.json", "text.txt")))
    draw = random.Random(0)
    _tokenizer(made.bert)
    _tokenizer(made.t5)
    _models(made)
    for path, count in ((made.pairs, 48), (made.checks, 20)):
        path.write_text("".join(json.dumps(_pair(draw)) + "\n" for _ in range(count)))
    lines = [" ".join(draw.choices(WORDS, k=9)) for _ in range(60)]
    made.text.write_text("\n".join(lines) + "\n")
    return made


def _pair(draw: random.Random) -> dict[str, str]:
    first = draw.choices(WORDS, k=draw.randint(2, 5))
    same = draw.random() < 0.5
    second = first if same else draw.choices(WORDS, k=len(first))
    return {
        "first": " ".join(first),
        "second": " ".join(second),
        "label": "same" if same else "other",
    }


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = {word: number for number, word in enumerate([*special, *WORDS])}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=64,
    )
    made.save_pretrained(folder)


def _models(made: Pieces) -> None:
    import torch
    from transformers import BertConfig, BertModel, T5Config, T5ForConditionalGeneration

    before = torch.get_rng_state()
    torch.manual_seed(0)
    bert = BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(bert).save_pretrained(made.bert)
    t5 = T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=3,
    )
    T5ForConditionalGeneration(t5).save_pretrained(made.t5)
    torch.set_rng_state(before)
