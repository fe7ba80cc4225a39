"""What an evaluation keeps comes off the device without making it wait."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from anytrain.engine.metrics import Accuracy, Collected, LossMean, Pearson
from anytrain.engine.recording.evaluation import Verdicts
from anytrain.engine.step.diagnose import find
from anytrain.machine.parallel.world import Solo

pytestmark = pytest.mark.gpu

_ABOUT_A_SECOND = 2_000_000_000  # cycles


def does_not_wait(action) -> bool:
    """Whether the call comes back while the device is busy with what was queued before it."""
    torch.cuda.synchronize()
    torch.cuda._sleep(_ABOUT_A_SECOND)
    queued = torch.cuda.Event()
    queued.record()
    action()
    came_back_first = not queued.query()
    torch.cuda.synchronize()
    return came_back_first


def test_collecting_waits_for_no_more_than_the_batch_before() -> None:
    rows, batch = Collected(), {"a": torch.ones(8, 100, device="cuda"), "b": None}
    rows.add(batch)  # the first ones make the pinned buffers
    rows.add(batch)
    assert does_not_wait(lambda: rows.add(batch))
    assert rows.result()["a"].shape == (24, 100)


def test_scores_and_losses_wait_for_no_more_than_the_batch_before() -> None:
    logits, labels = torch.eye(4, device="cuda"), torch.tensor([0, 1, 2, 0], device="cuda")
    accuracy, pearson, mean = Accuracy(), Pearson(), LossMean()
    loss, numbers = torch.tensor(2.0, device="cuda"), torch.arange(4.0, device="cuda")

    def update() -> None:
        accuracy.update(logits, labels)
        pearson.update(numbers, numbers * 2)
        mean.add(loss, 4)

    update()
    update()
    assert does_not_wait(update)
    assert accuracy.compute() == {"accuracy": 0.75}
    assert pearson.compute() == {"pearson": pytest.approx(1.0)}
    assert mean.value(Solo()) == 2.0


@pytest.mark.parametrize("shape", [(8, 3), (8, 16, 3), (8,)])
def test_verdicts_wait_for_nothing_and_are_those_of_the_host(shape: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(shape, generator=draw)
    labels = torch.randint(0, 3, shape[:-1] or shape, generator=draw)
    labels = labels if shape[:-1] else labels.float()
    looking = Verdicts()
    on_device = scores.cuda(), labels.cuda()

    def look() -> None:
        looking.look(*on_device)
        looking.end_batch(5)

    look()
    assert does_not_wait(look)
    on_host = Verdicts()
    for _ in range(2):
        on_host.look(scores, labels)
        on_host.end_batch(5)
    shares = [looking.share(), on_host.share()]
    assert looking.failure is None
    assert shares[0] is not None and shares[1] is not None
    torch.testing.assert_close(*(torch.from_numpy(share.rows) for share in shares))
    assert str(shares[0].table) == str(shares[1].table)


def test_a_buffer_that_the_device_overwrites_is_collected_as_it_was() -> None:
    rows, buffer = Collected(), torch.zeros(1_000_000, device="cuda", dtype=torch.bfloat16)
    for value in range(20):
        buffer.fill_(value)
        rows.add(buffer)
    buffer.fill_(-1)
    result = rows.result().reshape(20, -1)
    assert all((result[value] == value).all() for value in range(20))


def test_the_first_bad_module_is_named() -> None:
    class Log(nn.Module):
        def forward(self, x):
            return torch.log(x)

    model = nn.Sequential(nn.Identity(), nn.Sequential(Log(), nn.Linear(3, 3))).cuda()

    def run(batch):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(batch).mean()
        loss.backward()
        return loss

    batch = torch.ones(4, 3, device="cuda")
    batch[2] = 0
    found = find(model, run, [batch], ids=[[5, 6, 7, 8]])
    assert (found.phase, found.module, found.samples) == ("forward", "1.0", (7,))
