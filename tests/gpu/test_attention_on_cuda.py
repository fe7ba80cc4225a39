"""A recorded step's attention takes the kernels that the step takes op by op."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from anytrain.engine.step.norms import norm_widths
from anytrain.machine.backends.cuda_kernels import Kernels
from equivalence import twins

pytestmark = pytest.mark.gpu


def kernel(made: torch.Tensor) -> str:
    """Return the name of what made a tensor."""
    return "" if made.grad_fn is None else made.grad_fn.name()


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

    assert Kernels(torch.device("cuda", 0), norm_widths(make())).are_there()
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
