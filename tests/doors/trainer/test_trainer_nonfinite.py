"""A loss or a gradient that is not finite: stop, skip or rewind, and no weight touched."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anytrain.core.errors import NotFinite, Notice
from equivalence import twins

# With on_nonfinite="skip" the first update left out is told; what follows is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:An update was skipped")

BAD = 13  # in batches of 4 in order, a sample of the fourth step


class Root(nn.Module):
    """A square root: NaN for a negative value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the roots."""
        return x.sqrt()


class Risky(nn.Module):
    """A regression on roots."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.root = Root()
        self.outer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss and the guesses."""
        found = self.outer(self.root(x) + self.inner(x)).squeeze(-1)
        return {"loss": nn.functional.mse_loss(found, labels), "logits": found}


def risky() -> nn.Module:
    torch.manual_seed(0)
    return Risky()


def rows(count: int = 22, bad: int | None = BAD) -> twins.Rows:
    made = []
    for number, row in enumerate(twins.points(count)):
        x = [abs(value) for value in row["x"]]
        made.append({**row, "x": [-1.0, *x[1:]] if number == bad else x})
    return made


GIVEN: dict[str, Any] = {
    "model": risky,
    "num_train_epochs": 1,
    "lr_scheduler_type": "constant",
    "train_sampling_strategy": "sequential",
    "optim": "sgd",
    "learning_rate": 0.05,
}


def assert_equal(mine: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
    for name, weight in whole.items():
        assert torch.equal(mine[name], weight), name


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch_fused", "adafactor"])
def test_stop_names_step_module_and_sample_and_touches_no_weight(
    tmp_path: Path, optim: str
) -> None:
    given = {**GIVEN, "optim": optim, "logging_steps": 6}
    model = risky()
    with pytest.raises(NotFinite) as caught:
        twins.train(
            twins.OURS, tmp_path / "a", **{**given, "model": lambda: model}, train_dataset=rows()
        )
    told = str(caught.value)
    assert "step 4" in told
    assert "root (Root)" in told
    assert str(BAD) in told
    assert "No weight was changed" in told
    before = twins.train(twins.OURS, tmp_path / "b", **given, train_dataset=rows(), max_steps=3)
    assert_equal(weights(model), before.weights)


def test_stop_is_the_default_and_comes_before_a_save(tmp_path: Path) -> None:
    with pytest.raises(NotFinite, match="step 4"):
        twins.train(
            twins.OURS,
            tmp_path,
            **GIVEN,
            logging_steps=100,
            train_dataset=rows(),
            save_strategy="steps",
            save_steps=5,
        )
    assert not (tmp_path / "checkpoint-5").exists()


def test_stop_comes_at_the_end_where_nothing_was_logged_or_saved(tmp_path: Path) -> None:
    with pytest.raises(NotFinite, match="step 4"):
        twins.train(twins.OURS, tmp_path, **GIVEN, logging_steps=100, train_dataset=rows())


def test_a_bad_sample_among_micro_batches_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFinite) as caught:
        twins.train(
            twins.OURS,
            tmp_path,
            **GIVEN,
            train_dataset=rows(),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
        )
    assert "step 4" in str(caught.value)
    assert str(BAD) in str(caught.value)


def test_data_that_is_bad_is_named_as_such(tmp_path: Path) -> None:
    data = rows(bad=None)
    data[BAD] = {**data[BAD], "labels": float("nan")}
    with pytest.raises(NotFinite, match=r"(?s)data is bad.*13"):
        twins.train(twins.OURS, tmp_path, **GIVEN, train_dataset=data)


def test_an_infinite_loss_with_finite_gradients_stops_too(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        found = nn.functional.mse_loss(outputs["logits"], labels)
        return found + torch.where(labels.max() > 0.9, float("inf"), 0.0)

    with pytest.raises(NotFinite):
        twins.train(
            twins.OURS,
            tmp_path,
            model=twins.regression,
            train_dataset=twins.points(22),
            compute_loss_func=loss,
        )


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch_fused"])
def test_skip_leaves_the_step_out_and_counts_it(tmp_path: Path, optim: str) -> None:
    given = {**GIVEN, "optim": optim}
    ran = twins.train(
        twins.OURS,
        tmp_path / "a",
        **given,
        on_nonfinite="skip",
        logging_steps=6,
        train_dataset=rows(),
    )
    logged = [entry for entry in ran.history if "loss" in entry]
    assert [entry.get("skipped_steps") for entry in logged] == [1]
    assert ran.output.global_step == 6
    without = [row for number, row in enumerate(rows()) if not 12 <= number < 16]
    other = twins.train(twins.OURS, tmp_path / "b", **given, train_dataset=without)
    assert_equal(ran.weights, other.weights)


def test_rewind_goes_back_to_the_checkpoint_and_on_with_the_data(tmp_path: Path) -> None:
    with pytest.warns(Notice, match="Step 4 was not finite: went back to the weights of"):
        ran = twins.train(
            twins.OURS,
            tmp_path / "a",
            **GIVEN,
            on_nonfinite="rewind",
            train_dataset=rows(),
            save_strategy="steps",
            save_steps=2,
        )
    assert ran.output.global_step == 6
    # Steps 3 and 4 are as if they had not been: the third's update was taken back.
    without = [row for number, row in enumerate(rows()) if not 8 <= number < 16]
    other = twins.train(twins.OURS, tmp_path / "b", **GIVEN, train_dataset=without)
    assert_equal(ran.weights, other.weights)


def test_rewind_stops_where_there_is_nothing_to_go_back_to(tmp_path: Path) -> None:
    with pytest.raises(NotFinite, match="no checkpoint to go back to"):
        twins.train(twins.OURS, tmp_path, **GIVEN, on_nonfinite="rewind", train_dataset=rows())


def test_rewind_gives_up_after_three_times(tmp_path: Path) -> None:
    data = rows(40, bad=None)
    for number in (12, 16, 20, 24):
        data[number] = {**data[number], "x": [-1.0] * 4}
    with (
        pytest.warns(Notice, match="went back to the weights"),
        pytest.raises(NotFinite, match="taken back 3 times"),
    ):
        twins.train(
            twins.OURS,
            tmp_path,
            **GIVEN,
            on_nonfinite="rewind",
            train_dataset=data,
            save_strategy="steps",
            save_steps=2,
        )


def test_a_filtered_log_leaves_the_bad_loss_out(tmp_path: Path) -> None:
    ran = twins.train(
        twins.OURS,
        tmp_path,
        **GIVEN,
        on_nonfinite="skip",
        logging_nan_inf_filter=True,
        logging_steps=6,
        train_dataset=rows(),
    )
    assert all(entry["loss"] == entry["loss"] for entry in ran.history if "loss" in entry)
    assert ran.output.training_loss == ran.output.training_loss


@pytest.mark.parametrize("rule", ["stop", "rewind", "skip"])
def test_a_skipped_update_is_told_where_skipping_is_what_comes_of_it(
    tmp_path: Path, rule: str
) -> None:
    given = {**GIVEN, "on_nonfinite": rule, "save_strategy": "steps", "save_steps": 2}
    ends = pytest.raises(NotFinite) if rule == "stop" else nullcontext()
    with warnings.catch_warnings(record=True) as caught, ends:
        warnings.simplefilter("always", Notice)
        twins.train(twins.OURS, tmp_path, **given, logging_steps=1, train_dataset=rows())
    told = [str(each.message) for each in caught if "An update was skipped" in str(each.message)]
    assert bool(told) == (rule == "skip")
