"""The first bad module and the samples are named, and the model is left as it was."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from anytrain.engine.step.diagnose import Finding, ModuleWatch, find

INF, NAN = math.inf, math.nan


class Log(nn.Module):
    def forward(self, x):
        return torch.log(x)


class Exp(nn.Module):
    def forward(self, x):
        return torch.exp(x)


class Root(nn.Module):
    """Finite everywhere; its slope at 0 is infinite."""

    def forward(self, x):
        return torch.sqrt(x.abs())


class Nothing(nn.Module):
    def forward(self, x):
        return x * 0


class Positive(nn.Module):
    def forward(self, x):
        return x.relu_()


def trained_by(model, loss=lambda out: out.mean()):
    """Return what does forward and backward of one batch."""

    def run(batch):
        value = loss(model(batch))
        value.backward()
        return value.detach()

    return run


def eye(size: int = 3) -> nn.Linear:
    """Return a layer that hands its input on."""
    layer = nn.Linear(size, size, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(size))
    return layer


def batch_with(rows: int = 4, bad: dict[int, float] | None = None) -> torch.Tensor:
    batch = torch.ones(rows, 3)
    for row, value in (bad or {}).items():
        batch[row] = value
    return batch


def test_a_log_of_zero_is_named_with_its_rows_and_samples() -> None:
    model = nn.Sequential(eye(), nn.Sequential(Log(), eye()), eye())
    batches = [batch_with(), batch_with(bad={1: 0.0, 3: 0.0})]
    found = find(model, trained_by(model), batches, ids=[range(4), [40, 41, 42, 43]])
    assert (found.phase, found.module, found.kind) == ("forward", "1.0", "Log")
    assert (found.micro_batch, found.rows, found.samples) == (1, (1, 3), (41, 43))
    assert (found.num_nan, found.num_inf, found.num_values) == (0, 6, 12)
    assert str(found) == (
        "1.0 (Log) made 6 infinite among 12 values in its output, from finite inputs, "
        "in micro-batch 1; samples 41, 43."
    )


def test_an_exploding_exp_is_named_and_not_its_parents_or_followers() -> None:
    model = nn.Sequential(eye(), nn.Sequential(nn.Sequential(Exp())), eye())
    found = find(model, trained_by(model), [batch_with(bad={2: 1e4})])
    assert (found.phase, found.module, found.rows) == ("forward", "1.0.0", (2,))
    assert found.samples == ()
    assert str(found).endswith("in micro-batch 0; row 2.")


def test_code_between_modules_is_blamed_on_the_module_that_holds_it() -> None:
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = eye(), eye()

        def forward(self, x):
            return self.second(torch.log(self.first(x)))

    model = nn.Sequential(eye(), Block(), eye())
    found = find(model, trained_by(model), [batch_with(bad={0: 0.0})])
    assert (found.phase, found.module, found.kind) == ("forward", "1", "Block")
    assert found.tensor == "what it handed to 1.second"
    assert found.rows == (0,)


def test_an_infinite_slope_is_found_in_backward_alone() -> None:
    model = nn.Sequential(eye(), nn.Sequential(eye(), Root()), eye())
    found = find(model, trained_by(model), [batch_with(bad={3: 0.0})])
    assert (found.phase, found.module, found.kind) == ("backward", "1.1", "Root")
    assert found.rows == (3,)
    assert "In backward, 1.1 (Root) made" in str(found)


def test_a_slope_between_modules_is_blamed_on_the_module_that_holds_it() -> None:
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = eye(), eye()

        def forward(self, x):
            return self.second(torch.sqrt(self.first(x)))

    model = nn.Sequential(eye(), nn.Sequential(Block()), eye())
    found = find(model, trained_by(model), [batch_with(bad={2: 0.0})])
    assert (found.phase, found.module, found.kind) == ("backward", "1.0", "Block")
    assert found.tensor == "the gradient that it handed to 1.0.first"
    assert found.rows == (2,)


def test_one_of_several_users_of_a_tensor_is_told_from_the_others() -> None:
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.fine, self.bad, self.also_fine = eye(), Root(), eye()

        def forward(self, x):
            return self.fine(x) + self.bad(x) + self.also_fine(x)

    model = nn.Sequential(eye(), Branches())
    found = find(model, trained_by(model), [batch_with(bad={1: 0.0})])
    assert (found.phase, found.module) == ("backward", "1.bad")
    assert found.rows == (1,)


def test_a_nan_in_the_data_is_not_blamed_on_a_module() -> None:
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = eye()

        def forward(self, batch):
            return self.layer(batch["pixels"])

    model = Named()
    batch = {"index": torch.arange(4), "pixels": batch_with(bad={2: NAN})}
    found = find(model, trained_by(model), [batch], ids=[["a", "b", "c", "d"]])
    assert (found.phase, found.module, found.samples) == ("input", None, ("c",))
    assert str(found).startswith("The data is bad: 'pixels' holds 3 NaN among 12 values")


def test_a_weight_that_was_bad_before_the_step_is_named_first() -> None:
    model = nn.Sequential(eye(), eye(), Log())
    with torch.no_grad():
        model[1].weight[0, 0] = NAN
    found = find(model, trained_by(model), [batch_with(bad={0: 0.0})])
    assert (found.phase, found.module, found.tensor) == ("parameter", "1", "weight")
    assert str(found) == "weight of 1 (Linear) was bad before the step: 1 NaN among 9 values."


def test_a_loss_function_is_blamed_where_the_models_outputs_are_finite() -> None:
    model = nn.Sequential(eye())
    run = trained_by(model, loss=lambda out: torch.log(out).mean())
    found = find(model, run, [batch_with(rows=3, bad={1: 0.0})])
    assert (found.phase, found.module, found.rows) == ("loss", None, (1,))


def test_a_loss_whose_slope_is_infinite_is_blamed() -> None:
    model = nn.Sequential(eye())
    run = trained_by(model, loss=lambda out: torch.sqrt(out).mean())
    found = find(model, run, [batch_with(rows=3, bad={1: 0.0})])
    assert (found.phase, found.module, found.rows) == ("backward", None, (1,))
    assert str(found).startswith("The loss is finite and its gradient is not")


def test_a_replay_that_shows_nothing_says_so() -> None:
    model = nn.Sequential(eye())
    found = find(model, trained_by(model), [batch_with(), batch_with()])
    assert found == Finding(phase="not reproduced")
    assert not found.found
    assert str(found).startswith("Not reproduced")


def test_infinities_that_mask_are_not_blamed() -> None:
    class Masked(nn.Module):
        """Masks by -inf, as attention does, and works on finite values."""

        def __init__(self):
            super().__init__()
            self.softmax = nn.Softmax(-1)
            self.register_buffer("mask", torch.tensor([0.0, 0.0, -INF]))

        def forward(self, x):
            return self.softmax(x + self.mask)

    model = nn.Sequential(eye(), Masked(), Masked(), nn.Sequential(eye(), Log()))
    found = find(model, trained_by(model), [batch_with()])
    assert (found.phase, found.module) == ("forward", "3.1")


def test_modules_that_work_in_place_are_watched_too() -> None:
    layers = [eye(), nn.ReLU(inplace=True), eye(), Root(), eye(), Positive()]
    model = nn.Sequential(*layers)
    found = find(model, trained_by(model), [batch_with(bad={0: 0.0})])
    assert (found.phase, found.module, found.rows) == ("backward", "3", (0,))


def test_watching_changes_no_loss_and_no_gradient() -> None:
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            y = self.norm(self.conv(x))
            y += x
            return self.relu(y.mul_(2))

    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU6(inplace=True), nn.Dropout(0.0, inplace=True))
    model = nn.Sequential(stem, Residual(), Residual(), nn.Flatten(), nn.LSTM(48, 4))
    batch = torch.rand(5, 1, 6, 6)
    run = trained_by(model, loss=lambda out: out[0].square().mean())
    loss = run(batch)
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with ModuleWatch(model) as watch:
        assert torch.equal(run(batch), loss)
    assert watch.forward_onset() is None and watch.backward_onset() is None
    for parameter, gradient in zip(model.parameters(), plain, strict=True):
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_are_watched_too(reentrant: bool) -> None:
    class Saving(nn.Module):
        def __init__(self, *blocks):
            super().__init__()
            self.blocks = nn.ModuleList(blocks)

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    model = nn.Sequential(eye(), Saving(eye(), nn.Sequential(eye(), Root()), eye()))
    found = find(model, trained_by(model), [batch_with(bad={1: 0.0})])
    assert (found.phase, found.module, found.rows) == ("backward", "1.blocks.1.1", (1,))
    model[1].blocks[1][1] = Log()
    found = find(model, trained_by(model), [batch_with(bad={1: 0.0})])
    assert (found.phase, found.module, found.rows) == ("forward", "1.blocks.1.1", (1,))


def test_frozen_layers_and_a_shared_module_are_watched_too() -> None:
    shared = eye()
    model = nn.Sequential(eye().requires_grad_(False), shared, Root(), shared, eye())
    found = find(model, trained_by(model), [batch_with(bad={2: 0.0})])
    assert (found.phase, found.module, found.rows) == ("backward", "2", (2,))


def test_tuples_dicts_and_data_classes_are_looked_into() -> None:
    @dataclass
    class Out:
        value: torch.Tensor

    class Giving(nn.Module):
        def __init__(self, give):
            super().__init__()
            self.log, self.give = Log(), give

        def forward(self, x):
            return self.give(self.log(x))

    for give, take in [
        (lambda v: (None, [v]), lambda out: out[1][0]),
        (lambda v: {"a": {"b": v}, "n": 3}, lambda out: out["a"]["b"]),
        (Out, lambda out: out.value),
    ]:
        model = Giving(give)
        eyes = nn.Sequential(eye())
        both = nn.ModuleDict({"front": eyes, "back": model})

        def run(batch, both=both, take=take):
            loss = take(both["back"](both["front"](batch))).mean()
            loss.backward()
            return loss

        found = find(both, run, [batch_with(bad={0: 0.0})])
        assert (found.phase, found.module, found.rows) == ("forward", "back.log", (0,))


def test_rows_that_a_tensor_cannot_tell_are_found_by_running_each_alone() -> None:
    class Flat(nn.Module):
        """Works on a transposed batch: its first dimension is no sample."""

        def __init__(self):
            super().__init__()
            self.log = Log()

        def forward(self, x):
            return self.log(x.t())

    model = nn.Sequential(eye(), Flat())
    found = find(model, trained_by(model), [batch_with(rows=5, bad={4: 0.0})])
    assert (found.module, found.rows) == ("1.log", (4,))


def test_rows_are_left_open_where_one_alone_cannot_run() -> None:
    class Flat(nn.Module):
        def forward(self, x):
            return torch.log(x.t()).t()

    model = nn.Sequential(Flat(), nn.BatchNorm1d(3))
    found = find(model, trained_by(model), [batch_with(bad={1: 0.0})])
    assert (found.module, found.rows) == ("0", (1,))
    summing = nn.Sequential(eye(), nn.BatchNorm1d(3))
    run = trained_by(summing, loss=lambda out: torch.log(out.sum() * 0))
    found = find(summing, run, [batch_with()])
    assert (found.phase, found.rows) == ("loss", ())


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(eye(), nn.BatchNorm1d(3), nn.Sequential(Log()))
    model[1].eval()
    model[0].weight.grad = torch.ones(3, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    model[1].train()
    find(model, trained_by(model), [batch_with(), batch_with(bad={1: -1.0})])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert all(p.grad is None and not p._backward_hooks for p in model.parameters())
    assert model[1].training


def test_an_error_of_the_replay_leaves_no_hook_behind() -> None:
    model = nn.Sequential(eye())
    with pytest.raises(RuntimeError):
        find(model, trained_by(model), [torch.ones(2, 5)])
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks


def test_a_compiled_model_is_watched_uncompiled() -> None:
    inner = nn.Sequential(eye(), nn.Sequential(Log(), eye()))
    compiled = torch.compile(inner, backend="eager")
    compiled(batch_with())
    found = find(inner, trained_by(compiled), [batch_with(bad={1: 0.0})])
    assert (found.phase, found.module, found.rows) == ("forward", "1.0", (1,))


class TestBert:
    """A real transformer, small, with one poisoned sample."""

    @pytest.fixture
    def model(self):
        from transformers import BertConfig, BertForSequenceClassification

        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
        )
        return BertForSequenceClassification(config)

    @pytest.fixture
    def batch(self):
        ids = torch.randint(5, 49, (6, 8), generator=torch.Generator().manual_seed(1))
        ids[4, 3] = 49  # the one that will be poisoned
        mask = torch.ones(6, 8, dtype=torch.long)
        mask[2, 5:] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1] * 3)}

    @staticmethod
    def run_of(model):
        def run(batch):
            loss = model(**batch).loss
            loss.backward()
            return loss.detach()

        return run

    def test_one_poisoned_sample_is_named(self, model, batch) -> None:
        with torch.no_grad():
            model.bert.embeddings.word_embeddings.weight[49] = 3e38  # the norm's variance overflows
        found = find(model, self.run_of(model), [batch], ids=[[10, 11, 12, 13, 14, 15]])
        assert (found.phase, found.module) == ("forward", "bert.embeddings.LayerNorm")
        assert found.samples == (14,)

    def test_a_layer_that_overflows_is_named_exactly(self, model, batch) -> None:
        with torch.no_grad():
            model.bert.encoder.layer[1].output.dense.weight.fill_(3e38)
            model.bert.encoder.layer[1].output.dense.bias.fill_(3e38)
        found = find(model, self.run_of(model), [batch])
        assert (found.phase, found.module, found.kind) == (
            "forward",
            "bert.encoder.layer.1.output.dense",
            "Linear",
        )

    def test_gradient_checkpointing_hides_nothing(self, model, batch) -> None:
        model.gradient_checkpointing_enable()
        model.train()
        layer = model.bert.encoder.layer[2].intermediate
        layer.intermediate_act_fn = nn.Sequential(Nothing(), Root())
        found = find(model, self.run_of(model), [batch])
        assert (found.phase, found.module) == (
            "backward",
            "bert.encoder.layer.2.intermediate.intermediate_act_fn.1",
        )

    def test_a_loss_of_the_models_own_is_named(self, model, batch) -> None:
        batch["labels"] = torch.full((6,), -100)  # a mean over nothing
        found = find(model, self.run_of(model), [batch])
        assert found.phase == "loss"
        assert str(found).startswith("The model's outputs are finite and the loss is not: 1 NaN")
