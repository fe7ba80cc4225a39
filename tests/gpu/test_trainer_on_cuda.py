"""What only a real GPU shows of Trainer: who waits, what precision does, exact resume."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from anytrain.core.errors import NotFinite, Notice
from anytrain.doors.callbacks import TrainerCallback
from equivalence import twins

pytestmark = pytest.mark.gpu

PRECISIONS: list[dict[str, Any]] = [{}, {"bf16": True}, {"fp16": True}]
IDS = ["fp32", "bf16", "fp16"]


@pytest.fixture
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    yield
    torch.use_deterministic_algorithms(False)


def train(folder: Path | None = None, **given: Any) -> twins.Ran:
    rows = {
        "model": twins.bert,
        "train_dataset": twins.sentences(64),
        "eval_dataset": twins.sentences(16),
        "learning_rate": 5e-3,
    }
    return twins.train(twins.OURS, folder, **{**rows, "use_cpu": False, **given})


@pytest.mark.parametrize("precision", PRECISIONS, ids=IDS)
def test_it_learns_on_the_device_without_naming_it(
    tmp_path: Path, precision: dict[str, Any]
) -> None:
    ran = train(tmp_path, num_train_epochs=15, logging_steps=16, **precision)
    assert ran.trainer.args.device.type == "cuda"
    assert all(p.device.type == "cuda" for p in ran.trainer.model.parameters())
    assert all(p.dtype == torch.float32 for p in ran.trainer.model.parameters())
    losses = [entry["loss"] for entry in ran.history if "loss" in entry]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("precision", PRECISIONS[:2], ids=IDS[:2])
def test_losses_are_those_of_the_cpu(tmp_path: Path, precision: dict[str, Any]) -> None:
    on_gpu = train(tmp_path / "gpu", max_steps=6, **precision)
    on_cpu = train(tmp_path / "cpu", max_steps=6, use_cpu=True)
    rtol = 1e-3 if not precision else 5e-2
    twins.assert_same_history(on_gpu.history, on_cpu.history, rtol=rtol)


def unmasked(count: int) -> twins.Rows:
    """Return rows without a mask: transformers' own code looks at a mask's values on the host."""
    return [
        {name: value for name, value in row.items() if name != "attention_mask"}
        for row in twins.sentences(count)
    ]


class Strict(TrainerCallback):
    """Make any wait for the device an error from one log point to the next."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.num_watched = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Begin once the first steps have set everything up."""
        if state.global_step >= self.first:
            torch.cuda.set_sync_debug_mode("error")
            self.num_watched += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Let a log point, an evaluation, a save or the end wait."""
        ended = state.global_step >= state.max_steps
        if ended or control.should_log or control.should_evaluate or control.should_save:
            torch.cuda.set_sync_debug_mode("default")


@contextmanager
def sync_allowed_again() -> Iterator[None]:
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", PRECISIONS, ids=IDS)
@pytest.mark.parametrize(
    "wish",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"max_grad_norm": 0},
        {"on_nonfinite": "skip"},
        {"include_num_input_tokens_seen": "all"},
        {"label_smoothing_factor": 0.1},
        {"lr_scheduler_type": "cosine", "warmup_steps": 3, "weight_decay": 0.1},
        {"optim": "sgd"},
    ],
    ids=lambda wish: ", ".join(wish) or "plain",
)
def test_nothing_waits_between_two_log_points(
    tmp_path: Path, precision: dict[str, Any], wish: dict[str, Any]
) -> None:
    strict = Strict(first=5)
    with sync_allowed_again():
        ran = train(
            tmp_path,
            train_dataset=unmasked(64),
            logging_steps=5,
            callbacks=[strict],
            **precision,
            **wish,
        )
    assert ran.output.global_step == ran.trainer.state.max_steps
    assert strict.num_watched > 5


def test_a_save_behind_the_loop_lets_the_next_steps_run_on(tmp_path: Path) -> None:
    # A save copies the state to the host once; steps between two saves wait for nothing.
    strict = Strict(first=5)
    with sync_allowed_again():
        ran = train(
            tmp_path,
            train_dataset=unmasked(64),
            logging_steps=4,
            save_strategy="steps",
            save_steps=4,
            async_save=True,
            callbacks=[strict],
        )
    assert len(ran.folders) == ran.output.global_step // 4
    assert strict.num_watched > 5


class Died(Exception):
    """The end of a life."""


class Dies(TrainerCallback):
    """End a life after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Raise."""
        if state.global_step == self.step:
            raise Died


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("precision", PRECISIONS, ids=IDS)
@pytest.mark.parametrize("behind", [True, False], ids=["async", "waiting"])
def test_two_lives_are_one_bit_for_bit(
    tmp_path: Path, precision: dict[str, Any], behind: bool
) -> None:
    given: dict[str, Any] = {
        "model": lambda: twins.bert(dropout=0.2),
        "full_determinism": True,
        "save_strategy": "steps",
        "save_steps": 6,
        "logging_steps": 5,
        "gradient_accumulation_steps": 2,
        "async_save": behind,
        "num_train_epochs": 3,
        **precision,
    }
    once = train(tmp_path / "once", **given)
    with pytest.raises(Died):
        train(tmp_path / "twice", **given, callbacks=[Dies(17)])
    torch.manual_seed(99)
    twice = train(tmp_path / "twice", **given, resume=True)
    assert twice.history == once.history
    for name, weight in once.weights.items():
        assert torch.equal(twice.weights[name], weight), name


@pytest.mark.filterwarnings("ignore:An update was skipped")
@pytest.mark.parametrize("precision", PRECISIONS, ids=IDS)
def test_a_bad_step_stops_at_the_next_log_point_with_no_weight_touched(
    tmp_path: Path, precision: dict[str, Any]
) -> None:
    rows = twins.points(32)
    rows[21] = {**rows[21], "labels": float("nan")}
    given: dict[str, Any] = {
        "train_dataset": rows,
        "train_sampling_strategy": "sequential",
        "lr_scheduler_type": "constant",
        "num_train_epochs": 1,
        **precision,
    }
    model = twins.regression()
    with pytest.raises(NotFinite, match=r"(?s)step 6.*21"):
        train(tmp_path / "a", **given, model=lambda: model, logging_steps=8)
    before = train(tmp_path / "b", **given, model=twins.regression, max_steps=5, logging_steps=8)
    for name, p in model.named_parameters():
        assert torch.equal(p.detach(), before.weights[name]), name


def test_evaluation_and_prediction_are_those_of_the_cpu(tmp_path: Path) -> None:
    found = []
    for use_cpu in (False, True):
        made = twins.build(
            twins.OURS,
            tmp_path / str(use_cpu),
            model=twins.bert(),
            use_cpu=use_cpu,
            compute_metrics=lambda p: {"sum": float(p.predictions.sum())},
        )
        found.append(made.predict(twins.sentences(19)))
    assert found[0].metrics["test_loss"] == pytest.approx(found[1].metrics["test_loss"], rel=1e-4)
    torch.testing.assert_close(
        torch.tensor(found[0].predictions),
        torch.tensor(found[1].predictions),
        rtol=1e-3,
        atol=1e-4,
    )


class Wide(torch.nn.Module):
    """A model whose activations take about 270 MB a 1,024 rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [
            torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.GELU()) for _ in "12345678"
        ]
        self.layers = torch.nn.Sequential(*layers)
        self.head = torch.nn.Linear(4096, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.layers(x.expand(-1, 4096) * 1.0)).squeeze(-1)
        return {"loss": (logits - labels).square().mean(), "logits": logits}


def test_a_batch_that_does_not_fit_is_computed_in_parts(tmp_path: Path) -> None:
    def run(folder: str) -> twins.Ran:
        rows = [{"x": [float(n % 7)], "labels": float(n % 3)} for n in range(16384)]
        return twins.train(
            twins.OURS,
            tmp_path / folder,
            model=Wide,
            train_dataset=rows,
            per_device_train_batch_size=8192,
            learning_rate=1e-4,
            num_train_epochs=2,
            auto_find_batch_size=True,
            use_cpu=False,
        )

    whole = run("whole")
    del whole.trainer.model, whole.trainer.optimizer
    gib = 2**30
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    # Weights, gradients and moments of 134 million parameters are 2 GiB; the rest is too little.
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 2.6 * gib) / total)
    try:
        with pytest.warns(Notice, match="does not fit the memory"):
            cut = run("cut")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    twins.assert_same_history(cut.history, whole.history, rtol=1e-3)


@pytest.mark.parametrize(
    ("width", "engine", "is_worth_it"),
    [(32, "auto", False), (32_768, "auto", True), (32, "eager", True)],
    ids=["small", "large", "not recorded"],
)
def test_a_shape_is_recorded_where_the_model_is_large_enough_to_repay_it(
    tmp_path: Path, width: int, engine: str, is_worth_it: bool
) -> None:
    trainer = twins.build(
        twins.OURS,
        tmp_path,
        model=twins.bert(hidden_size=512, intermediate_size=width),
        train_dataset=twins.Mapped(twins.sentences(45, 24, ragged=True)),
        data_collator=twins.pad,
        length_buckets="auto",
        step_engine=engine,
        num_train_epochs=20_000,
        use_cpu=False,
    )
    trainer.get_train_dataloader()
    told = trainer._session.plan.shapes.because
    assert ("buckets of 8, 16, 24" in told) is is_worth_it, told


class Precise(TrainerCallback):
    """Note how exactly matrices are multiplied while it trains."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Note it."""
        self.seen.add(torch.get_float32_matmul_precision())


def test_tf32_is_one_runs_and_not_the_next_ones(tmp_path: Path) -> None:
    assert torch.get_float32_matmul_precision() == "highest"
    for tf32, expected in ((True, "high"), (None, "highest")):
        precise = Precise()
        train(tmp_path / expected, max_steps=4, tf32=tf32, callbacks=[precise])
        assert precise.seen == {expected}
        assert torch.get_float32_matmul_precision() == "highest"
