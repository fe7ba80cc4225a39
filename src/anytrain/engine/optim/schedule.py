"""A learning rate whose position in the schedule is counted on the device.

The host runs the user's scheduler ahead and writes each position's rate into a table; the device
counts the updates that were not skipped and reads its own position. So a skipped update holds the
schedule back without anybody waiting to learn of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

_ROOM = 8192
"""Positions that the table holds; it is written round and round, so that it never moves."""


class DeviceRate:
    """The learning rates of one optimizer's groups, as tensors that follow the device's count.

    INVARIANT: the rate is a function of the number of updates that happened, for schedulers
    whose own rate is a function of how often they were stepped.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        advance: Callable[[], None],
        device: torch.device,
    ) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._advance = advance
        self._host = [float(group["lr"]) for group in optimizer.param_groups]
        self._rates = [torch.tensor(rate, device=device) for rate in self._host]
        self._table = torch.zeros(len(self._host), _ROOM, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._calls = 0
        self._start()
        self._hand_over()

    def _start(self) -> None:
        """Remember where the schedule stands, to walk it again from here."""
        self._first = copy.deepcopy(self._scheduler.state_dict())
        self._first_rates = list(self._host)
        self._calls = 0
        self._position.zero_()
        self._write(0)

    def step(self, skipped: torch.Tensor) -> None:
        """Move one position, unless the update was skipped; nobody waits."""
        self.walk()
        self.follow(skipped)

    def follow(self, skipped: torch.Tensor) -> None:
        """Move the device's position, unless the update was skipped; a graph may record this."""
        self._position += 1 - skipped.to(torch.int64)
        place = self._position.remainder(_ROOM)
        for group, rate in enumerate(self._rates):
            rate.copy_(self._table[group].index_select(0, place).squeeze(0))

    def settle(self) -> None:
        """Bring the host's scheduler to where the device is; waits for the device."""
        true = int(self._position.item())
        if true == self._calls:
            return
        self._host = list(self._first_rates)
        self._scheduler.load_state_dict(copy.deepcopy(self._first))
        self._calls = 0
        for _ in range(true):
            self.walk()

    def restore(self, load: Callable[[], None]) -> None:
        """Let `load` put the scheduler and the optimizer somewhere else, and count from there."""
        load()
        self._host = [float(rate) for rate in self._scheduler.get_last_lr()]
        self._start()
        for rate, value in zip(self._rates, self._host, strict=True):
            rate.fill_(value)
        self._hand_over()

    def walk(self) -> None:
        """Run the host's schedule one position ahead, before the device may follow."""
        groups = self._optimizer.param_groups
        for group, rate in zip(groups, self._host, strict=True):
            group["lr"] = rate
        self._advance()
        self._host = [float(group["lr"]) for group in groups]
        self._calls += 1
        self._write(self._calls)
        self._hand_over()

    def _write(self, position: int) -> None:
        if self._table.device.type == "xla":  # a place by its number would be a graph of its own
            place = torch.tensor([position % _ROOM]).to(self._table.device)
            rates = torch.tensor(self._host, dtype=self._table.dtype).unsqueeze(1)
            self._table.index_copy_(1, place, rates.to(self._table.device))
            return
        for group, rate in enumerate(self._host):
            self._table[group, position % _ROOM].fill_(rate)

    def _hand_over(self) -> None:
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
