"""Steps recorded as CUDA graphs: the same training, and plain words where it cannot be."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anytrain import Accelerator, Trainer
from anytrain.doors.callbacks import TrainerCallback
from anytrain.engine.assemble import current
from anytrain.fast.kernels.step import Kernels
from anytrain.fast.recorded.cuda_graph import CudaGraphs
from anytrain.fast.shortcuts.norms import norm_kinds
from equivalence import twins

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def unmasked(rows: twins.Rows) -> twins.Rows:
    """Return rows without a mask: outside a recording transformers looks at a mask's values."""
    return [{n: v for n, v in row.items() if n != "attention_mask"} for row in rows]


def train(folder: Path, engine: str, make: Callable[[], nn.Module], **given: Any) -> Any:
    settings = {
        "train_dataset": unmasked(twins.sentences(64)),
        "learning_rate": 5e-3,
        "use_cpu": False,
        "max_steps": 12,
        "logging_steps": 1,
        "per_device_train_batch_size": 8,
        "step_engine": engine,
    }
    trainer = twins.build(twins.OURS, folder / engine, model=make(), **{**settings, **given})
    trainer.train()
    return trainer


def compile_kernels(make: Callable[[], nn.Module]) -> None:
    """Have our kernels compiled: the first training on a machine does not wait for them."""
    assert Kernels(torch.device("cuda", 0), norm_kinds(make())).are_there()
    assert Kernels(torch.device("cuda", 0)).are_there()


def plan_of(trainer: Any) -> Any:
    return trainer.accelerator.plan.step


def assert_same(eager: Any, recorded: Any, *, exact: bool = True) -> None:
    assert plan_of(recorded).value == "cuda_graph", plan_of(recorded).because
    assert plan_of(eager).value == "eager"
    for one, other in zip(eager.state.log_history, recorded.state.log_history, strict=True):
        for name in ("loss", "grad_norm", "learning_rate"):
            if name in one:
                assert other[name] == pytest.approx(one[name], rel=0 if exact else 1e-3), one
    weights = recorded.model.state_dict()
    for name, weight in eager.model.state_dict().items():
        if exact:
            assert torch.equal(weight, weights[name]), name
        else:
            torch.testing.assert_close(weight, weights[name], rtol=2e-2, atol=2e-3)


def bert(dropout: float = 0.0, **more: Any) -> nn.Module:
    """Return a BERT whose attention takes the same kernels inside a recording and outside."""
    return twins.bert(dropout=dropout, attn_implementation="eager", **more)


def frozen() -> nn.Module:
    model = bert()
    for parameter in model.bert.embeddings.parameters():
        parameter.requires_grad_(False)
    return model


def adapted() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["query", "value"], task_type="SEQ_CLS", r=4)
    model = bert()
    torch.manual_seed(0)
    return peft.get_peft_model(model, config)


def speaking() -> nn.Module:
    """Return a GPT-2 whose head, tied to its words, is wide and of an odd width."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=1027,
        n_positions=32,
        n_embd=64,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    """Return a Llama whose norms have kernels: RMS norms, and what comes between gate and up."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def translating() -> nn.Module:
    """Return a BART, which draws on the host for each layer, though it leaves none out."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BartConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    return transformers.BartForConditionalGeneration(config)


def disentangled() -> nn.Module:
    """Return a DeBERTa, which makes numbers on the host in functions that torch has scripted."""
    transformers = pytest.importorskip("transformers")
    config = transformers.DebertaV2Config(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        type_vocab_size=2,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=16,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        num_labels=3,
        problem_type="single_label_classification",  # else its loss looks for labels below 0
    )
    torch.manual_seed(0)
    return transformers.DebertaV2ForSequenceClassification(config)


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "plain": (bert, {}),
    "dropout": (lambda: bert(dropout=0.1), {}),
    "bf16": (lambda: bert(dropout=0.1), {"bf16": True}),
    "fp16": (bert, {"fp16": True}),
    "accumulation": (bert, {"gradient_accumulation_steps": 2}),
    "no clipping": (bert, {"max_grad_norm": 0}),
    "cosine": (bert, {"lr_scheduler_type": "cosine", "warmup_steps": 3}),
    "constant": (bert, {"lr_scheduler_type": "constant"}),
    "decay": (bert, {"weight_decay": 0.1}),
    "sgd": (bert, {"optim": "sgd"}),
    "checkpointing": (bert, {"gradient_checkpointing": True}),
    "checkpointing and dropout": (
        lambda: bert(dropout=0.1),
        {"gradient_checkpointing": True},
    ),
    "checkpointing, with wide norms": (
        lambda: bert(hidden_size=256),
        {"gradient_checkpointing": True, "learning_rate": 1e-4},
    ),
    "checkpointing by hand, with wide norms": (
        lambda: bert(hidden_size=256),
        {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": True},
            "learning_rate": 1e-4,
        },
    ),
    "tied": (lambda: twins.gpt2(dropout=0.1), {"train_dataset": unmasked(twins.texts(64))}),
    "wide and tied": (
        speaking,
        {"train_dataset": unmasked(twins.texts(64)), "learning_rate": 1e-3},
    ),
    "gated": (llama, {"train_dataset": unmasked(twins.texts(64)), "learning_rate": 1e-3}),
    "gated, checkpointing": (
        llama,
        {
            "train_dataset": unmasked(twins.texts(64)),
            "learning_rate": 1e-3,
            "gradient_checkpointing": True,
        },
    ),
    "layers that may be left out": (translating, {"train_dataset": unmasked(twins.texts(64))}),
    "scripted functions": (disentangled, {}),
    "frozen": (frozen, {}),
    "lora": (adapted, {}),
    "skip": (bert, {"on_nonfinite": "skip"}),
    "smoothing": (bert, {"label_smoothing_factor": 0.1}),
    "short last batch": (bert, {"train_dataset": unmasked(twins.sentences(60))}),
    "evaluated": (
        bert,
        {"eval_strategy": "steps", "eval_steps": 3, "eval_dataset": twins.sentences(16)},
    ),
    "evaluated in bf16": (
        bert,
        {
            "eval_strategy": "steps",
            "eval_steps": 4,
            "eval_dataset": twins.sentences(16),
            "bf16_full_eval": True,
        },
    ),
    "checkpointing and dropout, evaluated in bf16": (
        lambda: bert(dropout=0.1),
        {
            "gradient_checkpointing": True,
            "eval_strategy": "steps",
            "eval_steps": 8,
            "eval_dataset": twins.sentences(16),
            "bf16_full_eval": True,
            "max_steps": 24,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_recorded_run_is_the_eager_run(tmp_path: Path, case: str) -> None:
    make, given = CASES[case]
    eager = train(tmp_path, "eager", make, **given)
    recorded = train(tmp_path, "auto", make, **given)
    assert_same(eager, recorded)


def test_several_lengths_are_several_recordings(tmp_path: Path) -> None:
    rows = twins.sentences(96, ragged=True)
    given = {"train_dataset": rows, "data_collator": twins.pad, "max_steps": 24}
    eager = train(tmp_path, "eager", twins.bert, **given)
    recorded = train(tmp_path, "auto", twins.bert, **given)
    assert_same(eager, recorded, exact=False)


@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "case",
    [
        *("plain", "accumulation", "tied", "wide and tied", "lora", "frozen", "decay"),
        *("checkpointing, with wide norms", "checkpointing by hand, with wide norms"),
        *("gated", "gated, checkpointing"),
    ],
)
def test_shortcuts_change_results_by_rounding_alone(
    tmp_path: Path, case: str, precision: dict[str, Any]
) -> None:
    torch.use_deterministic_algorithms(False)
    make, given = CASES[case]
    compile_kernels(make)
    eager = train(tmp_path, "eager", make, **given, **precision)
    recorded = train(tmp_path, "auto", make, **given, **precision)
    assert plan_of(recorded).value == "cuda_graph"
    assert "torch's own kernels alone" not in plan_of(recorded).because
    for one, other in zip(eager.state.log_history, recorded.state.log_history, strict=True):
        if "loss" in one:
            assert other["loss"] == pytest.approx(one["loss"], rel=5e-3 if precision else 1e-4)


def test_recording_moves_no_random_number(tmp_path: Path) -> None:
    offsets = []
    for engine in ("eager", "auto"):
        train(tmp_path, engine, lambda: bert(dropout=0.1))
        offsets.append(torch.cuda.default_generators[0].get_offset())
    assert offsets[0] == offsets[1] > 0


class Reads(nn.Module):
    """A BERT that looks at a value on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = twins.bert()

    def forward(self, **inputs: Any) -> Any:
        outputs = self.inner(**inputs)
        if outputs["loss"].item() > 1e9:
            outputs["loss"] = outputs["loss"] * 0
        return outputs


def test_a_line_that_reads_a_value_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    eager = train(tmp_path, "eager", Reads)
    tried = train(tmp_path, "auto", Reads)
    assert plan_of(tried).value == "eager"
    assert 'outputs["loss"].item() > 1e9' in plan_of(tried).because
    assert "test_recorded_on_cuda.py line" in plan_of(tried).because
    for name, weight in eager.model.state_dict().items():
        assert torch.equal(weight, tried.model.state_dict()[name]), name


class Inplace(nn.Module):
    """A plain model that writes over a layer norm's result before a layer reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 256), nn.LayerNorm(256)
        self.act, self.last = nn.ReLU(inplace=True), nn.Linear(256, 1)

    def forward(self, x: Any, labels: Any) -> Any:
        out = self.last(self.act(self.norm(self.first(x).float()))).squeeze(-1)
        return {"loss": nn.functional.mse_loss(out.float(), labels)}


def seeded_inplace() -> nn.Module:
    torch.manual_seed(0)
    return Inplace()


def test_what_is_written_over_is_not_read_from_a_copy(tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(False)
    given = {"train_dataset": twins.points(64), "bf16": True, "learning_rate": 1e-3}
    compile_kernels(seeded_inplace)
    eager = train(tmp_path, "eager", seeded_inplace, **given)
    recorded = train(tmp_path, "auto", seeded_inplace, **given)
    assert plan_of(recorded).value == "cuda_graph", plan_of(recorded).because
    for one, other in zip(eager.state.log_history, recorded.state.log_history, strict=True):
        if "loss" in one:
            assert other["loss"] == pytest.approx(one["loss"], rel=2e-2)


class Smooth(Inplace):
    """A plain model whose loss holds the slope of its result."""

    def forward(self, x: Any, labels: Any) -> Any:
        with torch.enable_grad():
            x = x.requires_grad_()
            out = self.last(torch.tanh(self.norm(self.first(x).float()))).squeeze(-1)
            (slope,) = torch.autograd.grad(out.float().sum(), x, create_graph=True)
        loss = nn.functional.mse_loss(out.float(), labels) + slope.float().square().mean()
        return {"loss": loss}


def seeded_smooth() -> nn.Module:
    torch.manual_seed(0)
    return Smooth()


def test_a_gradient_penalty_is_trained_on_without_shortcuts(tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(False)
    given = {"train_dataset": twins.points(64), "bf16": True, "learning_rate": 1e-3}
    compile_kernels(seeded_smooth)
    eager = train(tmp_path, "eager", seeded_smooth, **given)
    recorded = train(tmp_path, "auto", seeded_smooth, **given)
    for name, weight in eager.model.state_dict().items():
        torch.testing.assert_close(weight, recorded.model.state_dict()[name], rtol=2e-2, atol=2e-3)


class Late(nn.Module):
    """A plain model whose second head gets its first gradient when the batches get smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Any, labels: Any) -> Any:
        head = self.first if len(x) == 8 else self.second
        return {"loss": nn.functional.mse_loss(head(self.body(x)).squeeze(-1), labels)}


def seeded_late() -> nn.Module:
    torch.manual_seed(0)
    return Late()


@pytest.mark.parametrize("exact", [True, False], ids=["deterministic", "shortcuts"])
def test_a_parameter_that_comes_late_is_trained_too(tmp_path: Path, exact: bool) -> None:
    torch.use_deterministic_algorithms(exact)
    given = {"train_dataset": twins.points(60), "max_steps": 32, "learning_rate": 1e-2}
    compile_kernels(seeded_late)
    eager = train(tmp_path, "eager", seeded_late, **given)
    recorded = train(tmp_path, "auto", seeded_late, **given)
    assert not torch.equal(recorded.model.second.weight.cpu(), seeded_late().second.weight)
    for name, weight in eager.model.state_dict().items():
        torch.testing.assert_close(weight, recorded.model.state_dict()[name], rtol=1e-3, atol=1e-4)


def test_memory_is_given_back_after_training(tmp_path: Path) -> None:
    compile_kernels(bert)
    before = torch.cuda.memory_allocated()
    trainer = train(tmp_path, "auto", bert)
    trainer.model.cpu()
    trainer.optimizer = None
    trainer._run = None
    left = torch.cuda.memory_allocated() - before
    assert left < 64 * 2**20
    again = train(tmp_path, "auto", bert)
    assert plan_of(again).value == "cuda_graph"


class Looks(TrainerCallback):
    """Look into the middle of a step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Look."""


def test_a_callback_inside_a_step_is_named(tmp_path: Path) -> None:
    trainer = train(tmp_path, "auto", twins.bert, callbacks=[Looks()])
    assert plan_of(trainer).value == "eager"
    assert "middle of a step" in plan_of(trainer).because


def test_an_own_training_step_is_named(tmp_path: Path) -> None:
    class Own(Trainer):
        """A Trainer with a training_step of its own."""

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            return super().training_step(*args, **kwargs)

    trainer = train(tmp_path, "auto", twins.bert, kind=lambda made: Own)
    assert plan_of(trainer).value == "eager"
    assert "training_step" in plan_of(trainer).because


def test_a_bad_step_is_left_out_of_a_recorded_run(tmp_path: Path) -> None:
    rows = twins.points(64)
    rows[40]["x"] = [float("nan")] * len(rows[40]["x"])
    given = {"train_dataset": rows, "on_nonfinite": "skip"}
    eager = train(tmp_path, "eager", twins.regression, **given)
    recorded = train(tmp_path, "auto", twins.regression, **given)
    assert plan_of(recorded).value == "cuda_graph", plan_of(recorded).because
    for name, weight in eager.model.state_dict().items():
        assert torch.isfinite(weight).all()
        assert torch.equal(weight, recorded.model.state_dict()[name]), name


@pytest.mark.parametrize("checkpointed", [False, True])
def test_memory_stays_near_the_eager_runs(tmp_path: Path, checkpointed: bool) -> None:
    torch.use_deterministic_algorithms(False)
    big = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    compile_kernels(lambda: bert(**big))
    peaks = []
    for engine in ("eager", "auto"):
        gc.collect()  # else what is left of earlier runs counts for one of them
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trainer = train(
            tmp_path,
            engine,
            lambda: twins.bert(**big, max_position_embeddings=256),
            train_dataset=unmasked(twins.sentences(2560, length=128)),
            per_device_train_batch_size=256,
            gradient_checkpointing=checkpointed,
            bf16=True,
        )
        peaks.append(torch.cuda.max_memory_allocated() - before)
        assert plan_of(trainer).value == ("eager" if engine == "eager" else "cuda_graph")
        del trainer
    assert peaks[1] <= 1.15 * peaks[0]


def test_a_recording_writes_to_no_memory_of_one_that_is_gone() -> None:
    torch.use_deterministic_algorithms(False)
    device = torch.device("cuda", 0)
    left = torch.randn(64, 1 << 16, device=device, dtype=torch.bfloat16)
    right = torch.randn(1 << 16, 64, device=device, dtype=torch.bfloat16)
    expected = left @ right
    recorders = [CudaGraphs(device) for _ in range(33)]  # torch has 32 streams, one after another
    first, last = recorders[0], recorders[-1]
    gone = first.record(lambda: left @ right, None)
    replay, found = last.record(lambda: left @ right, None)
    del gone, first, recorders
    gc.collect()
    last.release()
    torch.cuda.empty_cache()
    others = [torch.zeros(1 << 23, device=device) for _ in range(32)]
    replay()
    torch.testing.assert_close(found, expected)
    assert not any(bool(other.any()) for other in others)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_users_own_loop_gets_the_same_engine(
    accumulation: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    data = torch.randn(24, 16, 8)
    results = []
    for engine in ("eager", "auto"):
        monkeypatch.setenv("ANYTRAIN_STEP", engine)
        current.clear()
        accelerator = Accelerator(
            mixed_precision=precision, gradient_accumulation_steps=accumulation
        )
        model = copy.deepcopy(first)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
        loader = torch.utils.data.DataLoader(data, batch_size=None)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        step = accelerator.step(lambda m, x: m(x).float().square().mean(), max_grad_norm=1.0)
        torch.manual_seed(1)
        losses = [step(batch).loss for batch in loader]
        assert accelerator.plan.step.value == ("eager" if engine == "eager" else "cuda_graph")
        results.append(([float(v) for v in losses], copy.deepcopy(model.state_dict())))
    (losses, weights), (losses_again, weights_again) = results
    assert losses == losses_again
    for name, weight in weights.items():
        assert torch.equal(weight, weights_again[name]), name
