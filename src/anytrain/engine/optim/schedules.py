"""Learning-rate schedules by name.

Each but two is a pure function of the number of updates, as a multiple of the optimizer's rate.
Only the position is state: what a resumed run asks of the schedule (its length, its warm-up)
counts, not what the interrupted one asked. The other two follow a metric.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from anytrain.core.errors import BadInput
from anytrain.core.nearest import nearest
from anytrain.core.notices import give_notice
from anytrain.engine.optim.adafactor import Adafactor, AdafactorSchedule
from anytrain.engine.optim.greedy import Greedy

_CURVES = ("linear", "cosine", "1-sqrt")


@dataclass(frozen=True, slots=True)
class Ask:
    """What was asked of one schedule."""

    name: str
    optimizer: Optimizer
    num_warmup_steps: int
    num_training_steps: int | None
    options: dict[str, Any]

    @property
    def length(self) -> int:
        """The number of updates, for schedules that end."""
        if self.num_training_steps is None:
            raise BadInput(
                f"The schedule {self.name!r} needs the number of updates.",
                why="its rate falls towards the end of training, and no end is known.",
                fix="set max_steps, or take 'constant', 'constant_with_warmup' or 'inverse_sqrt'.",
            )
        return self.num_training_steps

    @property
    def rate(self) -> float:
        """The optimizer's own learning rate."""
        first: float = self.optimizer.param_groups[0]["lr"]
        return float(self.optimizer.defaults.get("lr", first))

    def number(self, key: str, default: float | None = None) -> float:
        """Return an option that is a number; without a default it must be given."""
        value = self.options.get(key)
        if value is None:
            if default is None:
                raise self.wrong(f"needs the option {key!r}", "it has no default.")
            return default
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise self.wrong(f"cannot take {key}={value!r}", f"{key!r} is a finite number.")
        return number

    def word(self, key: str, default: str, known: tuple[str, ...]) -> str:
        """Return an option that is one of a few words."""
        value = self.options.get(key, default)
        if value not in known:
            words = ", ".join(map(repr, known))
            raise self.wrong(f"cannot take {key}={value!r}", f"{key!r} is one of {words}.")
        return str(value)

    def wrong(self, what: str, why: str) -> BadInput:
        """Return the error for an option that cannot work."""
        return BadInput(
            f"The schedule {self.name!r} {what}.",
            why=why,
            fix=f"correct lr_scheduler_kwargs; {_options_of(self.name)}.",
        )


def build(
    name: str,
    optimizer: Optimizer,
    *,
    num_warmup_steps: int,
    num_training_steps: int | None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Return the named schedule of an optimizer.

    It is torch's LRScheduler, except for "greedy"; ask `follows_metric` what its `step` takes.

    >>> import torch
    >>> sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> build("linear", sgd, num_warmup_steps=2, num_training_steps=10).get_last_lr()
    [0.0]
    """
    name = str(getattr(name, "value", name))
    if name not in _SCHEDULES:
        near = nearest(name, _SCHEDULES)
        raise BadInput(
            f"There is no schedule named {name!r}.",
            why=f"the schedules are {', '.join(_SCHEDULES)}.",
            fix=f"did you mean lr_scheduler_type={near!r}?" if near else "take one of these.",
        )
    known, make = _SCHEDULES[name]
    ask = Ask(name, optimizer, num_warmup_steps, num_training_steps, dict(options or {}))
    unknown = [repr(key) for key in ask.options if key not in known]
    if unknown:
        raise ask.wrong(f"cannot take {', '.join(unknown)}", f"{_options_of(name)}.")
    if any(group.get("lr") is None for group in optimizer.param_groups):
        return _of_own_rate(ask)
    return make(ask)


def _of_own_rate(ask: Ask) -> AdafactorSchedule:
    """Return what reads the rate of an optimizer that makes its own; nothing else moves it."""
    if ask.name != "constant" or not isinstance(ask.optimizer, Adafactor):
        raise BadInput(
            f"The schedule {ask.name!r} has no learning rate to move.",
            why=f"this {type(ask.optimizer).__name__} makes its own rate at each step (lr=None).",
            fix="pass lr_scheduler_type='constant' to leave it as it is, or give the optimizer "
            "a learning rate (Adafactor: relative_step=False).",
        )
    return AdafactorSchedule(ask.optimizer)


def names() -> tuple[str, ...]:
    """Return the names that `build` knows."""
    return tuple(_SCHEDULES)


def follows_metric(scheduler: Any) -> bool:
    """Whether the scheduler's step takes a metric, so that it moves at evaluations alone."""
    return "metrics" in inspect.signature(scheduler.step).parameters


def warmup_steps(asked: float, num_training_steps: int) -> int:
    """Return the number of warm-up updates; below 1 it is asked for as a share of training.

    >>> warmup_steps(0.1, 95), warmup_steps(20, 95)
    (10, 20)
    """
    return int(asked) if asked >= 1 else math.ceil(num_training_steps * asked)


def _options_of(name: str) -> str:
    known = _SCHEDULES[name][0]
    return f"its options are {', '.join(known)}" if known else "it has no options"


def _warming(step: int, warmup: int) -> float | None:
    """Return the share of the rate while it warms up, then None."""
    return float(step) / float(max(1, warmup)) if step < warmup else None


def _progress(step: int, warmup: int, length: int) -> float:
    """Return how much of what follows the warm-up is done."""
    return float(step - warmup) / float(max(1, length - warmup))


def _wave(cycles: float, done: float) -> float:
    """Return a cosine's height between 0 and 1 after a part of so many cycles."""
    return 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * done))


def _above(floor: float, factor: float) -> float:
    """Return the factor drawn up so that its 0 is the floor."""
    return max(0.0, factor * (1 - floor) + floor)


def _constant(step: int) -> float:
    return 1.0


def _constant_after(step: int, *, num_warmup_steps: int) -> float:
    warm = _warming(step, num_warmup_steps)
    return 1.0 if warm is None else warm


def _linear(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    warm = _warming(step, num_warmup_steps)
    if warm is not None:
        return warm
    left = float(num_training_steps - step)
    return max(0.0, left / float(max(1, num_training_steps - num_warmup_steps)))


def _cosine(
    step: int,
    *,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float,
    min_lr_rate: float = 0.0,
) -> float:
    warm = _warming(step, num_warmup_steps)
    if warm is not None:
        return warm
    done = _progress(step, num_warmup_steps, num_training_steps)
    return _above(min_lr_rate, _wave(num_cycles, done))


def _restarts(
    step: int, *, num_warmup_steps: int, num_training_steps: int, num_cycles: float
) -> float:
    warm = _warming(step, num_warmup_steps)
    if warm is not None:
        return warm
    done = _progress(step, num_warmup_steps, num_training_steps)
    return 0.0 if done >= 1.0 else max(0.0, _wave(0.5, (num_cycles * done) % 1.0))


def _polynomial(
    step: int,
    *,
    num_warmup_steps: int,
    num_training_steps: int,
    lr_end: float,
    power: float,
    lr_init: float,
) -> float:
    warm = _warming(step, num_warmup_steps)
    if warm is not None:
        return warm
    if step > num_training_steps or num_training_steps == num_warmup_steps:
        return lr_end / lr_init
    left = 1 - (step - num_warmup_steps) / (num_training_steps - num_warmup_steps)
    return float(((lr_init - lr_end) * left**power + lr_end) / lr_init)


def _inverse_sqrt(step: int, *, num_warmup_steps: int, timescale: float) -> float:
    warm = _warming(step, num_warmup_steps)
    if warm is not None:
        return warm
    return 1.0 / math.sqrt((step + timescale - num_warmup_steps) / timescale)


def _cosine_from_above(
    step: int,
    *,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float,
    min_lr_rate: float,
    warmup_lr_rate: float | None,
) -> float:
    """A cosine that never rests at 0: its warm-up starts above, its fall one step early."""
    if step < num_warmup_steps:
        if warmup_lr_rate is None:
            return (step + 1.0) / max(1.0, num_warmup_steps)
        return warmup_lr_rate + (1.0 - warmup_lr_rate) * step / max(1, num_warmup_steps - 1)
    done = _progress(step + 1, num_warmup_steps, num_training_steps)
    return _above(min_lr_rate, _wave(num_cycles, done))


def _three_stages(  # noqa: PLR0913  # each by the name that scripts read
    step: int,
    *,
    num_warmup_steps: int,
    num_stable_steps: float,
    num_decay_steps: float,
    warmup_type: str,
    decay_type: str,
    min_lr_ratio: float,
    num_cycles: float,
) -> float:
    if step < num_warmup_steps:
        done = float(step) / float(max(1, num_warmup_steps))
        return _above(min_lr_ratio, _rise(warmup_type, done))
    falling = step - num_warmup_steps - num_stable_steps
    if falling < 0:
        return 1.0
    if falling < num_decay_steps:
        done = float(falling) / float(max(1, num_decay_steps))
        return _above(min_lr_ratio, _fall(decay_type, done, num_cycles))
    return min_lr_ratio


def _rise(curve: str, done: float) -> float:
    if curve == "linear":
        return done
    if curve == "cosine":
        return 0.5 * (1.0 - math.cos(math.pi * done))
    return 1.0 - math.sqrt(1.0 - done)


def _fall(curve: str, done: float, cycles: float) -> float:
    if curve == "linear":
        return 1.0 - done
    if curve == "cosine":
        return _wave(cycles, done)
    return 1.0 - math.sqrt(done)


def _of_step(ask: Ask, factor: Callable[..., float], **values: Any) -> LambdaLR:
    """Return a schedule whose state is its position: a partial has nothing else to save.

    What the partial holds has HF's names, by which scripts read it.
    """
    return LambdaLR(ask.optimizer, partial(factor, **values))


def _span(ask: Ask) -> dict[str, Any]:
    return {"num_warmup_steps": ask.num_warmup_steps, "num_training_steps": ask.length}


def _make_constant(ask: Ask) -> LambdaLR:
    return _of_step(ask, _constant)


def _make_constant_after(ask: Ask) -> LambdaLR:
    return _of_step(ask, _constant_after, num_warmup_steps=ask.num_warmup_steps)


def _make_linear(ask: Ask) -> LambdaLR:
    return _of_step(ask, _linear, **_span(ask))


def _make_cosine(ask: Ask) -> LambdaLR:
    return _of_step(ask, _cosine, **_span(ask), num_cycles=ask.number("num_cycles", 0.5))


def _make_restarts(ask: Ask) -> LambdaLR:
    return _of_step(ask, _restarts, **_span(ask), num_cycles=ask.number("num_cycles", 1))


def _make_polynomial(ask: Ask) -> LambdaLR:
    end, power, rate = ask.number("lr_end", 1e-7), ask.number("power", 1.0), ask.rate
    if not rate > end:
        raise ask.wrong(
            f"cannot fall from the learning rate {rate} to lr_end={end}",
            "lr_end must be smaller than the learning rate.",
        )
    return _of_step(ask, _polynomial, **_span(ask), lr_end=end, power=power, lr_init=rate)


def _make_inverse_sqrt(ask: Ask) -> LambdaLR:
    timescale = ask.number("timescale", ask.num_warmup_steps or 10_000)
    if timescale <= 0:
        raise ask.wrong(
            f"cannot take timescale={timescale}",
            "it is a number of updates above 0, by default that of the warm-up.",
        )
    warmup = ask.num_warmup_steps
    return _of_step(ask, _inverse_sqrt, num_warmup_steps=warmup, timescale=timescale)


def _floor(ask: Ask) -> float:
    """Return the lowest rate as a share of the optimizer's, asked for in one of two ways."""
    given = [key for key in ("min_lr", "min_lr_rate") if ask.options.get(key) is not None]
    if len(given) != 1:
        raise ask.wrong(
            "needs one of min_lr and min_lr_rate",
            "both were given." if given else "neither was given.",
        )
    if given == ["min_lr_rate"]:
        return ask.number("min_lr_rate")
    if ask.rate == 0:
        raise ask.wrong("cannot take min_lr", "the learning rate is 0.")
    return ask.number("min_lr") / ask.rate


def _make_cosine_with_floor(ask: Ask) -> LambdaLR:
    cycles = ask.number("num_cycles", 0.5)
    return _of_step(ask, _cosine, **_span(ask), num_cycles=cycles, min_lr_rate=_floor(ask))


def _make_cosine_from_above(ask: Ask) -> LambdaLR:
    first = ask.number("warmup_lr_rate", math.nan)
    return _of_step(
        ask,
        _cosine_from_above,
        **_span(ask),
        num_cycles=ask.number("num_cycles", 0.5),
        min_lr_rate=_floor(ask),
        warmup_lr_rate=None if math.isnan(first) else first,
    )


def _make_three_stages(ask: Ask) -> LambdaLR:
    decay, warmup = ask.number("num_decay_steps"), ask.num_warmup_steps
    if ask.options.get("num_stable_steps") is None:
        stable = ask.length - warmup - decay
    else:
        stable = ask.number("num_stable_steps")
        total = warmup + stable + decay
        if ask.num_training_steps is not None and total != ask.num_training_steps:
            give_notice(
                f"warmup_stable_decay: {warmup} warm-up, {stable:g} stable and {decay:g} decay "
                f"updates make {total:g}, and training has {ask.num_training_steps}.",
                stacklevel=4,
            )
    return _of_step(
        ask,
        _three_stages,
        num_warmup_steps=warmup,
        num_stable_steps=stable,
        num_decay_steps=decay,
        warmup_type=ask.word("warmup_type", "linear", _CURVES),
        decay_type=ask.word("decay_type", "cosine", _CURVES),
        min_lr_ratio=ask.number("min_lr_ratio", 0.0),
        num_cycles=ask.number("num_cycles", 0.5),
    )


def _make_by_metric(kind: Callable[..., Any], ask: Ask) -> Any:
    options = dict(ask.options)
    for key, parameter in inspect.signature(kind).parameters.items():
        is_number = type(parameter.default) in (int, float)
        if key in options and is_number and not isinstance(options[key], list | tuple):
            number = ask.number(key)
            options[key] = int(number) if number.is_integer() else number
    try:
        return kind(ask.optimizer, **options)
    except BadInput:
        raise
    except (TypeError, ValueError) as error:
        raise ask.wrong("cannot take its options", f"{error}") from error


def _parameters(kind: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(kind).parameters)[1:]


_FLOORED = ("num_cycles", "min_lr", "min_lr_rate")
_STAGES = ("num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio")
_SCHEDULES: dict[str, tuple[tuple[str, ...], Callable[[Ask], Any]]] = {
    "linear": ((), _make_linear),
    "cosine": (("num_cycles",), _make_cosine),
    "cosine_with_restarts": (("num_cycles",), _make_restarts),
    "polynomial": (("lr_end", "power"), _make_polynomial),
    "constant": ((), _make_constant),
    "constant_with_warmup": ((), _make_constant_after),
    "inverse_sqrt": (("timescale",), _make_inverse_sqrt),
    "reduce_lr_on_plateau": (
        _parameters(ReduceLROnPlateau),
        partial(_make_by_metric, ReduceLROnPlateau),
    ),
    "cosine_with_min_lr": (_FLOORED, _make_cosine_with_floor),
    "cosine_warmup_with_min_lr": ((*_FLOORED, "warmup_lr_rate"), _make_cosine_from_above),
    "warmup_stable_decay": ((*_STAGES, "num_cycles"), _make_three_stages),
    "greedy": (_parameters(Greedy), partial(_make_by_metric, Greedy)),
}
