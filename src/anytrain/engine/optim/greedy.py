"""A learning rate that rises while a metric improves and falls while it does not.

After "GreedyLR: A Novel Adaptive Learning Rate Scheduler" (arXiv 2512.14527).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from anytrain.core.errors import BadInput, BadType
from anytrain.core.notices import give_notice

# What is counted, as opposed to what was asked for.
_COUNTED = (
    "best",
    "last_epoch",
    "num_good_epochs",
    "num_bad_epochs",
    "cooldown_counter",
    "warmup_counter",
    "resets_in",
)


class Greedy:
    """A schedule moved by a metric: up after good evaluations in a row, down after bad ones.

    A move is made after more than `patience` evaluations of one kind in a row, by `factor`;
    `warmup` evaluations after a rise and `cooldown` after a fall don't count. A rate that has
    been asked to fall `reset_start` times while at its lowest starts again from the first.
    """

    def __init__(  # noqa: PLR0913  # the options are the algorithm's
        self,
        optimizer: Optimizer,
        mode: str = "min",
        factor: float = 0.95,
        patience: int = 10,
        threshold: float = 1e-6,
        threshold_mode: str = "abs",
        cooldown: int = 0,
        warmup: int = 0,
        min_lr: float | Sequence[float] = 1e-3,
        max_lr: float | Sequence[float] = 1.0,
        eps: float = 1e-8,
        verbose: bool = False,
        smooth: bool = False,
        window_size: int = 50,
        reset_start: int = 500,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise BadType(
                f"A {type(optimizer).__name__} has no learning rate to move.",
                why="the schedule sets the rate of an optimizer's groups.",
                fix="pass a torch.optim.Optimizer.",
            )
        self.optimizer = optimizer
        self.mode = _one_of("mode", mode, ("min", "max"))
        self.threshold_mode = _one_of("threshold_mode", threshold_mode, ("rel", "abs"))
        self.factor = _below_one(factor)
        self.patience, self.threshold = patience, threshold
        self.cooldown, self.warmup = cooldown, warmup
        self.min_lrs = _each_group("min_lr", min_lr, optimizer)
        self.max_lrs = _each_group("max_lr", max_lr, optimizer)
        self.eps, self.verbose = eps, verbose
        self.smooth, self.window_size = smooth, window_size
        self.reset_start = reset_start
        self.last_epoch = 0
        self._first = self._rates()
        self._last = self._rates()
        self._begin()
        _tell_if_stuck(self._first, self.min_lrs)

    def _begin(self) -> None:
        self.best = math.inf if self.mode == "min" else -math.inf
        self.num_good_epochs = self.num_bad_epochs = 0
        self.cooldown_counter = self.warmup_counter = 0
        self.resets_in = self.reset_start
        self._window: list[float] = []
        self._sum = 0.0

    def step(self, metrics: Any, epoch: int | None = None) -> None:
        """Take the metric of one evaluation into account."""
        current = self._smoothed(float(metrics))
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.num_good_epochs = self.num_bad_epochs = 0
        elif self.warmup_counter > 0:
            self.warmup_counter -= 1
            self.num_good_epochs = self.num_bad_epochs = 0
        else:
            self._judge(current)
        self._last = self._rates()

    def _smoothed(self, value: float) -> float:
        if not self.smooth:
            return value
        self._window.append(value)
        self._sum += value
        if len(self._window) > self.window_size:
            self._sum -= self._window.pop(0)
        return self._sum / len(self._window)

    def _judge(self, current: float) -> None:
        if self.is_better(current, self.best):
            self.best = current
            self.num_good_epochs, self.num_bad_epochs = self.num_good_epochs + 1, 0
        else:
            self.num_good_epochs, self.num_bad_epochs = 0, self.num_bad_epochs + 1
        if self.num_good_epochs > self.patience:
            self._rise()
            self.warmup_counter, self.num_good_epochs = self.warmup, 0
        elif self.num_bad_epochs > self.patience:
            self._fall()
            self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0

    def is_better(self, current: float, best: float) -> bool:
        """Whether a metric is better than the best by more than the threshold."""
        sign = -1.0 if self.mode == "min" else 1.0
        if self.threshold_mode == "rel":
            bound = best * (1.0 + sign * self.threshold)
        else:
            bound = best + sign * self.threshold
        return current < bound if self.mode == "min" else current > bound

    def _rise(self) -> None:
        self._move(lambda rate, group: min(rate / self.factor, self.max_lrs[group]), up=True)
        self.resets_in = self.reset_start

    def _fall(self) -> None:
        self._move(lambda rate, group: max(rate * self.factor, self.min_lrs[group]), up=False)
        if all(rate <= low for rate, low in zip(self._rates(), self.min_lrs, strict=True)):
            self.resets_in -= 1
            if self.resets_in <= 0:
                self._reset()

    def _move(self, to: Callable[[float, int], float], *, up: bool) -> None:
        for group, old in enumerate(self._rates()):
            new = to(old, group)
            if (new - old if up else old - new) > self.eps:
                _set_rate(self.optimizer.param_groups[group], new)
                verb = "rises" if up else "falls"
                self._say(f"the learning rate of group {group} {verb} to {new:.4e}")

    def _reset(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self._first, strict=True):
            _set_rate(group, rate)
        self._begin()
        self._say("the schedule starts again")

    def _say(self, text: str) -> None:
        if self.verbose:
            sys.stdout.write(f"evaluation {self.last_epoch}: {text}.\n")

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each group after the last step."""
        return list(self._last)

    def state_dict(self) -> dict[str, Any]:
        """Return what was counted, and the rates; not the options, which are asked for anew."""
        counted = {name: getattr(self, name) for name in _COUNTED}
        rates = {"first_lrs": list(self._first), "last_lrs": list(self._last)}
        return {**counted, **rates, "window": list(self._window), "window_sum": self._sum}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what was counted, and the rates."""
        for name in _COUNTED:
            setattr(self, name, state_dict[name])
        self._first, self._last = list(state_dict["first_lrs"]), list(state_dict["last_lrs"])
        self._window, self._sum = list(state_dict["window"]), state_dict["window_sum"]
        for group, rate in zip(self.optimizer.param_groups, self._last, strict=True):
            _set_rate(group, rate)


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _below_one(factor: float) -> float:
    if not 0.0 < factor < 1.0:
        raise BadInput(
            f"Cannot move a learning rate by the factor {factor}.",
            why="a fall multiplies by it and a rise divides by it.",
            fix="pass a factor between 0 and 1, such as 0.95.",
        )
    return factor


def _one_of(option: str, value: str, known: tuple[str, str]) -> str:
    if value not in known:
        raise BadInput(
            f"The schedule 'greedy' cannot take {option}={value!r}.",
            why=f"{option!r} is {known[0]!r} or {known[1]!r}.",
            fix="pass one of the two.",
        )
    return value


def _each_group(option: str, value: float | Sequence[float], optimizer: Optimizer) -> list[float]:
    count = len(optimizer.param_groups)
    values = list(value) if isinstance(value, Sequence) else [value] * count
    if len(values) != count:
        raise BadInput(
            f"The schedule 'greedy' got {len(values)} values of {option}.",
            why=f"the optimizer has {count} parameter groups.",
            fix=f"pass one number, or {count}.",
        )
    return values


def _tell_if_stuck(rates: list[float], lowest: list[float]) -> None:
    if all(rate <= low for rate, low in zip(rates, lowest, strict=True)):
        give_notice(
            f"greedy: the learning rate {max(rates):g} is not above min_lr={max(lowest):g}, so it "
            'can only rise; pass lr_scheduler_kwargs={"min_lr": ...} below it to let it fall.',
            stacklevel=4,
        )
