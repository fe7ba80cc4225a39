from __future__ import annotations

import torch
from transformers import masking_utils

from anytrain.core import patches
from anytrain.engine.prepared.model import values_unread


def test_values_of_masks_are_not_looked_at_on_a_device_that_traces() -> None:
    mask, own = torch.ones(1, 4, dtype=torch.bool), masking_utils.is_tracing
    assert not masking_utils.is_tracing(mask)
    with values_unread("cpu"), values_unread("cpu"):
        assert patches.in_force() == ["mask values"]
        assert masking_utils.is_tracing(mask)
        assert not masking_utils.is_tracing(None)
        assert not masking_utils.is_tracing(mask.to("meta"))
    assert masking_utils.is_tracing is own and patches.in_force() == []
