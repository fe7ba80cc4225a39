"""Attention takes the fastest kernel for its shape, and a recorded step the same as op by op."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from anytrain.fast.kernels.step import Kernels
from anytrain.fast.shortcuts.attention import attend_quickly
from anytrain.fast.shortcuts.norms import norm_kinds
from equivalence import twins

pytestmark = pytest.mark.gpu


def kernel(made: torch.Tensor) -> str:
    """Return the name of what made a tensor."""
    return type(made.grad_fn).__name__


@pytest.mark.parametrize("precision", [{}, {"bf16": True}])
@pytest.mark.parametrize(
    ("make", "rows"), [(twins.bert, twins.sentences), (twins.gpt2, twins.texts)]
)
def test_a_batch_without_a_mask_is_recorded_without_one(
    make: Any, rows: Any, precision: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, seen = functional.scaled_dot_product_attention, []

    def noting(*args: Any, attn_mask: Any = None, **more: Any) -> torch.Tensor:
        made = attend(*args, attn_mask=attn_mask, **more)
        seen.append((torch.cuda.is_current_stream_capturing(), attn_mask is None, kernel(made)))
        return made

    assert Kernels(torch.device("cuda", 0), norm_kinds(make())).are_there()
    monkeypatch.setattr(functional, "scaled_dot_product_attention", noting)
    dataset = [{n: v for n, v in row.items() if n != "attention_mask"} for row in rows(64)]
    trainer = twins.build(
        twins.OURS,
        tmp_path,
        model=make(),
        train_dataset=dataset,
        use_cpu=False,
        max_steps=8,
        per_device_train_batch_size=8,
        **precision,
    )
    trainer.train()
    plan = trainer.accelerator.plan.step
    assert plan.value == "cuda_graph", plan.because
    recorded = {(without, name) for captured, without, name in seen if captured}
    assert recorded == {(without, name) for captured, without, name in seen if not captured}
    assert {without for without, _ in recorded} == {True}


@pytest.fixture
def _quick() -> Iterator[None]:
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with attend_quickly(torch.device("cuda", 0)):
        if ALL_ATTENTION_FUNCTIONS["sdpa"] is own:
            pytest.skip("torch does not ask cuDNN first on this GPU")
        yield


def attend(query: Any, key: Any, value: Any, mask: Any = None, dropout: float = 0.0) -> Any:
    """Attend as transformers' models do."""
    whole = nn.Module()
    whole.is_causal = False
    return ALL_ATTENTION_FUNCTIONS["sdpa"](whole, query, key, value, mask, dropout=dropout)[0]


def taken(length: int = 64, width: int = 64, dtype: Any = torch.bfloat16, mask: Any = None) -> str:
    """Return the name of the kernel that attention took."""
    query = torch.randn(2, 4, length, width, dtype=dtype, device="cuda", requires_grad=True)
    made: Any = attend(query, query, query, mask, dropout=0.1).grad_fn
    while "ScaledDot" not in type(made).__name__ and "_Attend" not in type(made).__name__:
        made = made.next_functions[0][0]
    return type(made).__name__


@pytest.mark.usefixtures("_quick")
def test_short_texts_are_not_cudnns_and_long_ones_still_are() -> None:
    added = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device="cuda")
    for _ in range(2):
        assert "_Attend" in taken()
        assert "_Attend" in taken(length=128, width=32)
        assert "Cudnn" in taken(length=129)
        assert "Cudnn" in taken(width=128)
        assert "Efficient" in taken(width=16)
        assert "Efficient" in taken(mask=added)
        assert "Cudnn" in taken(length=72, dtype=torch.float16)
    assert "Efficient" in taken(dtype=torch.float16)


@pytest.mark.usefixtures("_quick")
def test_a_choice_of_the_users_own_stands() -> None:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        assert "Cudnn" in taken()
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        assert "Flash" in taken()
    torch.use_deterministic_algorithms(True)
    try:
        assert "_Attend" not in taken()
    finally:
        torch.use_deterministic_algorithms(False)
    assert "_Attend" in taken()


class Looking(TorchFunctionMode):
    """Somebody who counts what attention is given."""

    seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += func is functional.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("_quick")
def test_who_looks_at_torchs_functions_sees_attention() -> None:
    with Looking() as looking:
        assert "ScaledDot" in taken()
    assert looking.seen == 1
    with FlopCounterMode(display=False) as counter:
        taken(length=128)
    assert counter.get_total_flops() > 0


@pytest.mark.parametrize("length", [5, 50, 64, 128])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.usefixtures("_quick")
def test_short_texts_are_attended_as_before(length: int, masked: bool) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(3, 4, length, 32, device="cuda").bfloat16() for _ in range(3)]
    mask = torch.rand(3, 1, length, length, device="cuda") < 0.7 if masked else None
    if mask is not None:
        mask[..., 0] = True
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        given = [part.to(dtype).requires_grad_() for part in parts]
        made = attend(*given, mask)
        gradients = torch.autograd.grad(made.square().sum(), given)
        found.append([made, *gradients])
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("given", [{}, {"gradient_checkpointing": True}], ids=["", "checkpointed"])
def test_dropped_values_are_the_same_recorded_and_op_by_op(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model() -> nn.Module:
        return twins.bert(dropout=0.5, hidden_size=64)

    assert Kernels(torch.device("cuda", 0), norm_kinds(model())).are_there()
    losses = []
    for engine in ("auto", "eager"):
        monkeypatch.setenv("ANYTRAIN_STEP", engine)
        trainer = twins.build(
            twins.OURS,
            tmp_path / engine,
            model=model(),
            train_dataset=twins.sentences(64),
            use_cpu=False,
            bf16=True,
            max_steps=8,
            logging_steps=1,
            learning_rate=1e-4,  # losses go up and down by what is dropped, and little else
            **given,
        )
        trainer.train()
        planned = trainer.accelerator.plan.step
        assert (planned.value == "cuda_graph") is (engine == "auto"), planned.because
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == pytest.approx(losses[1], rel=3e-2)


@pytest.mark.parametrize("asks_cudnn", [True, False])
def test_a_recorded_block_runs_again_with_the_numbers_that_it_has_drawn(
    asks_cudnn: bool, tmp_path: Path
) -> None:
    """With a mask that hides nothing, attention op by op may take a kernel that draws otherwise."""

    def model() -> nn.Module:
        return twins.bert(dropout=0.5, hidden_size=64, max_position_embeddings=128)

    assert Kernels(torch.device("cuda", 0), norm_kinds(model())).are_there()
    trainer = twins.build(
        twins.OURS,
        tmp_path,
        model=model(),
        train_dataset=twins.sentences(64, length=96),
        use_cpu=False,
        bf16=True,
        max_steps=12,
        gradient_checkpointing=True,
    )
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(asks_cudnn and before)
    try:
        trainer.train()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    planned = trainer.accelerator.plan.step
    assert planned.value == "cuda_graph", planned.because
