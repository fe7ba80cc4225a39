"""Guards against numbers that are none: a healthy run passes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from anytrain.insight.preflight.report import Report
from anytrain.insight.preflight.run import preflight_of
from anytrain.insight.preflight.script import trace_here
from anytrain.insight.preflight.targets import parse_target

GUARDS = {
    "isnan": lambda x: torch.isnan(x.sum()),
    "isinf": lambda x: torch.isinf(x).any().item(),
    "either": lambda x: (torch.isnan(x) | torch.isinf(x)).any(),
    "counted": lambda x: torch.isnan(x).sum() > 0,
    "counted by hand": lambda x: torch.isnan(x).sum().item(),
    "not finite": lambda x: not torch.isfinite(x).all(),
    "none finite": lambda x: (~torch.isfinite(x)).any(),
    "not itself": lambda x: (x != x).any(),
    "infinite": lambda x: x.sum().abs() == float("inf"),
    "listed": lambda x: any(torch.isnan(x).tolist()[0]),
    "large": lambda x: x.sum() > 1e4,
    "gathered": lambda x: torch.stack([torch.isnan(x.sum()), torch.isinf(x.sum())]).any(),
}


def run(guard: Any) -> Report:
    def work() -> None:
        model = nn.Linear(4, 2).to("cuda")
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            out = model(torch.ones(3, 4, device="cuda"))
            out.sum().backward()
            if guard(out):
                raise ValueError("bad numbers")
            optimizer.step()
            optimizer.zero_grad()

    return preflight_of(
        lambda target, setting: trace_here(target, work, setting), [parse_target("cuda:24GB")]
    )


@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_against_bad_numbers_is_passed(name: str) -> None:
    (outlook,) = run(GUARDS[name]).outlooks
    assert not [each for each in outlook.findings if each.kind == "trace"]
    assert outlook.verdict == "runs, fits"


def test_what_an_unknown_value_has_ended_is_no_certain_error() -> None:
    (outlook,) = run(lambda x: x.sum() > 0.5).outlooks
    (found,) = [each for each in outlook.findings if each.kind == "trace"]
    assert (found.severity, found.certain) == ("warning", False)
    assert "ValueError: bad numbers" in found.what
    assert outlook.verdict.startswith("not seen to its end")


def test_what_fails_for_itself_is_an_error() -> None:
    (outlook,) = run(lambda x: x.sum().item() and x @ x).outlooks
    assert outlook.verdict.startswith("fails")
    assert (outlook.memory, outlook.time) == (None, None)  # no step was seen whole


def test_a_loop_without_a_loader_has_no_batch_to_count() -> None:
    told = " ".join(str(run(lambda x: False)).split())
    assert "batch of unknown size (no prepared loader)" in told
    assert "Largest batch: not looked for" in told
    assert "batch of 0" not in told
    assert "samples/s" not in told
