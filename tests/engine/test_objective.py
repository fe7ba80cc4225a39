from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from anytrain.core.errors import BadInput
from anytrain.engine import objective
from equivalence import twins


class Takes(nn.Module):
    def forward(self, *places: Any, **names: Any) -> Any:
        return places, names


def test_a_model_is_called_by_name_by_place_or_with_the_batch_itself() -> None:
    model, x = Takes(), torch.ones(2)
    assert objective.call(model, {"x": x}) == ((), {"x": x})
    assert objective.call(model, [x, x]) == ((x, x), {})
    assert objective.call(model, (x,)) == ((x,), {})
    assert objective.call(model, x) == ((x,), {})


@pytest.mark.parametrize("batch", [None, "x", 3, [1, 2], ["a", "b"]])
def test_a_batch_without_tensors_is_explained_where_the_model_fails_on_it(batch: Any) -> None:
    assert objective.call(Takes(), batch)[0] == (tuple(batch) if type(batch) is list else (batch,))
    with pytest.raises(BadInput, match=f"data_collator returned a {type(batch).__name__}"):
        objective.call(nn.Linear(2, 1), batch)


def test_a_models_own_error_is_left_as_it_is() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        objective.call(nn.Linear(2, 1), [{"x": torch.ones(2)}, 2])
    with pytest.raises(TypeError, match="must be Tensor"):
        objective.call(nn.Linear(2, 1), SimpleNamespace(x=torch.ones(2)))


def test_a_loss_is_found_by_name_in_first_place_or_alone() -> None:
    loss, logits = torch.tensor(1.0), torch.ones(2, 3)
    for outputs in ({"logits": logits, "loss": loss}, (loss, logits), [loss], loss):
        assert objective.loss_of(outputs, {}) is loss


@pytest.mark.parametrize("outputs", [{"logits": torch.ones(2)}, torch.ones(2), (), "loss", None])
def test_outputs_without_a_loss_are_told_with_what_was_given(outputs: Any) -> None:
    with pytest.raises(BadInput, match="did not return a loss") as caught:
        objective.loss_of(outputs, {"x": torch.ones(2, 3)})
    assert "it was given x" in str(caught.value)


def test_items_are_labels_that_count_or_else_samples() -> None:
    words = torch.tensor([[1, -100, 2], [3, 4, -100]])
    assert int(objective.num_items({"labels": words})) == 4
    assert int(objective.num_items({"labels": words}, shifted=True)) == 2
    assert int(objective.num_items({"labels": torch.tensor([0, 1, -100])}, shifted=True)) == 2
    assert objective.num_items({"x": torch.ones(5, 2), "labels": torch.rand(5)}) == 5
    assert objective.num_items([torch.ones(3, 2)]) == 3
    assert objective.num_items({"name": "text"}) == 1


def test_shares_of_micro_batches_add_up_to_the_mean_over_all_items() -> None:
    values = torch.arange(10.0)
    cuts = [values[:3], values[3:4], values[4:]]
    whole = torch.tensor(10)
    parts = [objective.weighed(cut.mean(), torch.tensor(len(cut)), whole, 1) for cut in cuts]
    assert float(sum(parts)) == pytest.approx(float(values.mean()))


def test_shares_of_ranks_are_right_once_averaged() -> None:
    values = torch.arange(8.0)
    ranks = [values[:6], values[6:]]
    parts = [objective.weighed(r.mean(), len(r), torch.tensor(8), 2) for r in ranks]
    assert float(sum(parts) / 2) == pytest.approx(float(values.mean()))


def test_a_micro_batch_without_items_adds_neither_loss_nor_gradient() -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    labels = torch.full((3,), -100)
    loss = nn.functional.cross_entropy(logits, labels)
    part = objective.weighed(loss, objective.num_items({"labels": labels}), torch.tensor(5), 1)
    part.backward()
    assert float(part.detach()) == 0
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros(3, 4))


@pytest.mark.parametrize(
    ("model", "shifts"),
    [
        (twins.gpt2, True),
        (twins.llama, True),
        (twins.t5, False),
        (twins.bert, False),
        (partial(twins.bert, "MaskedLM"), False),
        (partial(twins.bert, "PreTraining"), False),
        (twins.regression, False),
    ],
)
def test_only_causal_language_models_shift_their_labels(model: Any, shifts: bool) -> None:
    assert objective.shifts_labels(model()) is shifts


def test_smoothing_by_nothing_is_the_cross_entropy() -> None:
    logits, labels = torch.randn(4, 6, 5), torch.randint(0, 5, (4, 6))
    labels[0, :3] = -100
    plain = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(objective.smoothed(logits, labels, 0.0), plain)
    soft = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.2)
    torch.testing.assert_close(objective.smoothed(logits, labels, 0.2), soft)
    shifted = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(objective.smoothed(logits, labels, 0.0, shifted=True), shifted)


def test_smoothing_over_no_item_is_nothing() -> None:
    logits = torch.randn(2, 3, requires_grad=True)
    loss = objective.smoothed(logits, torch.full((2,), -100), 0.1)
    loss.backward()
    assert float(loss.detach()) == 0
    assert torch.isfinite(logits.grad).all()  # type: ignore[arg-type]  # it has one


def by_items(out: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return out / num_items_in_batch


def inside(out: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return [value / num_items_in_batch for value in out]


def ignores(out: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return out.mean()


def passes_on(out: Any, labels: Any, **more: Any) -> Any:
    return by_items(out, labels, **more)


def cannot(out: Any, labels: Any) -> Any:
    return out


class Called:
    def __call__(self, out: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return out / num_items_in_batch


READERS = [by_items, inside, passes_on, Called(), partial(by_items, labels=None)]


@pytest.mark.parametrize("function", READERS)
def test_who_reads_an_argument_is_seen_in_its_code(function: Any) -> None:
    assert objective.reads(function, "num_items_in_batch")


@pytest.mark.parametrize("function", [ignores, cannot, partial(ignores, labels=None)])
def test_who_does_not_read_it_is_seen_too(function: Any) -> None:
    assert not objective.reads(function, "num_items_in_batch")
