"""Operations that wait for a GPU by themselves are found in a traced script."""

from __future__ import annotations

import textwrap
from pathlib import Path

from anytrain.insight.preflight.targets import parse_target
from anytrain.insight.preflight.trace_process import trace_run

SCRIPT = """
    import torch
    from anytrain import Accelerator

    accelerator = Accelerator()
    net = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=8)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for x in loader:
        h = net(x)
        square = h.T @ h + torch.eye(8, device=h.device)
        host = torch.linalg.inv(torch.eye(8))
        loss = torch.linalg.qr(square)[1].sum() + torch.linalg.inv_ex(square)[0].sum()
        loss = loss + torch.linalg.inv(square).sum()  # waits
        loss = loss + torch.linalg.eigvalsh(square).sum()  # waits
        loss = loss + torch.linalg.svdvals(square).sum()  # waits
        loss = loss + torch.histc(x, bins=8).sum()  # waits
        loss = loss + torch.histc(x, bins=8, min=-1, max=1).sum()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""


def lines_that_wait(path: Path, target: str) -> list[int]:
    trace = trace_run(parse_target(target), [str(path)])
    assert trace.failure == ""
    found = {op.place.line for op in trace.ops if op.host_read and op.phase == "forward"}
    return sorted(found)


def test_what_looks_at_its_own_success_waits_on_cuda(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(text := textwrap.dedent(SCRIPT))
    expected = [n for n, line in enumerate(text.splitlines(), 1) if line.endswith("# waits")]
    assert lines_that_wait(path, "cuda:24GB") == expected
