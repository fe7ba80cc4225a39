"""Who asks for which attention kernel. What they do is in tests/gpu/test_attention_on_cuda.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from anytrain.machine.backends import cuda_attention
from anytrain.machine.backends.cuda_attention import attend_quickly, is_short

CUDNN, FLASH, EFFICIENT, MATH = 3, 1, 2, 0
CUDA = torch.device("cuda", 0)


def heads(length: int = 8, width: int = 32, dtype: Any = torch.bfloat16) -> torch.Tensor:
    """Return a tensor that says it is on a GPU, and has no memory."""
    with FakeTensorMode():
        return torch.empty(2, 4, length, width, dtype=dtype, device="cuda")


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """Return the orders of kernels that attention was asked with."""
    seen: list[list[int]] = []

    def attend(query: Any, *more: Any, **by: Any) -> Any:
        seen.append(torch._C._get_sdp_priority_order())
        if by.get("scale") == 0:
            raise ValueError("no such scale")
        return query

    before = torch._C._get_sdp_priority_order()
    monkeypatch.setattr(functional, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(cuda_attention, "_asks_cudnn_first", lambda device: True)
    torch._C._set_sdp_priority_order([CUDNN, FLASH, EFFICIENT, MATH])
    attend_quickly(CUDA)
    attend_quickly(CUDA)
    yield seen
    torch._C._set_sdp_priority_order(before)


def test_torch_is_left_alone_where_cudnn_is_not_asked() -> None:
    own = functional.scaled_dot_product_attention
    attend_quickly(torch.device("cpu"))
    assert functional.scaled_dot_product_attention is own


def test_what_is_short() -> None:
    assert is_short(heads(64, 64), heads(64, 64), heads(64, 64))
    assert not is_short(heads(72), heads(72), heads(72))
    assert not is_short(heads(8), heads(72), heads(72))
    assert not is_short(heads(8, 128), heads(8, 128), heads(8, 128))
    assert not is_short(*[heads(dtype=torch.float32)] * 3)
    assert not is_short(*[torch.empty(2, 4, 8, 32, dtype=torch.bfloat16)] * 3)


def test_short_texts_ask_for_the_other_kernel_once_and_put_the_order_back(
    orders: list[list[int]],
) -> None:
    attend, usual = functional.scaled_dot_product_attention, torch._C._get_sdp_priority_order()
    attend(heads(), heads(), heads())
    attend(query=heads(72), key=heads(72), value=heads(72))
    with pytest.raises(ValueError, match="no such scale"):
        attend(heads(), heads(), heads(), scale=0)
    first, second, third = orders
    assert first[:4] == third[:4] == [EFFICIENT, CUDNN, FLASH, MATH]
    assert second == usual == torch._C._get_sdp_priority_order()


def test_an_order_of_the_users_own_and_deterministic_mode_stand(orders: list[list[int]]) -> None:
    attend = functional.scaled_dot_product_attention
    torch._C._set_sdp_priority_order([FLASH, CUDNN, EFFICIENT, MATH])
    attend(heads(), heads(), heads())
    torch._C._set_sdp_priority_order([CUDNN, FLASH, EFFICIENT, MATH])
    torch.use_deterministic_algorithms(True)
    try:
        attend(heads(), heads(), heads())
    finally:
        torch.use_deterministic_algorithms(False)
    assert [order[0] for order in orders] == [FLASH, CUDNN]
