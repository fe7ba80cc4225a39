from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anytrain.insight.preflight.fake_device import kernel_choice


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(kernel_choice.operation_on_mps(func).name())
        return func(*args, **(kwargs or {}))


def test_a_singular_value_decomposition_is_told_from_its_values_alone() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    before = torch.linalg.svd(x, full_matrices=False)
    library = torch.library.Library("aten", "IMPL")
    kernel_choice.keep_svd_whole(library, "AutogradCPU")
    try:
        with Seen() as whole:
            after = torch.linalg.svd(x, full_matrices=False)
        with Seen() as values:
            torch.linalg.svdvals(x)
        after.S.sum().backward()
    finally:
        library._destroy()
    assert [n for n in whole.names if "svd" in n] == ["aten::linalg_svd"]
    assert [n for n in values.names if "svd" in n] == ["aten::_linalg_svd"]
    assert torch.equal(before.S, after[1])
    assert x.grad is not None
