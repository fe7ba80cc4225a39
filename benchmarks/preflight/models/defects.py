"""Thirty small trainings with one defect each; the line at fault ends in the mark."""

from __future__ import annotations

import tempfile

import numpy as np
import torch
from cases import MARK, Rows, Tokens, classify, fit, planted
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from anytrain import Accelerator, Trainer, TrainingArguments

__all__ = ["MARK"]
MPS, CUDA, TPU = "mps:16GB", "cuda:24GB", "tpu:v5e"


class Head(nn.Module):
    """A linear layer before and after whatever a case does in between."""

    def __init__(self, inputs: int = 8, width: int = 8) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(inputs, width), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.between(self.inner(x)))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x


# -- no kernel on mps -------------------------------------------------------------------------


@planted("kernels", MPS)
def eigenvalues() -> None:
    class Model(Head):
        def between(self, x):
            values, vectors = torch.linalg.eigh(x.T @ x)  # planted
            return x @ vectors

    fit(Model(), Rows((8,)))


@planted("kernels", MPS)
def eigenvalues_of_any_matrix() -> None:
    class Model(Head):
        def between(self, x):
            found = torch.linalg.eigvals(x.T @ x)  # planted
            return x + found.real.sum()

    fit(Model(), Rows((8,)))


@planted("kernels", MPS)
def fractional_pooling() -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4 * 16, 4)

        def forward(self, x):
            x = F.fractional_max_pool2d(self.conv(x), 2, output_size=4)  # planted
            return self.head(x.flatten(1))

    fit(Model(), Rows((1, 12, 12)))


@planted("kernels", MPS)
def pooling_in_three_dimensions() -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv3d(1, 2, 1), nn.Linear(16, 4)

        def forward(self, x):
            x = F.adaptive_max_pool3d(self.conv(x), 2)  # planted
            return self.head(x.flatten(1))

    fit(Model(), Rows((1, 4, 4, 4)))


@planted("kernels", MPS)
def a_margin_loss() -> None:
    def loss_of(model, batch):
        x, y = batch
        return F.multi_margin_loss(model(x), y)  # planted

    fit(Head(), Rows((8,)), loss_of=loss_of)


@planted("kernels", MPS)
def a_matrix_exponential() -> None:
    class Model(Head):
        def between(self, x):
            return x @ torch.linalg.matrix_exp(self.inner.weight)  # planted

    fit(Model(), Rows((8,)))


@planted("kernels", MPS)
def a_random_leak() -> None:
    class Model(Head):
        def between(self, x):
            return F.rrelu(x, training=self.training)  # planted

    fit(Model(), Rows((8,)))


@planted("kernels", MPS)
def the_most_common_value() -> None:
    class Model(Head):
        def between(self, x):
            common = torch.mode(x.round(), dim=1).values  # planted
            return x + common[:, None]

    fit(Model(), Rows((8,)))


@planted("kernels", MPS)
def values_by_place() -> None:
    class Model(Head):
        def between(self, x):
            places = torch.arange(8, device=x.device)
            return x * torch.take(self.inner.weight, places)  # planted

    fit(Model(), Rows((8,)))


@planted("kernels", MPS)
def words_of_bounded_length() -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(50, 8, max_norm=1.0)
            self.head = nn.Linear(8, 4)

        def forward(self, ids):
            return self.head(self.words(ids).mean(1))  # planted

    fit(Model(), Tokens())


# -- number formats that mps lacks -----------------------------------------------------------


@planted("dtypes", MPS)
def a_ramp_in_float64() -> None:
    class Model(Head):
        def between(self, x):
            ramp = torch.linspace(0, 1, 8, dtype=torch.float64, device=x.device)  # planted
            return x * ramp.float()

    fit(Model(), Rows((8,)))


@planted("dtypes", MPS)
def a_sum_in_float64() -> None:
    class Model(Head):
        def between(self, x):
            mean = x.double().mean()  # planted
            return x - mean.float()

    fit(Model(), Rows((8,)))


@planted("dtypes", MPS)
def weights_from_numpy() -> None:
    class Model(Head):
        def between(self, x):
            scale = torch.from_numpy(np.linspace(0.5, 1.5, 8)).to(x.device)  # planted
            return x * scale.to(x.dtype)

    fit(Model(), Rows((8,)))


# -- waits ------------------------------------------------------------------------------------


@planted("host_reads", CUDA)
def a_value_that_is_looked_at() -> None:
    class Model(Head):
        def between(self, x):
            largest = x.abs().max().item()  # planted
            return x / max(largest, 1.0)

    fit(Model(), Rows((8,)))


@planted("host_reads", CUDA)
def a_tensor_that_decides() -> None:
    class Model(Head):
        def between(self, x):
            if x.mean() > 0:  # planted
                x = x * 2
            return x

    fit(Model(), Rows((8,)))


@planted("host_reads", CUDA)
def a_list_of_values() -> None:
    class Model(Head):
        def between(self, x):
            means = x.mean(0).tolist()  # planted
            return x - sum(means) / len(means)

    fit(Model(), Rows((8,)))


@planted("host_reads", CUDA)
def a_mask_that_selects() -> None:
    def loss_of(model, batch):
        x, y = batch
        errors = F.cross_entropy(model(x), y, reduction="none")
        return errors[errors > 0.1].mean()  # planted

    fit(Head(), Rows((8,)), loss_of=loss_of)


@planted("host_reads", CUDA)
def places_that_are_not_zero() -> None:
    class Model(Head):
        def between(self, x):
            rows = (x.sum(1) > 0).nonzero()  # planted
            return x + rows.numel() * 0.01

    fit(Model(), Rows((8,)))


@planted("host_reads", CUDA)
def numbers_for_numpy() -> None:
    class Model(Head):
        def between(self, x):
            spread = np.std(x.detach().cpu().numpy())  # planted
            return x / (1.0 + float(spread))

    fit(Model(), Rows((8,)))


@planted("host_reads", CUDA)
def a_loss_that_is_printed_each_step() -> None:
    seen = []

    def loss_of(model, batch):
        loss = classify(model, batch)
        seen.append(float(loss))  # planted
        return loss

    fit(Head(), Rows((8,)), loss_of=loss_of)


@planted("host_reads", TPU)
def values_that_occur() -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(50, 8), nn.Linear(8, 4)

        def forward(self, ids):
            kinds = torch.unique(ids)  # planted
            return self.head(self.words(ids).mean(1) + self.words(kinds).mean(0))

    fit(Model(), Tokens())


@planted("host_reads", TPU)
def a_mask_that_picks_words() -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(50, 8), nn.Linear(8, 4)

        def forward(self, ids):
            found = self.words(ids)
            rare = torch.masked_select(found, (ids > 25)[..., None])  # planted
            return self.head(found.mean(1)) + rare.mean()

    fit(Model(), Tokens())


# -- the run as a whole ------------------------------------------------------------------------


@planted("precision", CUDA)
def half_precision_without_a_scale() -> None:
    def loss_of(model, batch):
        x, y = batch
        with torch.autocast(x.device.type, dtype=torch.float16):
            return F.cross_entropy(model(x), y)  # planted

    fit(Head(), Rows((8,)), loss_of=loss_of)


@planted("precision", MPS)
def weights_in_half_precision() -> None:
    def loss_of(model, batch):
        x, y = batch
        return F.cross_entropy(model(x.half()).float(), y)  # planted

    fit(Head().half(), Rows((8,)), loss_of=loss_of)


@planted("distributed", MPS, num_processes=2)
def two_processes_on_a_mac() -> None:
    fit(Head(), Rows((8,)))


@planted("unused", CUDA, num_processes=2)
def a_layer_that_nobody_calls() -> None:
    class Model(Head):
        def __init__(self):
            super().__init__()
            self.forgotten = nn.Linear(8, 8)  # planted

    fit(Model(), Rows((8,)))


@planted("workers", MPS)
def a_collator_that_cannot_travel() -> None:
    data = Rows((8,))
    together = torch.utils.data.default_collate
    loader = DataLoader(data, 4, num_workers=2, collate_fn=lambda rows: together(rows))  # planted
    fit(Head(), loader)


@planted("randomness", MPS)
def dropout_that_is_drawn_again() -> None:
    class Model(Head):
        def between(self, x):
            return checkpoint(self.dropped, x, use_reentrant=False)

        def dropped(self, x):
            return F.dropout(torch.tanh(x), 0.5, self.training)  # planted

    fit(Model(), Rows((8,)))


@planted("shapes", TPU)
def sentences_of_every_length() -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(50, 8), nn.Linear(8, 4)

        def forward(self, input_ids, labels=None):
            scores = self.head(self.words(input_ids).mean(1))
            return {"loss": F.cross_entropy(scores, labels), "logits": scores}

    class Padding:
        def __call__(self, rows):
            ids = [torch.tensor(row["input_ids"]) for row in rows]
            padded = nn.utils.rnn.pad_sequence(ids, batch_first=True)
            return {"input_ids": padded, "labels": torch.tensor([row["labels"] for row in rows])}

    rows = [{"input_ids": [1] * (3 + 5 * n % 97), "labels": n % 4} for n in range(200)]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, max_steps=5, per_device_train_batch_size=4)
        Trainer(Model(), args, data_collator=Padding(), train_dataset=rows).train()  # planted


@planted("disk", CUDA)
def a_checkpoint_larger_than_the_disk() -> None:
    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            # A petabyte: no weight is ever allocated.
            self.many = nn.ModuleList(nn.Linear(2**22, 2**22, bias=False) for _ in range(16))
            self.small = nn.Linear(8, 4)

        def forward(self, x):
            # one row of each, so that a step is small
            return self.small(x + sum(layer.weight[0, :8] for layer in self.many))

    with tempfile.TemporaryDirectory() as folder:
        model = Large()
        accelerator = Accelerator(project_dir=folder)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(Rows((8,)), batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # planted
        for batch in loader:
            accelerator.backward(classify(model, batch))
            optimizer.step()
            optimizer.zero_grad()
