"""Thirty small trainings that run everywhere: a preflight must find no error in them."""

from __future__ import annotations

import math
import tempfile

import torch
from cases import Rows, Tokens, classify, clean, fit
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from anytrain import Trainer, TrainingArguments


def net(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


class Encoder(nn.Module):
    """A small transformer that reads words."""

    def __init__(self, *, causal: bool = False, dropout: float = 0.1) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 16), nn.Embedding(64, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True) for _ in range(2)
        )
        self.head, self.causal = nn.Linear(16, 4), causal

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        mask = None
        if self.causal:
            mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(x.mean(1))


@clean()
def layers_in_a_row() -> None:
    fit(net(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), Rows((8,)))


@clean()
def layers_with_dropout_and_norms() -> None:
    fit(net(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4)),
        Rows((8,)))  # fmt: skip


@clean()
def pictures() -> None:
    fit(
        net(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, groups=8),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 4),
        ),
        Rows((3, 12, 12)),
    )


@clean()
def pictures_with_shortcuts() -> None:
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
            self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)])

        def forward(self, x):
            return F.relu(x + self.norms[1](self.two(F.relu(self.norms[0](self.one(x))))))

    layers = (nn.Conv2d(3, 8, 1), Block(), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    fit(net(*layers, nn.Linear(8, 4)), Rows((3, 8, 8)))


@clean()
def pictures_in_patches() -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = nn.Conv2d(3, 16, 4, stride=4)
            self.first = nn.Parameter(torch.zeros(1, 1, 16))
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.head = nn.Linear(16, 4)

        def forward(self, x):
            x = self.patches(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1)
            return self.head(self.layer(x)[:, 0])

    fit(Model(), Rows((3, 8, 8)))


@clean()
def words() -> None:
    fit(Encoder(), Tokens())


@clean()
def words_from_left_to_right() -> None:
    fit(Encoder(causal=True), Tokens())


@clean()
def attention_written_out() -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.all = nn.Embedding(50, 16), nn.Linear(16, 48)
            self.head = nn.Linear(16, 4)

        def forward(self, ids):
            q, k, v = self.all(self.words(ids)).chunk(3, dim=-1)
            scores = q @ k.transpose(1, 2) / math.sqrt(16)
            scores = scores.masked_fill((ids == 0)[:, None], float("-inf"))
            return self.head((scores.softmax(-1) @ v).mean(1))

    fit(Model(), Tokens())


@clean()
def attention_by_torch() -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.all = nn.Embedding(50, 16), nn.Linear(16, 48)
            self.head = nn.Linear(16, 4)

        def forward(self, ids):
            q, k, v = self.all(self.words(ids)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.head(found.transpose(1, 2).flatten(2).mean(1))

    fit(Model(), Tokens())


@clean()
def the_next_word_with_tied_weights() -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.mix = nn.Embedding(50, 16), nn.Linear(16, 16)
            self.out = nn.Linear(16, 50, bias=False)
            self.out.weight = self.words.weight

        def forward(self, ids):
            return self.out(torch.tanh(self.mix(self.words(ids))))

    def loss_of(model, batch):
        ids, _ = batch
        return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])

    fit(Model(), Tokens(), loss_of=loss_of)


@clean()
def a_long_memory() -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.memory = nn.Embedding(50, 8), nn.LSTM(8, 8, batch_first=True)
            self.head = nn.Linear(8, 4)

        def forward(self, ids):
            return self.head(self.memory(self.words(ids))[0][:, -1])

    fit(Model(), Tokens())


@clean()
def a_gated_memory() -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRUCell(4, 8), nn.Linear(8, 4)

        def forward(self, x):
            state = x.new_zeros(len(x), 8)
            for moment in x.unbind(1):
                state = self.cell(moment, state)
            return self.head(state)

    fit(Model(), Rows((3, 4)))


@clean()
def sounds() -> None:
    fit(
        net(
            nn.Conv1d(1, 8, 5, stride=2),
            nn.GroupNorm(2, 8),
            nn.SiLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(8, 4),
        ),
        Rows((1, 40)),
    )


@clean()
def pictures_from_numbers() -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.decode = nn.Linear(16, 8), nn.Linear(4, 16)

        def forward(self, x):
            mean, spread = self.encode(x).chunk(2, dim=-1)
            drawn = mean + torch.randn_like(mean) * (spread / 2).exp()
            return self.decode(drawn), mean, spread

    def loss_of(model, batch):
        x, _ = batch
        made, mean, spread = model(x)
        kept = -0.5 * (1 + spread - mean**2 - spread.exp()).sum(-1).mean()
        return F.mse_loss(made, x) + kept

    fit(Model(), Rows((16,)), loss_of=loss_of)


@clean()
def down_and_up_again() -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Conv2d(1, 4, 2, 2), nn.ConvTranspose2d(4, 4, 2, 2)
            self.out = nn.Conv2d(5, 1, 1)

        def forward(self, x):
            deep = F.interpolate(F.relu(self.down(x)), scale_factor=1.0)
            return self.out(torch.cat([self.up(deep), x], dim=1))

    def loss_of(model, batch):
        return F.l1_loss(model(batch[0]), batch[0])

    fit(Model(), Rows((1, 8, 8)), loss_of=loss_of)


@clean()
def sharper_pictures() -> None:
    def loss_of(model, batch):
        x, _ = batch
        return F.smooth_l1_loss(model(x), F.interpolate(x, scale_factor=2, mode="nearest"))

    fit(net(nn.Conv2d(1, 4, 3, padding=1), nn.PixelShuffle(2)), Rows((1, 6, 6)), loss_of=loss_of)


@clean()
def bags_of_words() -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.EmbeddingBag(50, 8, mode="mean"), nn.Linear(8, 4)

        def forward(self, ids):
            return self.head(self.words(ids))

    fit(Model(), Tokens())


@clean()
def experts_that_are_weighed() -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(
                nn.Linear(8, 4) for _ in range(4)
            )  # fmt: skip

        def forward(self, x):
            best, which = self.gate(x).softmax(-1).topk(2, dim=-1)
            made = torch.stack([expert(x) for expert in self.experts], dim=1)
            return (made.gather(1, which[..., None].expand(-1, -1, 4)) * best[..., None]).sum(1)

    fit(Model(), Rows((8,)))


@clean()
def pairs_that_belong_together() -> None:
    def loss_of(model, batch):
        one, other, _ = batch
        a, b = (F.normalize(model(x), dim=-1) for x in (one, other))
        scores = a @ b.T / 0.1
        same = torch.arange(len(scores), device=scores.device)
        return (F.cross_entropy(scores, same) + F.cross_entropy(scores.T, same)) / 2

    fit(nn.Linear(8, 8), Rows((8,), (8,)), loss_of=loss_of)


@clean()
def a_mean_over_what_is_not_padded() -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(50, 8, padding_idx=0), nn.Linear(8, 4)

        def forward(self, ids):
            keep = (ids != 0)[..., None].float()
            found = self.words(ids)
            return self.head((found * keep).sum(1) / keep.sum(1).clamp(min=1))

    fit(Model(), Tokens())


@clean()
def bfloat16() -> None:
    fit(Encoder(), Tokens(), mixed_precision="bf16")


@clean("mps:16GB", "cuda:24GB")  # no TPU scales a loss
def float16_with_its_scale() -> None:
    def loss_of(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y)

    model = net(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    kind = {"mixed_precision": "fp16"}
    fit(model, Rows((8,)), loss_of=loss_of, **kind)


@clean()
def batches_that_add_up() -> None:
    fit(net(nn.Linear(8, 4)), Rows((8,)), gradient_accumulation_steps=2)


@clean()
def gradients_that_are_clipped() -> None:
    fit(net(nn.Linear(8, 16), nn.Softplus(), nn.Linear(16, 4)), Rows((8,)), clip=1.0,
        schedule=True)  # fmt: skip


@clean()
def plain_descent() -> None:
    model = net(nn.Linear(8, 16), nn.Hardswish(), nn.Linear(16, 4))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    fit(model, Rows((8,)), optimizer=sgd)


@clean("mps:16GB", "cuda:24GB")  # torch.utils.checkpoint fails on torch_xla's tensors
def blocks_that_are_computed_again() -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.head = nn.Linear(8, 4)

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(lambda y, b=block: torch.relu(b(y)), x, use_reentrant=False)
            return self.head(x)

    fit(Model(), Rows((8,)))


@clean()
def some_weights_held_fast() -> None:
    model = net(nn.Linear(8, 16), nn.ELU(), nn.Linear(16, 4))
    model[0].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    fit(model, Rows((8,)), optimizer=torch.optim.AdamW(trained))


@clean()
def labels_that_are_smoothed() -> None:
    def loss_of(model, batch):
        *inputs, labels = batch
        return F.cross_entropy(model(*inputs), labels, label_smoothing=0.1)

    fit(net(nn.Linear(8, 16), nn.Mish(), nn.Linear(16, 4)), Rows((8,)), loss_of=loss_of)


@clean()
def workers_that_can_be_started() -> None:
    loader = DataLoader(Rows((8,)), batch_size=4, num_workers=2)
    fit(net(nn.Linear(8, 4)), loader, loss_of=classify)


@clean()
def a_trainer_of_sentences_of_one_length() -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Encoder()

        def forward(self, input_ids, labels=None):
            scores = self.inner(input_ids)
            return {"loss": F.cross_entropy(scores, labels), "logits": scores}

    rows = [{"input_ids": torch.arange(12) + n, "labels": n % 4} for n in range(16)]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, max_steps=3, per_device_train_batch_size=4, bf16=True)
        Trainer(Model(), args, train_dataset=rows, eval_dataset=rows).train()
