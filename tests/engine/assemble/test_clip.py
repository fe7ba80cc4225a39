"""What a step measures and bounds: the gradients of the model, as far as they are to scale."""

from __future__ import annotations

import torch
from torch import nn

from anytrain.engine.precision import LossScale
from anytrain.engine.prepared.optimizer import PreparedOptimizer
from anytrain.engine.prepared.walk import Accumulation, Cursor
from anytrain.engine.step.guard import Clip, ScaledGuard
from anytrain.machine.parallel.world import Solo
from anytrain.machine.strategies.solo import norm


def test_gradients_that_are_not_scaled_back_are_left_out() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    scale = LossScale(torch.amp.GradScaler("cpu", init_scale=65536.0))
    guard = ScaledGuard(scale, torch.device("cpu"), False)
    head = torch.optim.SGD(model[1].parameters(), lr=0.1)
    optimizer = PreparedOptimizer(head, Cursor(Accumulation()), guard, Solo())
    body = tuple(model[0].parameters())
    clip = Clip(optimizer, model, 1.0, norm, untrained=body, sees_all=True, can_read=False)
    loss = model(torch.ones(3, 4)).square().mean()
    true = torch.autograd.grad(loss, list(model[1].parameters()), retain_graph=True)
    scale(loss).backward()
    torch.testing.assert_close(clip(), torch.nn.utils.get_total_norm(true))
