"""Who asks for which attention kernel. What they do is in tests/gpu/test_attention_on_cuda.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from anytrain.fast.kernels import attention
from anytrain.fast.kernels.attention import is_short
from anytrain.fast.kernels.short_attention import _is_plain, fits
from anytrain.fast.shortcuts.attention import attend_quickly

CUDNN, FLASH, EFFICIENT, MATH = 3, 1, 2, 0
USUAL = [CUDNN, FLASH, EFFICIENT, MATH]
CUDA = torch.device("cuda", 0)


def heads(length: int = 8, width: int = 32, dtype: Any = torch.bfloat16) -> torch.Tensor:
    """Return a tensor that says it is on a GPU, and has no memory."""
    with FakeTensorMode():
        return torch.empty(2, 4, length, width, dtype=dtype, device="cuda")


@pytest.fixture
def _usual(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch ask cuDNN first, as on a Hopper GPU."""
    before = torch._C._get_sdp_priority_order()
    monkeypatch.setattr(attention, "asks_cudnn_first", lambda device: True)
    torch._C._set_sdp_priority_order(USUAL)
    yield
    torch._C._set_sdp_priority_order(before)


class Orders(list[list[int]]):
    """The orders of kernels that attention was asked with."""

    def __call__(self, length: int = 8, **by: Any) -> None:
        self.attend(None, heads(length), heads(length), heads(length), None, **by)

    attend: Callable[..., Any]


class Ready:
    """Kernels that are there, or are not."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def are_there(self) -> bool:
        return True


@pytest.fixture
def orders(_usual: None, monkeypatch: pytest.MonkeyPatch) -> Orders:
    seen = Orders()

    def attend(module: Any, *given: Any, dropout: float = 0.0) -> None:
        seen.append(torch._C._get_sdp_priority_order())
        if dropout > 1:
            raise ValueError("drops more than all")

    monkeypatch.setattr(attention, "ShortAttention", Ready)
    seen.attend = attention.quick(attend, CUDA)
    return seen


def test_what_is_short() -> None:
    assert is_short(heads(64, 64), heads(64, 64), heads(64, 64))
    assert is_short(heads(128), heads(72), heads(72))
    assert not is_short(heads(136), heads(136), heads(136))
    assert not is_short(heads(8), heads(136), heads(136))
    assert not is_short(heads(72), heads(72), heads(72), most=64)
    assert not is_short(heads(8, 128), heads(8, 128), heads(8, 128))
    assert not is_short(*[heads(dtype=torch.float32)] * 3)
    assert not is_short(*[torch.empty(2, 4, 8, 32, dtype=torch.bfloat16)] * 3)
    assert not is_short(*[torch.nested.nested_tensor([torch.ones(2, 4, 8)] * 3)] * 3)
    assert not is_short(*[torch.fx.Proxy(torch.fx.Graph().placeholder("query"))] * 3)


def test_short_texts_ask_for_the_other_kernel_and_put_the_order_back(orders: Orders) -> None:
    orders()
    orders(length=72)
    with pytest.raises(ValueError, match="drops more than all"):
        orders(dropout=2.0)
    short, long, failed = orders
    assert short[:4] == failed[:4] == [EFFICIENT, CUDNN, FLASH, MATH]
    assert long[:4] == torch._C._get_sdp_priority_order()[:4] == USUAL


def test_a_choice_of_the_users_own_stands(orders: Orders) -> None:
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        orders()
    mine = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(mine, set_priority=True):
        orders()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        orders()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    torch.use_deterministic_algorithms(True)
    try:
        orders()
    finally:
        torch.use_deterministic_algorithms(False)
    assert [order[0] for order in orders] == [CUDNN] * 4
    orders()
    assert orders[-1][0] == EFFICIENT


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Put a list in our kernels' place, which know any bfloat16 tensor of a CPU."""
    found: list[Any] = []

    def attend(kernels: Any, given: Any, mask: Any, wanted: Any) -> torch.Tensor:
        found.append((mask, wanted))
        return given[0] * 0

    def fits(query: Any, key: Any, value: Any, mask: Any) -> bool:
        return bool(query.dtype == torch.bfloat16)

    monkeypatch.setattr(attention, "ShortAttention", Ready)
    monkeypatch.setattr(attention, "attend", attend)
    monkeypatch.setattr(attention, "fits", fits)
    return found


def test_our_kernels_get_what_torchs_function_is_asked(asked: list[Any]) -> None:
    query = torch.ones(2, 4, 8, 16, dtype=torch.bfloat16)
    mask = torch.ones(8, 8, dtype=torch.bool)
    torchs = torch.nn.functional.scaled_dot_product_attention
    with attention._Own():
        torchs(query, query, query, dropout_p=0.25, is_causal=True)
        torchs(query, query, query, mask, scale=0.5, enable_gqa=False)
        torch.softmax(query, -1)
    assert [wanted for _, wanted in asked] == [(0.25, True, 0.25), (0.0, False, 0.5)]
    assert asked[0][0] is None
    assert asked[1][0] is mask


def test_torch_attends_where_our_kernels_do_not_know_the_case(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torchs = torch.nn.functional.scaled_dot_product_attention
    whole = torch.ones(2, 4, 8, 16)
    half, mask = whole.bfloat16(), torch.ones(8, 8, dtype=torch.bool)
    with attention._Own():
        assert torch.equal(torchs(whole, whole, whole), whole)
        with suppress(RuntimeError):  # some versions refuse both at once
            torchs(half, half, half, mask, is_causal=True)
        assert not torchs(half, half, half, dropout_p=1.0).any()
        assert torch.equal(torchs(half, half, half, scale=0.0), half)
        monkeypatch.setattr(Ready, "are_there", lambda self: False)
        assert torch.equal(torchs(half, half, half), half)
    assert asked == []


def test_which_cases_our_kernels_know() -> None:
    def known(query: Any, other: Any, mask: Any = None) -> bool:
        return fits(query, other, other, mask)

    half, mask = torch.empty(2, 4, 8, 32, dtype=torch.bfloat16), torch.ones(8, 8).bool()
    assert not known(half, half)  # it is not on a GPU
    assert not known(heads(), heads())  # nor is one that has no memory
    for wrong in (half.float(), half[0], half[..., :16], half.expand(2, 4, 8, 32)[:, :2]):
        assert not known(wrong, half)
    cpu = torch.device("cpu")
    assert _is_plain(mask, cpu)
    assert _is_plain(None, CUDA)
    for wrong in (mask.float(), mask[0], mask[(None,) * 3]):
        assert not _is_plain(wrong, cpu)
    assert not _is_plain(mask, CUDA)


def test_a_default_device_is_nobody_who_looks(_usual: None) -> None:
    usual = torch._C._get_sdp_priority_order()
    assert attention._is_free(usual)
    with torch.device("cpu"):
        assert attention._is_free(usual)
        with attention._Own():
            assert not attention._is_free(usual)
    with FakeTensorMode():
        assert not attention._is_free(usual)


def test_transformers_function_is_replaced_until_the_last_run_ends_and_torchs_is_not(
    _usual: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    torchs = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(AttentionInterface, "_global_mapping", dict(ALL_ATTENTION_FUNCTIONS))
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    first, second = attend_quickly(CUDA), attend_quickly(CUDA)
    first.__enter__()
    quick = ALL_ATTENTION_FUNCTIONS["sdpa"]
    second.__enter__()  # of a run that begins before the other ends
    assert quick is not own
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is quick
    assert torch.nn.functional.scaled_dot_product_attention is torchs
    first.__exit__(None, None, None)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is quick
    second.__exit__(None, None, None)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
    query = torch.randn(2, 4, 8, 16)
    module = torch.nn.Module()
    assert torch.equal(
        quick(module, query, query, query, None)[0], own(module, query, query, query, None)[0]
    )
