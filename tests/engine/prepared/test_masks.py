from __future__ import annotations

import pytest
import torch
from transformers import masking_utils

from anytrain.engine.prepared.masks import leave_unread


def test_values_of_masks_are_not_looked_at_on_a_device_that_traces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(masking_utils, "is_tracing", masking_utils.is_tracing)  # put back after
    mask = torch.ones(1, 4, dtype=torch.bool)
    assert not masking_utils.is_tracing(mask)
    leave_unread("cpu")
    leave_unread("cpu")
    assert masking_utils.is_tracing(mask)
    assert not masking_utils.is_tracing(None)
    assert not masking_utils.is_tracing(mask.to("meta"))
